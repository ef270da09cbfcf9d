"""Keeping: what a client asks about chunks beside their bytes. A part of Client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.client.batches import batch_from_message, chain_batches, joined_plans
from kvstore.client.caller import Caller
from kvstore.client.connection import countdown
from kvstore.client.frames import FrameAssembler
from kvstore.client.options import MAX_NAME_CHARS
from kvstore.client.transport import Transport, arrival_of, room_of, whole_frames
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    check_text,
)
from kvstore.proto.frame import MAX_FRAME_BYTES, FrameHeader, check_frame
from kvstore.proto.messages import accuracy_number
from kvstore.proto.plans import MAX_HANDOVER_MS, PlannedBatch
from kvstore.proto.types import Accuracy, ChunkKey


class Keeping(Caller):
    """Keep, forget and look at chunks. Thread-safe."""

    # --- keeping and forgetting

    def pin(self, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Keep chunks from eviction for *ttl_ms*; return how many are known."""
        _check_uint32("ttl_ms", ttl_ms)
        replies = self._ask("Pin", pb.PinRequest(ttl_ms=ttl_ms), keys, pb.PinResponse)
        return sum(reply.pinned for reply in replies)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End pins; return how many there were."""
        replies = self._ask("Unpin", pb.UnpinRequest(), keys, pb.UnpinResponse)
        return sum(reply.unpinned for reply in replies)

    def announce_puts(self, keys: Sequence[ChunkKey], within_ms: int) -> int:
        """Say that this client will put *keys* within *within_ms*, at most ten minutes.

        Until then lookups of others count them as pending, and may wait for them. 0 takes the
        announcement back; the end of the session does, too. Return how many are pending by it: not
        those that are there, or that somebody else has announced.
        """
        _check_uint32("within_ms", within_ms)
        request = pb.AnnouncePutsRequest(ttl_ms=within_ms)
        replies = self._ask("AnnouncePuts", request, keys, pb.AnnouncePutsResponse)
        return sum(reply.pending for reply in replies)

    def plan(self, chains: Sequence[Sequence[ChunkKey]], ttl_ms: int = 0) -> PlannedBatch:
        """Announce a batch of prompts, each by the keys of its chunks.

        One round trip, or several for more chunks than the server takes in a request.
        The answer says in which order to ask for them, and how often each chunk comes. With
        *ttl_ms* the server keeps their chunks until each was asked for as often as announced (by
        a lookup with lease, or by being put), the session ends or the time is up, within its
        limit of pins.
        """
        _check_uint32("ttl_ms", ttl_ms)

        def work(transport: Transport) -> PlannedBatch:
            terms, left_ms = transport.session.terms, countdown(self.options.deadline_ms)
            groups = chain_batches(chains, terms.max_batch_chunks)
            plans = []
            for group in groups:
                lengths = [len(chain) for _, chain in group]
                request = pb.PlanRequest(
                    session_id=terms.session_id,
                    chains=b"".join(self._digests(chain) for _, chain in group),
                    lengths=lengths,
                    ttl_ms=ttl_ms,
                )
                reply = transport.calls.call("Plan", request, left_ms(), pb.PlanResponse)
                plans.append(batch_from_message(reply, lengths))
            return joined_plans(chains, groups, plans)

        return self._with_session(work)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks on every tier; return how many. Chunks that are being read stay."""
        replies = self._ask("Delete", pb.DeleteRequest(), keys, pb.DeleteResponse)
        return sum(reply.deleted for reply in replies)

    def clear(self, tier: str = "", *, dry_run: bool = False) -> int:
        """Forget every chunk of this client's namespace that nobody reads; return how many.

        With *tier* only their copies there go, with *dry_run* none: the answer says what would.
        """
        check_text("tier", tier, MAX_NAME_CHARS)
        request = pb.ClearRequest(tier=tier, dry_run=dry_run, deadline_ms=self.options.deadline_ms)

        def work(transport: Transport) -> int:
            request.session_id = transport.session.terms.session_id
            return self._call("Clear", request, pb.ClearResponse).deleted

        return self._with_session(work)

    # --- looking

    def stat(self, keys: Sequence[ChunkKey], *, ranks: bool = False) -> list[pb.ChunkStat]:
        """Return what the server knows of those chunks that exist.

        With *ranks*, of 16 chunks at most, also how many others each tier would evict before.
        """
        replies = self._ask("Stat", pb.StatRequest(ranks=ranks), keys, pb.StatResponse)
        return [chunk for reply in replies for chunk in reply.chunks]

    def list(
        self, limit: int = 0, *, after: bytes = b"", prefix: bytes = b""
    ) -> Sequence[pb.ChunkStat]:
        """Return the chunks of this client's namespace, at most *limit* unless 0.

        They come in the order of their digests: those behind the digest *after*, so that pages
        follow each other, and those that begin with *prefix*.
        """
        _check_uint32("limit", limit)

        def work(transport: Transport) -> Sequence[pb.ChunkStat]:
            session_id = transport.session.terms.session_id
            request = pb.ListRequest(session_id=session_id, limit=limit, after=after, prefix=prefix)
            pages = self._connection.stream("List", request, self.options.deadline_ms)
            return [chunk for page in pages for chunk in page.chunks]

        return self._with_session(work)

    def frame(
        self, key: ChunkKey, *, min_accuracy: Accuracy = Accuracy.exact
    ) -> tuple[FrameHeader, bytes] | None:
        """Return a chunk's frame as it lies on a tier, all of it verified; None without one.

        Raises ChunkCorruptError or InvalidFrameError for a frame that is damaged, which the
        server is told of.
        """

        def work(transport: Transport) -> tuple[FrameHeader, bytes] | None:
            session = transport.session
            request = pb.GetRequest(
                session_id=session.terms.session_id,
                digests=self._digest(key),
                deadline_ms=self.options.deadline_ms,
                min_accuracy=accuracy_number(min_accuracy),
            )
            replies = self._connection.stream("Get", request, self.options.deadline_ms)
            assembler = FrameAssembler(MAX_FRAME_BYTES, room_of())
            found = list(whole_frames(map(arrival_of, replies), assembler))
            if not found:
                return None
            data = np.asarray(found[0].data)
            try:
                header = check_frame(data, key)
                if header.representation != session.representation_digest:
                    raise ChunkCorruptError(key, "it was stored for another Model")
                return header, data.tobytes()
            except (ChunkCorruptError, InvalidFrameError):
                self._quarantine(transport, key)
                raise

        return self._with_session(work)

    def status(self) -> pb.StatusResponse:
        """Return the server's state."""
        return self._call("Status", pb.StatusRequest(), pb.StatusResponse)

    def drain(self) -> bool:
        """Have the server refuse new work and save what it holds; True if all was saved."""
        request = pb.DrainRequest(deadline_ms=self.options.deadline_ms)
        return self._call("Drain", request, pb.DrainResponse).clean


def _check_uint32(field: str, value: int) -> None:
    if not 0 <= value < 1 << 32:
        raise InvalidRequestError(field, value, "give 0 to 2^32-1")


def check_wait(wait_ms: int) -> int:
    """Return *wait_ms* if chunks may be waited for so long. Raises InvalidRequestError."""
    if not 0 <= wait_ms <= MAX_HANDOVER_MS // 2:
        raise InvalidRequestError("wait_ms", wait_ms, f"use 0 to {MAX_HANDOVER_MS // 2}")
    return wait_ms
