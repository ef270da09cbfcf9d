"""Rows of the disk tier's index, over restarts, damage and full disks.

As a program: test_disk_index.py FOLDER makes an index in FOLDER, leaves its file system nearly
full, opens the index again and prints how many rows it found.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import run
from typing import Any

import lmdb
import pytest
from contracts.chunks import make_info
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidFrameError, TierUnavailableError
from kvstore.tiers.disk_index import (
    DiskIndex,
    IndexRow,
    PackedRow,
    pack_owner,
    pack_row,
    unpack_row,
)
from kvstore.tiers.disk_io import free_bytes

INDEX_BYTES = 1 << 20
_U64 = st.integers(0, (1 << 64) - 1)


def row_of(seed: int, sequence: int = 0, offset: int = 0) -> IndexRow:
    return IndexRow(make_info(seed, 4_096), 0, offset, sequence)


def store(path: Path, packed: list[PackedRow]) -> None:
    """Write rows to the index at *path*, whatever they say."""
    index = DiskIndex(path, INDEX_BYTES)
    index.open(lambda row: True, ExitStack())
    assert index.commit([], packed) == len(packed)
    index.close()


@given(st.integers(0, 99), st.integers(0, (1 << 32) - 1), _U64, st.integers(0, (1 << 63) - 1))
def test_row_comes_back_as_it_was(seed: int, extent: int, offset: int, sequence: int) -> None:
    row = IndexRow(make_info(seed, 1 + offset // 2), extent, offset, sequence)
    assert unpack_row(row.info.key, pack_row(row)) == row


@given(st.data())
def test_row_with_any_byte_changed_cut_or_under_another_key_is_refused(data: st.DataObject) -> None:
    row = row_of(data.draw(st.integers(0, 99)))
    packed = bytearray(pack_row(row))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidFrameError):
        unpack_row(row.info.key, bytes(packed))
    with pytest.raises(InvalidFrameError):
        unpack_row(row.info.key, pack_row(row)[:at])
    other, body = row_of(100).info.key, pack_row(row)[:-8]
    for value in (pack_row(row), body + struct.pack("<Q", checksum(other + body))):
        with pytest.raises(InvalidFrameError):
            unpack_row(other, value)


@given(st.binary(max_size=300))
def test_rubbish_is_never_a_row(value: bytes) -> None:
    key = row_of(1).info.key
    signed = value + struct.pack("<Q", checksum(key + value))
    for attempt in (value, signed):
        with pytest.raises(InvalidFrameError):
            unpack_row(key, attempt)


def test_row_of_a_future_version_is_dropped_and_counted(tmp_path: Path) -> None:
    future, present = row_of(1), row_of(2)
    body = b"\x02" + pack_row(future)[1:-8]
    signed = body + struct.pack("<Q", checksum(future.info.key + body))
    store(tmp_path, [(future.info.key, signed), (present.info.key, pack_row(present))])
    for dropped in (1, 0):
        index = DiskIndex(tmp_path, INDEX_BYTES)
        assert index.open(lambda row: True, ExitStack()) == [present]
        assert index.dropped == dropped
        index.close()


def test_numbers_that_no_row_can_follow_are_dropped(tmp_path: Path) -> None:
    last, present = row_of(1, sequence=(1 << 64) - 1), row_of(2)
    owners = [pack_owner((1 << 32) - 1, "other"), pack_owner(3, "mine")]
    store(tmp_path, [(row.info.key, pack_row(row)) for row in (last, present)] + owners)
    index = DiskIndex(tmp_path, INDEX_BYTES)
    assert index.open(lambda row: True, ExitStack()) == [present]
    assert (index.dropped, index.owners) == (2, {3: "mine"})
    index.close()


def test_rows_come_back_in_order_of_sealing_and_the_newest_claims_first(tmp_path: Path) -> None:
    rows = [row_of(seed, sequence=(seed * 7) % 10, offset=4_096 * (seed % 4)) for seed in range(10)]
    store(tmp_path, [(row.info.key, pack_row(row)) for row in rows])
    taken: set[int] = set()
    asked: list[IndexRow] = []

    def claim(row: IndexRow) -> bool:
        asked.append(row)
        is_free = row.offset not in taken
        taken.add(row.offset)
        return is_free

    index = DiskIndex(tmp_path, INDEX_BYTES)
    kept = index.open(claim, ExitStack())
    index.close()
    assert [row.sequence for row in asked] == list(range(9, -1, -1))
    newest = {row.offset: row for row in sorted(rows, key=lambda row: row.sequence)}
    assert kept == sorted(newest.values(), key=lambda row: row.sequence)
    assert index.dropped == 6


def test_full_index_takes_what_fits_and_can_always_delete(tmp_path: Path) -> None:
    index = DiskIndex(tmp_path, INDEX_BYTES)
    index.open(lambda row: True, ExitStack())
    held: list[IndexRow] = []
    for cycle in range(3):
        fresh = [row_of(10_000 * cycle + seed, sequence=len(held)) for seed in range(6_000)]
        count = index.commit([], [(row.info.key, pack_row(row)) for row in fresh])
        assert 0 < count < len(fresh)
        held += fresh[:count]
        assert index.commit([], [(row.info.key, pack_row(row)) for row in fresh[-8:]]) == 0
        gone = held[cycle::2]
        assert index.commit([row.info.key for row in gone], []) == 0
        held = [row for row in held if row not in gone]
    index.close()
    index = DiskIndex(tmp_path, INDEX_BYTES)
    kept = index.open(lambda row: True, ExitStack())
    assert {row.info.key for row in kept} == {row.info.key for row in held}
    assert index.dropped == 0
    index.close()


def test_deletes_come_before_rows_of_the_same_key(tmp_path: Path) -> None:
    old, new = row_of(1, sequence=1), row_of(1, sequence=2)
    store(tmp_path, [(old.info.key, pack_row(old))])
    index = DiskIndex(tmp_path, INDEX_BYTES)
    index.open(lambda row: True, ExitStack())
    index.commit([old.info.key], [(new.info.key, pack_row(new))])
    index.close()
    assert index.open(lambda row: True, ExitStack()) == [new]
    index.close()


def test_file_of_a_future_lmdb_is_refused_and_left_alone(tmp_path: Path) -> None:
    store(tmp_path, [(row_of(1).info.key, pack_row(row_of(1)))])
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in (0, 4096):
        data[page + 20] = 2
    file.write_bytes(data)
    with pytest.raises(TierUnavailableError, match="nothing was changed"):
        DiskIndex(tmp_path, INDEX_BYTES).open(lambda row: True, ExitStack())
    assert file.read_bytes() == data


def test_rewritten_index_survives_a_leftover_of_a_broken_off_rewrite(tmp_path: Path) -> None:
    kept, refused = row_of(1), row_of(2)
    store(tmp_path, [(row.info.key, pack_row(row)) for row in (kept, refused)])
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "data.mdb").write_bytes(b"half")
    index = DiskIndex(tmp_path, INDEX_BYTES)
    assert index.open(lambda row: row == kept, ExitStack()) == [kept]
    index.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.mdb"]
    assert index.open(lambda row: True, ExitStack()) == [kept]
    index.close()


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("No space left on device"), OSError(errno.EIO, "Input/output error")]
)
def test_index_is_read_again_where_it_cannot_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rows = [row_of(seed, sequence=seed) for seed in range(200)]
    store(tmp_path, [(row.info.key, pack_row(row)) for row in rows])
    opened = lmdb.open

    def full(path: str, **options: Any) -> lmdb.Environment:
        if path.endswith("draft") and (tmp_path / "data.mdb").exists():
            raise error
        return opened(path, **options)

    monkeypatch.setattr(lmdb, "open", full)
    index = DiskIndex(tmp_path, INDEX_BYTES)
    data = (tmp_path / "data.mdb").read_bytes()
    assert index.open(lambda row: True, ExitStack()) == rows
    assert index.dropped == 0
    assert (tmp_path / "data.mdb").read_bytes() == data, "a sound index stays"
    index.close()
    assert index.open(lambda row: row != rows[7], ExitStack()) == rows[:7] + rows[8:]
    assert index.dropped == 1
    index.close()
    assert len(index.open(lambda row: True, ExitStack())) == len(rows) - 1
    index.close()


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        (lmdb.DiskError("No space left on device"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "Input/output error"), False),
    ],
)
def test_a_damaged_index_makes_room_on_a_full_disk_and_stays_where_it_may_go_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, starts: bool
) -> None:
    rows = [row_of(seed, sequence=seed) for seed in range(200)]
    store(tmp_path, [(row.info.key, pack_row(row)) for row in rows])
    file = tmp_path / "data.mdb"
    damaged = file.read_bytes()[:8192] + b"\xff" * (file.stat().st_size - 8192)
    file.write_bytes(damaged)
    opened = lmdb.open

    def full(path: str, **options: Any) -> lmdb.Environment:
        if path.endswith("draft") and file.exists():
            raise error
        return opened(path, **options)

    monkeypatch.setattr(lmdb, "open", full)
    index = DiskIndex(tmp_path, INDEX_BYTES)
    if starts:
        assert index.open(lambda row: True, ExitStack()) == []
        assert index.dropped == 1
        index.close()
    else:
        with pytest.raises(TierUnavailableError, match="Input/output"):
            index.open(lambda row: True, ExitStack())
        assert file.read_bytes() == damaged


@pytest.mark.skipif(
    run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a mount of its own",
)
def test_a_full_file_system_costs_a_sound_index_nothing(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4m full "$1" && exec "$2" "$3" "$1"'
    child = run(
        ["unshare", "-rm", "sh", "-c", script, "-", tmp_path, sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (child.stdout, child.returncode) == ("1000\n", 0), child.stderr


def test_something_else_in_place_of_the_rewrite_costs_no_row(tmp_path: Path) -> None:
    path, other = tmp_path / "index", tmp_path / "other"
    row, draft = row_of(1), path / "draft"
    store(path, [(row.info.key, pack_row(row))])
    other.mkdir()
    (other / "kept").write_bytes(b"kept")
    for make in (
        lambda: draft.write_bytes(b"half"),
        lambda: (draft / "data.mdb").mkdir(parents=True),
        lambda: draft.symlink_to(other),
    ):
        make()
        index = DiskIndex(path, INDEX_BYTES)
        assert index.open(lambda row: True, ExitStack()) == [row]
        index.close()
        if draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)
    assert (other / "kept").read_bytes() == b"kept"


def test_index_that_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierUnavailableError, match="cannot be opened"):
        DiskIndex(tmp_path / "file" / "index", INDEX_BYTES).open(lambda row: True, ExitStack())
    with pytest.raises(TierUnavailableError, match="cannot be opened"), ExitStack() as undo:
        DiskIndex(tmp_path / "index", 1 << 62).open(lambda row: True, undo)
    assert not (tmp_path / "index").exists()


def main() -> None:
    """Open an index where LMDB's writes are cut short, which it calls an I/O error."""
    folder = Path(sys.argv[1])
    path = folder / "index"
    store(path, [(row.info.key, pack_row(row)) for row in map(row_of, range(1_000))])
    number = (path / "data.mdb").stat().st_ino
    (folder / "filler").write_bytes(bytes(free_bytes(folder) - (64 << 10)))
    index = DiskIndex(path, INDEX_BYTES)
    print(len(index.open(lambda row: True, ExitStack())))
    assert index.commit([row_of(1).info.key], []) == 0
    assert (path / "data.mdb").stat().st_ino == number
    index.close()


if __name__ == "__main__":
    main()
