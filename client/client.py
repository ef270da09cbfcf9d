"""The blocking client of one server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from typing_extensions import override

from kvstore.client.chunk import Chunk
from kvstore.client.engine_calls import EngineCalls, check_frame_bytes, check_out
from kvstore.client.events import Following
from kvstore.client.keeping import Keeping, check_wait
from kvstore.client.lease import ChunkLease
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.outgoing import OutgoingPortion
from kvstore.client.reader import given
from kvstore.client.rectangle import Rectangle
from kvstore.client.resolving import Resolving
from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import Outgoing, Put, Transport
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, KVStoreError, TierUnavailableError
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.hints import NO_HINTS, Hints
from kvstore.proto.keys import chain_digests, chunk_key
from kvstore.proto.plan_wire import engine_to_message
from kvstore.proto.plans import EngineTerms, PrefillModel
from kvstore.proto.portion import Portion
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkKey,
    Fidelity,
    Match,
)
from kvstore.proto.wire import fidelity_number, hints_to_message, match_from_message


class Client(Keeping, EngineCalls, Resolving, Following):
    """Put, look up and get chunks of one Representation. Thread-safe.

    Connects at the first call, and again after the server restarted. Every method raises
    KVStoreErrors only and returns within ``options.deadline_ms`` plus 50 ms a round trip.
    A miss is an answer: a Match of 0, a shorter list.
    """

    def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt. *extra*: cache salt, multimodal hashes, in order."""
        space = self.namespace
        digests = chain_digests(tokens, self.options.chunk_tokens, extra)
        return [chunk_key(space, digest) for digest in digests]

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
        Raises LayoutMismatchError or RepresentationError before anything is sent when a
        chunk is not of this client's Representation.
        """
        if not chunks:
            return []

        def work(transport: Transport) -> list[Put]:
            outgoing = [self._outgoing(transport.session, chunk, rectangle) for chunk in chunks]
            if any(chunk.importance is not None for chunk in chunks):
                self._weigh(transport, chunks, outgoing)
            results: list[Put] = []
            for batch in _batches(outgoing, transport.session.terms.max_batch_chunks):
                results += transport.put(
                    batch,
                    durable=durable,
                    deadline_ms=self.options.deadline_ms,
                    hints=hints,
                )
            return results

        return self._with_session(work)

    def _weigh(
        self, transport: Transport, chunks: Sequence[Chunk], outgoing: Sequence[Outgoing]
    ) -> None:
        """Say which tokens matter, ahead of the chunks; a server that does not hear it codes all
        alike.
        """
        pairs = zip(chunks, outgoing, strict=True)
        weights = [(one.key, one.weights(out.template.layout.tokens)) for one, out in pairs]
        told = [(key, each) for key, each in weights if each]
        limit = transport.session.terms.max_batch_chunks
        for start in range(0, len(told), limit):
            batch = told[start : start + limit]
            request = pb.WeighRequest(
                session_id=transport.session.terms.session_id,
                digests=self._digests([key for key, _ in batch]),
                weights=[each for _, each in batch],
            )
            with suppress(TierUnavailableError, DeadlineError):
                self._call("Weigh", request, pb.WeighResponse)

    def _outgoing(
        self, session: Session, chunk: Chunk, rectangle: Rectangle | None = None
    ) -> Outgoing:
        self._digest(chunk.key)
        portion: Portion | None = None
        if rectangle is None:
            layout, arrays = chunk.arrays(self.representation)
        else:
            portion, arrays = rectangle.arrays(self.representation, chunk)
            layout = portion.whole
        template = FrameTemplate(
            chunk.key, chunk.parent, session.representation_digest, chunk.content, layout,
            chunk.position, chunk.prefill_flops,
        )  # fmt: skip
        check_frame_bytes(session, layout)
        if portion is not None:
            return OutgoingPortion(template, arrays, portion)
        return Outgoing(template, arrays)

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        *,
        lease: bool = False,
        min_fidelity: Fidelity = Fidelity.exact,
        prefill: PrefillModel | None = None,
        prompt_tokens: int = 0,
        wait_ms: int = 0,
    ) -> Match:
        """Find the longest prefix of *keys* that can be read now; one round trip.

        With *prefill*, what the engine takes, the match has a ``plan``: which chunks to load and
        which to recompute, never slower than to recompute all. *prompt_tokens* are those of the
        whole prompt, behind its last chunk too. An engine with a deadline gives the same model
        to ``get_levelled``, which also weighs at which level to load each chunk:

            client.get_levelled(keys, PlanTerms(deadline_s, prefill, decode_bytes_per_s))

        With *wait_ms* the answer waits, for so long at most, until the chunks are here that
        others are putting or have promised.
        """
        least = fidelity_number(min_fidelity)
        tokens = prompt_tokens or len(keys) * self.options.chunk_tokens
        engine = EngineTerms(prefill, tokens) if prefill is not None else None
        request = pb.LookupRequest(
            lease=lease,
            min_fidelity=least,
            prefill=engine_to_message(engine),
            wait_ms=check_wait(wait_ms),
        )
        return self._look(keys, request)[0]

    def _look(
        self, keys: Sequence[ChunkKey], request: pb.LookupRequest
    ) -> tuple[Match, bytes, Transport]:
        """Look up *keys*; return the match, the places that came along, and by which transport."""

        def work(transport: Transport) -> tuple[Match, bytes, Transport]:
            request.session_id = transport.session.terms.session_id
            request.digests = self._digests(keys)
            patience_ms = self.options.deadline_ms + request.wait_ms
            request.deadline_ms = min(patience_ms, MAX_DEADLINE_MS)
            reply = transport.calls.call("Lookup", request, request.deadline_ms, pb.LookupResponse)
            match = match_from_message(reply, len(keys))
            return match, reply.places, transport

        return self._with_session(work)

    def get(
        self,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None = None,
        *,
        min_fidelity: Fidelity = Fidelity.exact,
        rectangle: Rectangle | None = None,
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that is there in time, verified.

        Tensors come as arrays of unsigned integers of the dtype's size, to be viewed as it, or
        are written into *out*, one entry a key, numpy or torch. What lies in *out* past the
        returned length is not to be used. Below an exact *min_fidelity* any of them may be
        restored from a lossy copy: neither they nor what is computed from them is to be put.
        With a *rectangle* tensors, and *out*, are what one rank has of each chunk.
        """
        check_out(keys, out)
        return self._read_prefix(keys, self._room(given(out), rectangle), min_fidelity)

    def lease(
        self, keys: Sequence[ChunkKey], *, min_fidelity: Fidelity = Fidelity.exact
    ) -> ChunkLease:
        """Look up *keys* and keep what is ready from eviction: ``with client.lease(keys) as l``.

        Views and gets of the lease are of *min_fidelity* or better, too.
        """
        least = fidelity_number(min_fidelity)
        request = pb.LookupRequest(lease=True, places=True, min_fidelity=least)
        match, rows, transport = self._look(keys, request)
        view = transport.viewer(rows, keys[: match.ready])
        return ChunkLease(keys, match, partial(self._get, min_fidelity), self._release, view)

    def _get(
        self,
        least: Fidelity,
        keys: Sequence[ChunkKey],
        out: Sequence[LayerTensors] | None,
        lease_id: int,
    ) -> list[ChunkTensors]:
        check_out(keys, out)
        return self._read(keys, given(out), lease_id, least)

    def _release(self, lease_id: int, hints: Hints = NO_HINTS) -> None:
        try:
            transport = self._connected()
            request = pb.ReleaseRequest(
                session_id=transport.session.terms.session_id,
                lease_ids=[lease_id],
                hints=hints_to_message(hints),
            )
            transport.calls.call("Release", request, self.options.deadline_ms, pb.ReleaseResponse)
        except KVStoreError:
            return  # it ends with its session or its time


def parents(keys: Sequence[ChunkKey]) -> Sequence[ChainDigest]:
    """Return the parent digest of each key of a chain."""
    return [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys[:-1])][: len(keys)]


def _batches(chunks: Sequence[Outgoing], limit: int) -> Iterator[Sequence[Outgoing]]:
    for start in range(0, len(chunks), limit):
        yield chunks[start : start + limit]
