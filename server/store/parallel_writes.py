"""Parallel writes: chunks that several writers put portion by portion, until they are whole.

Ranks of a parallel engine each have some layers or heads. What they put is verified, copied to
where it belongs in the room of the whole raw frame, and the frame sealed once every layer and
head has come. Until then lookups call the chunk pending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.frame import (
    FIXED_BYTES,
    FLAG_RESTORED,
    FrameHeader,
    check_identity,
    parse_header,
    stated_header_bytes,
)
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, Portion, PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.partial_chunks import Claim, PartialChunk
from kvstore.server.store.reservations import NO_OPTIONS, PutOptions, PutResult, Reservations
from kvstore.tiers.cpu import CpuTier

UNFINISHED_PERCENT = 25
"""Of CPU memory: rooms of unfinished chunks, and what streams bring on its way into them."""
MAX_UNFINISHED_CHUNKS = 4096
UNFINISHED_S = 30.0
"""What the portions of a chunk may be apart; then what has come of it is dropped."""


@dataclass(frozen=True, slots=True)
class PartialChunkLimits:
    """Bounds of partial chunks: bytes, number, and seconds until one is dropped."""

    limit_bytes: int
    chunks: int = MAX_UNFINISHED_CHUNKS
    unfinished_s: float = UNFINISHED_S

    @classmethod
    def of(cls, tier: CpuTier, unfinished_s: float) -> PartialChunkLimits:
        """Return the limits of a server with that memory."""
        return cls(tier.capacity_bytes * UNFINISHED_PERCENT // 100, unfinished_s=unfinished_s)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What is put of a chunk: a frame of ``frame_bytes`` of a portion.

    A streamed one waits in memory of the server until it is whole.
    """

    portion: Portion
    frame_bytes: int
    is_streamed: bool = False


@dataclass(slots=True, eq=False)
class PartTicket:
    """A portion that is being put; owned by a session. The room is the unfinished chunk's."""

    ticket_id: int
    session: Session
    info: ChunkInfo
    part: ChunkPart
    options: PutOptions = NO_OPTIONS
    frame: Bytes | None = None
    """Memory for a streamed one."""

    @property
    def key(self) -> ChunkKey:
        """The chunk's name."""
        return self.info.key

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that is to come."""
        return self.part.frame_bytes


class ParallelWrites:
    """Unfinished chunks, by key. Thread-safe."""

    def __init__(self, reservations: Reservations, limits: PartialChunkLimits) -> None:
        self._reservations = reservations
        self._limits = limits
        self._counters = reservations.counters
        self._clock = reservations.clock
        self._chunks: dict[ChunkKey, PartialChunk] = {}
        self._used_bytes = 0
        # Guards the two above, and all of a chunk but the copying of its bytes.
        self._lock = threading.Lock()

    def begin(self, ticket: PartTicket, deadline: float) -> PutResult | None:
        """Have room for the chunk of *ticket*, or say why there is nothing to write.

        Raises InvalidRequestError for a portion of another chunk than other writers state,
        QuotaExceededError.
        """
        reason = self._take_scratch(ticket)
        if reason:
            return self._refused(reason)
        try:
            answer = self._join(ticket) or self._open(ticket, deadline)
        except KVStoreError:
            self.discard(ticket)
            raise
        if isinstance(answer, PutResult):
            self.discard(ticket)
            return answer
        return None

    def _refused(self, reason: str) -> PutResult:
        self._counters.add("put_refused_chunks")
        return PutResult(PutOutcome.refused, reason)

    def _take_scratch(self, ticket: PartTicket) -> str:
        if not ticket.part.is_streamed:
            return ""
        with self._lock:
            if self._used_bytes + ticket.frame_bytes > self._limits.limit_bytes:
                return self._full()
            self._used_bytes += ticket.frame_bytes
        ticket.frame = np.empty(ticket.frame_bytes, np.uint8)
        return ""

    def _full(self) -> str:
        limit_bytes, chunks = self._limits.limit_bytes, self._limits.chunks
        return f"unfinished chunks have all of their {limit_bytes} bytes or are {chunks}"

    def _join(self, ticket: PartTicket) -> bool:
        """Take part in a chunk that is there; False when there is none."""
        with self._lock:
            chunk = self._chunks.get(ticket.key)
            if chunk is not None:
                chunk.join(ticket.session, ticket.part.portion, ticket.info.parent)
            return chunk is not None

    def _open(self, ticket: PartTicket, deadline: float) -> bool | PutResult:
        """Begin a chunk: admission, quota and room are asked for here, once."""
        info, need_bytes = ticket.info, ticket.info.size_bytes
        with self._lock:
            is_full = (
                self._used_bytes + need_bytes > self._limits.limit_bytes
                or len(self._chunks) >= self._limits.chunks
            )
            self._used_bytes += 0 if is_full else need_bytes
        if is_full:
            return self._refused(self._full())
        try:
            reserved = self._reservations.reserve(ticket.session, info, deadline, ticket.options)
        except KVStoreError:
            self._release(need_bytes)
            raise
        if isinstance(reserved, PutResult):
            self._release(need_bytes)
            return reserved
        until = self._clock() + self._limits.unfinished_s
        room = self._reservations.view(reserved)
        chunk = PartialChunk(reserved, room, ticket.session.tenant, until)
        with self._lock:
            first = self._chunks.setdefault(info.key, chunk)
        if first is not chunk:  # another writer was quicker
            self._reservations.give_back(reserved)
            self._release(need_bytes)
        elif self._reservations.has(info.key):  # others were, and have made it whole since
            self._let_go(lambda one: one is chunk)
            return PutResult(PutOutcome.exists)
        return self._join(ticket) or self._too_late(ticket)

    def _release(self, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= size_bytes

    def discard(self, ticket: PartTicket) -> None:
        """Give up one portion; the chunk waits for another writer of it."""
        if ticket.frame is not None:
            ticket.frame = None
            self._release(ticket.frame_bytes)

    def take(self, ticket: PartTicket, frame: Bytes) -> PutResult:
        """Verify *frame*, which its writer may still have a hand on, and put it where it belongs.

        The last one makes the chunk visible. Raises InvalidFrameError, ChunkCorruptError,
        UnknownCodecError, InvalidRequestError; nothing of the portion stays then.
        """
        try:
            header = _read_header(ticket, frame)
            with self._lock:
                chunk = self._chunks.get(ticket.key)
                claim = None if chunk is None else chunk.claim(ticket.part.portion)
            if chunk is None or claim is None:
                return self._too_late(ticket)
            return self._fill(chunk, claim, ticket, header, frame)
        except KVStoreError:
            self._counters.add("put_invalid_chunks")
            raise
        finally:
            self.discard(ticket)

    def _too_late(self, ticket: PartTicket) -> PutResult:
        if self._reservations.has(ticket.key):
            return PutResult(PutOutcome.exists)
        reason = "its other portions did not come in time"
        self._reservations.record_refused(ticket.key, reason)
        return self._refused(reason)

    def _fill(
        self,
        chunk: PartialChunk,
        claim: Claim,
        ticket: PartTicket,
        header: FrameHeader,
        frame: Bytes,
    ) -> PutResult:
        portion = ticket.part.portion
        is_right = is_whole = False
        try:
            chunk.fill(header, frame, portion, claim)
            with self._lock:
                chunk.agree(header, ticket.options.hints)
            is_right = True
        finally:
            with self._lock:
                is_whole = chunk.leave(portion, claim, is_filled=is_right)
                is_gone = chunk.is_dropped and not chunk.writers
                chunk.is_sealing = chunk.is_sealing or (is_whole and not chunk.is_dropped)
            if is_gone:
                self._reservations.give_back(chunk.reservation)
        if chunk.is_dropped:
            return self._too_late(ticket)
        self._counters.add("put_portions")
        if not is_whole:
            return PutResult(PutOutcome.pending, "waits for the chunk's other portions")
        try:
            whole = chunk.sum_up()
            return self._reservations.seal(chunk.reservation, whole, chunk.tenant, chunk.hints)
        finally:  # not before it is visible: it is known all the time
            with self._lock:
                self._forget(chunk)

    def _forget(self, chunk: PartialChunk) -> None:
        del self._chunks[chunk.info.key]
        self._used_bytes -= chunk.info.size_bytes

    # --- those that do not become whole

    def expire(self) -> int:
        """Drop the chunks whose time is up; return how many."""
        now = self._clock()
        return self._drop(lambda chunk: chunk.until <= now)

    def end_session(self, session_id: int) -> int:
        """Drop the chunks that nobody else who lives has a part in; return how many."""
        with self._lock:
            theirs = {one for one in self._chunks.values() if session_id in one.sessions}
            for chunk in theirs:
                chunk.sessions.discard(session_id)
        return self._drop(lambda chunk: chunk in theirs and not chunk.sessions)

    def _drop(self, is_over: Callable[[PartialChunk], bool]) -> int:
        count = self._let_go(is_over)
        self._counters.add("dropped_unfinished_chunks", count)
        return count

    def _let_go(self, is_over: Callable[[PartialChunk], bool]) -> int:
        with self._lock:
            over = [one for one in self._chunks.values() if is_over(one) and not one.is_sealing]
            for chunk in over:
                chunk.is_dropped = True
                self._forget(chunk)
            free = [chunk for chunk in over if not chunk.writers]
        for chunk in free:
            self._reservations.give_back(chunk.reservation)
        return len(over)

    @property
    def used_bytes(self) -> int:
        """Bytes of unfinished chunks, and of streamed portions on their way into them."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._chunks)


def _read_header(ticket: PartTicket, frame: Bytes) -> FrameHeader:
    """Return the header of *frame* if it is what was announced.

    Read once: whoever still writes to the frame cannot slip another one past.
    """
    start = frame[:FIXED_BYTES].copy()
    end = min(max(stated_header_bytes(start), FIXED_BYTES), len(frame)) if len(start) else 0
    header = parse_header(frame[:end].copy(), takes_portions=True)
    check_identity(header, len(frame), ticket.key)
    if header.portion != ticket.part.portion or header.parent != ticket.info.parent:
        raise InvalidRequestError(
            "frame", header.key.hex(), "its rectangle or parent is not what was reserved"
        )
    if header.representation != ticket.session.representation_digest:
        raise InvalidRequestError(
            "representation", header.representation.hex(), "the frame is of another model's KV"
        )
    if header.codec_id or header.fidelity is not Fidelity.exact or header.flags & FLAG_RESTORED:
        raise InvalidRequestError("codec", header.codec_id, "rectangles are put raw")
    return header
