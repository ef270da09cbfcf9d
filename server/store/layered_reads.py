"""Layer-wise reads: layer i of all chunks is sent while layer i+1 is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvstore.codecs.slices import cut_rows, kept_rows
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
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
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import ChunkInfo, ChunkKey, layer_order
from kvstore.server.store.reads import LayerPart, Loads, ReadTerms
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.server.tiering.work_queue import Ticket
from kvstore.tiers.base import Reservation

READ_AHEAD_CHUNKS = 8
"""Chunks whose headers are read ahead."""
READ_AHEAD_SEGMENTS = 32
"""Segments that are read ahead."""

_numbers = count()


class StreamingLoad:
    """Reads a raw frame from *source* in pieces, in its load queue.

    Each segment is verified on arrival. Once it is closed and no read is in progress, the chunk
    becomes visible in CPU memory if it is complete, else its memory is freed; until then the reader
    owns ``frame``. Thread-safe.
    """

    def __init__(self, loads: Loads, source: TierSlot, stored: ChunkInfo) -> None:
        self.source = source
        self._loads = loads
        self._moves = loads.moves
        self._stored = stored
        self._name = stored.key + next(_numbers).to_bytes(8, "little")
        self.frame: Bytes
        self.header: FrameHeader
        self._reservation: Reservation | None = None
        self._unread = stored.layout.segment_count
        self._users = 1
        """The reader plus the reads in progress."""
        self._lock = threading.Lock()  # guards the two above

    def submit(self, segment: int | None) -> Ticket | None:
        """Queue a read of *segment*, None: of the header; return None when the queue is full."""
        number = b"" if segment is None else segment.to_bytes(4, "little")
        work = partial(self._run, segment)
        return self._loads.submit(self.source, self._name + number, work)

    def _run(self, segment: int | None) -> bool:
        with self._lock:
            if not self._users:
                raise LeaseExpiredError("the get of this layer has ended")
            self._users += 1
        try:
            if segment is None:
                self._open()
            else:
                self._read(segment)
            return True
        except ChunkCorruptError:
            self._moves.eviction.drop_corrupt(self.source, self._stored.key)
            raise
        finally:
            self.close()

    def _open(self) -> None:
        """Reserve memory and read the header. Raises KVStoreErrors."""
        moves, stored, terms = self._moves, self._stored, self._loads.terms
        request = SpaceRequest(stored, terms.session.tenant, terms.deadline)
        moves.catalog.hold(stored.key)
        try:
            self._reservation = moves.eviction.reserve(moves.tiers.cpu, request)
        except BaseException:
            moves.catalog.release_hold(stored.key)
            raise
        self.frame = moves.tiers.cpu_tier.view(self._reservation)
        size = header_bytes(stored.layout)
        self._take(0, size)
        try:
            header = parse_header(self.frame[:size])
        except InvalidFrameError as error:
            raise ChunkCorruptError(stored.key, str(error)) from None
        if (header.key, header.layout, header.codec_id, header.frame_bytes, header.accuracy) != (
            stored.key, stored.layout, stored.codec_id, stored.size_bytes, stored.accuracy,
        ) or header.levels:  # fmt: skip
            raise ChunkCorruptError(stored.key, f"its place holds chunk {header.key.hex()}")
        self.header = header

    def _read(self, segment: int) -> None:
        """Read one segment with the padding before it, and verify it."""
        ends = self.header.segments["offset"] + self.header.segments["stored_bytes"]
        start = int(ends[segment - 1]) if segment else self.header.header_bytes
        started = self._moves.clock()
        self._take(start, int(ends[segment]))
        check_segment(self.header, segment, checksum(self.header.segment(self.frame, segment)))
        self.source.note_load(int(ends[segment]) - start, self._moves.clock() - started)
        with self._lock:
            self._unread -= 1

    def _take(self, start: int, stop: int) -> None:
        source, key = self.source, self._stored.key
        read = partial(source.tier.read, key, self.frame[start:stop], start)
        if not self._moves.read_from(source, key, lambda: source.guarded(read, "read")):
            raise TierUnavailableError(source.name, f"it lost {key.hex()}")

    def close(self) -> None:
        """End one use; the last one makes a complete chunk visible and frees any other."""
        with self._lock:
            self._users -= 1
            is_over = not self._users
        if not is_over or self._reservation is None:
            return
        moves, stored = self._moves, self._stored
        if self._unread:
            moves.tiers.cpu_tier.abort(self._reservation)
        elif moves.tiers.cpu_tier.seal(self._reservation):
            moves.note_moved(stored, self.source, moves.tiers.cpu)
        moves.catalog.release_hold(stored.key)


@dataclass(slots=True)
class _Source:
    """One chunk of the get: *ticket* loads its header from a lower tier, ``load`` the rest."""

    index: int
    tier: str
    ticket: Ticket | None = None
    load: StreamingLoad | None = None
    header: FrameHeader = field(init=False)
    frame: Bytes = field(init=False)
    kept: Rows | None = None
    """Rows to send; None: all."""


class LayerwiseRead:
    """Sends layer i of all chunks while layer i+1 is read. Used once, by one thread, under a lease.

    Raw frames of a lower tier are read layer by layer, directly into CPU memory, and promoted once
    complete; others are promoted before their first layer.
    """

    def __init__(self, moves: Moves, keys: Sequence[ChunkKey], terms: ReadTerms) -> None:
        self.skipped: SkippedRows | None = None
        """Rows that are not sent."""
        self._moves = moves
        self._least = terms.least
        self._keys = keys
        self._reads = Loads(moves, terms)
        self._order = layer_order(terms.session.representation)
        self._sources: list[_Source] = []
        self._loads: list[StreamingLoad] = []

    def parts(self) -> Iterator[LayerPart]:
        """Yield the header of each chunk up to the first that is lost or late, then segments.

        A chunk that is lost later cuts the prefix there; a late one ends the stream.
        """
        counters = self._moves.counters
        try:
            self._open()
            for source in self._sources:
                yield self._part(source, 0, source.frame[: source.header.header_bytes])
            yield from self._segments()
        finally:
            self._reads.close()
            for load in self._loads:
                load.close()
            counters.add("get_chunks", len(self._sources))
            counters.add("get_missed_chunks", len(self._keys) - len(self._sources))

    def _part(self, source: _Source, offset: int, data: Bytes) -> LayerPart:
        self._moves.counters.add("get_bytes", len(data))
        return LayerPart(source.index, source.tier, source.header.frame_bytes, offset, data)

    # --- headers

    def _open(self) -> None:
        begun: list[_Source | None] = []
        for index, key in enumerate(self._keys):
            for ahead in self._keys[len(begun) : index + 1 + READ_AHEAD_CHUNKS]:
                begun.append(self._begin(len(begun), ahead))
            source = begun[index]
            if source is None or not self._is_opened(source, key):
                return
            source.kept = kept_rows(source.header, self.skipped, index)
            self._sources.append(source)

    def _begin(self, index: int, key: ChunkKey) -> _Source | None:
        """Start loading the header of *key*; return None if it cannot be loaded."""
        moves = self._moves
        copies = moves.catalog.copies(key)
        fit = [name for name, copy in copies.items() if copy.accuracy >= self._least]
        slot = next(iter(moves.nearest(key, fit)), None)
        if slot is None:
            return None
        source, copy = _Source(index, slot.name), copies[slot.name]
        if slot is moves.tiers.cpu:
            return source
        is_raw = copy.codec_id == 0 and copy.size_bytes == raw_frame_bytes(copy.layout)
        if is_raw and slot.tier.reads_parts:
            source.load = StreamingLoad(self._reads, slot, copy)
            self._loads.append(source.load)
            source.ticket = source.load.submit(None)
        else:
            source.ticket = self._reads.load(key, slot)
        return None if source.ticket is None else source

    def _is_opened(self, source: _Source, key: ChunkKey) -> bool:
        """Wait for a header; return False if the chunk cannot be read."""
        if source.ticket is not None and not self._reads.result(source.ticket):
            return False
        if source.load is not None:
            source.header, source.frame = source.load.header, source.load.frame
        else:
            frame = self._moves.tiers.cpu_tier.peek(key)
            if frame is None:
                return False
            source.header, source.frame = parse_header(frame), frame
        header = source.header  # a chunk that is too lossy or lacks its end state is not read
        return header.accuracy >= self._least and header.layout.segment_count == len(self._order)

    # --- segments

    def _segments(self) -> Iterator[LayerPart]:
        plan = [(source, segment) for _, segment in self._order for source in self._sources]
        tickets: list[Ticket | None] = []
        live = len(self._sources)
        for number, (source, segment) in enumerate(plan):
            for ahead, wanted in plan[len(tickets) : number + 1 + READ_AHEAD_SEGMENTS]:
                load = ahead.load if ahead.index < live else None
                tickets.append(None if load is None else load.submit(wanted))
            if source.index >= live:
                continue
            is_here = source.load is None or self._reads.result(tickets[number])
            data = self._wanted(source, segment) if is_here else None
            if data is None:  # the read failed: the prefix ends before this chunk
                live = source.index
                continue
            yield self._part(source, int(source.header.segments[segment]["offset"]), data)

    def _wanted(self, source: _Source, segment: int) -> Bytes | None:
        """Return the bytes of a segment to send; None when it fails verification before a cut."""
        header, data = source.header, source.header.segment(source.frame, segment)
        if source.kept is None:
            return data
        try:
            return cut_rows(header, segment, data, source.kept)
        except ChunkCorruptError:
            slot = source.load.source if source.load is not None else self._moves.tiers.cpu
            self._moves.eviction.drop_corrupt(slot, header.key)
            return None
