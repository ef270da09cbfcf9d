"""A folder of preallocated extent files, owned by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError

TIER = "disk"
FORMAT_VERSION = 1
GRANULE_BYTES = 4096
"""Frames start and extents end on this boundary, which is also what O_DIRECT asks for."""

_EXTENT_NAME = re.compile(r"(\d{4,})\.kv")
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_NO_FILES = {errno.EMFILE, errno.ENFILE}

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Made:
    """What this start created or enlarged, to be taken back when the start fails."""

    paths: list[Path] = field(default_factory=list)
    former_bytes: dict[Path, int] = field(default_factory=dict)


class ExtentFolder:
    """The lock, the format and the extent files of one folder.

    Each extent file has a number that no other file of the tier ever had or will have.
    ``kept`` says which files there are and how large they are to be, ``wanted`` the sizes of
    those that are still to be made. A folder keeps the extent size it was created with.
    ``failure`` says why the folder is left alone until ``retry_at_s``. Not thread-safe to open
    or close; ``create`` and ``remove`` of different numbers may run in parallel.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, extent_bytes: int, spare_bytes: int = 0
    ) -> None:
        """Own *path* and plan *capacity_bytes* there, floored to whole granules.

        *spare_bytes* must be free besides. A larger capacity than last time adds extents, a
        smaller one deletes those with the highest numbers. Raises TierUnavailableError, taking
        back what was created.
        """
        for name, value in (("capacity_bytes", capacity_bytes), ("extent_bytes", extent_bytes)):
            if value < GRANULE_BYTES:
                raise InvalidRequestError(name, value, f"give at least {GRANULE_BYTES}")
        self.path = path
        self.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.extent_bytes = extent_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.kept: dict[int, int] = {}
        self.wanted: list[int] = []
        self.is_new = False
        self.failure = ""
        self.retry_at_s = 0.0
        self._lock_fd = -1
        self._made = _Made()
        try:
            self._own(spare_bytes)
        except OSError as error:
            self.discard()
            raise TierUnavailableError(TIER, self._explain(error)) from error
        except TierUnavailableError:
            self.discard()
            raise

    def replan(self, taken: Container[int]) -> None:
        """Give up the files whose numbers are taken; others of their size are made instead."""
        for number in [number for number in self.kept if number in taken]:
            self.wanted.append(self.kept.pop(number))

    def fill(self, first_number: int) -> None:
        """Make every planned file, the new ones with numbers from *first_number* on.

        What is beyond the capacity is deleted last. Raises TierUnavailableError; ``discard``
        then takes back what was made.
        """
        try:
            for number, size in self.kept.items():
                self._make_whole(self.file(number), size)
            for number, size in enumerate(self.wanted, start=first_number):
                self._made.paths.append(self.file(number))
                self._create(self.file(number), size)
                self.kept[number] = size
            self.wanted = []
            for number, file in self._existing():
                if number not in self.kept and file.is_file():
                    file.unlink()
            sync_folder(self.path / "extents")
            sync_folder(self.path)
        except OSError as error:
            raise TierUnavailableError(TIER, self._explain(error)) from error

    def create(self, number: int, size_bytes: int) -> None:
        """Make one more extent file, durably. Raises OSError, leaving no file."""
        file = self.file(number)
        try:
            self._create(file, size_bytes)
            sync_folder(file.parent)
        except OSError:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            raise
        self.kept[number] = size_bytes

    def remove(self, number: int) -> None:
        """Delete an extent file; whoever has it open keeps its bytes. Raises OSError."""
        self.kept.pop(number, None)
        self.file(number).unlink(missing_ok=True)

    def file(self, number: int) -> Path:
        """Return the path of an extent."""
        return self.path / "extents" / f"{number:04d}.kv"

    def note_made(self, path: Path) -> None:
        """Have ``discard`` remove a file that is about to be created in the folder."""
        self._made.paths.append(path)

    def discard(self) -> None:
        """Take back what this start created, then close. The lock file stays.

        Whoever opened the lock file before it was unlinked would hold a lock on nothing.
        """
        remove_made(self._made.paths)
        for path, size in self._made.former_bytes.items():
            os.truncate(path, size)
        self._made = _Made()
        self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _own(self, spare_bytes: int) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
        if self.path.stat().st_mode & stat.S_IRWXO:
            fix = f"chmod 700 {self.path}"
            logger.warning("other users can look into the disk's folder", fix=fix)
        self._lock_fd = _take_lock(self.path)
        known = _read_format(self.path)
        self.is_new = known is None
        self.extent_bytes = known or self.extent_bytes
        left = self._plan()
        self._check_room(spare_bytes)
        full, rest = divmod(left, self.extent_bytes)
        self.wanted = [self.extent_bytes] * full + [rest] * (rest > 0)
        if known is None:
            self._made.paths += [self.path / "FORMAT", self.path / "FORMAT.new"]
            write_durably(self.path / "FORMAT", _format_line(FORMAT_VERSION, self.extent_bytes))
        folder = self.path / "extents"
        if not folder.is_dir():
            self._made.paths.append(folder)
            folder.mkdir(mode=0o700)

    def _plan(self) -> int:
        """Keep the lowest numbers, then grow files that were cut; return the bytes left."""
        left = self.capacity_bytes
        sizes: dict[int, int] = {}
        for number, file in self._existing():
            size = file.stat().st_size // GRANULE_BYTES * GRANULE_BYTES
            sizes[number] = min(size, self.extent_bytes, left)
            left -= sizes[number]
        for number, size in sizes.items():
            grown = min(self.extent_bytes - size, left)
            left -= grown
            if size + grown:
                self.kept[number] = size + grown
        return left

    def _check_room(self, spare_bytes: int) -> None:
        """Refuse before the first file is touched, rather than fill the disk to find out."""
        need = self.capacity_bytes + spare_bytes
        for number, size in self.kept.items():
            need -= min(size, self.file(number).stat().st_blocks * 512)
        room = os.statvfs(self.path)
        free = room.f_bavail * room.f_frsize
        if need > free:
            raise TierUnavailableError(
                TIER,
                f"{self.path} needs {need} more bytes and has {free} free: "
                "give the tier less capacity, or a larger disk",
            )

    def _make_whole(self, file: Path, size: int) -> None:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            former = os.fstat(fd).st_size
            if former < size:
                self._made.former_bytes[file] = former
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            if former < size:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _create(self, file: Path, size: int) -> None:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _existing(self) -> list[tuple[int, Path]]:
        """Return the numbers and paths of the extents there are, ascending."""
        folder = self.path / "extents"
        names = os.listdir(folder) if folder.is_dir() else []
        found = [match for name in names if (match := _EXTENT_NAME.fullmatch(name))]
        return sorted((int(match[1]), folder / match[0]) for match in found)

    def _explain(self, error: OSError) -> str:
        path = self.path
        if error.errno in _NO_ROOM:
            room = os.statvfs(path)
            free = room.f_bavail * room.f_frsize
            return (
                f"{path} cannot hold {self.capacity_bytes} bytes, {free} are free "
                f"({error.strerror}): give the tier less capacity, or a larger disk"
            )
        if error.errno in _NO_FILES:
            return f"{path}: {error.strerror}: raise the open files limit, or use larger extents"
        return f"{path}: {error.strerror}: give a folder that this process can create and write"


def remove_made(paths: list[Path]) -> None:
    """Remove what was created in this order, files and empty folders. Raises OSError."""
    for path in reversed(paths):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make the names in the folder *path* durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(file: Path, data: bytes) -> None:
    """Replace *file* by one that holds *data*, for this user alone whatever the umask.

    A crash leaves the old or the new one. Raises OSError.
    """
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)  # one that a crash left may have another mode
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(draft, flags, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(file)
    sync_folder(file.parent)


def signed_line(words: str) -> bytes:
    """Return *words* with their checksum, as a line of a file."""
    return f"{words} {checksum(words.encode()):016x}\n".encode()


def refused(path: Path, reason: str) -> TierUnavailableError:
    """Return the error for a folder that was left as it is."""
    return TierUnavailableError(
        TIER, f"{path} {reason}; nothing was changed: move it away, or give another folder"
    )


def _take_lock(path: Path) -> int:
    fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise TierUnavailableError(
            TIER,
            f"{path} is in use by process {holder}: stop it, or give this server another folder",
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _format_line(version: int, extent_bytes: int) -> bytes:
    return signed_line(f"kvstore disk {version} {extent_bytes}")


def _read_format(path: Path) -> int | None:
    """Return the extent size the folder was made with; None for a new folder."""
    file = path / "FORMAT"
    if not file.exists():
        if (path / "extents").exists() or (path / "index").exists():
            raise refused(path, "has no FORMAT beside its extents or index")
        return None
    with file.open("rb") as stream:
        line = stream.read(256)
    words = line.decode(errors="replace").split()
    if words[:2] != ["kvstore", "disk"] or len(words) < 3:
        raise refused(path, "has a FORMAT that no disk tier wrote")
    if words[2] != str(FORMAT_VERSION):
        raise refused(path, f"has format version {words[2]}, this server knows {FORMAT_VERSION}")
    if len(words) < 4 or not words[3].isdecimal() or line != _format_line(1, int(words[3])):
        raise refused(path, "has a damaged FORMAT")
    return int(words[3])
