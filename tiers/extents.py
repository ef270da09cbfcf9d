"""A folder of preallocated extent files, owned by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError

TIER = "disk"
FORMAT_VERSION = 1
GRANULE_BYTES = 4096
"""Frames start and extents end on this boundary, so that O_DIRECT needs no new format."""
DEFAULT_EXTENT_BYTES = 4 << 30

_EXTENT_NAME = re.compile(r"(\d{4,})\.kv")
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_NO_FILES = {errno.EMFILE, errno.ENFILE}


@dataclass(slots=True)
class _Made:
    """What this start created or enlarged, to be taken back when the start fails."""

    paths: list[Path] = field(default_factory=list)
    former_bytes: dict[Path, int] = field(default_factory=dict)


class ExtentFolder:
    """The lock, the format and the extent files of one disk tier.

    ``sizes[i]`` is the size of extent i in bytes and ``sync_failures[i]`` how often making
    it durable failed. A folder keeps the extent size it was created with. Not thread-safe
    to open or close; ``read``, ``write`` and ``sync`` may run in parallel.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, extent_bytes: int, spare_bytes: int = 0
    ) -> None:
        """Own *path* and allocate *capacity_bytes* there, floored to whole granules.

        *spare_bytes* must be free besides. A larger capacity than last time adds extents, a
        smaller one deletes them. Raises TierUnavailableError, taking back what was created.
        """
        for name, value in (("capacity_bytes", capacity_bytes), ("extent_bytes", extent_bytes)):
            if value < GRANULE_BYTES:
                raise InvalidRequestError(name, value, f"give at least {GRANULE_BYTES}")
        self.path = path
        self.extent_bytes = extent_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.sizes: list[int] = []
        self.sync_failures: list[int] = []
        self._fds: list[int] = []
        self._lock_fd = -1
        self._made = _Made()
        try:
            self._own(capacity_bytes, spare_bytes)
        except OSError as error:
            self.discard()
            raise TierUnavailableError(TIER, _explain(path, error, capacity_bytes)) from error
        except TierUnavailableError:
            self.discard()
            raise

    def read(self, extent: int, offset: int, out: Bytes) -> None:
        """Fill *out* from *offset* of *extent*. Raises TierUnavailableError."""
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._fds[extent], [out[done:].data], offset + done)
                if count == 0:
                    raise TierUnavailableError(TIER, f"{self._file(extent)} ends early")
                done += count
        except OSError as error:
            raise self._failed(extent, "read", error) from error

    def write(self, extent: int, offset: int, data: Bytes) -> None:
        """Put *data* at *offset* of *extent*. Raises TierUnavailableError."""
        done = 0
        try:
            while done < len(data):
                done += os.pwritev(self._fds[extent], [data[done:].data], offset + done)
        except OSError as error:
            raise self._failed(extent, "write", error) from error

    def sync(self, extent: int) -> None:
        """Make every byte written to *extent* durable. Raises TierUnavailableError.

        After a failure the kernel may have dropped any byte not yet durable, and the next
        call succeeds all the same: whoever wrote before must compare ``sync_failures``.
        """
        try:
            os.fdatasync(self._fds[extent])
        except OSError as error:
            self.sync_failures[extent] += 1
            raise self._failed(extent, "sync", error) from error

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
        """Close the extents, then release the lock. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _own(self, capacity_bytes: int, spare_bytes: int) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
        self._lock_fd = _take_lock(self.path)
        known = _read_format(self.path)
        self.extent_bytes = known or self.extent_bytes
        capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self._check_room(capacity_bytes, spare_bytes)
        full, rest = divmod(capacity_bytes, self.extent_bytes)
        self.sizes = [self.extent_bytes] * full + [rest] * (rest > 0)
        self.sync_failures = [0] * len(self.sizes)
        if known is None:
            self._made.paths += [self.path / "FORMAT", self.path / "FORMAT.new"]
            _write_format(self.path, self.extent_bytes)
        folder = self.path / "extents"
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
            self._made.paths.append(folder)
        for extent, size in enumerate(self.sizes):
            self._open_extent(self._file(extent), size)
        self._drop_surplus()
        sync_folder(folder)
        sync_folder(self.path)

    def _check_room(self, capacity_bytes: int, spare_bytes: int) -> None:
        """Refuse before the first file is touched, rather than fill the disk to find out."""
        need = capacity_bytes + spare_bytes
        for extent, file in self._existing():
            size = min(self.extent_bytes, capacity_bytes - extent * self.extent_bytes)
            need -= max(0, min(size, file.stat().st_blocks * 512))
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        if need > free:
            raise TierUnavailableError(
                TIER,
                f"{self.path} needs {need} more bytes and has {free} free: "
                "give the tier less capacity, or a larger disk",
            )

    def _open_extent(self, file: Path, size: int) -> None:
        existed = file.exists()
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        former = os.fstat(fd).st_size
        if not existed:
            self._made.paths.append(file)
        elif former < size:
            self._made.former_bytes[file] = former
        os.posix_fallocate(fd, 0, size)
        if former < size:
            os.fsync(fd)

    def _drop_surplus(self) -> None:
        for fd, size in zip(self._fds, self.sizes, strict=True):
            os.ftruncate(fd, size)
        for extent, file in self._existing():
            if extent >= len(self.sizes) and file.is_file():
                file.unlink()

    def _existing(self) -> list[tuple[int, Path]]:
        folder = self.path / "extents"
        names = os.listdir(folder) if folder.is_dir() else []
        found = [match for name in names if (match := _EXTENT_NAME.fullmatch(name))]
        return [(int(match[1]), folder / match[0]) for match in found]

    def _file(self, extent: int) -> Path:
        return self.path / "extents" / f"{extent:04d}.kv"

    def _failed(self, extent: int, verb: str, error: OSError) -> TierUnavailableError:
        return TierUnavailableError(TIER, f"{verb} of {self._file(extent)}: {error.strerror}")


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
    line = f"kvstore disk {version} {extent_bytes}"
    return f"{line} {checksum(line.encode()):016x}\n".encode()


def _write_format(path: Path, extent_bytes: int) -> None:
    draft = path / "FORMAT.new"
    with draft.open("wb") as file:
        file.write(_format_line(FORMAT_VERSION, extent_bytes))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path / "FORMAT")


def _read_format(path: Path) -> int | None:
    """Return the extent size the folder was made with; None for a new folder."""
    file = path / "FORMAT"
    if not file.exists():
        if (path / "extents").exists() or (path / "index").exists():
            raise _refused(path, "has no FORMAT beside its extents or index")
        return None
    with file.open("rb") as stream:
        line = stream.read(256)
    words = line.decode(errors="replace").split()
    if words[:2] != ["kvstore", "disk"] or len(words) < 3:
        raise _refused(path, "has a FORMAT that no disk tier wrote")
    if words[2] != str(FORMAT_VERSION):
        raise _refused(path, f"has format version {words[2]}, this server knows {FORMAT_VERSION}")
    if len(words) < 4 or not words[3].isdecimal() or line != _format_line(1, int(words[3])):
        raise _refused(path, "has a damaged FORMAT")
    return int(words[3])


def _refused(path: Path, reason: str) -> TierUnavailableError:
    return TierUnavailableError(
        TIER, f"{path} {reason}; nothing was changed: move it away, or give another folder"
    )


def _explain(path: Path, error: OSError, capacity_bytes: int) -> str:
    if error.errno in _NO_ROOM:
        stat = os.statvfs(path)
        free = stat.f_bavail * stat.f_frsize
        return (
            f"{path} cannot hold {capacity_bytes} bytes, {free} are free ({error.strerror}): "
            "give the tier less capacity, or a larger disk"
        )
    if error.errno in _NO_FILES:
        return f"{path}: {error.strerror}: raise the open files limit, or use larger extents"
    return f"{path}: {error.strerror}: give a folder that this process can create and write"
