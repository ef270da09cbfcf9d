"""Data files of the disk tier: preallocated, each of one tenant, spread over folders."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import structlog

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError, TierUnavailableError
from kvstore.tiers.allocator import FreeList
from kvstore.tiers.base import DEFAULT_TENANT
from kvstore.tiers.disk_io import (
    BLOCK_BYTES,
    TIER,
    FileIO,
    allocate_file,
    free_bytes,
    read_signed_line,
    refused,
    signed_line,
    sync_folder,
    take_lock,
    write_durably,
)

FOLDER_RETRY_S = 5.0
"""How long puts avoid one of several folders after a failure."""

MAX_FILES = 10**9
"""Numbers of data files are below; others are not ours."""
_FILE_NAME = re.compile(r"([0-9]{4,9})\.kv")
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_GONE = "it is gone: look the chunk up again"
_REMOVED = "it was removed while this server used it: restart the server"

logger = structlog.get_logger(__name__)


class DirectoryId(NamedTuple):
    """Identity of a folder: number ``position``, from 0, of ``folders`` of the set ``set_id``."""

    set_id: str
    position: int
    folders: int

    def line(self) -> bytes:
        """Return the content of the folder's file ``DISK``."""
        return signed_line(f"kvstore disk-set 1 {self.set_id} {self.position} {self.folders}")

    @classmethod
    def read(cls, path: Path) -> DirectoryId | None:
        """Return the identity stored in the folder *path*; None if there is none."""
        words = read_signed_line(path / "DISK", "disk-set", "[0-9a-f]+ [0-9]{1,9} [0-9]{1,9}")
        return None if words is None else cls(words[0], int(words[1]), int(words[2]))


@dataclass(eq=False)
class DataFile:
    """One file of frames. It has one owner from its first frame until it is deleted; a blank one
    has none.

    ``is_known`` is False for a file whose past owners are unknown: it is never shared. The
    descriptor is closed with the last reference, so no read or sync uses a closed one.
    """

    directory: DiskDirectory
    number: int
    size_bytes: int
    fd: int = -1
    owner: str | None = None
    is_known: bool = True
    sync_failures: int = 0

    def __post_init__(self) -> None:
        self.free = FreeList(self.size_bytes, BLOCK_BYTES)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.directory.path / "extents" / f"{self.number:04d}.kv"

    def is_blank(self) -> bool:
        """Return whether nothing was ever written to it, if its file system can tell."""
        try:
            os.lseek(self.fd, 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO
        return False

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class DiskDirectory:
    """The lock, the format and the data files of one folder.

    Each data file has a number that the tier never reuses. ``wanted`` has the sizes of the files to
    create. A folder keeps the file size it was created with. ``failure`` states why puts avoid it
    until ``retry_at_s``.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, file_bytes: int, spare_bytes: int, undo: ExitStack
    ) -> None:
        """Lock the folder and plan its files for the capacity, floored to whole blocks.

        *spare_bytes* must be free in addition. A larger capacity than last time adds files, a
        smaller one deletes those with the highest numbers. *undo* removes what is created except
        the lock file: a process that opened it before the unlink would lock nothing.
        """
        if capacity_bytes < BLOCK_BYTES:
            fix = f"give at least {BLOCK_BYTES}"
            raise InvalidRequestError("capacity_bytes", capacity_bytes, fix)
        self.path = path
        self.capacity_bytes = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        self.file_bytes = file_bytes // BLOCK_BYTES * BLOCK_BYTES
        self.files: dict[int, DataFile] = {}
        self.wanted: list[int] = []
        self.failure = ""
        self.retry_at_s = 0.0
        self._lock_fd = -1
        self.undo = undo
        undo.callback(self.close)
        try:
            self._own(spare_bytes)
        except OSError as error:
            raise TierUnavailableError(TIER, self._explain(error)) from error

    def _own(self, spare_bytes: int) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
        if self.path.stat().st_mode & stat.S_IRWXO:
            fix = f"chmod 700 {self.path}"
            logger.warning("other users can access the disk tier's folder", fix=fix)
        self._lock_fd = take_lock(self.path)
        words = read_signed_line(self.path / "FORMAT", TIER, "[1-9][0-9]{3,17}")
        if words is not None:
            self.file_bytes = int(words[0])
        elif (self.path / "extents").exists() or (self.path / "index").exists():
            raise refused(self.path, "has no FORMAT beside its extents or index")
        self._plan(spare_bytes)
        if words is None:
            self.write("FORMAT", signed_line(f"kvstore {TIER} 1 {self.file_bytes}"))
        folder = self.path / "extents"
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
            self.undo.callback(folder.rmdir)

    def _plan(self, spare_bytes: int) -> None:
        """Plan to keep the files of the lowest numbers, grow truncated ones, and create the rest. A
        capacity that does not fit is refused before a file changes: else the disk would fill up.
        """
        left, need = self.capacity_bytes, self.capacity_bytes + spare_bytes
        sizes: dict[int, int] = {}
        for number, path in self._existing():
            size = path.stat().st_size // BLOCK_BYTES * BLOCK_BYTES
            sizes[number] = min(size, self.file_bytes, left)
            left -= sizes[number]
        for number, size in sizes.items():
            grown = min(self.file_bytes - size, left)
            left -= grown
            if size + grown:
                file = self.files[number] = DataFile(self, number, size + grown)
                need -= min(file.size_bytes, file.path.stat().st_blocks * 512)
        if need > (free := free_bytes(self.path)):
            reason = f"{self.path} needs {need} more bytes and has {free} free"
            fix = "give the tier less capacity, or a larger disk"
            raise TierUnavailableError(TIER, f"{reason}: {fix}")
        full, rest = divmod(left, self.file_bytes)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and len(self.files) + full >= limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # all are open at once
        self.wanted = [self.file_bytes] * full + [rest] * (rest > 0)

    @property
    def used_bytes(self) -> int:
        """Used part of ``capacity_bytes``. Under the lock of ``DataFiles``."""
        return sum(file.free.used_bytes for file in self.files.values())

    def fill(self, first_number: int) -> None:
        """Create every planned file, new ones with numbers from *first_number* on. Files beyond the
        capacity are deleted last. Raises TierUnavailableError.
        """
        try:
            for file in self.files.values():
                former = file.path.stat().st_size
                if former < file.size_bytes and file.path.is_file():
                    self.undo.callback(os.truncate, file.path, former)
                allocate_file(file.path, file.size_bytes, is_new=False)
            for number, size in enumerate(self.wanted, start=first_number):
                file = DataFile(self, number, size)
                self.undo.callback(file.path.unlink, missing_ok=True)
                allocate_file(file.path, size)
                self.files[number] = file
            for number, path in self._existing():
                if number not in self.files and path.is_file():
                    path.unlink()
            sync_folder(self.path / "extents")
            sync_folder(self.path)
        except OSError as error:
            raise TierUnavailableError(TIER, self._explain(error)) from error

    def write(self, name: str, line: bytes) -> None:
        """Write one of the folder's small files, durably. Raises OSError."""
        if not (self.path / name).exists():
            for made in (name, f"{name}.new"):
                self.undo.callback((self.path / made).unlink, missing_ok=True)
        write_durably(self.path / name, line)

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        for file in self.files.values():
            file.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _existing(self) -> list[tuple[int, Path]]:
        """Return the numbers and paths of the existing data files, ascending."""
        folder = self.path / "extents"
        names = os.listdir(folder) if folder.is_dir() else []
        found = [match for name in names if (match := _FILE_NAME.fullmatch(name))]
        return sorted((int(match[1]), folder / match[0]) for match in found)

    def _explain(self, error: OSError) -> str:
        path, reason = self.path, error.strerror
        if error.errno in _NO_SPACE:
            what = f"{path} cannot hold {self.capacity_bytes} bytes, {free_bytes(path)} are free"
            return f"{what} ({reason}): give the tier less capacity, or a larger disk"
        if error.errno in _NO_DESCRIPTORS:
            return f"{path}: {reason}: raise the open files limit, or use larger data files"
        return f"{path}: {reason}: give a folder that this process can create and write"


class DataFiles:
    """The data files of all folders: allocation and I/O.

    Folders fill up in proportion to their size. ``lock`` is the only lock of the tier: it guards
    ``by_number``, free ranges and owners. Methods documented so run under it, without I/O.
    """

    def __init__(
        self,
        folders: Sequence[tuple[Path, int]],
        file_bytes: int,
        index_bytes: int,
        io: FileIO,
        clock: Callable[[], float],
        undo: ExitStack,
    ) -> None:
        """Lock every folder, and check that they are those of one tier, in order.

        *file_bytes* applies to new folders only. *index_bytes* must be free in the first one in
        addition. Raises TierUnavailableError; *undo* then removes what was created.
        """
        self.lock = Lock()
        self.by_number: dict[int, DataFile] = {}
        self.directories: list[DiskDirectory] = []
        self._next_number = 0
        self.removed = ""
        """Why puts are refused until restart: a file was removed."""
        self._missing: list[tuple[DiskDirectory, int]] = []
        """Deleted files that could not be recreated yet."""
        self.io = io
        self._clock = clock
        undo.callback(io.close)
        for path, capacity_bytes in folders:
            if self.directories:
                file_bytes, index_bytes = self.directories[0].file_bytes, 0
            made = DiskDirectory(path, capacity_bytes, file_bytes, index_bytes, undo)
            self.directories.append(made)
        _check_ids([directory.path for directory in self.directories])
        self.capacity_bytes = sum(one.capacity_bytes for one in self.directories)
        for directory in self.directories:
            # A duplicate number: the folder is new, and its files are of an interrupted start.
            for number in directory.files.keys() & self.by_number.keys():
                directory.wanted.append(directory.files.pop(number).size_bytes)
            self.by_number |= directory.files

    @property
    def used_bytes(self) -> int:
        """Used part of ``capacity_bytes``. Under the lock."""
        return sum(directory.used_bytes for directory in self.directories)

    def open(self, owners: Mapping[int, str]) -> None:
        """Create missing files, open all, and assign *owners*.

        A file without an owner is blank, or recreated. A file with chunks whose owner's row was
        lost serves them, and is never shared. New files get no number in *owners*.
        """
        found = set(self.by_number)
        self._next_number = 1 + max([*owners, *found], default=-1)
        for directory in self.directories:
            directory.fill(self._next_number)
            self._next_number += len(directory.wanted)
            self.by_number |= directory.files
        for file in self.by_number.values():
            self._open(file)
        try:
            for file in list(self.by_number.values()):
                file.owner = owners.get(file.number)
                if file.owner is None and file.free.used_bytes:
                    file.owner, file.is_known = DEFAULT_TENANT, False
                elif file.owner is None and file.number in found and not file.is_blank():
                    self._remove(file)
                    file.path.unlink()
                    self._make(file.directory, file.size_bytes)
            self._mark_ids()
        except OSError as error:
            reason = f"{self.directories[0].path}: {error.strerror}"
            raise TierUnavailableError(TIER, reason) from error

    def _mark_ids(self) -> None:
        """Write each of several folders' identity, the first one last."""
        first = DirectoryId.read(self.directories[0].path)
        if first is None and len(self.directories) == 1:
            return
        set_id = os.urandom(16).hex() if first is None else first.set_id
        for position, directory in reversed(list(enumerate(self.directories))):
            wanted = DirectoryId(set_id, position, len(self.directories))
            if DirectoryId.read(directory.path) != wanted:
                directory.write("DISK", wanted.line())

    def _open(self, file: DataFile) -> None:
        try:
            file.fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | self.io.open_flags)
            self.io.check(file.fd)
        except OSError as error:
            if error.errno == errno.EINVAL and self.io.open_flags:
                what = f"{file.directory.path} is on a file system without direct reads and writes"
                fix = "start without --disk-direct, or give a folder on another file system"
                raise TierUnavailableError(TIER, f"{what} ({error.strerror}): {fix}") from None
            raise TierUnavailableError(TIER, f"{file.path}: {error.strerror}") from error

    def _make(self, directory: DiskDirectory, size_bytes: int) -> None:
        """Create a blank file with a new number. Raises TierUnavailableError."""
        with self.lock:
            file = DataFile(directory, self._next_number, size_bytes)
            self._next_number += 1
        try:
            allocate_file(file.path, size_bytes)
            sync_folder(file.path.parent)
        except OSError as error:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
            reason = f"{file.path} cannot be created: {error.strerror}"
            raise TierUnavailableError(TIER, reason) from error
        self._open(file)
        with self.lock:
            self.by_number[file.number] = directory.files[file.number] = file

    def _remove(self, file: DataFile) -> None:
        """Take *file* out of use. Under the lock."""
        del self.by_number[file.number], file.directory.files[file.number]

    # --- allocation, under the lock

    def allocate(self, tenant: str, size_bytes: int) -> tuple[DataFile, int, bool] | None:
        """Allocate space for a frame: the file, the offset, and whether the file is new to the
        tenant. None if no usable file has it, even if bytes are free in total.
        """
        usable = [one for one in self.directories if self._is_usable(one)]
        for directory in sorted(usable, key=lambda one: one.used_bytes / one.capacity_bytes):
            fits = (
                file
                for owner in (tenant, None)
                for file in directory.files.values()
                if file.owner == owner and file.free.largest_free_bytes >= size_bytes
            )
            if (file := next(fits, None)) is not None:
                is_new, file.owner = file.owner is None, tenant
                offset = file.free.allocate(size_bytes)
                assert offset is not None
                return file, offset, is_new
        return None

    def reserve_at(self, number: int, offset: int, size_bytes: int) -> bool:
        """Allocate exactly the range of a recovered frame; False if any of it is allocated."""
        file = self.by_number.get(number)
        return file is not None and file.free.reserve_at(offset, size_bytes)

    def _find_empty(self, tenant: str, size_bytes: int) -> DataFile | None:
        for file in self.by_number.values():
            is_theirs = file.owner not in (None, tenant) and not file.free.used_bytes
            if is_theirs and file.size_bytes >= size_bytes and self._is_usable(file.directory):
                return file
        return None

    def _is_usable(self, directory: DiskDirectory) -> bool:
        """Return whether puts may use the folder; after a failure only from ``retry_at_s`` on."""
        return not directory.failure or self._clock() >= directory.retry_at_s

    # --- files

    def reassign(
        self, tenant: str, size_bytes: int, note_owner: Callable[[int, str | None], None]
    ) -> None:
        """Replace an empty file of another tenant, if there is one, by a blank file.

        Wiping the old file is not enough: processes of the former tenant may still have it open,
        and would see the next bytes. Until they close it the disk may lack space for another file;
        it is then created by a later call. *note_owner* is called under the lock. Raises
        TierUnavailableError.
        """
        with self.lock:
            empty = self._find_empty(tenant, size_bytes)
            if empty is not None:
                self._remove(empty)
                note_owner(empty.number, None)
                self._missing.append((empty.directory, empty.size_bytes))
        if empty is not None:
            try:
                empty.path.unlink(missing_ok=True)
            except OSError as error:
                reason = f"{empty.directory.path}: {error.strerror}"
                raise TierUnavailableError(TIER, reason) from error
            del empty  # closing its descriptor frees its space
        with self.lock:
            missing, self._missing = self._missing, []
        try:
            while missing:
                self._make(*missing[-1])
                missing.pop()
        except TierUnavailableError:
            with self.lock:
                self._missing += missing

    def open_shared(self, number: int, tenant: str) -> int:
        """Return a new descriptor of a data file, as ``Tier.extent_file`` does."""
        with self.lock:
            file = self.by_number.get(number)
            owner = None if file is None or not file.is_known else file.owner
        if file is None or owner is None:
            raise InvalidRequestError("extent", number, _GONE)
        if owner != tenant:
            raise PermissionDeniedError(f"extent {number} belongs to another tenant")
        try:
            # By its name, which is never reused: a duplicate of our descriptor would be writable.
            return os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            file.is_known = False  # from now on only our descriptor reads it
            raise InvalidRequestError("extent", number, _GONE) from None
        except OSError as error:
            raise self._failed(file, "open", error) from error

    def read(self, file: DataFile, offset: int, out: Bytes) -> None:
        """Fill *out* from *offset* on. Raises TierUnavailableError."""
        try:
            is_whole = self.io.read(file.fd, offset, out)
        except OSError as error:
            raise self._failed(file, "read", error) from error
        if not is_whole:
            is_partial = self._has_others(file.directory)
            raise TierUnavailableError(TIER, f"{file.path} ends early", is_partial=is_partial)

    def write(self, file: DataFile, offset: int, data: Bytes) -> None:
        """Write *data* at *offset*. Raises TierUnavailableError."""
        try:
            self.io.write(file.fd, offset, data)
        except OSError as error:
            raise self._failed(file, "write", error) from error
        file.directory.failure = ""

    def sync(self, file: DataFile) -> None:
        """Make writes to *file* durable. After a failure the kernel may have dropped any byte not
        yet durable, and yet the next call succeeds: compare ``sync_failures``.
        """
        try:
            os.fdatasync(file.fd)
            self._check_linked(file)
        except OSError as error:
            file.sync_failures += 1
            raise self._failed(file, "sync", error) from error

    def check_linked(self) -> None:
        """Raise TierUnavailableError if a data file was removed: its bytes end with the process."""
        with self.lock:
            files = list(self.by_number.values())
        for file in files:
            try:
                self._check_linked(file)
            except OSError as error:
                raise self._failed(file, "sync", error) from error

    def _check_linked(self, file: DataFile) -> None:
        if os.fstat(file.fd).st_nlink == 0:
            with self.lock:
                is_ours = self.by_number.get(file.number) is file
            if is_ours:  # else it was reassigned to another tenant
                raise FileNotFoundError(errno.ENOENT, _REMOVED)

    def _failed(self, file: DataFile, verb: str, error: OSError) -> TierUnavailableError:
        """Record the failure, and avoid the folder for a while if there are others."""
        reason = f"{verb} of {file.path}: {error.strerror}"
        is_partial = self._has_others(file.directory)
        if isinstance(error, FileNotFoundError) and not is_partial and not self.removed:
            self.removed = reason
            logger.warning("nothing is put on disk until the restart", reason=reason)
        if is_partial:
            file.directory.failure = reason
            file.directory.retry_at_s = self._clock() + FOLDER_RETRY_S
        return TierUnavailableError(TIER, reason, is_partial=is_partial)

    def _has_others(self, directory: DiskDirectory) -> bool:
        return any(other is not directory and not other.failure for other in self.directories)

    def close(self) -> None:
        """Close the files, then release the folders. Idempotent."""
        for directory in self.directories:
            directory.close()
        self.io.close()


def _check_ids(paths: Sequence[Path]) -> None:
    """Refuse folders that are not those of one tier, in order; new ones may follow."""
    first, *others = map(DirectoryId.read, paths)
    if first is not None and first.position:
        raise refused(paths[0], f"is disk {first.position} of its tier: give its disk 0 first", "")
    known = 1 if first is None else first.folders
    if known > len(paths):
        reason = f"is the first of {known} folders and {len(paths)} are given: give them all"
        raise refused(paths[0], reason, "")
    for position, (path, found) in enumerate(zip(paths[1:], others, strict=True), start=1):
        is_ours = first is not None and found is not None and found[:2] == (first[0], position)
        if position < known and not is_ours:
            what = "empty" if found is None else f"disk {found.position} of tier {found.set_id}"
            reason = f"should be disk {position} of the tier but is {what}: mount it"
            raise refused(path, reason, "")
        is_free = found is None and not (path / "index").exists()
        if position >= known and not (is_ours or is_free):
            raise refused(path, "belongs to another disk tier")
