"""The blocking client of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from typing_extensions import override

from kvstore.client.batches import batches, digest_batches, joined, match_from_message, prefix_plan
from kvstore.client.chunk import Chunk
from kvstore.client.connection import countdown
from kvstore.client.decode import given
from kvstore.client.engine_calls import EngineCalls, check_frame_bytes, check_out
from kvstore.client.events import Following
from kvstore.client.keeping import Keeping, check_wait
from kvstore.client.lease import ChunkLease
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.page_names import page_digests
from kvstore.client.rectangle import Rectangle
from kvstore.client.resolving import Resolving
from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import Outgoing, OutgoingShard, Put, Transport
from kvstore.client.view import View
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, TierUnavailableError
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.keys import chain_digests, chunk_key
from kvstore.proto.messages import accuracy_number, engine_to_message
from kvstore.proto.plans import NO_HINTS, EngineTerms, Hints, PrefillModel
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkKey,
    Match,
    Shard,
    Stated,
)


class Client(Keeping, EngineCalls, Resolving, Following):
    """Put, look up and get chunks of one Model. Thread-safe.

    Connects at the first call, and again after the server restarted. Every method raises
    KVStoreErrors only and returns within ``options.deadline_ms`` plus 50 ms a round trip.
    A miss is an answer: a Match of 0, a shorter list.
    """

    def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt. *extra*: cache salt, multimodal hashes, in order."""
        space = self.namespace
        size = self.options.chunk_tokens
        is_sglangs = self.options.sglang_names and not extra
        digests = page_digests(tokens, size) if is_sglangs else chain_digests(tokens, size, extra)
        return [chunk_key(space, digest) for digest in digests]

    @property
    def weighs(self) -> bool:
        """Whether the server that we have a session with has a use for ``Chunk.importance``."""
        transport = self._transport
        return transport is not None and transport.session.terms.weighs

    # --- data

    @override
    def put(
        self,
        chunks: Sequence[Chunk],
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
        rectangle: Rectangle | None = None,
    ) -> list[Put]:
        """Store chunks; with *durable* return once they would survive a power cut.

        *hints* are of all of them; who has nothing to say leaves them out. With a *rectangle* the
        tensors are those of one rank: the outcome is ``pending`` until other ranks have put the
        rest of a chunk, and ``stored`` for the one that makes it whole.
        Raises LayoutMismatchError or ModelError before anything is sent when a
        chunk is not of this client's Model.
        """
        if not chunks:
            return []

        def work(transport: Transport) -> list[Put]:
            left_ms = countdown(self.options.deadline_ms)
            outgoing = [self._outgoing(transport.session, chunk, rectangle) for chunk in chunks]
            if any(chunk.importance is not None for chunk in chunks):
                self._weigh(transport, chunks, outgoing, left_ms)
            results: list[Put] = []
            for _, batch in batches(outgoing, transport.session.terms.max_batch_chunks):
                results += transport.put(
                    batch,
                    durable=durable,
                    deadline_ms=left_ms(),
                    hints=hints,
                )
            return results

        return self._with_session(work)

    def _weigh(
        self,
        transport: Transport,
        chunks: Sequence[Chunk],
        outgoing: Sequence[Outgoing],
        left_ms: Callable[[], int],
    ) -> None:
        """Say which tokens matter, ahead of the chunks, where a codec has a use for it; a server
        that does not hear it codes all alike.
        """
        pairs = zip(chunks, outgoing, strict=True)
        weights = [(one.key, one.weights(out.template.layout.tokens)) for one, out in pairs]
        told = [(key, each) for key, each in weights if each and transport.session.terms.weighs]
        for _, batch in batches(told, transport.session.terms.max_batch_chunks) if told else ():
            request = pb.WeighRequest(
                session_id=transport.session.terms.session_id,
                digests=self._digests([key for key, _ in batch]),
                weights=[each for _, each in batch],
            )
            with suppress(TierUnavailableError, DeadlineError):
                self._connection.call("Weigh", request, left_ms(), pb.WeighResponse)

    def _outgoing(
        self, session: Session, chunk: Chunk, rectangle: Rectangle | None = None
    ) -> Outgoing:
        self._digest(chunk.key)
        shard: Shard | None = None
        if rectangle is None:
            layout, arrays = chunk.arrays(self.representation)
        else:
            shard, arrays = rectangle.arrays(self.representation, chunk)
            layout = shard.whole
        template = FrameTemplate(
            chunk.key, chunk.parent, session.representation_digest, chunk.content, layout,
            chunk.position, chunk.prefill_flops,
        )  # fmt: skip
        check_frame_bytes(session, layout)
        if shard is not None:
            return OutgoingShard(template, arrays, shard)
        return Outgoing(template, arrays)

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        *,
        lease: bool = False,
        min_accuracy: Accuracy = Accuracy.exact,
        prefill: PrefillModel | None = None,
        prompt_tokens: int = 0,
        wait_ms: int = 0,
    ) -> Match:
        """Find the longest prefix of *keys* that can be read now.

        One round trip; one for each batch of a prompt that is longer than the server takes in a
        request, up to the first that is not ready whole.

        With *prefill*, what the engine takes, the match has a ``plan``: which chunks to load and
        which to recompute, never slower than to recompute all. *prompt_tokens* are those of the
        whole prompt, behind its last chunk too. An engine with a deadline gives the same model
        to ``get_levelled``, which also weighs at which level to load each chunk:

            client.get_levelled(keys, PlanTerms(deadline_s, prefill, decode_bytes_per_s))

        With *wait_ms* the answer waits, for so long at most, until the chunks are here that
        others are putting or have announced.
        """
        least = accuracy_number(min_accuracy)
        tokens = prompt_tokens or len(keys) * self.options.chunk_tokens
        engine = EngineTerms(prefill, tokens) if prefill is not None else None
        request = pb.LookupRequest(
            lease=lease,
            min_accuracy=least,
            prefill=engine_to_message(engine),
            wait_ms=check_wait(wait_ms),
        )
        match = self._look(keys, request)[0]
        if prefill is not None and match.plan is None and keys:
            plan = prefix_plan(match, self.options.chunk_tokens, len(keys), tokens, prefill)
            match = replace(match, plan=plan)
        return match

    def _look(
        self, keys: Sequence[ChunkKey], request: pb.LookupRequest
    ) -> tuple[Match, Sequence[bytes], Transport]:
        """Look up *keys*; return the match, the places that each batch brought, and by which
        transport.
        """

        def work(transport: Transport) -> tuple[Match, Sequence[bytes], Transport]:
            parts = digest_batches(self._digests(keys), transport.session.terms.max_batch_chunks)
            matches: list[Match] = []
            places: list[bytes] = []
            try:
                for reply, count in self._replies(transport, request, parts):
                    matches.append(match_from_message(reply, count))
                    places.append(reply.places)
                    if matches[-1].ready < count:  # so nothing behind it is of use
                        break
            except BaseException:
                self._release([lease for match in matches for lease in match.leases])
                raise
            return joined(matches, len(keys)), places, transport

        return self._with_session(work)

    def _replies(
        self, transport: Transport, asked: pb.LookupRequest, parts: Sequence[bytes]
    ) -> Iterator[tuple[pb.LookupResponse, int]]:
        """Yield the answer about each of *parts* and how many chunks that is of."""
        request = pb.LookupRequest()
        request.CopyFrom(asked)
        request.session_id = transport.session.terms.session_id
        deadline_ms = asked.deadline_ms or self.options.deadline_ms
        patience_ms = min(deadline_ms + asked.wait_ms, MAX_DEADLINE_MS)
        left_ms = countdown(patience_ms)
        for part in parts:
            request.digests, request.deadline_ms = part, left_ms()
            request.wait_ms = max(0, asked.wait_ms - (patience_ms - request.deadline_ms))
            reply = transport.calls.call("Lookup", request, request.deadline_ms, pb.LookupResponse)
            yield reply, len(part) // DIGEST_BYTES
            request.ClearField("prefill")  # a plan of what is behind the first makes no sense

    def get(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        min_accuracy: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
        rectangle: Rectangle | None = None,
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that is there in time, verified.

        Tensors come as arrays of unsigned integers of the dtype's size, to be viewed as it, or
        are written into *out*, one entry a key, numpy or torch. What lies in *out* past the
        returned length is not to be used. Below an exact *min_accuracy* any of them may be
        restored from a lossy copy: neither they nor what is computed from them is to be put.
        *stated*, a list, is filled with what the copy of each chunk that is returned states.
        With a *rectangle* tensors, and *out*, are what one rank has of each chunk.
        """
        check_out(keys, out)
        return self._read_prefix(keys, self._room(given(out), rectangle), min_accuracy, stated)

    def lease(
        self, keys: Sequence[ChunkKey], *, min_accuracy: Accuracy = Accuracy.exact
    ) -> ChunkLease:
        """Look up *keys* and keep what is ready from eviction: ``with client.lease(keys) as l``.

        Views and gets of the lease are of *min_accuracy* or better, too.
        """
        least = accuracy_number(min_accuracy)
        request = pb.LookupRequest(lease=True, places=True, min_accuracy=least)
        match, places, transport = self._look(keys, request)
        view = _view(transport, places, keys[: match.ready])
        return ChunkLease(keys, match, partial(self._get, min_accuracy), self._release, view)

    def _get(
        self,
        least: Accuracy,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None,
        leases: Sequence[int],
    ) -> list[ChunkTensors]:
        check_out(keys, out)
        return self._read(keys, given(out), leases, least)


def parents(keys: Sequence[ChunkKey]) -> Sequence[ChainDigest]:
    """Return the parent digest of each key of a chain."""
    return [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys[:-1])][: len(keys)]


def _view(transport: Transport, places: Sequence[bytes], keys: Sequence[ChunkKey]) -> View:
    """Return what shows the leased *keys*, whose *places* came by batches."""
    limit = transport.session.terms.max_batch_chunks
    pairs = zip(places, batches(keys, limit), strict=False)  # of the last none may be ready
    views = [transport.viewer(rows, some) for rows, (_, some) in pairs]
    return views[0] if len(views) == 1 else lambda index: views[index // limit](index % limit)
