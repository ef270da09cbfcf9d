"""Lookups: which chunks of a prompt are stored and worth loading; and a Lease of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, Self

from kvstore.client.chunk import LayerTensors
from kvstore.client.chunk_reads import ChunkRequest, read_prefix, target_in
from kvstore.client.forks import FORKS
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.planning import chunks_worth_loading
from kvstore.client.server_link import LeftMs, ServerLink, batches, digest_batches, packed
from kvstore.client.transports.base import Transport
from kvstore.client.view import ChunkView
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
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkKey, Match


class Found(NamedTuple):
    """The match, the places of each batch's chunks if requested, and the transport."""

    match: Match
    places: Sequence[bytes]
    transport: Transport


def look_up(
    link: ServerLink, keys: Sequence[ChunkKey], wanted: pb.LookupRequest, deadline_ms: int
) -> Found:
    """Look *keys* up, batch after batch, up to the first that is not entirely ready.

    *wanted* has everything but digests, session and deadline; its wait is added to *deadline_ms*.
    """
    total_ms = min(deadline_ms + wanted.wait_ms, MAX_DEADLINE_MS)

    def work(transport: Transport, left_ms: LeftMs) -> Found:
        session, terms = transport.session, transport.session.terms
        request = pb.LookupRequest()
        request.CopyFrom(wanted)
        request.session_id = terms.session_id
        matches: list[Match] = []
        places: list[bytes] = []
        try:
            digests, limit = packed(keys, session.namespace), terms.max_batch_chunks
            for _, part in digest_batches(digests, limit):
                request.digests, request.deadline_ms = part, left_ms()
                request.wait_ms = max(0, wanted.wait_ms - (total_ms - request.deadline_ms))
                reply = transport.calls.call(
                    "Lookup", request, request.deadline_ms, pb.LookupResponse
                )
                count = len(part) // DIGEST_BYTES
                matches.append(match_from_message(reply, count))
                places.append(reply.places)
                if matches[-1].ready < count:  # later batches are of no use
                    break
                request.ClearField("prefill")  # a plan without the first batch makes no sense
        except BaseException:
            leases = [lease for match in matches for lease in match.leases]
            with suppress(DeadlineError):  # with no time left they expire
                if leases:
                    transport.release(leases, left_ms())
            raise
        return Found(joined(matches, len(keys)), places, transport)

    return link.run(work, total_ms)


def match_from_message(message: pb.LookupResponse, requested: int) -> Match:
    """Return the match of a lookup of *requested* chunks. Raises KVStoreError if it is invalid."""
    names, sources = tuple(message.tier_names), message.tiers
    ready = message.ready
    fits = len(sources) == ready and len(message.load_us) == 4 * ready <= 4 * requested
    if not fits or max(sources, default=-1) >= len(names):
        raise KVStoreError(f"the server's reply to a lookup of {requested} chunks is invalid")
    return Match(
        ready=ready,
        pending=message.pending,
        missing=requested - ready - message.pending,
        tier_names=names,
        sources=sources,
        loads=message.load_us,
        lease_id=message.lease_id,
        lease_ttl_ms=message.lease_ttl_ms,
        plan=_plan_from_message(message, requested),
        shared=min(message.shared, requested),
    )


def _plan_from_message(message: pb.LookupResponse, requested: int) -> LoadPlan | None:
    """Return the plan over *requested* chunks; None without one. Raises KVStoreError."""
    if not message.plan and not message.recompute_ms:
        return None
    ranges = tuple(as_value(PlanRange, one) for one in message.plan)
    bounds = [0, *(one.stop for one in ranges)]
    is_whole = bounds[-1] == requested and [one.first for one in ranges] == bounds[:-1]
    if not is_whole or any(first >= stop for first, stop in pairwise(bounds)):
        raise KVStoreError(f"the server's plan for {requested} chunks is invalid")
    return LoadPlan(ranges, message.plan_ms, message.recompute_ms)


def joined(matches: Sequence[Match], requested: int) -> Match:
    """Return the match of *requested* chunks, all ready in *matches* but the last; without a plan
    unless they were one request.
    """
    first, last = matches[0], matches[-1]
    if first.ready + first.pending + first.missing == requested:
        return first
    ready = sum(match.ready for match in matches)
    return replace(
        first,
        ready=ready,
        pending=last.pending,
        missing=requested - ready - last.pending,
        sources=b"".join(match.sources for match in matches),
        loads=b"".join(match.loads for match in matches),
        more_leases=tuple(match.lease_id for match in matches[1:] if match.lease_id),
        plan=None,
        shared=sum(match.shared for match in matches),
    )


def prefix_plan(match: Match, chunk_tokens: int, chunks: int, engine: EngineTerms) -> LoadPlan:
    """Plan a prompt of several batches, of which a server plans only one: load from its start,
    compute the rest. Never slower than to compute all.
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
    """Chunks under *leases*; leave the ``with`` to release them."""

    def __init__(
        self, leases: Sequence[int], release: Callable[[Sequence[int], Hints], None]
    ) -> None:
        self._leases = leases
        self._release = release
        self._is_released = not leases
        self._process = FORKS.process

    def release(self, hints: Hints = NO_HINTS) -> None:
        """End the lease, and send *hints* on its chunks. Idempotent; does nothing in a child."""
        was_released, self._is_released = self._is_released, True
        if not was_released and self._process is FORKS.process:
            self._release(self._leases, hints)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Lease(Held):
    """``keys`` are the chunks that ``match`` has ready. Leave the ``with`` to release them."""

    def __init__(
        self,
        link: ServerLink,
        keys: Sequence[ChunkKey],
        found: Found,
        accuracy: Accuracy,
        client: object,
    ) -> None:
        """*found*: the match and the places of the prompt with *keys*. *client* closes *link* when
        it is collected, so the lease keeps it.
        """
        super().__init__(found.match.leases, link.release)
        self._client = client
        self.match = found.match
        self.keys = list(keys[: self.match.ready])
        self._link = link
        self._accuracy = accuracy
        self._limit = found.transport.session.terms.max_batch_chunks
        runs = zip(found.places, batches(self.keys, self._limit), strict=False)  # none in the last
        self._views = [found.transport.viewer(rows, some) for rows, (_, some) in runs]

    def view(self, index: int) -> ChunkView | None:
        """Return a view of the chunk of ``keys[index]`` in the server's memory.

        None when it is elsewhere or memory is not shared: use ``get``. Raises LeaseExpiredError
        after the release, past the lease's time or in a child process, ChunkCorruptError.
        """
        FORKS.check(self._process, "the lease")
        if not is_whole(index) or not 0 <= index < len(self.keys):
            raise InvalidRequestError("index", index, f"{len(self.keys)} chunks are leased")
        if self._is_released:
            raise LeaseExpiredError(f"lease_id={self.match.lease_id}: released; lease again")
        return self._views[index // self._limit](index % self._limit)

    def get(self, out: Sequence[LayerTensors] | None = None) -> list[ChunkTensors]:
        """Read the leased chunks, into *out* if given, as ``Client.get_chunks`` does.

        Raises LeaseExpiredError after the release, past the lease's time or in a child.
        """
        FORKS.check(self._process, "the lease")
        if not self.keys:
            return []
        target, options = target_in(self.keys, out), self._link.options
        request = ChunkRequest(
            self.keys, target, self._accuracy, options.deadline_ms, self._leases, options.shard
        )
        return [one.tensors for one in read_prefix(self._link, request)]
