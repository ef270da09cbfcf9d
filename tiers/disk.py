"""The disk tier: frames in preallocated extent files, their places in LMDB."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import ClassVar

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.arena import OffsetAllocator
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats
from kvstore.tiers.disk_commit import GroupCommit, Seal
from kvstore.tiers.disk_index import DEFAULT_INDEX_BYTES, DiskIndex, IndexRow, pack_row
from kvstore.tiers.extents import DEFAULT_EXTENT_BYTES, GRANULE_BYTES, TIER, ExtentFolder


class _Place:
    """Where one reservation writes. Compared by identity: each is spent once."""

    __slots__ = ("extent", "offset", "sync_failures")

    def __init__(self, extent: int, offset: int, sync_failures: int) -> None:
        self.extent = extent
        self.offset = offset
        self.sync_failures = sync_failures


class DiskTier(Tier):
    """Frames on a local file system, found again after a restart.

    ``extent_bytes`` bounds a frame and counts only for a new folder. The folder takes
    ``index_bytes`` besides its capacity. ``dropped_rows`` counts what was unusable in the
    index at start.

    A durable chunk stays until it is deleted. What is deleted may come back after a crash,
    over bytes that are already another chunk's: that frame then has another key or fails its
    checksum, which every caller checks.
    """

    name: ClassVar[str] = TIER
    survives_restart: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
        index_bytes: int = DEFAULT_INDEX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own the folder *path* and recover what it holds; *clock* gives seconds.

        Raises TierUnavailableError, naming the fix, when the folder is another process's, of
        another format, not writable or too small. Files of a failed first start are removed.
        """
        self._index = DiskIndex(path / "index", index_bytes)
        self._folder = ExtentFolder(path, capacity_bytes, extent_bytes, self._index.missing_bytes)
        self.capacity_bytes = sum(self._folder.sizes)
        self._lock = Lock()
        self._idle = Condition(self._lock)
        self._callers = 0
        self._closed = False
        self._arenas = [OffsetAllocator(size, GRANULE_BYTES) for size in self._folder.sizes]
        self._arena_hint = 0
        self._reserved: set[_Place] = set()
        try:
            rows = self._index.open(self._claim)
        except TierUnavailableError:
            self._folder.discard()
            raise
        self._chunks: dict[ChunkKey, IndexRow] = {row.info.key: row for row in rows}
        self._sequence = itertools.count(rows[-1].sequence + 1 if rows else 0)
        self.dropped_rows = self._index.dropped
        self._commit = GroupCommit(self._folder, self._index, self._lock, clock, self._forget)

    @property
    def commits(self) -> int:
        """Groups committed since the start."""
        return self._commit.commits

    @property
    def lost_seals(self) -> int:
        """Chunks dropped since the start because their commit failed."""
        return self._commit.lost_seals

    def allocated_bytes(self, size_bytes: int) -> int:
        """Bytes a frame of *size_bytes* takes here, slack included."""
        return self._arenas[0].rounded(size_bytes)

    def max_frame_bytes(self) -> int:
        """The size of the largest extent."""
        return self._folder.sizes[0]

    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Take room for a frame of ``info.size_bytes``.

        Raises TierFullError, also while the index is full, and TierUnavailableError while
        the index cannot be written.
        """
        size = self.allocated_bytes(info.size_bytes)
        with self._calling():
            if self._commit.index_full:
                self._commit.settle_all()
            if self._commit.index_failure:
                raise TierUnavailableError(TIER, self._commit.index_failure)
            if self._commit.index_full:
                raise TierFullError(TIER, size, 0)
            with self._lock:
                place = self._allocate(size)
                self._reserved.add(place)
        return Reservation(info, tenant, size, place)

    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        """Copy *data* into the reserved frame at byte *offset*."""
        _check_range(reservation.info, offset, len(data))
        with self._calling():
            with self._lock:
                place = self._held(reservation)
            self._folder.write(place.extent, place.offset + offset, data)

    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible; with *durable* return once it is committed.

        A durable seal of a key that is sealed but not yet committed waits for that commit.
        Raises TierUnavailableError, or TierFullError when the index is full; the room is
        then free.
        """
        with self._calling():
            with self._lock:
                place = self._held(reservation)
            info = reservation.info
            row = IndexRow(info, place.extent, place.offset, next(self._sequence))
            packed = pack_row(row)
            with self._lock:
                self._reserved.remove(place)
                known = self._chunks.get(info.key)
                pending: Seal | None
                if known is None:
                    self._chunks[info.key] = row
                    pending = self._commit.add(row, packed, place.sync_failures)
                else:
                    self._arenas[place.extent].free(place.offset)
                    pending = self._commit.pending(known) if durable else None
                is_due = durable or self._commit.is_due()
            if pending is not None and is_due:
                self._commit.settle(pending.group)
                if pending.failure is not None:
                    raise pending.failure
        return known is None

    def abort(self, reservation: Reservation) -> None:
        """Free the room of a reservation that will not be sealed."""
        with self._lock:
            place = self._held(reservation)
            self._reserved.remove(place)
            self._arenas[place.extent].free(place.offset)

    def read_into(self, key: ChunkKey, out: Bytes, offset: int = 0) -> bool:
        """Fill *out* with the frame's bytes from *offset*, as the file gives them."""
        with self._calling():
            with self._lock:
                row = self._chunks.get(key)
            if row is None:
                return False
            _check_range(row.info, offset, len(out))
            self._folder.read(row.extent, row.offset + offset, out)
        return True

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return what is known of each key, None for absent ones."""
        with self._lock:
            rows = [self._chunks.get(key) for key in keys]
        return [None if row is None else row.info for row in rows]

    def delete(self, key: ChunkKey) -> bool:
        """Forget *key* and free its room; the index follows with the next group."""
        with self._lock:
            self._check_open()
            row = self._chunks.pop(key, None)
            if row is None:
                return False
            self._arenas[row.extent].free(row.offset)
            self._commit.drop(key)
        return True

    def scan(self) -> Iterator[ChunkInfo]:
        """Yield the chunks sealed by now, least recently sealed first."""
        with self._lock:
            rows = list(self._chunks.values())
        return (row.info for row in rows)

    def stats(self) -> TierStats:
        """Count the tier."""
        with self._lock:
            used = sum(arena.used_bytes for arena in self._arenas)
            return TierStats(self.capacity_bytes, used, len(self._chunks), len(self._reserved))

    def flush(self) -> None:
        """Commit every seal and delete. Raises the error of the first seal that failed."""
        with self._calling():
            failure = self._commit.settle_all()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Commit what is pending, then release the folder. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._callers:
                self._idle.wait()
        self._commit.close()
        self._index.close()
        self._folder.close()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Keep ``close`` from closing files under a call: their numbers might be reused."""
        with self._lock:
            self._check_open()
            self._callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if not self._callers:
                    self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailableError(TIER, f"{self._folder.path} is closed")

    def _held(self, reservation: Reservation) -> _Place:
        place = reservation.place
        if not isinstance(place, _Place) or place not in self._reserved:
            raise InvalidRequestError(
                "reservation", reservation.info.key.hex(), "was sealed or aborted already"
            )
        return place

    def _claim(self, row: IndexRow) -> bool:
        return row.extent < len(self._arenas) and self._arenas[row.extent].claim(
            row.offset, row.info.size_bytes
        )

    def _allocate(self, size_bytes: int) -> _Place:
        """Prefer the extent used last, so that a commit has few files to sync."""
        count = len(self._arenas)
        for step in range(count):
            extent = (self._arena_hint + step) % count
            offset = self._arenas[extent].allocate(size_bytes)
            if offset is not None:
                self._arena_hint = extent
                return _Place(extent, offset, self._folder.sync_failures[extent])
        free = sum(arena.free_bytes for arena in self._arenas)
        raise TierFullError(TIER, size_bytes, free)

    def _forget(self, row: IndexRow) -> None:
        if self._chunks.get(row.info.key) is row:
            del self._chunks[row.info.key]
            self._arenas[row.extent].free(row.offset)


def _check_range(info: ChunkInfo, offset: int, size_bytes: int) -> None:
    if offset < 0 or offset + size_bytes > info.size_bytes:
        raise InvalidRequestError(
            "offset", (offset, size_bytes), f"stay within the frame's {info.size_bytes} bytes"
        )
