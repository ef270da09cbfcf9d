"""File I/O of the disk tier: buffered or direct, and small files written durably."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import LifoQueue
from subprocess import DEVNULL, TimeoutExpired, run
from typing import ClassVar

import numpy as np
from typing_extensions import override

from kvstore.proto.buffers import Bytes, FileGroups, checksum, copy_bytes, read_summed
from kvstore.proto.errors import InvalidFrameError, TierUnavailableError

TIER = "disk"
BLOCK_BYTES = 4096
"""Frames start and data files end on this boundary, which O_DIRECT also requires."""
BOUNCE_BYTES = 1 << 20
"""Size of a bounce buffer of direct I/O."""
BOUNCE_BUFFERS = 8
"""Transfers at once; others wait."""
PROBE_BYTES = 1 << 20
"""Distance of the bytes that ``is_near`` looks for in the page cache."""
READ_LIMIT_S = 60.0
"""Time limit to read an index at start; beyond it the start is refused."""
_HEAD = struct.Struct("<HI")
_OTHER_VERSION = 3
_DAMAGED = 4
_DAMAGE = (_DAMAGED, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE)
"""Exit statuses of the reader for a damaged file. Any other except 0 implies nothing about it."""

_READER = """
import sys
sys.path[:] = sys.argv[3:]
import lmdb, mmap, os, resource, signal, struct
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
path, is_backward = sys.argv[1], sys.argv[2] == "backward"
file = open(path, "rb")
size = os.fstat(file.fileno()).st_size
damage = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError,
    lmdb.MapResizedError, lmdb.CursorFullError,
)
try:
    env = lmdb.open(path, subdir=False, readonly=True, lock=False)
except lmdb.Error as error:
    page, known = mmap.PAGESIZE, (0xBEEFC0DE, 1)
    head = file.read(2 * page).ljust(2 * page, bytes(1))
    # Of each meta page: magic, version, last page.
    first, second = (struct.unpack_from("<II112xQ", head, at) for at in (16, page + 16))
    if first[:2] == second[:2] != known and first[0] == known[0]:
        sys.exit(3)
    is_wrong = any(meta[:2] != known or meta[2] >= size // page for meta in (first, second))
    if is_wrong or isinstance(error, damage):
        sys.exit(4)
    raise
used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
os.posix_fadvise(file.fileno(), 0, min(used, size), os.POSIX_FADV_WILLNEED)
last, count, left, out = None, 0, size, sys.stdout.buffer
try:
    with env.begin(buffers=True) as transaction:
        cursor = transaction.cursor()
        for key, value in cursor.iterprev() if is_backward else cursor.iternext():
            key, value = bytes(key), value[:8192]
            left -= len(key) + len(value)
            if left < 0 or last is not None and (key >= last if is_backward else key <= last):
                sys.exit(4)
            out.write(struct.pack("<HI", len(key), len(value)) + key)
            out.write(value)
            last, count = key, count + 1
except damage:
    sys.exit(4)
sys.exit(4 if count != env.stat()["entries"] else 0)
"""
"""Writes the rows of an LMDB file, in order of keys, and exits with 0 if it found no damage, with
``_DAMAGED`` if it did, with ``_OTHER_VERSION`` if both meta pages are of another version of LMDB.
An exception unrelated to the file, such as MemoryError, is exit status 1.

LMDB trusts its pages: a zeroed one aborts the process, a missing one raises SIGBUS, and a last page
past the end of the file may exceed the address space. Keys out of order and rows beyond the file's
size are damage too, and could make the walk endless. Values are cut to 8 KiB.
"""


class FileIO:
    """Reads and writes data files through the page cache. Thread-safe."""

    open_flags: ClassVar[int] = 0
    can_sum: ClassVar[bool] = True
    """Whether ``read_summed`` is supported."""

    def check(self, fd: int) -> None:
        """Raise OSError if the file does not support this kind of I/O."""

    def close(self) -> None:
        """Free the buffers. Idempotent."""

    def read(self, fd: int, offset: int, out: Bytes) -> bool:
        """Fill *out* from *offset*. False when the file ends early. Raises OSError, as ``write``
        does.
        """
        done = 0
        while done < len(out):
            count = os.preadv(fd, [out[done:].data], offset + done)
            if not count:
                return False
            done += count
        return True

    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        """Have the kernel read these bytes into the page cache."""
        if not self.is_near(fd, offset, size_bytes):
            with suppress(OSError):
                os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def is_near(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Return whether these bytes seem to be in the page cache, judged by samples."""
        # For read-ahead the kernel checks every page: 0.1 ms for 8 MiB.
        byte = bytearray(1)
        last = offset + size_bytes - 1
        try:
            for at in (*range(offset, last, PROBE_BYTES), last):
                os.preadv(fd, [byte], at, os.RWF_NOWAIT)
        except OSError:  # not cached, or the file system does not support RWF_NOWAIT
            return False
        return True

    def read_summed(self, fd: int, groups: FileGroups) -> list[int] | None:
        """Fill *groups* and return their sums; None: use ``read``. See ``buffers``."""
        return read_summed(fd, groups)

    def write(self, fd: int, offset: int, data: Bytes) -> None:
        """Write *data* at *offset*, a block boundary."""
        done = 0
        while done < len(data):
            done += os.pwritev(fd, [data[done:].data], offset + done)


class DirectIO(FileIO):
    """Reads and writes past the page cache, at the price of a copy through aligned memory.

    Transfers are whole blocks: frames start on block boundaries, and the last block of one is
    padded with zeros. Takes at most ``BOUNCE_BUFFERS`` x ``BOUNCE_BYTES`` of memory.
    """

    open_flags = os.O_DIRECT
    can_sum = False

    def __init__(self) -> None:
        self.close()

    @override
    def close(self) -> None:
        self._free: LifoQueue[Bytes | None] = LifoQueue()
        """Unused buffers; None for each that may be created."""
        for _ in range(BOUNCE_BUFFERS):
            self._free.put(None)

    @override
    def read(self, fd: int, offset: int, out: Bytes) -> bool:
        done = 0
        with self._bounce() as bounce:
            while done < len(out):
                start = (offset + done) % BLOCK_BYTES
                size = min(len(bounce), _whole_blocks(start + len(out) - done))
                got = os.preadv(fd, [bounce[:size].data], offset + done - start) - start
                if got <= 0:
                    return False
                take = min(got, len(out) - done)
                copy_bytes(out[done : done + take], bounce[start : start + take])
                done += take
        return True

    @override
    def write(self, fd: int, offset: int, data: Bytes) -> None:
        done = 0
        with self._bounce() as bounce:
            while done < len(data):
                take = min(len(bounce), len(data) - done)
                size = _whole_blocks(take)
                copy_bytes(bounce[:take], data[done : done + take])
                bounce[take:size] = 0
                written = 0
                while written < size:
                    # A short write ends on a sector; the repeated bytes are the same.
                    step = os.pwritev(fd, [bounce[written:size].data], offset + done + written)
                    written += step // BLOCK_BYTES * BLOCK_BYTES
                    if step < BLOCK_BYTES:
                        raise OSError(errno.EIO, "the device wrote less than a block")
                done += take

    @contextmanager
    def _bounce(self) -> Iterator[Bytes]:
        free = self._free
        bounce = free.get()
        if bounce is None:
            # Anonymous mappings are page-aligned, and end with their last view.
            bounce = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        try:
            yield bounce
        finally:
            free.put(bounce)

    @override
    def read_ahead(self, fd: int, offset: int, size_bytes: int) -> None:
        """Do nothing: direct reads do not use the page cache."""

    @override
    def check(self, fd: int) -> None:
        with self._bounce() as bounce:
            os.preadv(fd, [bounce[:BLOCK_BYTES].data], 0)


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def sync_folder(path: Path) -> None:
    """Make the entries of the folder *path* durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(file: Path, data: bytes) -> None:
    """Replace *file* by one with *data*, of mode 0600 regardless of the umask. A crash leaves the
    old or the new one. Raises OSError.
    """
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)  # one left by a crash may have another mode
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(draft, flags, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(file)
    sync_folder(file.parent)


def signed_line(words: str) -> bytes:
    """Return the line of *words* and their checksum."""
    return f"{words} {checksum(words.encode()):016x}\n".encode()


def read_signed_line(file: Path, kind: str, pattern: str) -> list[str] | None:
    """Return the words after ``kvstore KIND 1`` in *file*, which match *pattern*; None if there is
    no file. Raises TierUnavailableError when it is damaged or of another kind or version.
    """
    try:
        with file.open("rb") as stream:
            line = stream.read(256)
    except FileNotFoundError:
        return None
    words = line.decode(errors="replace").split()
    if words[:2] != ["kvstore", kind] or len(words) < 3:
        raise refused(file.parent, f"has a {file.name} that no disk tier wrote")
    if words[2] != "1":
        reason = f"has a {file.name} of format version {words[2]}, this server supports 1"
        raise refused(file.parent, reason)
    if line != signed_line(" ".join(words[:-1])):
        raise refused(file.parent, f"has a damaged {file.name}")
    if not re.fullmatch(pattern, " ".join(words[3:-1])):
        raise refused(file.parent, f"has a {file.name} that no disk tier wrote")
    return words[3:-1]


def refused(
    path: Path, reason: str, fix: str = ": move it away, or give another folder"
) -> TierUnavailableError:
    """Return the error for a folder that was left unchanged."""
    return TierUnavailableError(TIER, f"{path} {reason}; nothing was changed{fix}")


def free_bytes(path: Path) -> int:
    """Return the bytes of *path*'s file system that this user can allocate. Raises OSError."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def allocate_file(path: Path, size_bytes: int, *, is_new: bool = True) -> None:
    """Allocate all blocks of a file of this size, durably except its name. Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL if is_new else 0
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(path: Path) -> int:
    """Lock the folder *path* and return the descriptor that holds the lock. Raises OSError, and
    TierUnavailableError if another process holds it.
    """
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


def read_lmdb(file: Path, direction: str, rows: dict[bytes, bytes]) -> int:
    """Add the rows of an LMDB file, which may be damaged, to *rows*; a child process reads them.

    Return 0 when the child read all, else its exit status for damage. Raises OSError,
    InvalidFrameError for another version of LMDB, and TierUnavailableError for any other exit
    status.
    """
    command = [sys.executable, "-c", _READER, str(file), direction, *sys.path]
    try:
        # In its own session, so that a Ctrl-C for the server does not end it.
        done = run(  # noqa: S603 - no shell, and our own program
            command, stdin=DEVNULL, capture_output=True, check=False, start_new_session=True,
            timeout=READ_LIMIT_S,
        )  # fmt: skip
        status, data, words = done.returncode, done.stdout, done.stderr.decode(errors="replace")
    except TimeoutExpired:
        status, data, words = -signal.SIGKILL, b"", ""
    at = 0
    while at + _HEAD.size <= len(data):
        key_bytes, value_bytes = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size + key_bytes
        at = start + value_bytes
        rows[data[start - key_bytes : start]] = data[start:at]
    if status == _OTHER_VERSION:
        raise InvalidFrameError("index", str(file), "it is of another version of LMDB")
    if status and status not in _DAMAGE:
        reason = f"its reader ended with status {status}"
        if status == -signal.SIGKILL:
            reason += f": it took {READ_LIMIT_S:g} s, or memory ran out"
        last = next((line for line in reversed(words.split("\n")) if line.strip()), "")
        raise refused(
            file.parent,
            f"could not be read: {reason}{last and f' ({last})'}",
            ": start again, or move it away to start empty",
        )
    return status
