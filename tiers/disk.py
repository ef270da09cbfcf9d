"""The disk tier: frames in preallocated extent files, their places in LMDB."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import ClassVar

from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.file_sums import LOOP_FROM_BYTES
from kvstore.proto.frame_check import FrameCheck
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import DEFAULT_TENANT, FilePlace, Reservation, Tier, TierStats
from kvstore.tiers.disk_commit import GroupCommit, Seal
from kvstore.tiers.disk_exchange import exchange
from kvstore.tiers.disk_folder import GRANULE_BYTES, TIER
from kvstore.tiers.disk_index import DEFAULT_INDEX_BYTES, DiskIndex, IndexRow, pack_row
from kvstore.tiers.disk_io import CachedIO, DirectIO, check_range, join_runs
from kvstore.tiers.disk_set import DiskShare
from kvstore.tiers.disk_space import DiskSpace, Located, side_by_side
from kvstore.tiers.disk_start import DiskOptions, own_folders, recover
from kvstore.tiers.extents import Extent, Extents, extent_bytes_for

READ_AHEAD_BYTES = 64 << 20
"""What the kernel is asked to read ahead at a time."""
STEP_BYTES = 1 << 19
"""A step of a read that is checked as it comes: larger ones have left a core's own cache by then,
smaller ones cost more calls than they gain.
"""

RUN_BYTES = 2 << 20
"""What is read and summed at once: whoever gives up a load waits for no more."""


class _Place:
    """Where one reservation writes. Compared by identity: each is spent once."""

    __slots__ = ("extent", "offset", "sync_failures")

    def __init__(self, extent: Extent, offset: int) -> None:
        self.extent = extent
        self.offset = offset
        self.sync_failures = extent.sync_failures


class DiskTier(Tier):
    """Frames on local file systems, found again after a restart.

    An extent's file has frames of one tenant, from the first to its end, so that a descriptor
    of it shows nobody else's bytes: TierFullError may come while bytes are free, and evicting
    the ``residents`` of one extent makes its room anyone's.

    The first folder takes ``index_bytes`` besides its capacity. ``dropped_rows`` counts what was
    unusable in the index at start. When one of several folders fails, what lies there is
    unavailable and nothing is put there for a while; the others serve.

    A durable chunk stays until it is deleted. What is deleted may come back after a crash,
    over bytes that are already another chunk's: that frame then has another key or fails its
    checksum, which every caller checks.
    """

    name: ClassVar[str] = TIER
    survives_restart: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        index_bytes: int = DEFAULT_INDEX_BYTES,
        options: DiskOptions = DiskOptions(),  # noqa: B008 - it is frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own the folder *path* and recover what it holds; *clock* gives seconds.

        *extent_bytes* bounds a frame and counts only for a new folder. Raises
        TierUnavailableError, naming the fix, when a folder is another process's, of another
        format or tier, not writable or too small. Files of a failed first start are removed.
        """
        self._index = DiskIndex(path / "index", index_bytes)
        shares = [DiskShare(path, capacity_bytes), *options.others]
        if extent_bytes is None:
            total = sum(share.capacity_bytes for share in shares)
            extent_bytes = extent_bytes_for(total, options.largest_frame_bytes)
        folders = own_folders(shares, extent_bytes, self._index.missing_bytes)
        self._path = path
        self._lock = Lock()
        self._idle = Condition(self._lock)
        self._callers = 0
        self._closed = False
        io = DirectIO() if options.is_direct else CachedIO()
        self._extents = Extents(folders, io, self._lock, clock)
        self._space = DiskSpace(folders, self._extents.by_number, self._extents.is_usable)
        self.capacity_bytes = self._space.capacity_bytes
        self._reserved: set[_Place] = set()
        self._sequence = itertools.count(recover(self._index, self._extents, self._space))
        self._largest_bytes = max(e.size_bytes for e in self._extents.by_number.values())
        self.dropped_rows = self._index.dropped
        self._commit = GroupCommit(self._extents, self._index, self._lock, clock, self._forget)
        with self._lock:
            for number in self._index.owners.keys() - self._extents.by_number.keys():
                self._commit.note_owner(number, None)

    @property
    def commits(self) -> int:
        """Groups committed since the start."""
        return self._commit.commits

    @property
    @override
    def trouble(self) -> str:
        return self._commit.write_failure

    @property
    def lost_seals(self) -> int:
        """Chunks dropped since the start because their commit failed."""
        return self._commit.lost_seals

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise InvalidRequestError("size_bytes", size_bytes, "give a positive size")
        return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES

    @override
    def max_frame_bytes(self) -> int:
        return self._largest_bytes

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Take room for a frame of ``info.size_bytes``.

        Raises TierFullError, also while the index is full, and TierUnavailableError while
        the index cannot be written or files cannot be synced.
        """
        size = self.allocated_bytes(info.size_bytes)
        with self._calling():
            if self._commit.index_full:
                self._commit.settle_all()
            if failure := self._commit.write_failure:
                # What is there can be read all the same.
                raise TierUnavailableError(TIER, failure, is_partial=True)
            if self._commit.index_full:
                raise TierFullError(TIER, size, 0)
            place = self._allocate(tenant, size)
            if place is None:
                exchange(self._extents, self._space, tenant, size, self._commit.note_owner)
                place = self._allocate(tenant, size)
            if place is None:
                raise TierFullError(TIER, size, self.capacity_bytes - self._space.used_bytes)
        return Reservation(info, tenant, size, place)

    def _allocate(self, tenant: str, size_bytes: int) -> _Place | None:
        with self._lock:
            found = self._space.allocate(tenant, size_bytes)
            if found is None:
                return None
            extent, offset, is_new = found
            if is_new:
                self._commit.note_owner(extent.number, tenant)
            place = _Place(extent, offset)
            self._reserved.add(place)
            return place

    @override
    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        check_range(reservation.info.size_bytes, offset, len(data))
        with self._calling():
            with self._lock:
                place = self._held(reservation)
            self._extents.write(place.extent, place.offset + offset, data)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible; with *durable* return once it is committed.

        A durable seal of a key that is sealed but not yet committed waits for that commit.
        Raises TierUnavailableError, or TierFullError when the index is full; the room is
        then free.
        """
        with self._calling():
            with self._lock:
                place = self._held(reservation)
            info, extent = reservation.info, place.extent
            row = IndexRow(info, extent.number, place.offset, next(self._sequence))
            packed = pack_row(row)
            with self._lock:
                self._reserved.remove(place)
                is_first = info.key not in self._space
                pending: Seal | None
                if is_first:
                    self._space.put(info, extent, place.offset)
                    pending = self._commit.add(row, packed, place.sync_failures)
                else:
                    self._space.free(extent, place.offset, info.size_bytes)
                    pending = self._commit.pending(info.key) if durable else None
                is_due = durable or self._commit.is_due()
            if pending is not None and is_due:
                self._commit.settle(pending.group)
                if pending.failure is not None:
                    raise pending.failure
        return is_first

    @override
    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            place = self._held(reservation)
            self._reserved.remove(place)
            self._space.free(place.extent, place.offset, reservation.info.size_bytes)

    @override
    def read_into(self, key: ChunkKey, out: Bytes, offset: int = 0) -> bool:
        return self.read_ranges(key, [(offset, out)])

    @override
    def read_ranges(self, key: ChunkKey, ranges: Sequence[tuple[int, Bytes]]) -> bool:
        """Fill each buffer from its offset; ranges that follow one another are one read."""
        with self._reading(key) as found:
            if found is None:
                return False
            for offset, out in ranges:
                check_range(found.size_bytes, offset, len(out))
            for offset, outs in join_runs(ranges):
                self._extents.read(found.extent, found.offset + offset, outs)
        return True

    @override
    def read_steps(self, key: ChunkKey, out: Bytes) -> Iterator[int]:
        with self._reading(key) as found:
            if found is None:
                return
            check_range(found.size_bytes, 0, len(out))
            yield from self._steps(found, out, 0)

    @override
    def read_checked(self, key: ChunkKey, out: Bytes, check: FrameCheck) -> Iterator[int]:
        with self._reading(key) as found:
            if found is None:
                return
            check_range(found.size_bytes, 0, len(out))
            done = 0
            if len(out) >= LOOP_FROM_BYTES and self._extents.can_sum():
                done = check.header_bytes
                self._extents.read(found.extent, found.offset, [out[:done]])
                yield done
            while segments := check.following(done, RUN_BYTES):
                groups = [(found.offset + a, [out[a:b]]) for a, b in segments]
                sums = self._extents.read_summed(found.extent, groups)
                if sums is None:
                    break
                check.take_sums(sums)
                done = segments[-1][1]
                yield done
            if done < len(out):
                yield from self._steps(found, out, done)

    def _steps(self, found: Located, out: Bytes, first: int) -> Iterator[int]:
        """Fill *out* from *first* on, step by step."""
        for start in range(first, max(first + 1, len(out) - STEP_BYTES // 2), STEP_BYTES):
            # A short rest comes with the last step: one more read costs more than it is worth.
            stop = start + STEP_BYTES if start + 3 * STEP_BYTES // 2 < len(out) else len(out)
            self._extents.read(found.extent, found.offset + start, [out[start:stop]])
            yield stop

    @contextmanager
    def _reading(self, key: ChunkKey) -> Iterator[Located | None]:
        """Keep the tier, and the file that *key* lies in, from being closed meanwhile."""
        with self._lock:
            self._check_open()
            self._callers += 1
            found = self._space.locate(key)
            if found is not None:
                found.extent.users += 1
        try:
            yield found
        finally:
            with self._lock:
                self._end_call()
                is_last = found is not None and self._extents.release(found.extent)
            if found is not None and is_last:
                self._extents.close_gone(found.extent)

    @override
    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Have the kernel read the chunks ahead, ``READ_AHEAD_BYTES`` of them at most."""
        left = READ_AHEAD_BYTES
        for key in keys:
            with self._reading(key) as found:
                if found is None:
                    continue
                left -= found.size_bytes
                if left < 0:
                    return
                self._extents.read_ahead(found.extent, found.offset, found.size_bytes)

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        with self._lock:
            return [self._space.info(key) for key in keys]

    @override
    def delete(self, key: ChunkKey) -> bool:
        """Forget *key* and free its room; the index follows with the next group."""
        with self._lock:
            self._check_open()
            if not self._space.remove(key):
                return False
            self._commit.drop(key)
        return True

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        with self._lock:
            infos = self._space.infos()
        return iter(infos)

    @override
    def stats(self) -> TierStats:
        with self._lock:
            used, chunks = self._space.used_bytes, len(self._space)
            return TierStats(self.capacity_bytes, used, chunks, len(self._reserved))

    @override
    def residents(self, key: ChunkKey) -> list[ChunkKey]:
        """Return the sealed chunks of the extent that holds *key*; none when absent."""
        with self._lock:
            found = self._space.locate(key)
            return [] if found is None else self._space.keys_in(found.extent)

    @override
    def in_the_way(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        with self._lock:
            found = self._space.locate(key)
            if found is None or found.extent.owner != tenant:
                return []
            chunks, holes = self._space.neighbours(found.extent), found.extent.holes.spans()
        return side_by_side(chunks, holes, key, size_bytes)

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        with self._lock:
            found = self._space.locate(key)
            owner = None if found is None else found.extent.owner
        return DEFAULT_TENANT if owner is None else owner

    @override
    def file_place(self, key: ChunkKey) -> FilePlace | None:
        with self._lock:
            found = self._space.locate(key)
        if found is None or not found.extent.is_known:
            return None
        return FilePlace(found.extent.number, found.offset, found.size_bytes)

    @override
    def extent_file(self, extent: int, tenant: str) -> int:
        with self._calling():
            return self._extents.open_shared(extent, tenant)

    @override
    def flush(self) -> None:
        """Commit every seal and delete. Raises the error of the first seal that failed."""
        with self._calling():
            failure = self._commit.settle_all()
        if failure is not None:
            raise failure

    @override
    def close(self) -> None:
        """Commit what is pending, then release the folders. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._callers:
                self._idle.wait()
        self._commit.close()
        self._index.close()
        self._extents.close()

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
                self._end_call()

    def _end_call(self) -> None:
        self._callers -= 1
        if not self._callers:
            self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailableError(TIER, f"{self._path} is closed")

    def _held(self, reservation: Reservation) -> _Place:
        place = reservation.place
        if not isinstance(place, _Place) or place not in self._reserved:
            raise InvalidRequestError(
                "reservation", reservation.info.key.hex(), "was sealed or aborted already"
            )
        return place

    def _forget(self, row: IndexRow) -> None:
        found = self._space.locate(row.info.key)
        if found is not None and (found.extent.number, found.offset) == (row.extent, row.offset):
            self._space.remove(row.info.key)
