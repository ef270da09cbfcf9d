from __future__ import annotations

import random
import sys
from pathlib import Path
from subprocess import run

import lmdb
import pytest

from kvstore.proto.errors import InvalidFrameError
from kvstore.tiers.lmdb_pages import LmdbReader

PAGE = 4096
_USE_AND_CHANGE = """
import lmdb, random, sys
draw = random.Random(1)
for path in sys.argv[1:]:
    env = lmdb.open(path, map_size=16 << 20, lock=False)
    for _ in range(10):
        with env.begin(write=True) as transaction:
            keys = [key for key, _ in transaction.cursor()]
            for key in draw.sample(keys, min(10, len(keys))):
                transaction.delete(key)
            for _ in range(10):
                transaction.put(draw.randbytes(32), draw.randbytes(200))
    env.close()
"""


def make_file(path: Path, seed: int, rounds: int = 40) -> dict[bytes, bytes]:
    """Write an LMDB file through many transactions; return the rows it must have."""
    draw = random.Random(seed)
    sizes = [100, 200, 200, 3_000, 9_000] if seed % 2 else [100, 200]
    rows: dict[bytes, bytes] = {}
    env = lmdb.open(str(path), map_size=64 << 20, lock=False, sync=False)
    for _ in range(rounds):
        with env.begin(write=True) as transaction:
            for _ in range(draw.choice([0, 1, 30])):
                key, value = draw.randbytes(32), draw.randbytes(draw.choice(sizes))
                rows[key] = value
                transaction.put(key, value)
            for key in draw.sample(sorted(rows), min(len(rows), draw.choice([0, 1, 10, 500]))):
                transaction.delete(key)
                del rows[key]
    env.close()
    return rows


def read(path: Path) -> tuple[dict[bytes, bytes], int]:
    reader = LmdbReader(path / "data.mdb")
    return dict(reader.rows()), reader.damage


@pytest.mark.parametrize("seed", range(12))
def test_reads_what_lmdb_wrote_and_finds_nothing_wrong(tmp_path: Path, seed: int) -> None:
    rows = make_file(tmp_path, seed, rounds=10 * (seed + 1))
    found, damage = read(tmp_path)
    assert found == rows
    assert list(found) == sorted(rows)
    assert damage == 0


def test_file_without_rows_is_sound(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path), lock=False).close()
    assert read(tmp_path) == ({}, 0)


def test_zeroed_leaf_costs_its_rows_alone(tmp_path: Path) -> None:
    rows = make_file(tmp_path, 2)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    victim = sorted(rows)[len(rows) // 2]
    pages = {at // PAGE for at in range(len(data)) if data.startswith(victim, at)}
    for page in pages:
        data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    file.write_bytes(data)
    found, damage = read(tmp_path)
    assert damage > 0
    assert victim not in found
    assert len(rows) // 2 < len(found) < len(rows)
    assert found.items() <= rows.items()


@pytest.mark.parametrize("damaged", [[0], [1], [0, 1]])
def test_damaged_meta_page_is_noticed_and_the_other_one_used(
    tmp_path: Path, damaged: list[int]
) -> None:
    rows = make_file(tmp_path, 2)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in damaged:
        data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    file.write_bytes(data)
    found, damage = read(tmp_path)
    assert damage >= len(damaged)
    assert bool(found) is (len(damaged) == 1)
    if found:
        assert len(found.keys() & rows.keys()) > len(rows) // 4


def test_unknown_lmdb_version_is_an_error_not_damage(tmp_path: Path) -> None:
    make_file(tmp_path, 1)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    data[20] = data[PAGE + 20] = 3
    file.write_bytes(data)
    with pytest.raises(InvalidFrameError, match="this reader knows LMDB 1"):
        read(tmp_path)


def test_page_reached_twice_is_damage(tmp_path: Path) -> None:
    make_file(tmp_path, 2)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    newest = max((0, PAGE), key=lambda at: int.from_bytes(data[at + 144 : at + 152], "little"))
    root = int.from_bytes(data[newest + 128 : newest + 136], "little") * PAGE
    assert data[root + 10] == 1
    first, second = (
        root + int.from_bytes(data[root + 16 + at : root + 18 + at], "little") for at in (0, 2)
    )
    data[second : second + 4] = data[first : first + 4]
    file.write_bytes(data)
    assert read(tmp_path)[1] >= 1


@pytest.mark.parametrize("seed", range(3))
def test_file_found_sound_after_random_damage_never_crashes_lmdb(tmp_path: Path, seed: int) -> None:
    """In a child, as a crash of LMDB is the death of its process."""
    draw = random.Random(seed)
    source = tmp_path / "source"
    make_file(source, seed)
    whole = (source / "data.mdb").read_bytes()
    sound: list[str] = []
    refused = 0
    for attempt in range(150):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / "data.mdb").write_bytes(_damaged(whole, draw))
        if read(folder)[1]:
            refused += 1
        else:
            sound.append(str(folder))
    assert refused > 20
    assert len(sound) > 5
    child = run([sys.executable, "-c", _USE_AND_CHANGE, *sound], capture_output=True, check=False)
    assert (child.returncode, child.stderr) == (0, b"")


def _damaged(whole: bytes, draw: random.Random) -> bytes:
    data = bytearray(whole)
    page = draw.randrange(len(data) // PAGE) * PAGE
    match draw.randrange(5):
        case 0:
            data[page + draw.randrange(PAGE)] ^= 1 << draw.randrange(8)
        case 1:
            data[page + draw.randrange(160)] = draw.randrange(256)
        case 2:
            data[page : page + PAGE] = bytes(PAGE)
        case 3:
            del data[draw.randrange(len(data)) :]
        case _:
            other = draw.randrange(len(data) // PAGE) * PAGE
            data[page : page + PAGE] = data[other : other + PAGE]
    return bytes(data)
