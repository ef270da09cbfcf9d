"""The disk tier: frames in preallocated data files, indexed in LMDB."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition
from typing import ClassVar

from typing_extensions import override

from kvstore.proto.buffers import READ_LOOP_FROM_BYTES, Bytes
from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import Place, Reach, unpack_places
from kvstore.tiers.allocator import Span, adjacent_run
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range
from kvstore.tiers.disk_files import DataFile, DataFiles
from kvstore.tiers.disk_index import (
    DEFAULT_INDEX_BYTES,
    DiskIndex,
    GroupCommit,
    IndexRow,
    PendingRow,
)
from kvstore.tiers.disk_io import BLOCK_BYTES, TIER, DirectIO, FileIO
from kvstore.tiers.locations import LocationTable

DEFAULT_FILE_BYTES = 4 << 30
"""Size of data files from a capacity of 64 GiB on; smaller tiers have about sixteen files."""
READ_AHEAD_BYTES = 64 << 20
"""Upper limit of one ``prefetch``."""
STEP_BYTES = 1 << 19
"""Bytes read before each check: larger steps leave a core's own cache before it, smaller ones cost
more calls than they gain.
"""

RUN_BYTES = 2 << 20
"""Bytes read and summed in one call; bounds how long an abandoned load continues."""


def file_bytes_for(capacity_bytes: int, largest_frame_bytes: int = 256 << 20) -> int:
    """Return the size of the data files of a new tier: a power of two plus a 32nd of it.

    The files are few enough to open and enough for several tenants. A frame is a power of two plus
    its header, so a file without the extra 32nd would hold one frame less.
    """
    near = 1 << max(1, capacity_bytes // 16).bit_length() - 1
    least = 1 << max(1, largest_frame_bytes - 1).bit_length()
    near = max(min(near, DEFAULT_FILE_BYTES), least)
    return near + near // 32


def _place(row: IndexRow) -> Place:
    return Place(row.file, Reach.file, 0, row.offset, row.info.size_bytes, 0)


class DiskTier(Tier):
    """Frames on local file systems; they survive a restart.

    A data file has frames of one tenant for its whole life, so that its descriptor exposes no other
    tenant's bytes: TierFullError is possible while bytes are free, and evicting the
    ``chunks_sharing_block`` of one file frees it for any tenant. When one of several folders fails,
    puts avoid it for a while; the others serve. A deleted chunk may reappear after a crash, over
    another chunk's bytes: every caller checks keys and checksums.
    """

    name: ClassVar[str] = TIER
    survives_restart: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = True
    granule_bytes = BLOCK_BYTES

    def __init__(
        self,
        *folders: tuple[Path, int],
        file_bytes: int | None = None,
        index_bytes: int = DEFAULT_INDEX_BYTES,
        is_direct: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock *folders*, given with their capacities, and recover their chunks. The first takes
        *index_bytes* more.

        *file_bytes*, the size of the data files, bounds a frame and applies to new folders only.
        *is_direct* reads and writes past the page cache. Raises TierUnavailableError with the fix
        when a folder is in use, of another format or tier, not writable or too small; everything
        created is then removed.
        """
        self._path = folders[0][0]
        self._index = DiskIndex(self._path / "index", index_bytes)
        if file_bytes is None:
            file_bytes = file_bytes_for(sum(size for _, size in folders))
        io = DirectIO() if is_direct else FileIO()
        with ExitStack() as undo:
            missing_bytes = self._index.missing_bytes
            self._files = DataFiles(folders, file_bytes, missing_bytes, io, clock, undo)
            rows = self._index.open(
                lambda row: self._files.reserve_at(row.file, row.offset, row.info.size_bytes), undo
            )
            self._files.open(self._index.owners)
            undo.pop_all()
        self._lock = self._files.lock
        self._idle = Condition(self._lock)
        self._callers = 0
        self._closed = False
        self.capacity_bytes = self._files.capacity_bytes
        self._reserved: set[PendingRow] = set()
        self._chunks = LocationTable()
        for row in rows:
            self._chunks.seal(row.info, _place(row))
        self._sequence = itertools.count(rows[-1].sequence + 1 if rows else 0)
        self.max_frame_bytes = max(file.size_bytes for file in self._files.by_number.values())
        self.dropped_rows = self._index.dropped
        self._commit = GroupCommit(self._files, self._index, clock, self._forget)
        with self._lock:
            for number in self._index.owners.keys() - self._files.by_number.keys():
                self._commit.note_owner(number, None)

    @property
    @override
    def write_error(self) -> str:
        return self._files.removed or self._commit.write_failure

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        size = self.allocated_bytes(info.size_bytes)
        with self._calling():
            if self._commit.index_full:
                self._commit.commit_all()
            if failure := self.write_error:
                # Stored chunks stay readable.
                raise TierUnavailableError(TIER, failure, is_partial=True)
            if self._commit.index_full:
                raise TierFullError(TIER, size, 0)
            pending = self._allocate(tenant, info)
            if pending is None:
                self._files.reassign(tenant, size, self._commit.note_owner)
                pending = self._allocate(tenant, info)
            if pending is None:
                raise TierFullError(TIER, size, self.capacity_bytes - self._files.used_bytes)
        return Reservation(info, tenant, size, pending)

    def _allocate(self, tenant: str, info: ChunkInfo) -> PendingRow | None:
        with self._lock:
            found = self._files.allocate(tenant, self.allocated_bytes(info.size_bytes))
            if found is None:
                return None
            file, offset, is_new = found
            if is_new:
                self._commit.note_owner(file.number, tenant)
            pending = PendingRow(IndexRow(info, file.number, offset, 0), file, file.sync_failures)
            self._reserved.add(pending)
            return pending

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        reservation.check(frame)
        with self._calling():
            with self._lock:
                pending = self._held(reservation)
            self._files.write(pending.file, pending.row.offset, frame)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible; with *durable* return once its key, sealed now or before, is
        committed. Also raises TierFullError when the index is full; the space is then free.
        """
        with self._calling():
            with self._lock:
                pending = self._release(reservation)
                row = pending.row = pending.row._replace(sequence=next(self._sequence))
                is_first = not self._chunks.find(row.info.key)
                if is_first:
                    self._chunks.seal(row.info, _place(row))
                    waited = pending if self._commit.add(pending) or durable else None
                else:
                    pending.file.free.free_range(row.offset, row.info.size_bytes)
                    waited = self._commit.pending(row.info.key) if durable else None
            if waited is not None:
                self._commit.settle(waited)
        return is_first

    @override
    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            pending = self._release(reservation)
            pending.file.free.free_range(pending.row.offset, reservation.info.size_bytes)

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        with self._calling(key) as found:
            if found is None:
                return False
            file, place = found
            check_range(place.size_bytes, offset, len(out))
            if verifier is None:
                self._files.read(file, place.offset + offset, out)
            else:
                self._read_verified(file, place.offset, out, verifier)
        return True

    def _read_verified(
        self, file: DataFile, start: int, out: Bytes, verifier: FrameVerifier
    ) -> None:
        """Fill *out* with the frame in steps, summing segments as they are read."""
        done = 0
        if len(out) >= READ_LOOP_FROM_BYTES and self._files.io.can_sum:
            done = verifier.header_bytes
            self._files.read(file, start, out[:done])
            verifier.update(done)
        while segments := verifier.next_segments(done, RUN_BYTES):
            groups = [(start + a, [out[a:b]]) for a, b in segments]
            sums = self._files.io.read_summed(file.fd, groups)
            if sums is None:
                break
            verifier.add_checksums(sums)
            done = segments[-1][1]
            verifier.update(done)
        while done < len(out):
            # A short rest joins the last step: a separate read would cost more than it saves.
            stop = done + STEP_BYTES if done + 3 * STEP_BYTES // 2 < len(out) else len(out)
            self._files.read(file, start + done, out[done:stop])
            verifier.update(stop)
            done = stop

    @override
    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Have the kernel read the chunks ahead, at most ``READ_AHEAD_BYTES``."""
        left = READ_AHEAD_BYTES
        for key in keys:
            with self._calling(key) as found:
                if found is None:
                    continue
                file, place = found
                left -= place.size_bytes
                if left < 0:
                    return
                self._files.io.read_ahead(file.fd, place.offset, place.size_bytes)

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        with self._lock:
            return [self._chunks.info_of(key) for key in keys]

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            self._check_open()
            is_here = self._remove(key)
            if is_here:
                self._commit.drop(key)
        return is_here

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        with self._lock:
            return iter(self._chunks.infos())

    @override
    def stats(self) -> TierStats:
        with self._lock:
            used, chunks = self._files.used_bytes, len(self._chunks)
            return TierStats(self.capacity_bytes, used, chunks, len(self._reserved))

    @override
    def chunks_sharing_block(self, key: ChunkKey) -> list[ChunkKey]:
        with self._lock:
            place = self._chunks.location(key)
            return [] if place is None else self._chunks.keys_in(place.number)

    @override
    def eviction_run(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        with self._lock:
            found = self._locate(key)
            if found is None or found[0].owner != tenant:
                return []
            file, _ = found
            keys = self._chunks.keys_in(file.number)
            rows = self._chunks.place_rows(keys)
            spans = file.free.holes()
        for one, place in zip(keys, unpack_places(rows), strict=True):
            end = place.offset + self.allocated_bytes(place.size_bytes)
            spans.append(Span(place.offset, end, one))
        return adjacent_run(spans, key, size_bytes)

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        with self._lock:
            found = self._locate(key)
        return (found and found[0].owner) or DEFAULT_TENANT

    @override
    def file_place(self, key: ChunkKey) -> Place | None:
        with self._lock:
            found = self._locate(key)
        return found[1] if found is not None and found[0].is_known else None

    @override
    def extent_file(self, extent: int, tenant: str) -> int:
        with self._calling():
            return self._files.open_shared(extent, tenant)

    @override
    def flush(self) -> None:
        """Commit every seal and delete. Raises the error of the first seal that failed."""
        with self._calling():
            failure = self._commit.commit_all()
            self._files.check_linked()
        if failure is not None:
            raise failure

    @override
    def close(self) -> None:
        """Commit pending rows, then release the folders. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._callers:
                self._idle.wait()
        self._commit.close()
        self._index.close()
        self._files.close()

    @contextmanager
    def _calling(self, key: ChunkKey | None = None) -> Iterator[tuple[DataFile, Place] | None]:
        """Hold back ``close`` during a call, as closed descriptors might be reused. Yields file and
        place of *key*; None when it is absent.
        """
        with self._lock:
            self._check_open()
            self._callers += 1
            found = None if key is None else self._locate(key)
        try:
            yield found
        finally:
            with self._lock:
                self._callers -= 1
                if not self._callers:
                    self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailableError(TIER, f"{self._path} is closed")

    def _held(self, reservation: Reservation) -> PendingRow:
        pending = reservation.place
        if not isinstance(pending, PendingRow) or pending not in self._reserved:
            raise reservation.spent()
        return pending

    def _release(self, reservation: Reservation) -> PendingRow:
        pending = self._held(reservation)
        self._reserved.remove(pending)
        return pending

    def _forget(self, row: IndexRow) -> None:
        found = self._chunks.location(row.info.key)
        if found is not None and (found.number, found.offset) == (row.file, row.offset):
            self._remove(row.info.key)

    def _locate(self, key: ChunkKey) -> tuple[DataFile, Place] | None:
        place = self._chunks.location(key)
        return None if place is None else (self._files.by_number[place.number], place)

    def _remove(self, key: ChunkKey) -> bool:
        """Delete a chunk and free its space. Return whether it was present."""
        place = self._chunks.pop(key)
        if place is not None:
            self._files.by_number[place.number].free.free_range(place.offset, place.size_bytes)
        return place is not None
