"""A RangeRead: some bytes of frames as they lie on a tier, and no others read.

Nothing is verified here: who reads a prefix of a frame has its header, whose checksums the
bytes must have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import numpy as np

from kvstore.codecs.base import codec_by_id
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    UnknownCodecError,
)
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity
from kvstore.proto.unix_socket import Place, Reach
from kvstore.server.store.reads import Reads
from kvstore.server.telemetry.outcomes import Fate
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot

LEAST_MEASURED_BYTES = 64 << 10
"""Of less, what a read takes says nothing about the medium's bandwidth."""

_numbers = count()


class ByteRange(NamedTuple):
    """Bytes *start* to *stop* of a frame, the last not included; cut at the frame's end."""

    start: int
    stop: int


class RangeData(NamedTuple):
    """Bytes of one frame: ``data[i]`` are those of span i, fewer or none past the frame's end."""

    tier: str
    frame_bytes: int
    data: Sequence[Bytes]


class RangeRead:
    """Reads of leased chunks for one request. Of the copies of a chunk one with levels is chosen
    before others, of those the smallest; of less than *least* none.
    """

    def __init__(self, moves: Moves, reads: Reads, least: Fidelity, deadline: float) -> None:
        self._moves = moves
        self._reads = reads
        self._least = least
        self._deadline = deadline

    def place(self, key: ChunkKey, reach: Collection[Reach]) -> tuple[str, Place] | None:
        """Return the tier of the chosen copy and where a reader of *reach* reads it in place."""
        name, info = self._chosen(key)
        if info is None:
            return None
        if name == self._moves.tiers.cpu.name and Reach.memory in reach:
            held = self._moves.tiers.cpu_tier.locate(key)
            if held is None:
                return None
            where = (held.offset, held.size_bytes, held.generation)
            return name, Place(held.slab_id, Reach.memory, 0, *where)
        filed = self._moves.tiers.file_backed
        if filed is None or name != filed.name or Reach.file not in reach:
            return None
        lies = filed.tier.file_place(key)
        if lies is None:
            return None
        return name, Place(lies.extent, Reach.file, 0, lies.offset, lies.size_bytes, 0)

    @contextmanager
    def read(self, key: ChunkKey, spans: Sequence[ByteRange]) -> Iterator[RangeData | None]:
        """Lend *spans* of the chosen copy; None when there is none, or not in time."""
        name, info = self._chosen(key)
        if info is None:
            yield None
            return
        if name == self._moves.tiers.cpu.name:
            frame = self._moves.tiers.cpu_tier.peek(key)
            if frame is None:
                yield None
            else:
                yield RangeData(name, len(frame), [frame[a:b] for a, b in spans])
            return
        cut = [ByteRange(min(a, info.size_bytes), min(b, info.size_bytes)) for a, b in spans]
        size_bytes = sum(stop - start for start, stop in cut)
        if not self._reads.reserve_bypass(size_bytes):
            yield None
            return
        try:
            yield self._read(self._moves.tiers.slots[name], info, cut)
        finally:
            self._reads.release_bypass(size_bytes)

    def _chosen(self, key: ChunkKey) -> tuple[str, ChunkInfo | None]:
        copies = {
            name: info
            for name, info in self._moves.catalog.copies(key).items()
            if info.fidelity >= self._least and not self._moves.tiers.slots[name].breaker.is_open
        }
        order = {name: (not _has_levels(i.codec_id), i.size_bytes) for name, i in copies.items()}
        name = min(order, key=order.__getitem__, default="")
        return name, copies.get(name)

    def _read(
        self, slot: TierSlot, info: ChunkInfo, spans: Sequence[ByteRange]
    ) -> RangeData | None:
        moves = self._moves
        data: list[Bytes] = [np.empty(max(0, stop - start), np.uint8) for start, stop in spans]
        ranges = [(span.start, out) for span, out in zip(spans, data, strict=True) if len(out)]
        name = b"ranges" + info.key + next(_numbers).to_bytes(8, "little")
        ticket = moves.work_queue.submit(
            f"load-{slot.name}", name, lambda: self._fill(slot, info, ranges)
        )
        try:
            found = ticket is not None and moves.work_queue.wait(ticket, self._deadline)
        except KVStoreError:
            moves.counters.add("get_late_chunks")
            found = False
        return RangeData(slot.name, info.size_bytes, data) if found else None

    def _fill(self, slot: TierSlot, info: ChunkInfo, ranges: Sequence[tuple[int, Bytes]]) -> bool:
        moves, started = self._moves, self._moves.clock()
        try:
            found = slot.guarded(lambda: slot.tier.read_batch(info.key, ranges), "read")
        except InvalidRequestError:
            found = False  # others have put a frame of another size in its place
        if not found:
            moves.catalog.forget(slot.name, info.key)
            moves.catalog.outcomes.note(info.key, Fate.lost, slot.name)
            moves.counters.add("lost_chunks")
            return False
        size_bytes = sum(len(out) for _, out in ranges)
        if size_bytes >= LEAST_MEASURED_BYTES:
            slot.rate.observe(size_bytes, moves.clock() - started)
        moves.counters.add("get_bytes", size_bytes)
        return True


def _has_levels(codec_id: int) -> bool:
    try:
        return codec_by_id(codec_id).max_levels > 0
    except UnknownCodecError:
        return False
