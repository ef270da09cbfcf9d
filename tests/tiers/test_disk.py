from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from contracts.chunks import make_frame, make_info, make_representation, payload
from contracts.shelf import (
    assert_absent,
    assert_counts,
    assert_holds,
    bytes_of,
    fill_up,
    get,
    open_files,
    put,
)
from contracts.tier import TierContract
from helpers.disk_process import EXTENT_BYTES, INDEX_BYTES, open_disk, sealer

from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_io import signed_line


def flip(path: Path, needle: bytes, at: int) -> int:
    """Flip a bit *at* bytes behind each place where *needle* lies in the file; return how many."""
    data = bytearray(path.read_bytes())
    found, start = 0, data.find(needle)
    while start >= 0:
        data[start + at] ^= 1
        found, start = found + 1, data.find(needle, start + 1)
    path.write_bytes(data)
    return found


class TestDiskTier(TierContract):
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        folder = (tmp_path / "disk", capacity_bytes)
        return DiskTier(folder, file_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES)


def test_second_server_on_a_folder_is_told_who_has_it(tmp_path: Path) -> None:
    with sealer(tmp_path / "disk", 0) as child:
        with pytest.raises(TierUnavailableError, match=f"process {child.pid}: stop it") as caught:
            open_disk(tmp_path / "disk")
        assert str(tmp_path / "disk") in str(caught.value)
    open_disk(tmp_path / "disk", 2 << 20).close()


def test_folder_is_locked_within_one_process_too(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    with pytest.raises(TierUnavailableError, match=f"in use by process {os.getpid()}"):
        open_disk(tmp_path)
    info, frame = make_frame(1)
    put(tier, info, frame, durable=True)
    assert_holds(tier, info, frame)
    tier.close()


def test_path_that_cannot_be_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    for path in (file, file / "folder", Path("/proc/kvstore")):
        with pytest.raises(TierUnavailableError, match=f"{path}: .*give a folder that this proc"):
            open_disk(path)
    assert file.read_bytes() == b"mine"


def test_capacity_beyond_the_disk_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailableError, match=r"needs \d+ more bytes and has \d+ free"):
        open_disk(tmp_path / "disk", 1 << 50)
    assert os.listdir(tmp_path / "disk") == ["LOCK"]
    open_disk(tmp_path / "disk").close()


def test_a_size_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes=4095"):
        DiskTier((tmp_path, 4095))
    assert os.listdir(tmp_path) == []


def test_start_that_fails_halfway_takes_back_its_files_and_keeps_the_chunks(tmp_path: Path) -> None:
    extents = tmp_path / "extents"
    tier = open_disk(tmp_path, 5 << 19)
    info, frame = make_frame(1)
    put(tier, info, frame, durable=True)
    tier.close()
    before = {file.name: file.stat().st_size for file in extents.iterdir()}
    (extents / "0004.kv").mkdir()
    with pytest.raises(TierUnavailableError, match="Is a directory"):
        open_disk(tmp_path, 5 << 20)
    (extents / "0004.kv").rmdir()
    assert {file.name: file.stat().st_size for file in extents.iterdir()} == before
    tier = open_disk(tmp_path, 5 << 19)
    assert_holds(tier, info, frame)
    tier.close()


def test_capacity_is_allocated_at_start_and_floored_to_granules(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, (5 << 19) + 4095)
    assert tier.capacity_bytes == 5 << 19
    assert tier.max_frame_bytes == EXTENT_BYTES
    files = sorted((tmp_path / "extents").iterdir())
    assert [file.name for file in files] == ["0000.kv", "0001.kv", "0002.kv"]
    assert [file.stat().st_size for file in files] == [1 << 20, 1 << 20, 1 << 19]
    assert all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files)
    index = (tmp_path / "index" / "data.mdb").stat()
    assert min(index.st_blocks * 512, index.st_size) >= INDEX_BYTES
    tier.close()


def test_grown_tier_keeps_its_chunks_and_uses_the_new_room(tmp_path: Path) -> None:
    small = open_disk(tmp_path, 3 << 19)
    infos = [make_info(seed, 400_000) for seed in range(20)]
    old, _ = fill_up(small, infos)
    small.close()
    large = open_disk(tmp_path, 4 << 20)
    assert large.dropped_rows == 0
    new, _ = fill_up(large, infos[len(old) :])
    assert len(new) >= 4
    for info in old + new:
        assert_holds(large, info, bytes_of(info))
    assert_counts(large, old + new, [])
    large.close()


def test_shrunk_tier_drops_the_chunks_beyond_and_their_files(tmp_path: Path) -> None:
    large = open_disk(tmp_path)
    sealed, _ = fill_up(large, [make_info(seed, 200_000) for seed in range(30)])
    assert len(sealed) == 20
    large.close()
    small = open_disk(tmp_path, 3 << 19)
    kept = list(small.scan())
    assert kept == [info for info in sealed if info in kept]
    assert len(kept) == 7
    assert small.dropped_rows == 13
    assert_counts(small, kept, [])
    for info in kept:
        assert_holds(small, info, bytes_of(info))
    assert sorted(os.listdir(tmp_path / "extents")) == ["0000.kv", "0001.kv"]
    small.close()
    large = open_disk(tmp_path)
    assert list(large.scan()) == kept
    assert large.dropped_rows == 0
    large.close()


def test_folder_keeps_the_extent_size_it_was_made_with(tmp_path: Path) -> None:
    open_disk(tmp_path).close()
    tier = DiskTier((tmp_path, 4 << 20), file_bytes=2 << 20, index_bytes=INDEX_BYTES)
    assert tier.max_frame_bytes == EXTENT_BYTES
    tier.close()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"kvstore disk 2 whatever comes\n", "format version 2, this server supports 1"),
        (b"kvstore disk 1 8388608 0123456789abcdef\n", "damaged FORMAT"),
        (b"kvstore disk 1\n", "damaged FORMAT"),
        (signed_line("kvstore disk 1 many"), "no disk tier wrote"),
        (signed_line("kvstore disk 1 0"), "no disk tier wrote"),
        (b"\xff\x00", "no disk tier wrote"),
        (b"", "no disk tier wrote"),
        (None, "no FORMAT beside its extents"),
    ],
)
def test_unknown_format_is_refused_and_nothing_is_changed(
    tmp_path: Path, line: bytes | None, reason: str
) -> None:
    tier = open_disk(tmp_path / "disk")
    put(tier, make_info(1, 5_000), payload(1, 5_000))
    tier.close()
    (tmp_path / "disk" / "FORMAT").unlink()
    if line is not None:
        (tmp_path / "disk" / "FORMAT").write_bytes(line)
    shutil.copytree(tmp_path / "disk", tmp_path / "before")
    with pytest.raises(TierUnavailableError, match=f"{reason}.*; nothing was changed"):
        open_disk(tmp_path / "disk", 1 << 20)
    left = subprocess.run(
        ["diff", "-r", "-q", str(tmp_path / "before"), str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in left.stdout.splitlines() if "LOCK" not in line] == []


def test_flipped_index_row_makes_its_key_absent_and_is_counted(tmp_path: Path) -> None:
    infos = [make_info(seed, 5_000) for seed in range(9)]
    tier = open_disk(tmp_path)
    for info in infos:
        put(tier, info, bytes_of(info))
    tier.close()
    assert flip(tmp_path / "index" / "data.mdb", infos[4].key + b"\x01\0\0\0", 60) >= 1
    tier = open_disk(tmp_path)
    assert tier.dropped_rows == 1
    assert_absent(tier, infos[4])
    assert_counts(tier, infos[:4] + infos[5:], [])
    assert put(tier, infos[4], bytes_of(infos[4]), durable=True)
    tier.close()
    tier = open_disk(tmp_path)
    assert tier.dropped_rows == 0
    assert list(tier.scan()) == [*infos[:4], *infos[5:], infos[4]]
    for info in infos:
        assert_holds(tier, info, bytes_of(info))
    tier.close()


def test_cut_extent_is_made_whole_and_its_chunks_fail_their_check(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    frames = [make_frame(seed, 256, representation=make_representation(4)) for seed in range(8)]
    for info, frame in frames:
        put(tier, info, frame)
    tier.close()
    file = tmp_path / "extents" / "0000.kv"
    os.truncate(file, 3 << 12)
    tier = open_disk(tmp_path)
    assert file.stat().st_size == EXTENT_BYTES
    for info, frame in frames:
        found = get(tier, info)
        assert found is not None
        with pytest.raises((ChunkCorruptError, InvalidFrameError)):
            check_frame(found, info.key)
        assert tier.delete(info.key)
        assert put(tier, info, frame)
        assert_holds(tier, info, frame)
    tier.close()


def test_extent_cut_under_a_running_tier_is_an_error_of_the_medium(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    info, frame = make_frame(1)
    put(tier, info, frame)
    os.truncate(tmp_path / "extents" / "0000.kv", 100)
    with pytest.raises(TierUnavailableError, match=r"0000\.kv ends early"):
        get(tier, info)
    tier.close()


def test_full_index_refuses_and_takes_chunks_again_after_deletes(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 16 << 20, index_bytes=1 << 20)
    sealed: list[ChunkInfo] = []
    while tier._commit.lost_rows == 0:
        info = make_info(len(sealed), 1_000)
        try:
            put(tier, info, bytes_of(info), durable=True)
        except TierFullError:
            break
        sealed.append(info)
    assert_counts(tier, sealed, [])
    assert tier._commit.lost_rows == 1
    with pytest.raises(TierFullError):
        tier.reserve(make_info(3_000, 1_000))
    for info in sealed[::2]:
        assert tier.delete(info.key)
    again = [make_info(seed, 1_000) for seed in range(5_000, 5_020)]
    for info in again:
        assert put(tier, info, bytes_of(info), durable=True)
    tier.close()
    tier = open_disk(tmp_path, 16 << 20, index_bytes=1 << 20)
    assert list(tier.scan()) == sealed[1::2] + again
    tier.close()


def test_closed_tier_answers_unavailable_and_holds_no_file_or_thread(tmp_path: Path) -> None:
    info, frame = make_frame(1)
    open_disk(tmp_path).close()
    files, threads = open_files(), set(threading.enumerate())
    for _ in range(3):
        tier = open_disk(tmp_path)
        put(tier, info, frame)
        held = tier.reserve(info)
        tier.close()
        for call in (
            lambda tier=tier: get(tier, info),
            lambda tier=tier, held=held: tier.write(held, frame),
            lambda tier=tier, held=held: tier.seal(held),
            lambda tier=tier: tier.reserve(info),
            lambda tier=tier: tier.delete(info.key),
            lambda tier=tier: tier.flush(),
        ):
            with pytest.raises(TierUnavailableError, match="is closed"):
                call()
        assert open_files() == files
        assert set(threading.enumerate()) <= threads
