"""The extents of the disk tier: files of frames, spread over folders, each of one tenant."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TierUnavailableError,
)
from kvstore.proto.file_sums import FileGroups
from kvstore.tiers.allocator import FreeList
from kvstore.tiers.disk_folder import GRANULE_BYTES, TIER, ExtentFolder
from kvstore.tiers.disk_io import FileIO, no_direct

DEFAULT_EXTENT_BYTES = 4 << 30
"""Extents of a tier from 64 GiB on; smaller tiers have about sixteen."""
FOLDER_RETRY_S = 5.0
"""How long nothing is put into one of several folders after it failed."""

_GONE = "it is gone: look the chunk up anew"


def extent_bytes_for(capacity_bytes: int, largest_frame_bytes: int) -> int:
    """Return the size of the extents of a new tier: a power of two and its 32nd.

    Few enough to open, enough of them for several tenants, and the odd 32nd because a frame is
    a power of two and its header, of which a power of two would hold one less than it could.
    """
    near = 1 << max(1, capacity_bytes // 16).bit_length() - 1
    least = 1 << max(1, largest_frame_bytes - 1).bit_length()
    near = max(min(near, DEFAULT_EXTENT_BYTES), least)
    return near + near // 32


class Extent:
    """One file of frames. It has one owner from its first frame until it is deleted.

    The tier's lock guards ``holes``, ``owner`` and ``users``. ``is_known`` is False
    for a file of which nobody knows whose bytes it ever held: it is never shared.
    """

    __slots__ = (
        "fd", "folder", "holes", "is_gone", "is_known", "number", "owner",
        "size_bytes", "sync_failures", "users",
    )  # fmt: skip

    def __init__(self, folder: ExtentFolder, number: int, size_bytes: int) -> None:
        self.folder = folder
        self.number = number
        self.size_bytes = size_bytes
        self.fd = -1
        self.holes = FreeList(size_bytes, GRANULE_BYTES)
        self.owner: str | None = None
        self.is_known = True
        self.is_gone = False
        self.users = 0
        """Calls that read, write or sync the file now: it is closed after the last of them."""
        self.sync_failures = 0


class Extents:
    """The files of all extents by number, and what is done to their bytes.

    *lock* is the tier's and guards the table. *clock* gives monotonic seconds.
    """

    def __init__(
        self,
        folders: Sequence[ExtentFolder],
        io: FileIO,
        lock: Lock,
        clock: Callable[[], float],
    ) -> None:
        self.folders = list(folders)
        self.by_number: dict[int, Extent] = {}
        self.next_number = 0
        self._io = io
        self.lock = lock
        self._clock = clock
        for folder in self.folders:
            # A number that is taken: the folder is new, and its files a broken-off start's.
            folder.replan(self.by_number)
            for number, size in folder.kept.items():
                self.by_number[number] = Extent(folder, number, size)

    def open(self, numbers: Iterable[int]) -> None:
        """Open every file, after making those that are missing.

        *numbers* are in use elsewhere and never given to a new file. Raises
        TierUnavailableError.
        """
        self.next_number = 1 + max([*numbers, *self.by_number], default=-1)
        for folder in self.folders:
            count = len(folder.wanted)
            folder.fill(self.next_number)
            self.next_number += count
            for number, size in folder.kept.items():
                extent = self.by_number.setdefault(number, Extent(folder, number, size))
                extent.fd = self._open(folder, number)

    def _open(self, folder: ExtentFolder, number: int) -> int:
        file = folder.file(number)
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | self._io.open_flags)
        except OSError as error:
            if error.errno == errno.EINVAL and self._io.open_flags:
                raise no_direct(folder.path, error) from None
            raise TierUnavailableError(TIER, f"{file}: {error.strerror}") from error
        try:
            self._io.check(fd)
        except OSError as error:
            os.close(fd)
            raise no_direct(folder.path, error) from None
        return fd

    def drop(self, extent: Extent) -> None:
        """Delete an extent's file. Raises OSError; the extent is out of use all the same.

        Whoever still has the file open keeps its bytes, and the disk their room.
        """
        with self.lock:
            del self.by_number[extent.number]
            extent.is_gone = True
            is_last = not extent.users
        if is_last:
            self.close_gone(extent)
        extent.folder.remove(extent.number)

    def make(self, folder: ExtentFolder, size_bytes: int) -> Extent:
        """Make an extent of *size_bytes* with a number of its own. Raises TierUnavailableError."""
        with self.lock:
            number = self.next_number
            self.next_number += 1
        try:
            folder.create(number, size_bytes)
        except OSError as error:
            reason = f"{folder.file(number)} cannot be created: {error.strerror}"
            raise TierUnavailableError(TIER, reason) from error
        extent = Extent(folder, number, size_bytes)
        extent.fd = self._open(folder, number)
        with self.lock:
            self.by_number[number] = extent
        return extent

    def is_blank(self, extent: Extent) -> bool:
        """Whether nothing was ever written to the file, as far as its file system can tell."""
        try:
            os.lseek(extent.fd, 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO
        return False

    def open_shared(self, number: int, tenant: str) -> int:
        """Return a new descriptor of an extent's file, read-only and the caller's to close.

        Raises InvalidRequestError for an unknown extent or one whose history is unknown,
        PermissionDeniedError for another tenant's.
        """
        with self.lock:
            extent = self.by_number.get(number)
            owner = None if extent is None or not extent.is_known else extent.owner
        if extent is None or owner is None:
            raise InvalidRequestError("extent", number, _GONE)
        if owner != tenant:
            raise PermissionDeniedError(f"extent {number} belongs to another tenant")
        try:
            # By its name, which no other file ever has: a copy of our own could be written to.
            return os.open(extent.folder.file(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise InvalidRequestError("extent", number, _GONE) from None
        except OSError as error:
            raise self._failed(extent, "open", error) from error

    def release(self, extent: Extent) -> bool:
        """Undo one step of ``extent.users``; True when ``close_gone`` is due. Under the lock."""
        extent.users -= 1
        return extent.is_gone and not extent.users

    def close_gone(self, extent: Extent) -> None:
        """Close the file of a deleted extent that nobody uses any more."""
        os.close(extent.fd)

    @contextmanager
    def _using(self, number: int) -> Iterator[Extent | None]:
        """Keep an extent's file open meanwhile; None when it was deleted."""
        with self.lock:
            extent = self.by_number.get(number)
            if extent is not None:
                extent.users += 1
        try:
            yield extent
        finally:
            if extent is not None:
                with self.lock:
                    is_last = self.release(extent)
                if is_last:
                    self.close_gone(extent)

    def read(self, extent: Extent, offset: int, outs: Sequence[Bytes]) -> None:
        """Fill *outs* from *offset* on. Raises TierUnavailableError."""
        try:
            is_whole = self._io.read(extent.fd, offset, outs)
        except OSError as error:
            raise self._failed(extent, "read", error) from error
        if not is_whole:
            file = extent.folder.file(extent.number)
            is_partial = self._has_others(extent.folder)
            raise TierUnavailableError(TIER, f"{file} ends early", is_partial=is_partial)

    def can_sum(self) -> bool:
        """Whether ``read_summed`` is worth asking."""
        return self._io.can_sum()

    def read_summed(self, extent: Extent, groups: FileGroups) -> list[int] | None:
        """Fill *groups* and return their sums; None: ``read`` them, which says what is wrong."""
        return self._io.read_summed(extent.fd, groups)

    def write(self, extent: Extent, offset: int, data: Bytes) -> None:
        """Put *data* at *offset*. Raises TierUnavailableError."""
        try:
            self._io.write(extent.fd, offset, data)
        except OSError as error:
            raise self._failed(extent, "write", error) from error
        extent.folder.failure = ""

    def read_ahead(self, extent: Extent, offset: int, size_bytes: int) -> None:
        """Tell the kernel that these bytes are read soon; it may not care."""
        if self._io.reads_ahead and not self._io.is_near(extent.fd, offset, size_bytes):
            with suppress(OSError):
                os.posix_fadvise(extent.fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def sync(self, number: int) -> None:
        """Make what was written to an extent durable.

        Raises TierUnavailableError. After a failure the kernel may have dropped any byte not
        yet durable, and the next call succeeds all the same: whoever wrote before must compare
        ``sync_failures``. Nothing is done for an extent that was deleted, with all its chunks.
        """
        with self._using(number) as extent:
            if extent is None:
                return
            try:
                os.fdatasync(extent.fd)
            except OSError as error:
                extent.sync_failures += 1
                raise self._failed(extent, "sync", error) from error

    def sync_failures(self, number: int) -> int | None:
        """Return how often the sync of an extent failed; None when it was deleted."""
        extent = self.by_number.get(number)
        return None if extent is None else extent.sync_failures

    def is_usable(self, folder: ExtentFolder) -> bool:
        """Whether frames may be put into *folder*; after a failure only once in a while."""
        return not folder.failure or self._clock() >= folder.retry_at_s

    def _failed(self, extent: Extent, verb: str, error: OSError) -> TierUnavailableError:
        """Note the failure, and leave the folder alone for a while if there are others."""
        folder = extent.folder
        reason = f"{verb} of {folder.file(extent.number)}: {error.strerror}"
        is_partial = self._has_others(folder)
        if is_partial:
            folder.failure = reason
            folder.retry_at_s = self._clock() + FOLDER_RETRY_S
        return TierUnavailableError(TIER, reason, is_partial=is_partial)

    def _has_others(self, folder: ExtentFolder) -> bool:
        return any(other is not folder and not other.failure for other in self.folders)

    def discard(self) -> None:
        """Close everything and take back what this start made."""
        self._close_files()
        for folder in self.folders:
            folder.discard()

    def close(self) -> None:
        """Close the files, then release the folders. Idempotent."""
        self._close_files()
        for folder in self.folders:
            folder.close()

    def _close_files(self) -> None:
        while self.by_number:
            _, extent = self.by_number.popitem()
            if extent.fd >= 0:
                os.close(extent.fd)
        self._io.close()
