"""A StreamingLoad: a chunk on its way up into CPU memory, one segment after another."""

from __future__ import annotations

import threading
from itertools import count

from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import (
    FrameHeader,
    check_segment,
    header_bytes,
    parse_header,
    raw_frame_bytes,
)
from kvstore.proto.types import ChunkInfo
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.server.tiering.work_queue import Ticket
from kvstore.tiers.base import Reservation

_numbers = count()


class StreamingLoad:
    """Reads a raw frame from *source* in pieces; ``open`` and ``read`` run in its load queue.

    Each segment is verified as it lands. ``close`` makes the chunk visible in CPU memory if all
    of it landed, and frees the room otherwise; until then ``frame`` is the reader's. Thread-safe.
    """

    def __init__(self, moves: Moves, source: TierSlot, stored: ChunkInfo, tenant: str) -> None:
        self.source = source
        self._moves = moves
        self._stored = stored
        self._tenant = tenant
        self._name = stored.key + next(_numbers).to_bytes(8, "little")
        self.frame: Bytes
        self.header: FrameHeader
        self._reservation: Reservation | None = None
        self._unread = stored.layout.segment_count
        self._running = 0
        self._is_closed = False
        self._lock = threading.Lock()  # guards the three above

    @staticmethod
    def is_possible(stored: ChunkInfo) -> bool:
        """Whether the stored copy has the bytes that CPU memory is to have."""
        return stored.codec_id == 0 and stored.size_bytes == raw_frame_bytes(stored.layout)

    def submit(self, segment: int | None, deadline: float) -> Ticket | None:
        """Queue a read, of the header for None; None when the queue is full."""
        number = b"" if segment is None else segment.to_bytes(4, "little")
        return self._moves.work_queue.submit(
            f"load-{self.source.name}",
            self._name + number,
            lambda: self._guarded(segment, deadline),
        )

    def _guarded(self, segment: int | None, deadline: float) -> bool:
        with self._lock:
            if self._is_closed:
                raise LeaseExpiredError("the get that wanted this layer is over")
            self._running += 1
        try:
            if segment is None:
                self._open(deadline)
            else:
                self._read(segment)
            return True
        except ChunkCorruptError:
            self._moves.eviction.drop_corrupt(self.source, self._stored.key)
            raise
        finally:
            with self._lock:
                self._running -= 1
                is_over = self._is_closed and not self._running
            if is_over:
                self._give_back()

    def _open(self, deadline: float) -> None:
        """Reserve room and read the header.

        Raises TierFullError, TierUnavailableError, ChunkCorruptError.
        """
        moves, stored = self._moves, self._stored
        room = SpaceRequest(stored, self._tenant, deadline)
        moves.catalog.hold(stored.key)
        try:
            self._reservation = moves.eviction.reserve(moves.tiers.cpu, room)
        except BaseException:
            moves.catalog.let_go(stored.key)
            raise
        self.frame = moves.tiers.cpu_tier.view(self._reservation)
        size = header_bytes(stored.layout)
        self._take(0, size)
        try:
            header = parse_header(self.frame[:size])
        except InvalidFrameError as error:
            raise ChunkCorruptError(stored.key, str(error)) from None
        if (header.key, header.layout, header.codec_id, header.frame_bytes, header.fidelity) != (
            stored.key, stored.layout, stored.codec_id, stored.size_bytes, stored.fidelity,
        ) or header.levels:  # fmt: skip
            raise ChunkCorruptError(stored.key, f"its place holds chunk {header.key.hex()}")
        self.header = header

    def _read(self, segment: int) -> None:
        """Read one segment, and the padding before it, and verify it."""
        ends = self.header.segments["offset"] + self.header.segments["stored_bytes"]
        start = int(ends[segment - 1]) if segment else self.header.header_bytes
        started = self._moves.clock()
        self._take(start, int(ends[segment]))
        check_segment(self.header, segment, checksum(self.header.segment(self.frame, segment)))
        self.source.rate.observe(int(ends[segment]) - start, self._moves.clock() - started)
        with self._lock:
            self._unread -= 1

    def _take(self, start: int, stop: int) -> None:
        source, key = self.source, self._stored.key
        try:
            found = source.guarded(
                lambda: source.tier.read(key, self.frame[start:stop], start), "read"
            )
        except InvalidRequestError:
            found = False  # others have put a frame of another size in its place
        if not found:
            self._moves.catalog.forget(source.name, key)
            self._moves.counters.add("lost_chunks")
            raise TierUnavailableError(source.name, f"it lost {key.hex()}")

    def close(self) -> None:
        """Seal what is whole, free what is not, as soon as nothing is being read. Idempotent."""
        with self._lock:
            is_over = not self._is_closed and not self._running
            self._is_closed = True
        if is_over:
            self._give_back()

    def _give_back(self) -> None:
        if self._reservation is None:
            return
        moves, stored = self._moves, self._stored
        if self._unread:
            moves.tiers.cpu_tier.abort(self._reservation)
        elif moves.tiers.cpu_tier.seal(self._reservation):
            moves.catalog.note_sealed(moves.tiers.cpu.name, stored)
            moves.counters.add("promoted_chunks")
            flows = moves.counters.flows
            flows.note(self.source.name, moves.tiers.cpu.name, stored.size_bytes)
        moves.catalog.let_go(stored.key)
