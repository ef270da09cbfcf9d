"""Layer-wise reads: leased chunks on their way out, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.codecs.row_cut import cut_rows, kept_rows
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, DeadlineError, KVStoreError
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import ChunkKey, Fidelity, layer_order
from kvstore.server.security.sessions import Session
from kvstore.server.store.streaming_load import StreamingLoad
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.work_queue import Ticket

READ_AHEAD_CHUNKS = 8
"""Chunks whose headers are read before their turn."""
READ_AHEAD_SEGMENTS = 32
"""Segments that are read before the reader asks for them."""


class LayerPart(NamedTuple):
    """A piece of a frame: its header or one segment. ``chunk`` is its number in the request."""

    chunk: int
    tier: str
    frame_bytes: int
    offset: int
    data: Bytes


@dataclass(slots=True)
class _Source:
    """One chunk of the get; ``load`` unless all of it is in CPU memory."""

    index: int
    tier: str
    header: FrameHeader
    frame: Bytes
    load: StreamingLoad | None
    kept: Rows | None = None
    """The rows that are sent; None: all."""


@dataclass(frozen=True, slots=True)
class _Opening:
    tier: str
    ticket: Ticket | None
    load: StreamingLoad | None


class LayerwiseRead:
    """Sends layer i of all chunks while layer i+1 is read. Used once, by one thread.

    What a lower tier holds as raw frames is read layer by layer, straight into CPU memory, and
    is a promotion once all of it came; other frames are promoted whole before their first
    layer. The caller holds the lease until it is done with what it got.
    """

    def __init__(
        self,
        moves: Moves,
        session: Session,
        keys: Sequence[ChunkKey],
        deadline: float,
        least: Fidelity = Fidelity.exact,
    ) -> None:
        self.skipped: SkippedRows | None = None
        """Rows that the reader does not want."""
        self._moves = moves
        self._least = least
        self._session = session
        self._keys = keys
        self._deadline = deadline
        self._order = layer_order(session.representation)
        self._sources: list[_Source] = []
        self._loads: list[StreamingLoad] = []

    def parts(self) -> Iterator[LayerPart]:
        """Yield the header of each chunk up to the first that is lost or late, then segments.

        A chunk that is lost on the way ends the prefix there; a late one ends the answer.
        """
        counters = self._moves.counters
        try:
            self._open()
            for source in self._sources:
                data = source.frame[: source.header.header_bytes]
                yield self._part(source, 0, data)
            yield from self._segments()
        finally:
            for load in self._loads:
                load.close()
            counters.add("get_chunks", len(self._sources))
            counters.add("get_missed_chunks", len(self._keys) - len(self._sources))

    def _part(self, source: _Source, offset: int, data: Bytes) -> LayerPart:
        self._moves.counters.add("get_bytes", len(data))
        return LayerPart(source.index, source.tier, source.header.frame_bytes, offset, data)

    # --- headers

    def _open(self) -> None:
        openings: list[_Opening | None] = []
        for index, key in enumerate(self._keys):
            ahead = self._keys[len(openings) : index + 1 + READ_AHEAD_CHUNKS]
            openings += [self._begin(key_ahead) for key_ahead in ahead]
            source = self._opened(index, key, openings[index])
            if source is None:
                return
            source.kept = kept_rows(source.header, self.skipped, index)
            self._sources.append(source)

    def _begin(self, key: ChunkKey) -> _Opening | None:
        """Start what brings the header of *key* in reach; None when nothing can."""
        moves = self._moves
        copies = moves.catalog.copies(key)
        for slot in moves.tiers.sources:
            copy = copies.get(slot.name)
            if copy is None or copy.fidelity < self._least or slot.breaker.is_open:
                continue
            if slot is moves.tiers.cpu:
                return _Opening(slot.name, None, None)
            if not (slot.tier.reads_parts and StreamingLoad.is_possible(copy)):
                ticket = moves.load(key, slot, self._session.tenant)
                return None if ticket is None else _Opening(slot.name, ticket, None)
            load = StreamingLoad(moves, slot, copy, self._session.tenant)
            self._loads.append(load)
            ticket = load.submit(None, self._deadline)
            return None if ticket is None else _Opening(slot.name, ticket, load)
        return None

    def _opened(self, index: int, key: ChunkKey, opening: _Opening | None) -> _Source | None:
        if opening is None or not self._is_done(opening.ticket):
            return None
        if opening.load is not None:
            load = opening.load
            if load.header.layout.segment_count != len(self._order):
                return None
            return _Source(index, opening.tier, load.header, load.frame, load)
        frame = self._moves.tiers.cpu_tier.peek(key)
        header = None if frame is None else parse_header(frame)
        if frame is None or header is None or header.fidelity < self._least:
            return None
        if header.layout.segment_count != len(self._order):
            return None  # without what is of its end
        return _Source(index, opening.tier, header, frame, None)

    def _is_done(self, ticket: Ticket | None) -> bool:
        """Wait for a read; False when it failed or is late."""
        try:
            if ticket is not None:
                self._moves.work_queue.wait(ticket, self._deadline)
        except DeadlineError:
            self._moves.counters.add("get_late_chunks")
            return False
        except KVStoreError:
            return False
        return True

    # --- segments

    def _segments(self) -> Iterator[LayerPart]:
        plan = [(source, segment) for _, segment in self._order for source in self._sources]
        tickets: list[Ticket | None] = []
        live = len(self._sources)
        for number, (source, segment) in enumerate(plan):
            for ahead, wanted in plan[len(tickets) : number + 1 + READ_AHEAD_SEGMENTS]:
                load = ahead.load if ahead.index < live else None
                tickets.append(None if load is None else load.submit(wanted, self._deadline))
            if source.index >= live:
                continue
            ticket = tickets[number]
            if source.load is not None and (ticket is None or not self._is_done(ticket)):
                live = source.index  # a segment that failed: nothing from here on
                continue
            offset = int(source.header.segments[segment]["offset"])
            data = self._wanted(source, segment)
            if data is None:
                live = source.index
                continue
            yield self._part(source, offset, data)

    def _wanted(self, source: _Source, segment: int) -> Bytes | None:
        """Return what is sent of a segment; None when it proved wrong before it was cut."""
        header, data = source.header, source.header.segment(source.frame, segment)
        if source.kept is None:
            return data
        try:
            return cut_rows(header, segment, data, source.kept)
        except ChunkCorruptError:
            slot = source.load.source if source.load is not None else self._moves.tiers.cpu
            self._moves.eviction.drop_corrupt(slot, header.key)
            return None
