"""The disk tier's index: rows in LMDB, written by group commit."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple, TypeAlias

import lmdb
import structlog

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import (
    InvalidFrameError,
    KVStoreError,
    LayoutMismatchError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.messages import pack_info, unpack_info
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.disk_files import MAX_FILES, DataFile, DataFiles
from kvstore.tiers.disk_io import BLOCK_BYTES, TIER, allocate_file, read_lmdb, sync_folder

DEFAULT_INDEX_BYTES = 256 << 20
"""Space for about 600,000 rows. Allocated at start, like the data files."""
MAX_PENDING_ROWS = 256
"""The seal that makes the batch this large commits it, durable or not."""
COMMIT_AGE_S = 0.2
"""How long a seal or delete without a waiter may stay uncommitted."""
MAX_SYNC_FAILURES = 3
"""Consecutive commits with a failed sync after which puts stop for SYNC_RETRY_S."""
SYNC_RETRY_S = 1.0
SPARE_SHARE = 4
"""One page in this many is kept free of rows, so that a full index can still delete."""
_STEP = 8
"""Changes in one transaction of a nearly full index: each needs few free pages."""

_VERSION = 1
_PLACE = struct.Struct("<B3xIQQ")
_CHECKSUM = struct.Struct("<Q")
_OWNER_KEY = struct.Struct(">6sI")
_OWNER_TAG = b"extent"
_MAX_SEQUENCE = 1 << 63
"""Rows have smaller numbers: others are not ours, and those that follow would not fit a row."""

logger = structlog.get_logger(__name__)


class IndexRow(NamedTuple):
    """One sealed frame: metadata, data file, offset, and its number in order of sealing."""

    info: ChunkInfo
    file: int
    offset: int
    sequence: int


PackedRow: TypeAlias = tuple[bytes, bytes]
"""A row's LMDB key and value."""


def pack_row(row: IndexRow) -> bytes:
    """Return the LMDB value of *row*."""
    place = _PLACE.pack(_VERSION, row.file, row.offset, row.sequence)
    return _signed(row.info.key, place + pack_info(row.info))


def unpack_row(key: bytes, value: bytes) -> IndexRow:
    """Parse and check an LMDB value. Raises InvalidFrameError."""
    body = _checked_body(key, value, _PLACE.size)
    _, file, offset, sequence = _PLACE.unpack_from(body)
    if sequence >= _MAX_SEQUENCE:
        raise InvalidFrameError("row", sequence, "no row has this sequence number")
    try:
        info = unpack_info(body[_PLACE.size :])
    except LayoutMismatchError as error:
        raise InvalidFrameError("row", key.hex(), str(error)) from None
    if info.key != key:
        raise InvalidFrameError("row", key.hex(), "the row has another key")
    return IndexRow(info, file, offset, sequence)


def owner_key(file: int) -> bytes:
    """Return the LMDB key of a data file's owner row; it is shorter than any chunk's."""
    return _OWNER_KEY.pack(_OWNER_TAG, file)


def pack_owner(file: int, tenant: str) -> PackedRow:
    """Return the owner row of a data file."""
    key = owner_key(file)
    return key, _signed(key, bytes([_VERSION]) + tenant.encode())


def unpack_owner(key: bytes, value: bytes) -> tuple[int, str]:
    """Parse and check an owner row. Raises InvalidFrameError."""
    body = _checked_body(key, value, 1)
    try:
        number = _OWNER_KEY.unpack(key)[1]
        if number >= MAX_FILES:
            raise InvalidFrameError("row", number, "no data file has this number")
        return number, body[1:].decode()
    except UnicodeDecodeError as error:
        raise InvalidFrameError("row", key.hex(), str(error)) from None


def _signed(key: bytes, body: bytes) -> bytes:
    """Return *body* with a checksum that also covers the key."""
    return body + _CHECKSUM.pack(checksum(key + body))


def _checked_body(key: bytes, value: bytes, least_bytes: int) -> bytes:
    body = value[: -_CHECKSUM.size]
    if len(body) < least_bytes or value != _signed(key, body):
        raise InvalidFrameError("row", key.hex(), "the row is damaged")
    if body[0] != _VERSION:
        raise InvalidFrameError("row", body[0], f"this reader supports version {_VERSION}")
    return body


class DiskIndex:
    """Rows by key, changed in durable transactions. One thread at a time. ``dropped`` counts
    unusable rows at start, ``owners`` has each data file's owner at start.
    """

    def __init__(self, path: Path, index_bytes: int) -> None:
        """Set the folder *path*; ``open`` opens the index."""
        self.dropped = 0
        self.owners: dict[int, str] = {}
        self._path = path
        self._file = path / "data.mdb"
        self._index_bytes = index_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._env: lmdb.Environment | None = None
        self._is_in_doubt = False

    @property
    def missing_bytes(self) -> int:
        """Bytes that ``open`` will allocate on the file system."""
        try:
            return max(0, self._index_bytes - self._file.stat().st_blocks * 512)
        except OSError:
            return self._index_bytes

    def open(self, claim: Callable[[IndexRow], bool], undo: ExitStack) -> list[IndexRow]:
        """Return the usable rows in order of sealing, ready to commit.

        *claim* allocates a row's range if it is free; of two that overlap the later sealed wins. A
        child process reads the rows, and a fresh file is written from them: this process maps only
        pages that it has written, unless both files do not fit and the child found no damage.
        Raises TierUnavailableError; a sound index then stays, and *undo* removes a new one.
        """
        undo.callback(self.close)
        try:
            if not self._path.exists():
                self._path.mkdir(mode=0o700)
                undo.callback(self._path.rmdir)
            rows: list[IndexRow] = []
            gone: list[bytes] = []
            if self._file.exists() and self._file.stat().st_size:
                rows, gone = self._recover(claim)
            else:
                undo.callback(self._file.unlink, missing_ok=True)
            self._env = _open_environment(self._path, self._index_bytes)
            most = self._env.max_key_size()  # keys from a damaged file may be longer
            if gone := [key for key in gone if 0 < len(key) <= most]:
                self.commit(gone, [])
            # Allocate everything now, so that no later commit fails on a full disk.
            size_bytes = max(self._index_bytes, self._file.stat().st_size)
            allocate_file(self._file, size_bytes, is_new=False)
            sync_folder(self._path)
        except InvalidFrameError as error:
            raise TierUnavailableError(
                TIER, f"{self._path}: {error}; nothing was changed: give another folder"
            ) from error
        except (OSError, lmdb.Error) as error:
            raise TierUnavailableError(
                TIER, f"{self._path} cannot be opened: {error}; move it away to start empty"
            ) from error
        return rows

    def commit(self, deletes: Iterable[bytes], rows: Sequence[PackedRow]) -> int:
        """Delete, then add, durably, and return how many *rows* were added before the index was
        full. Raises TierUnavailableError; the outcome is then unknown.
        """
        if not self._has_room(len(rows)) or not self._write(deletes, rows):
            deletes = list(deletes)
            for start in range(0, len(deletes), _STEP):
                if not self._write(deletes[start : start + _STEP], []):
                    raise TierUnavailableError(TIER, f"{self._path} has no page left to delete")
            for start in range(0, len(rows), _STEP):
                step = rows[start : start + _STEP]
                if not self._has_room(len(step)) or not self._write([], step):
                    return start
        return len(rows)

    def _has_room(self, count: int) -> bool:
        """Return whether *count* rows leave the pages for deletes, as LMDB copies on write."""
        stat = self._opened().stat()
        used = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        pages = self._index_bytes // stat["psize"]
        return count == 0 or used + count + pages // SPARE_SHARE <= pages

    def _opened(self) -> lmdb.Environment:
        """Return the index, remapped after a failed write, as LMDB requires. Its state is then the
        one before that write or after it, never in between.
        """
        if self._is_in_doubt:
            self.close()  # LMDB allows one mapping in a process
            self._is_in_doubt = True
            try:
                self._env = _open_environment(self._path, self._index_bytes)
            except (OSError, lmdb.Error) as error:
                raise TierUnavailableError(TIER, f"{self._path}: {error}") from error
            self._is_in_doubt = False
        if self._env is None:
            raise TierUnavailableError(TIER, f"{self._path} is not open")
        return self._env

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

    def close(self) -> None:
        """Unmap the index. Idempotent."""
        self._is_in_doubt = False
        if self._env is not None:
            self._env.close()
            self._env = None

    def _recover(self, claim: Callable[[IndexRow], bool]) -> tuple[list[IndexRow], list[bytes]]:
        """Return the usable rows, and the keys of unusable ones that the file may still have."""
        packed: dict[bytes, bytes] = {}
        status = read_lmdb(self._file, "forward", packed)
        if status:
            read_lmdb(self._file, "backward", packed)
        rows: list[IndexRow] = []
        gone: list[bytes] = []
        for key, value in packed.items():
            try:
                if key.startswith(_OWNER_TAG) and len(key) == _OWNER_KEY.size:
                    file, tenant = unpack_owner(key, value)
                    self.owners[file] = tenant
                else:
                    rows.append(unpack_row(key, value))
            except InvalidFrameError:
                gone.append(key)
        rows.sort(key=lambda row: row.sequence, reverse=True)
        kept: list[IndexRow] = []
        for row in rows:
            if claim(row):
                kept.append(row)
            else:
                gone.append(row.info.key)
        kept.reverse()
        self.dropped += len(gone) + (status != 0)
        if status:
            left = f"starts with the {len(kept)} chunks it found" if kept else "starts empty"
            event = f"the disk tier's index is damaged: the tier {left}"
            logger.warning(event, index=str(self._file), status=status)
        for key in gone:
            del packed[key]
        self._rewrite(sorted(packed.items()), is_sound=not status)
        return kept, gone

    def _rewrite(self, rows: list[PackedRow], *, is_sound: bool) -> None:
        """Replace the file by one with only *rows*; a crash leaves the old or the new one. If that
        fails, mostly for lack of space, a sound file stays.
        """
        draft = self._path / "draft"
        map_bytes = max(self._index_bytes, self._file.stat().st_size)
        try:
            _write_fresh(draft, map_bytes, rows)
        except (OSError, lmdb.Error) as error:
            if is_sound:
                shutil.rmtree(draft, ignore_errors=True)
                return
            if not isinstance(error, lmdb.DiskError) and error.args[0] not in (ENOSPC, EDQUOT):
                raise  # a retry may succeed
            self._file.unlink()
            _write_fresh(draft, map_bytes, rows)
        (draft / "data.mdb").rename(self._file)
        draft.rmdir()
        sync_folder(self._path)


def _write_fresh(path: Path, map_bytes: int, rows: list[PackedRow]) -> None:
    """Write an index of sorted *rows* to the folder *path*, durably. Raises OSError, lmdb.Error."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    with _open_environment(path, map_bytes) as env, env.begin(write=True) as transaction:
        transaction.cursor().putmulti(rows, append=True)


def _open_environment(path: Path, index_bytes: int) -> lmdb.Environment:
    # Never writemap: a full or truncated file would then raise SIGBUS. The folder's lock excludes
    # other processes and one thread commits at a time, so LMDB's own lock file is not needed.
    return lmdb.open(
        str(path), map_size=index_bytes, writemap=False, lock=False, max_dbs=0, mode=0o600
    )


@dataclass(slots=True, eq=False)
class Batch:
    """Rows and deletes that become durable together; deletes come first. ``owners`` has the new
    owners of data files, None for deleted files.
    """

    rows: dict[ChunkKey, PendingRow] = field(default_factory=dict)
    deletes: set[ChunkKey] = field(default_factory=set)
    owners: dict[int, str | None] = field(default_factory=dict)
    born_s: float = 0.0
    is_done: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows or self.deletes or self.owners)


@dataclass(slots=True, eq=False)
class PendingRow:
    """A row from its reservation until the index has it; ``failure`` is set until then.
    *sync_failures* is the count of *file* at the reservation.
    """

    row: IndexRow
    file: DataFile
    sync_failures: int
    batch: Batch | None = None
    failure: KVStoreError | None = field(
        default_factory=lambda: TierUnavailableError(TIER, "the commit was interrupted")
    )


class GroupCommit:
    """Group commit: rows and deletes join a batch; a caller that needs one durable commits all.

    Batches run one at a time, each in one transaction after a sync of every file it touches. So a
    range freed by a delete never has two rows in the index, and no chunk's row is in it without its
    file's owner. ``add``, ``drop``, ``note_owner``, ``pending`` and *forget* run under the lock of
    *files*; everything else takes it, and no sync or transaction runs under it.
    """

    def __init__(
        self,
        files: DataFiles,
        index: DiskIndex,
        clock: Callable[[], float],
        forget: Callable[[IndexRow], None],
    ) -> None:
        """Commit rows of *files* to *index*; *forget* is called for each row that failed."""
        self.commits = 0
        self.lost_rows = 0
        self.index_full = False
        self.index_failure = ""
        self._sync_failure = ""
        self._failed_syncs = 0
        self._sync_retry_at_s = 0.0
        self._files = files
        self._index = index
        self._lock = files.lock
        self._clock = clock
        self._forget = forget
        self._done = Condition(self._lock)
        self._work = Condition(self._lock)
        self._open = Batch()
        self._busy: Batch | None = None
        self._closed = False
        self._thread = Thread(target=self._background, name="kvstore-disk-commit", daemon=True)
        self._thread.start()

    @property
    def write_failure(self) -> str:
        """Why puts would not become durable now; empty if they would."""
        if self.index_failure:
            return self.index_failure
        is_off = self._failed_syncs >= MAX_SYNC_FAILURES and self._clock() < self._sync_retry_at_s
        return self._sync_failure if is_off else ""

    def add(self, pending: PendingRow) -> bool:
        """Add the row of a sealed frame to the open batch; return whether the batch is full."""
        pending.batch = self._join()
        pending.batch.rows[pending.row.info.key] = pending
        return len(pending.batch.rows) >= MAX_PENDING_ROWS

    def drop(self, key: ChunkKey) -> None:
        """Delete the row of *key*, or its pending row that is not written yet."""
        pending = self._open.rows.pop(key, None)
        if pending is None:
            self._join().deletes.add(key)
        else:
            pending.failure = None

    def note_owner(self, file: int, tenant: str | None) -> None:
        """Record a data file's owner, before or with the rows of its chunks."""
        self._join().owners[file] = tenant

    def pending(self, key: ChunkKey) -> PendingRow | None:
        """Return the row of *key* that is not written yet; None once it is."""
        pending = self._open.rows.get(key)
        if pending is None and self._busy is not None and key not in self._open.deletes:
            pending = self._busy.rows.get(key)
        return pending

    def settle(self, pending: PendingRow) -> None:
        """Wait until a row is committed. Raises its failure."""
        assert pending.batch is not None, "it was added"
        self.commit(pending.batch)
        if pending.failure is not None:
            raise pending.failure

    def commit(self, batch: Batch) -> None:
        """Wait until *batch* is committed or has failed; commit it if no other thread does."""
        with self._lock:
            while self._busy is not None and not batch.is_done:
                self._done.wait()
            if batch.is_done or not batch:
                return
            self._busy, self._open = batch, Batch()
        is_written = False
        try:
            is_written = self._write(batch)
        finally:
            with self._lock:
                self._finish(batch, is_written)
                batch.is_done = True
                self._busy = None
                self._done.notify_all()

    def commit_all(self) -> KVStoreError | None:
        """Commit everything so far; return the first row's failure, if any."""
        with self._lock:
            batches = [batch for batch in (self._busy, self._open) if batch is not None]
        for batch in batches:
            self.commit(batch)
        rows = (pending for batch in batches for pending in batch.rows.values())
        return next((pending.failure for pending in rows if pending.failure is not None), None)

    def close(self) -> None:
        """Stop the background thread and commit the rest."""
        with self._lock:
            self._closed = True
            self._work.notify()
        self._thread.join()
        self.commit_all()

    def _join(self) -> Batch:
        if not self._open:
            self._open.born_s = self._clock()
            self._work.notify()
        return self._open

    def _write(self, batch: Batch) -> bool:
        """Write *batch* and mark its rows. False: how much was written is unknown."""
        good = self._sync(list(batch.rows.values()))
        gone = [owner_key(file) for file, tenant in batch.owners.items() if tenant is None]
        owners = [pack_owner(file, name) for file, name in batch.owners.items() if name is not None]
        rows: list[PackedRow] = [(one.row.info.key, pack_row(one.row)) for one in good]
        try:
            done = self._index.commit({*batch.deletes, *gone}, owners + rows)
        except TierUnavailableError as error:
            self.index_failure = str(error)
            for pending in good:
                pending.failure = TierUnavailableError(TIER, self.index_failure)
            return False
        if done >= len(owners):
            batch.owners.clear()
        for at, pending in enumerate(good, len(owners)):
            size_bytes = pending.row.info.size_bytes
            pending.failure = None if at < done else TierFullError(TIER, size_bytes, 0)
        self.index_failure = ""
        is_short = done < len(rows) + len(owners)
        self.index_full = is_short or (self.index_full and not batch.deletes)
        self.commits += 1
        return True

    def _sync(self, rows: list[PendingRow]) -> list[PendingRow]:
        """Make the frames of *rows* durable; return the rows whose every byte is durable."""
        failures: dict[DataFile, TierUnavailableError] = {}
        for file in dict.fromkeys(pending.file for pending in rows):
            try:
                self._files.sync(file)
            except TierUnavailableError as error:
                failures[file] = error
        # Failures of one disk of several are not counted.
        counted = [failure for failure in failures.values() if not failure.is_partial]
        if rows:
            self._failed_syncs = self._failed_syncs + 1 if counted else 0
        for failure in counted:
            self._sync_failure = str(failure)
            self._sync_retry_at_s = self._clock() + SYNC_RETRY_S
        good: list[PendingRow] = []
        for pending in rows:
            if pending.file.sync_failures == pending.sync_failures:
                good.append(pending)
            else:
                lost = TierUnavailableError(TIER, "its bytes were lost when an earlier sync failed")
                pending.failure = failures.get(pending.file, lost)
        return good

    def _finish(self, batch: Batch, is_written: bool) -> None:
        """Forget failed rows; deletes that remain join the next batch."""
        for key, pending in batch.rows.items():
            if pending.failure is None:
                continue
            self.lost_rows += 1
            if key not in self._open.deletes:
                self._forget(pending.row)
            if not is_written:
                self._join().deletes.add(key)
        if not is_written and batch.deletes:
            self._join().deletes.update(batch.deletes)
        if batch.owners:
            self._join().owners = batch.owners | self._open.owners

    def _background(self) -> None:
        """Commit the open batch once it is COMMIT_AGE_S old."""
        while True:
            with self._lock:
                batch, wait_s = self._open, self._open.born_s + COMMIT_AGE_S - self._clock()
                if self._closed:
                    return
                if not batch or wait_s > 0:
                    self._work.wait(wait_s if batch else None)
                    continue
            self.commit(batch)
