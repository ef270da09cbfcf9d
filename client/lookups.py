"""Lookups: which chunks of a prompt are there and what is worth loading; and a Lease of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, Self

from kvstore.client.chunk import LayerTensors
from kvstore.client.forks import FORKS
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.planning import chunks_worth_loading
from kvstore.client.server_link import LeftMs, ServerLink, batches, digest_batches, packed
from kvstore.client.transports.base import Transport
from kvstore.client.view import ChunkView, View
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    is_whole,
)
from kvstore.proto.messages import as_value
from kvstore.proto.plans import NO_HINTS, EngineTerms, Hints, LoadPlan, PlanRange
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Match


class Found(NamedTuple):
    """The answer, where each batch's chunks lie, if that was requested, and by which transport."""

    match: Match
    places: Sequence[bytes]
    transport: Transport


def look_up(
    link: ServerLink, keys: Sequence[ChunkKey], wanted: pb.LookupRequest, deadline_ms: int
) -> Found:
    """Look *keys* up, a batch after another up to the first that is not ready whole.

    *wanted* has everything but digests, session and deadline; what it waits comes on top.
    """
    total_ms = min(deadline_ms + wanted.wait_ms, MAX_DEADLINE_MS)

    def work(transport: Transport, left_ms: LeftMs) -> Found:
        terms = transport.session.terms
        request = pb.LookupRequest()
        request.CopyFrom(wanted)
        request.session_id = terms.session_id
        matches: list[Match] = []
        places: list[bytes] = []
        try:
            digests, limit = packed(keys, terms.namespace), terms.max_batch_chunks
            for _, part in digest_batches(digests, limit):
                request.digests, request.deadline_ms = part, left_ms()
                request.wait_ms = max(0, wanted.wait_ms - (total_ms - request.deadline_ms))
                reply = transport.calls.call(
                    "Lookup", request, request.deadline_ms, pb.LookupResponse
                )
                count = len(part) // DIGEST_BYTES
                matches.append(match_from_message(reply, count))
                places.append(reply.places)
                if matches[-1].ready < count:  # so nothing behind it is of use
                    break
                request.ClearField("prefill")  # a plan of what is behind the first makes no sense
        except BaseException:
            leases = [lease for match in matches for lease in match.leases]
            with suppress(DeadlineError):  # with no time left they end with theirs
                if leases:
                    transport.release(leases, left_ms())
            raise
        return Found(joined(matches, len(keys)), places, transport)

    return link.run(work, total_ms)


def viewer(found: Found, keys: Sequence[ChunkKey]) -> View:
    """Return what shows the leased *keys* in the server's memory; their places came by batches."""
    limit = found.transport.session.terms.max_batch_chunks
    pairs = zip(found.places, batches(keys, limit), strict=False)  # of the last none may be ready
    views = [found.transport.viewer(rows, some) for rows, (_, some) in pairs]
    return views[0] if len(views) == 1 else lambda index: views[index // limit](index % limit)


def match_from_message(message: pb.LookupResponse, asked: int) -> Match:
    """Return the answer to a lookup of *asked* chunks. Raises KVStoreError if it is none."""
    names, sources = tuple(message.tier_names), message.tiers
    ready = message.ready
    fits = len(sources) == ready and len(message.load_us) == 4 * ready <= 4 * asked
    if not fits or max(sources, default=-1) >= len(names):
        raise KVStoreError(f"the server's answer to a lookup of {asked} chunks is damaged")
    return Match(
        ready=ready,
        pending=message.pending,
        missing=asked - ready - message.pending,
        tier_names=names,
        sources=sources,
        loads=message.load_us,
        lease_id=message.lease_id,
        lease_ttl_ms=message.lease_ttl_ms,
        plan=_plan_from_message(message, asked),
        shared=min(message.shared, asked),
    )


def _plan_from_message(message: pb.LookupResponse, asked: int) -> LoadPlan | None:
    """Return the plan over *asked* chunks; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(as_value(PlanRange, one) for one in message.plan)
    bounds = [0, *(one.stop for one in ranges)]
    is_whole = bounds[-1] == asked and [one.first for one in ranges] == bounds[:-1]
    if not is_whole or any(first >= stop for first, stop in pairwise(bounds)):
        raise KVStoreError(f"the server's plan for {asked} chunks is damaged")
    return LoadPlan(ranges, message.plan_ms, message.recompute_ms)


def joined(matches: Sequence[Match], asked: int) -> Match:
    """Return the answer about *asked* chunks, of which all but the last of *matches* are ready.

    There is no plan where not all of them were asked for at once.
    """
    first, last = matches[0], matches[-1]
    if first.ready + first.pending + first.missing == asked:
        return first
    ready = sum(match.ready for match in matches)
    return replace(
        first,
        ready=ready,
        pending=last.pending,
        missing=asked - ready - last.pending,
        sources=b"".join(match.sources for match in matches),
        loads=b"".join(match.loads for match in matches),
        more_leases=tuple(match.lease_id for match in matches[1:] if match.lease_id),
        plan=None,
        shared=sum(match.shared for match in matches),
    )


def prefix_plan(match: Match, chunk_tokens: int, chunks: int, engine: EngineTerms) -> LoadPlan:
    """Plan a prompt of several batches: load from its start, compute the rest.

    A server plans no more than one batch. Never slower than to compute all.
    """
    tokens, prefill = engine.prompt_tokens, engine.prefill
    spans = [(at * chunk_tokens, min((at + 1) * chunk_tokens, tokens)) for at in range(match.ready)]
    count = chunks_worth_loading(match.load_us, spans, tokens, prefill)
    load_ms = sum(match.load_us[:count]) / 1000
    start = spans[count - 1][1] if count else 0
    rest_ms = 1000 * prefill.seconds(tokens - start, start)
    ranges = (PlanRange(0, count, True, load_ms), PlanRange(count, chunks, False, rest_ms))
    return LoadPlan(
        tuple(one for one in ranges if one.first < one.stop),
        load_ms + rest_ms,
        1000 * prefill.seconds(tokens, 0),
    )


class Held:
    """What *leases* keep, until it is released: leave the ``with`` to do it."""

    def __init__(
        self, leases: Sequence[int], release: Callable[[Sequence[int], Hints], None]
    ) -> None:
        self._leases = leases
        self._release = release
        self._is_released = not leases
        self._process = FORKS.process

    def release(self, hints: Hints = NO_HINTS) -> None:
        """End the lease, and say what is known of its chunks by now. Idempotent.

        A child leaves it to the parent.
        """
        was_released, self._is_released = self._is_released, True
        if not was_released and self._process is FORKS.process:
            self._release(self._leases, hints)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Lease(Held):
    """``match`` says what is ready; ``keys`` are those chunks. Leave the ``with`` to release."""

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        match: Match,
        read: Callable[[Sequence[ChunkKey], Sequence[LayerTensors] | None], list[ChunkTensors]],
        release: Callable[[Sequence[int], Hints], None],
        view: View,
    ) -> None:
        super().__init__(match.leases, release)
        self.match = match
        self.keys = list(keys)
        self._read = read
        self._view = view

    def view(self, index: int) -> ChunkView | None:
        """Return the chunk of ``keys[index]`` where it lies in the server's memory.

        None when it lies elsewhere or memory is not shared: ``get`` reads it then. Raises
        LeaseExpiredError after the release, past the lease's time or in a child process,
        ChunkCorruptError.
        """
        FORKS.check(self._process, "the lease")
        if not is_whole(index) or not 0 <= index < len(self.keys):
            fix = f"{len(self.keys)} chunks are leased"
            raise InvalidRequestError("index", index, fix)
        if self._is_released:
            raise LeaseExpiredError(f"lease_id={self.match.lease_id}: released; lease again")
        return self._view(index)

    def get(self, out: Sequence[LayerTensors] | None = None) -> list[ChunkTensors]:
        """Read the leased chunks, into *out* where given, as ``Client.get_chunks`` does.

        Raises LeaseExpiredError after the release, past the lease's time or in a child.
        """
        FORKS.check(self._process, "the lease")
        if not self.keys:
            return []
        return self._read(self.keys, out)
