"""An index whose pages were damaged: what is left is served, and no process dies of it.

As a program: test_disk_damage.py FOLDER... opens the tier in each folder, reads every chunk, works
with the tier, and prints how many chunks there were and how many of those were right.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from subprocess import run

import pytest
from contracts.chunks import make_frame
from contracts.shelf import assert_holds, get, put
from helpers.disk_process import is_whole, open_disk
from structlog.testing import capture_logs

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers import disk_io
from kvstore.tiers.disk import DiskTier

PAGE = 4096
CHUNKS = 600
CAPACITY_BYTES = 4 << 20
KINDS = ("zeroed", "random", "cut", "flipped", "swapped", "first pages")
COPIES = 4


@cache
def frame_of(seed: int) -> tuple[ChunkInfo, Bytes]:
    return make_frame(seed, tokens=16)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tier whose index was written in many transactions, so that old pages are left."""
    path = tmp_path_factory.mktemp("original") / "disk"
    tier = open_disk(path, CAPACITY_BYTES)
    for start in range(0, CHUNKS, 50):
        for seed in range(start, start + 50):
            put(tier, *frame_of(seed))
            put(tier, *frame_of(10_000 + seed))
        tier.flush()
        for seed in range(start, start + 50):
            tier.delete(frame_of(10_000 + seed)[0].key)
    tier.close()
    return path


def damage(file: Path, kind: str, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    used = len(bytes(data).rstrip(b"\0")) // PAGE
    page = draw.randrange(2, used) * PAGE
    match kind:
        case "zeroed":
            data[page : page + PAGE] = bytes(PAGE)
        case "random":
            data[page : page + PAGE] = draw.randbytes(PAGE)
        case "cut":
            del data[page:]
        case "flipped":
            for _ in range(20):
                data[draw.randrange(used * PAGE)] ^= 1 << draw.randrange(8)
        case "swapped":
            other = draw.randrange(2, used) * PAGE
            data[page : page + PAGE] = data[other : other + PAGE]
        case _:
            at = draw.randrange(2) * PAGE
            data[at : at + 200] = draw.randbytes(200)
    file.write_bytes(data)


def damaged(original: Path, folder: Path, kind: str) -> Iterator[Path]:
    draw = random.Random(kind)
    for number in range(COPIES):
        path = folder / str(number)
        shutil.copytree(original, path)
        damage(path / "index" / "data.mdb", kind, draw)
        yield path


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_of_the_index_ends_the_process_or_serves_a_wrong_byte(
    original: Path, tmp_path: Path, kind: str
) -> None:
    paths = list(damaged(original, tmp_path, kind))
    child = run(
        [sys.executable, __file__, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == COPIES
    # A page in the middle costs what lies on it; what leads to others may cost all.
    if kind in ("zeroed", "random", "flipped"):
        assert max(right for _, right in lines) > CHUNKS // 2


VICTIM = sorted(frame_of(seed)[0].key for seed in range(CHUNKS))[CHUNKS // 2]


def test_a_damaged_page_costs_its_own_rows_and_one_line_says_so(
    original: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(original, tmp_path / "disk"))
    file = path / "index" / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in {at // PAGE for at in range(len(data)) if data.startswith(VICTIM, at)}:
        data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    file.write_bytes(data)
    with capture_logs() as logs:
        tier = open_disk(path, CAPACITY_BYTES)
    (event,) = (log["event"] for log in logs)
    kept = list(tier.scan())
    assert f"damaged: the tier starts with the {len(kept)} chunks it found" in event
    assert CHUNKS - 100 < len(kept) < CHUNKS
    assert all(is_whole(tier, info) for info in kept)
    assert tier.dropped_rows > 0
    tier.close()
    tier = open_disk(path, CAPACITY_BYTES)
    assert (list(tier.scan()), tier.dropped_rows) == (kept, 0)
    tier.close()


def test_a_row_whose_key_lost_its_length_costs_that_row_alone(
    original: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(original, tmp_path / "disk"))
    file = path / "index" / "data.mdb"
    data = bytearray(file.read_bytes())
    for at in (at for at in range(len(data)) if data.startswith(VICTIM, at)):
        data[at - 2 : at] = bytes(2)  # LMDB keeps the length before the key
    file.write_bytes(data)
    tier = open_disk(path, CAPACITY_BYTES)
    kept = list(tier.scan())
    assert kept
    assert all(info.key != VICTIM and is_whole(tier, info) for info in kept)
    tier.close()


def assert_refused_and_whole(original: Path, folder: Path, why: str) -> None:
    """A start on a copy is refused, and nothing there was changed."""
    path = folder / "disk"
    shutil.copytree(original, path)
    with pytest.raises(TierUnavailableError, match=f"could not be read: .*{why}.*nothing was"):
        open_disk(path, CAPACITY_BYTES)
    file = Path("index", "data.mdb")
    assert (path / file).read_bytes() == (original / file).read_bytes()


def assert_all_there(path: Path) -> None:
    with capture_logs() as logs:
        tier = open_disk(path, CAPACITY_BYTES)
    assert logs == []
    assert {info.key for info in tier.scan()} == {frame_of(seed)[0].key for seed in range(CHUNKS)}
    assert all(is_whole(tier, info) for info in tier.scan())
    tier.close()


def test_an_index_that_takes_too_long_to_read_refuses_the_start_and_loses_nothing(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_io, "READ_LIMIT_S", 0.0)
        assert_refused_and_whole(original, tmp_path, "it took 0 s, or memory ran out")
    assert_all_there(tmp_path / "disk")


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("echo MemoryError >&2; exit 1", "MemoryError"),
        ("exit 127", "status 127"),
        ("kill -KILL $$", "memory ran out"),
        ("kill -TERM $$", "status -15"),
    ],
)
def test_a_reader_that_fails_without_having_seen_damage_refuses_the_start_and_loses_nothing(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, why: str
) -> None:
    reader = tmp_path / "python"
    reader.write_text(f"#!/bin/sh\n{ends}\n")
    reader.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(reader))
        assert_refused_and_whole(original, tmp_path, why)
    assert_all_there(tmp_path / "disk")


def assert_starts_empty(path: Path) -> None:
    with capture_logs() as logs:
        tier = open_disk(path, CAPACITY_BYTES)
    (log,) = logs
    assert log["event"] == "the disk tier's index is damaged: the tier starts empty"
    assert list(tier.scan()) == []
    put(tier, *frame_of(1), durable=True)
    assert_holds(tier, *frame_of(1))
    tier.close()


@pytest.mark.parametrize("signal", ["BUS", "SEGV", "ABRT"])
def test_a_reader_that_dies_of_a_page_is_damage(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    path, reader = tmp_path / "disk", tmp_path / "python"
    shutil.copytree(original, path)
    reader.write_text(f"#!/bin/sh\nkill -{signal} $$\n")
    reader.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(reader))
    assert_starts_empty(path)


def test_an_index_cut_short_or_whose_meta_pages_no_reader_takes_is_damage(
    original: Path, tmp_path: Path
) -> None:
    for field in (0, 16, 16 + 4, 16 + 120):  # cut; magic, version, last page
        path = Path(shutil.copytree(original, tmp_path / str(field)))
        file = path / "index" / "data.mdb"
        data = bytearray(file.read_bytes())
        for page in range(2) if field else ():
            at = page * PAGE + field
            data[at : at + 7] = bytes([0x7F, page]) * 3 + b"\x7f"
        file.write_bytes(data if field else data[: 3 * PAGE])
        assert_starts_empty(path)


def check(tier: DiskTier) -> tuple[int, int]:
    """Read all chunks, then use the tier; return how many there were, and were right."""
    known = {frame_of(seed)[0].key: frame_of(seed)[1] for seed in range(CHUNKS)}
    infos = list(tier.scan())
    right = 0
    for info in infos:
        if not is_whole(tier, info):  # a row of long ago: a server drops what fails its check
            tier.delete(info.key)
            continue
        found = get(tier, info)
        assert found is not None
        if info.key in known:
            assert found.tobytes() == known[info.key].tobytes()
            right += 1
    for info in infos[::3]:
        tier.delete(info.key)
    for seed in range(20_000, 20_050):
        try:
            put(tier, *frame_of(seed), durable=seed % 10 == 0)
        except TierFullError:
            tier.delete(next(tier.scan()).key)
    return len(infos), right


def main() -> None:
    """Check each tier twice: as it was damaged, and as it was left then."""
    for path in sys.argv[1:]:
        tier = open_disk(Path(path), CAPACITY_BYTES)
        print(json.dumps(check(tier)))
        tier.close()
        tier = open_disk(Path(path), CAPACITY_BYTES)
        assert tier.dropped_rows == 0
        assert all(is_whole(tier, info) for info in tier.scan())
        tier.close()


if __name__ == "__main__":
    main()
