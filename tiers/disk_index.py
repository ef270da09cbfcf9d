"""Where each frame of the disk tier lies, in LMDB, so that a restart finds it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import lmdb

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkInfo
from kvstore.proto.wire import pack_info, unpack_info
from kvstore.tiers.disk_folder import TIER, remove_made, sync_folder
from kvstore.tiers.lmdb_pages import LmdbReader

DEFAULT_INDEX_BYTES = 256 << 20
"""Room for about 600,000 rows. Allocated at start, like the extents."""
MIN_INDEX_BYTES = 1 << 20
SPARE_SHARE = 4
"""One page in so many is kept from rows: a full index must still be able to delete."""
_STEP = 8
"""Changes in one transaction of an index that is nearly full: each needs few free pages."""

T = TypeVar("T")

_PLACE = struct.Struct("<B3xIQQ")
_ROW_VERSION = 1
_CHECKSUM = struct.Struct("<Q")
_OWNER_KEY = struct.Struct(">6sI")
_OWNER_TAG = b"extent"
_OWNER_VERSION = 1
_PAGE_BYTES = 4096


class IndexRow(NamedTuple):
    """One sealed frame: what it is, where it lies, and the how-manieth it was to be sealed."""

    info: ChunkInfo
    extent: int
    offset: int
    sequence: int


PackedRow: TypeAlias = tuple[bytes, bytes]
"""A row's LMDB key and value."""


def pack_row(row: IndexRow) -> bytes:
    """Return the LMDB value of *row*; its checksum covers the key too."""
    body = _PLACE.pack(_ROW_VERSION, row.extent, row.offset, row.sequence) + pack_info(row.info)
    return body + _CHECKSUM.pack(checksum(row.info.key + body))


def unpack_row(key: bytes, value: bytes) -> IndexRow:
    """Parse and check an LMDB value. Raises InvalidFrameError."""
    body, tail = value[: -_CHECKSUM.size], value[-_CHECKSUM.size :]
    if len(body) < _PLACE.size or _CHECKSUM.pack(checksum(key + body)) != tail:
        raise InvalidFrameError("row", key.hex(), "the row is damaged")
    version, extent, offset, sequence = _PLACE.unpack_from(body)
    if version != _ROW_VERSION:
        raise InvalidFrameError("row", version, f"this reader knows version {_ROW_VERSION}")
    try:
        info = unpack_info(body[_PLACE.size :])
    except LayoutMismatchError as error:
        raise InvalidFrameError("row", key.hex(), str(error)) from None
    if info.key != key:
        raise InvalidFrameError("row", key.hex(), "the row is of another key")
    return IndexRow(info, extent, offset, sequence)


def owner_key(extent: int) -> bytes:
    """Return the LMDB key of the row that says whose *extent* is; no chunk's is as short."""
    return _OWNER_KEY.pack(_OWNER_TAG, extent)


def pack_owner(extent: int, tenant: str) -> PackedRow:
    """Return the row that says that *tenant* owns *extent*."""
    key = owner_key(extent)
    body = bytes([_OWNER_VERSION]) + tenant.encode()
    return key, body + _CHECKSUM.pack(checksum(key + body))


def unpack_owner(key: bytes, value: bytes) -> tuple[int, str]:
    """Parse and check an owner's row. Raises InvalidFrameError."""
    body, tail = value[: -_CHECKSUM.size], value[-_CHECKSUM.size :]
    if not body or _CHECKSUM.pack(checksum(key + body)) != tail:
        raise InvalidFrameError("row", key.hex(), "the row is damaged")
    if body[0] != _OWNER_VERSION:
        raise InvalidFrameError("row", body[0], f"this reader knows version {_OWNER_VERSION}")
    try:
        return _OWNER_KEY.unpack(key)[1], body[1:].decode()
    except UnicodeDecodeError as error:
        raise InvalidFrameError("row", key.hex(), str(error)) from None


class DiskIndex:
    """Rows by key, changed in transactions that are durable when they return.

    ``dropped`` counts rows and pages that were unusable at start, and ``owners`` says whose
    each extent was then. One thread at a time.
    """

    def __init__(self, path: Path, index_bytes: int) -> None:
        """Name the index in the folder *path*; ``open`` does the work."""
        if index_bytes < MIN_INDEX_BYTES:
            raise InvalidRequestError("index_bytes", index_bytes, f"at least {MIN_INDEX_BYTES}")
        self.dropped = 0
        self.owners: dict[int, str] = {}
        self._path = path
        self._made: list[Path] = []
        self._file = path / "data.mdb"
        self._index_bytes = index_bytes // _PAGE_BYTES * _PAGE_BYTES
        self._env: lmdb.Environment | None = None
        self._is_in_doubt = False

    @property
    def missing_bytes(self) -> int:
        """What ``open`` will take from the file system."""
        try:
            return max(0, self._index_bytes - self._file.stat().st_blocks * 512)
        except OSError:
            return self._index_bytes

    def open(self, claim: Callable[[IndexRow], bool]) -> list[IndexRow]:
        """Return the usable rows in order of sealing, ready to commit.

        *claim* says whether a row's place is free; of two that overlap the one sealed later is
        asked first. When anything is unusable a new file is written from the other rows, so
        that LMDB only ever maps pages that were checked. Raises TierUnavailableError.
        """
        try:
            rows = self._open(claim)
        except InvalidFrameError as error:
            raise TierUnavailableError(
                TIER, f"{self._path}: {error}; nothing was changed: give another folder"
            ) from error
        except (OSError, lmdb.Error) as error:
            self.discard()
            raise TierUnavailableError(
                TIER, f"{self._path} cannot be opened: {error}; move it away to start empty"
            ) from error
        return rows

    def commit(self, deletes: Iterable[bytes], rows: Sequence[PackedRow]) -> int:
        """Delete, then add, and return how many *rows* went in; the index is full for the rest.

        All is durable on return, in one transaction where that fits, else in small ones, the
        deletes first. Raises TierUnavailableError; nobody knows then what took place.
        """
        if not self._has_room(len(rows)) or not self._write(deletes, rows):
            for some in _steps(list(deletes)):
                if not self._write(some, []):
                    raise TierUnavailableError(TIER, f"{self._path} has no page left to delete")
            done = 0
            for step in _steps(rows):
                if not self._has_room(len(step)) or not self._write([], step):
                    return done
                done += len(step)
        return len(rows)

    def _has_room(self, count: int) -> bool:
        """Whether *count* rows leave free the pages that deletes need: LMDB copies to delete."""
        stat = self._opened().stat()
        used = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        pages = self._index_bytes // stat["psize"]
        return count == 0 or used + count + pages // SPARE_SHARE <= pages

    def _opened(self) -> lmdb.Environment:
        if self._is_in_doubt:
            self._reopen()
        if self._env is None:
            raise TierUnavailableError(TIER, f"{self._path} is not open")
        return self._env

    def _reopen(self) -> None:
        """Map the index anew: after a failed write LMDB takes no other until that is done.

        What is there is the state before that write or the one after it: LMDB syncs the pages
        of a transaction before it writes the page that names them.
        """
        if self._env is not None:
            self._env.close()  # LMDB allows one mapping in a process
            self._env = None
        try:
            self._env = _open_environment(self._path, self._index_bytes)
        except (OSError, lmdb.Error) as error:
            raise TierUnavailableError(TIER, f"{self._path}: {error}") from error
        self._is_in_doubt = False

    def _write(self, deletes: Iterable[bytes], rows: Sequence[PackedRow]) -> bool:
        """Run one transaction; False, changing nothing, when it does not fit the index."""
        try:
            with self._opened().begin(write=True) as transaction:
                for key in sorted(deletes):
                    transaction.delete(key)
                for key, value in sorted(rows):
                    transaction.put(key, value)
        except lmdb.MapFullError:
            return False
        except lmdb.Error as error:
            self._is_in_doubt = True
            raise TierUnavailableError(TIER, f"{self._path}: {error}") from error
        return True

    def discard(self) -> None:
        """Unmap the index, and remove it if this start created it."""
        self.close()
        remove_made(self._made)
        self._made = []

    def close(self) -> None:
        """Unmap the index. Idempotent."""
        self._is_in_doubt = False
        if self._env is not None:
            self._env.close()
            self._env = None

    def _open(self, claim: Callable[[IndexRow], bool]) -> list[IndexRow]:
        if not self._path.exists():
            self._path.mkdir(mode=0o700)
            self._made.append(self._path)
        if self._file.exists() and self._file.stat().st_size:
            rows = self._recover(claim)
        else:
            self._made.append(self._file)
            rows = []
        self._env = _open_environment(self._path, self._index_bytes)
        self._allocate()
        return rows

    def _recover(self, claim: Callable[[IndexRow], bool]) -> list[IndexRow]:
        reader = LmdbReader(self._file)
        rows = []
        for key, value in reader.rows():
            try:
                if key.startswith(_OWNER_TAG) and len(key) == _OWNER_KEY.size:
                    extent, tenant = unpack_owner(key, value)
                    self.owners[extent] = tenant
                else:
                    rows.append(unpack_row(key, value))
            except InvalidFrameError:
                self.dropped += 1
        rows.sort(key=lambda row: row.sequence, reverse=True)
        kept = [row for row in rows if claim(row)]
        kept.reverse()
        self.dropped += reader.damage + len(rows) - len(kept)
        if self.dropped:
            self._rewrite(kept)
        return kept

    def _rewrite(self, rows: list[IndexRow]) -> None:
        """Replace the file by one with just *rows*; a crash leaves the old or the new one."""
        draft = self._path / "draft"
        draft.mkdir(mode=0o700, exist_ok=True)
        (draft / "data.mdb").unlink(missing_ok=True)
        env = _open_environment(draft, max(self._index_bytes, self._file.stat().st_size))
        try:
            with env.begin(write=True) as transaction:
                for extent, tenant in self.owners.items():
                    transaction.put(*pack_owner(extent, tenant))
                for row in rows:
                    transaction.put(row.info.key, pack_row(row))
        finally:
            env.close()
        (draft / "data.mdb").rename(self._file)
        draft.rmdir()
        sync_folder(self._path)

    def _allocate(self) -> None:
        """Take all room now, so that no later commit meets a full disk."""
        fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, self._index_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self._path)


def _steps(changes: Sequence[T]) -> Iterator[Sequence[T]]:
    return (changes[start : start + _STEP] for start in range(0, len(changes), _STEP))


def _open_environment(path: Path, index_bytes: int) -> lmdb.Environment:
    """Never writemap: a full or shortened file would then be a SIGBUS.

    The folder's lock keeps other processes out and the tier commits from one thread at a
    time, so LMDB's own lock file is not needed.
    """
    return lmdb.open(
        str(path), map_size=index_bytes, writemap=False, lock=False, max_dbs=0, mode=0o600
    )
