"""A disk tier over several folders: spread, recognised, and one of them lost."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from contracts.chunks import make_info
from contracts.shelf import assert_absent, assert_counts, assert_holds, bytes_of, fill_up, put
from contracts.tier import TierContract
from helpers.disk_process import EXTENT_BYTES, INDEX_BYTES

from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_files import FOLDER_RETRY_S
from kvstore.tiers.disk_io import signed_line, write_durably


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_over(paths: Sequence[Path], mib: Sequence[int], clock: Clock | None = None) -> DiskTier:
    """Open a tier over *paths* of so many MiB each; nothing is committed unless someone asks."""
    shares = [(path, size << 20) for path, size in zip(paths, mib, strict=True)]
    return DiskTier(
        *shares, file_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES, clock=clock or Clock()
    )


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


def folder_of(tier: DiskTier, info: ChunkInfo, paths: Sequence[Path]) -> int:
    place = tier.file_place(info.key)
    assert place is not None
    (found,) = [
        number
        for number, path in enumerate(paths)
        if (path / "extents" / f"{place.number:04d}.kv").exists()
    ]
    return found


class TestSeveralFolders(TierContract):
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        half = capacity_bytes // 2
        shares = [(tmp_path / "a", capacity_bytes - half), (tmp_path / "b", half)]
        return DiskTier(*shares, file_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES)


def test_frames_are_spread_in_proportion_to_the_folders_sizes(paths: list[Path]) -> None:
    tier = open_over(paths, [1, 2, 4])
    assert tier.capacity_bytes == 7 << 20
    infos = [make_info(seed, 32 << 10) for seed in range(112)]
    for info in infos:
        put(tier, info, bytes_of(info))
    counts = [0, 0, 0]
    for info in infos:
        counts[folder_of(tier, info, paths)] += 1
    assert counts == [16, 32, 64]
    tier.close()


def test_a_folder_can_be_added_and_the_chunks_stay(paths: list[Path]) -> None:
    infos: list[ChunkInfo] = []
    for count in (1, 2, 3):
        tier = open_over(paths[:count], [1] * count)
        infos += fill_up(tier, [make_info(100 * count + at, 64 << 10) for at in range(99)])[0]
        assert len(infos) == 16 * count
        for info in infos:
            assert_holds(tier, info, bytes_of(info))
        tier.close()


def refused(paths: Sequence[Path], why: str) -> None:
    with pytest.raises(TierUnavailableError, match=why):
        open_over(paths, [1] * len(paths))


def made(paths: Sequence[Path]) -> list[ChunkInfo]:
    tier = open_over(paths, [1] * len(paths))
    infos = [make_info(seed, 64 << 10) for seed in range(12)]
    for info in infos:
        put(tier, info, bytes_of(info))
    tier.close()
    return infos


def test_a_folder_that_is_not_mounted_is_refused_by_name(paths: list[Path]) -> None:
    infos = made(paths)
    paths[1].rename(paths[1].with_name("unmounted"))
    refused(paths, f"{paths[1]} should be disk 1 of the tier but is empty: mount it")
    paths[1].mkdir(exist_ok=True)
    refused(paths, f"{paths[1]} should be disk 1 of the tier but is empty: mount it")
    shutil.rmtree(paths[1])
    paths[1].with_name("unmounted").rename(paths[1])
    tier = open_over(paths, [1, 1, 1])
    assert_counts(tier, infos, [])
    tier.close()


def test_folders_in_another_order_are_refused_by_name(paths: list[Path]) -> None:
    made(paths)
    a, b, c = paths
    refused([a, c, b], f"{c} should be disk 1 of the tier but is disk 2 of tier [0-9a-f]{{32}}")
    refused([b, a, c], f"{b} is disk 1 of its tier: give its disk 0 first")
    open_over(paths, [1, 1, 1]).close()


def test_a_folder_of_another_tier_is_refused_by_name(paths: list[Path], tmp_path: Path) -> None:
    made(paths[:2])
    made([tmp_path / "x", tmp_path / "y"])
    made([tmp_path / "alone"])
    a, b, c = paths
    refused([a, tmp_path / "y"], f"{tmp_path}/y should be disk 1 of the tier but is disk 1 of")
    refused([a, b, tmp_path / "y"], f"{tmp_path}/y belongs to another disk tier")
    refused([a, b, tmp_path / "alone"], f"{tmp_path}/alone belongs to another disk tier")
    refused([c, b], f"{b} belongs to another disk tier")
    refused([tmp_path / "alone", b], f"{b} belongs to another disk tier")
    assert not (c / "FORMAT").exists()
    open_over([a, b], [1, 1]).close()


def test_a_folder_left_out_is_refused(paths: list[Path]) -> None:
    made(paths)
    refused(paths[:1], f"{paths[0]} is the first of 3 folders and 1 are given: give them all")
    refused(paths[:2], "is the first of 3 folders and 2 are given")


def test_a_damaged_or_unknown_identity_is_refused(paths: list[Path]) -> None:
    made(paths[:2])
    for line, why in (
        (b"", "no disk tier wrote"),
        (b"kvstore disk-set 2 more to come\n", "version 2, this server supports 1"),
        (b"kvstore disk-set 1 00 1 2 0123456789abcdef\n", "damaged DISK"),
        (signed_line("kvstore disk-set 1 00 one two"), "no disk tier wrote"),
        (signed_line("kvstore disk-set 1 00"), "no disk tier wrote"),
    ):
        (paths[1] / "DISK").write_bytes(line)
        refused(paths[:2], f"{paths[1]} .*{why}; nothing was changed")


def test_more_files_than_can_be_open_are_refused_before_one_is_made(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (16, 16))
    with pytest.raises(TierUnavailableError, match="raise the open files limit"):
        open_over(paths[:1], [16])
    assert os.listdir(paths[0]) == ["LOCK"]
    open_over(paths[:1], [8]).close()
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    open_over(paths[:1], [16]).close()


def test_a_second_folder_that_is_too_small_takes_back_what_the_first_got(paths: list[Path]) -> None:
    with pytest.raises(TierUnavailableError, match=f"{paths[1]} needs"):
        open_over(paths[:2], [1, 1 << 30])
    assert os.listdir(paths[0]) == os.listdir(paths[1]) == ["LOCK"]
    open_over(paths[:2], [1, 1]).close()


def test_leftovers_of_a_start_that_was_killed_do_no_harm(paths: list[Path]) -> None:
    infos = made(paths[:1])
    made([paths[1]])
    (paths[1] / "index" / "data.mdb").unlink()
    (paths[1] / "index").rmdir()
    tier = open_over(paths[:2], [1, 1])
    for info in infos:
        assert_holds(tier, info, bytes_of(info))
    sealed, _ = fill_up(tier, [make_info(seed, 64 << 10) for seed in range(50, 99)])
    assert len(sealed) == 20
    tier.close()


class DeadFolder:
    """Every read, write and sync below a folder fails."""

    def __init__(self, patch: pytest.MonkeyPatch, path: Path) -> None:
        self.is_dead = True
        self._path = re.compile(re.escape(str(path)) + "/.*[.]kv")
        for name in ("preadv", "pwritev", "fdatasync"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, *rest: object) -> int:
            if self.is_dead and self._path.match(os.readlink(f"/proc/self/fd/{fd}")):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, *rest)

        return call


def test_a_disk_that_dies_takes_its_chunks_and_no_others(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tier = open_over(paths[:2], [2, 2], clock)
    infos = [make_info(seed, 64 << 10) for seed in range(20)]
    for info in infos:
        put(tier, info, bytes_of(info), durable=True)
    lost = [info for info in infos if folder_of(tier, info, paths[:2]) == 1]
    assert len(lost) == 10
    folder = DeadFolder(monkeypatch, paths[1])
    for info in infos:
        if info not in lost:
            assert_holds(tier, info, bytes_of(info))
            continue
        with pytest.raises(TierUnavailableError, match="Input/output error") as caught:
            tier.read(info.key, bytes_of(info))
        assert caught.value.is_partial
    more = [make_info(seed, 64 << 10) for seed in range(30, 40)]
    for info in more:
        put(tier, info, bytes_of(info), durable=True)
    assert {folder_of(tier, info, paths[:2]) for info in more} == {0}
    assert tier.delete(lost[0].key)
    clock.now_s += FOLDER_RETRY_S
    attempt = tier.reserve(make_info(50, 64 << 10))
    with pytest.raises(TierUnavailableError):
        tier.write(attempt, bytes_of(attempt.info))
    tier.abort(attempt)
    folder.is_dead = False
    for info in [*lost[1:], *more]:
        assert_holds(tier, info, bytes_of(info))
    clock.now_s += FOLDER_RETRY_S
    back = make_info(60, 64 << 10)
    put(tier, back, bytes_of(back), durable=True)
    assert folder_of(tier, back, paths[:2]) == 1
    tier.close()


def test_seals_on_a_disk_that_dies_fail_and_those_beside_them_do_not(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_over(paths[:2], [1, 1])
    infos = [make_info(seed, 64 << 10) for seed in range(10)]
    for info in infos:
        put(tier, info, bytes_of(info))
    lost = [info for info in infos if folder_of(tier, info, paths[:2]) == 1]
    DeadFolder(monkeypatch, paths[1])
    with pytest.raises(TierUnavailableError, match="Input/output error") as caught:
        tier.flush()
    assert caught.value.is_partial
    assert tier._commit.lost_rows == len(lost) == 5
    for info in infos:
        if info in lost:
            assert_absent(tier, info)
        else:
            assert_holds(tier, info, bytes_of(info))
    monkeypatch.undo()
    tier.close()


def test_when_the_last_disk_dies_the_tier_is_unavailable(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_over(paths[:2], [1, 1])
    infos = [make_info(seed, 64 << 10) for seed in range(2)]
    for info in infos:
        put(tier, info, bytes_of(info))
    with monkeypatch.context() as patch:
        for path in paths[:2]:
            DeadFolder(patch, path)
        errors = []
        for info in infos:
            with pytest.raises(TierUnavailableError) as caught:
                tier.read(info.key, bytes_of(info))
            errors.append(caught.value.is_partial)
        assert errors == [True, False]
    tier.close()


def test_full_disks_beside_a_dead_one_are_full(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_over(paths[:2], [1, 1])
    DeadFolder(monkeypatch, paths[1])
    sealed: list[ChunkInfo] = []
    for seed in range(40):
        info = make_info(seed, 64 << 10)
        try:
            reservation = tier.reserve(info)
        except TierFullError:
            break
        try:
            tier.write(reservation, bytes_of(info))
        except TierUnavailableError:
            tier.abort(reservation)
            continue
        tier.seal(reservation)
        sealed.append(info)
    assert len(sealed) == 16
    monkeypatch.undo()
    tier.close()


def test_lost_extent_is_replaced_under_a_new_number_and_its_chunks_are_misses(
    tmp_path: Path,
) -> None:
    tier = open_over([tmp_path], [4])
    infos = [make_info(seed, 300_000) for seed in range(8)]
    for info in infos:
        put(tier, info, bytes_of(info))
    tier.close()
    (tmp_path / "extents" / "0001.kv").unlink()
    tier = open_over([tmp_path], [4])
    assert tier.dropped_rows == 3
    assert_counts(tier, infos[:3] + infos[6:], [])
    names = sorted(file.name for file in (tmp_path / "extents").iterdir())
    assert names == ["0000.kv", "0002.kv", "0003.kv", "0004.kv"]
    sealed, _ = fill_up(tier, [make_info(seed, 300_000) for seed in range(8, 99)])
    for info in [*infos[:3], *infos[6:], *sealed]:
        assert_holds(tier, info, bytes_of(info))
    tier.close()


def test_a_file_that_is_written_durably_is_its_user_s_alone_under_any_umask(tmp_path: Path) -> None:
    left_by_a_crash = tmp_path / "file.new"
    left_by_a_crash.write_bytes(b"half")
    left_by_a_crash.chmod(0o644)
    before = os.umask(0)
    try:
        write_durably(tmp_path / "file", b"whole")
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert not left_by_a_crash.exists()
