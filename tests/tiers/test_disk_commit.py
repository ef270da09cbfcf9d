from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from contracts.chunks import make_frame, make_info, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, bytes_of, put
from helpers.disk_process import SEALER_BYTES, is_whole, open_disk, record, sealer

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_index import COMMIT_AGE_S, MAX_PENDING_ROWS, DiskIndex, PackedRow


def found_after_crash(path: Path) -> list[ChunkInfo]:
    """Return what a server would find had this one been killed now."""
    copy = path.with_name(path.name + "-crashed")
    shutil.copytree(path, copy)
    tier = open_disk(copy)
    infos = list(tier.scan())
    for info in infos:
        assert_holds(tier, info, bytes_of(info))
    tier.close()
    shutil.rmtree(copy)
    return infos


def put_some(tier: DiskTier, seed: int, *, durable: bool = False) -> ChunkInfo:
    info = make_info(seed, 5_000 + seed)
    assert put(tier, info, bytes_of(info), durable=durable)
    return info


class FailingSync:
    """os.fdatasync that reports lost bytes *times* times, as Linux does: once per failure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.left = times
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        if self.left:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real(fd)


def test_every_durable_seal_survives_kill_9(tmp_path: Path) -> None:
    draw = random.Random(9)
    owed: dict[str, int] = {}
    for first_seed in (1, 4_001, 8_001, 12_001, 16_001):
        with sealer(tmp_path / "disk", first_seed) as child:
            assert child.stdout is not None
            left = draw.randrange(10, 150)
            while left:
                left -= record(owed, child.stdout.readline())
            child.kill()
            for line in child.stdout:
                record(owed, line)
        tier = open_disk(tmp_path / "disk", SEALER_BYTES)
        assert tier.dropped_rows == 0
        for key, seed in owed.items():
            info, frame = make_frame(seed, tokens=16 + seed % 200)
            assert info.key.hex() == key
            assert_holds(tier, info, frame)
        for info in tier.scan():
            _check_or_delete(tier, info)
        tier.close()
        assert len(owed) > 10


def _check_or_delete(tier: DiskTier, info: ChunkInfo) -> None:
    """What nobody was promised is right or fails its check."""
    if not is_whole(tier, info):
        assert tier.delete(info.key)


def test_seal_is_visible_at_once_and_survives_a_crash_after_flush(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk")
    first = put_some(tier, 1)
    assert_holds(tier, first, bytes_of(first))
    assert found_after_crash(tmp_path / "disk") == []
    tier.flush()
    assert found_after_crash(tmp_path / "disk") == [first]
    second = put_some(tier, 2)
    third = put_some(tier, 3, durable=True)
    assert found_after_crash(tmp_path / "disk") == [first, second, third]
    assert tier._commit.commits == 2
    tier.flush()
    assert tier._commit.commits == 2
    tier.close()


def test_seal_nobody_waits_for_is_committed_when_old_enough(tmp_path: Path) -> None:
    now_s = [100.0]
    tier = DiskTier((tmp_path, 1 << 20), index_bytes=1 << 20, clock=lambda: now_s[0])
    put_some(tier, 1)
    assert tier._commit.commits == 0
    now_s[0] += COMMIT_AGE_S
    while tier._commit.commits == 0:
        time.sleep(0.01)
    tier.delete(make_info(1, 1).key)
    now_s[0] += COMMIT_AGE_S
    while tier._commit.commits == 1:
        time.sleep(0.01)
    tier.close()
    assert tier._commit.commits == 2


def test_seals_nobody_waits_for_are_committed_when_many(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk")
    for seed in range(MAX_PENDING_ROWS - 1):
        put(tier, make_info(seed, 500), bytes_of(make_info(seed, 500)))
    assert tier._commit.commits == 0
    put(tier, make_info(999, 500), bytes_of(make_info(999, 500)))
    assert tier._commit.commits == 1
    assert len(found_after_crash(tmp_path / "disk")) == MAX_PENDING_ROWS
    tier.close()


def test_chunk_deleted_before_its_commit_never_reaches_the_index(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk")
    gone = put_some(tier, 1)
    assert tier.delete(gone.key)
    kept = put_some(tier, 2, durable=True)
    assert found_after_crash(tmp_path / "disk") == [kept]
    assert_absent(tier, gone)
    assert tier._commit.lost_rows == 0
    tier.close()


def test_region_used_again_has_one_row_whatever_was_deleted(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk", 1 << 20)
    size = tier.max_frame_bytes
    for seed in range(5):
        info = make_info(seed, size)
        assert put(tier, info, bytes_of(info), durable=True)
        assert found_after_crash(tmp_path / "disk") == [info]
        assert tier.delete(info.key)
    again = make_info(4, size)
    assert put(tier, again, bytes_of(again), durable=True)
    assert found_after_crash(tmp_path / "disk") == [again]
    tier.close()


def test_durable_seal_of_a_known_key_makes_the_known_one_durable(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk")
    info = put_some(tier, 1)
    assert put(tier, info, bytes_of(info), durable=True) is False
    assert found_after_crash(tmp_path / "disk") == [info]
    assert_counts(tier, [info], [])
    tier.close()


def test_burst_of_durable_seals_shares_commits(tmp_path: Path) -> None:
    tier = open_disk(tmp_path / "disk")
    barrier = Barrier(8, timeout=60)

    def work(thread: int) -> list[ChunkInfo]:
        barrier.wait()
        return [put_some(tier, 100 * thread + step, durable=True) for step in range(20)]

    with ThreadPoolExecutor(8) as pool:
        infos = [info for some in pool.map(work, range(8)) for info in some]
    assert 20 <= tier._commit.commits < len(infos) == 160
    assert {info.key for info in found_after_crash(tmp_path / "disk")} == {i.key for i in infos}
    tier.close()


def test_failed_sync_fails_the_seal_and_frees_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(tmp_path / "disk")
    kept = put_some(tier, 1, durable=True)
    unwaited = put_some(tier, 2)
    FailingSync(monkeypatch)
    with pytest.raises(TierUnavailableError, match="Input/output error"):
        put_some(tier, 3, durable=True)
    assert_counts(tier, [kept], [])
    assert_absent(tier, unwaited)
    assert tier._commit.lost_rows == 2
    assert found_after_crash(tmp_path / "disk") == [kept]
    again = put_some(tier, 3, durable=True)
    assert found_after_crash(tmp_path / "disk") == [kept, again]
    tier.close()


def test_bytes_written_before_a_failed_sync_are_never_called_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(tmp_path / "disk")
    info = make_info(7, 9_000)
    early = tier.reserve(info)
    tier.write(early, payload(7, 9_000))
    FailingSync(monkeypatch)
    put(tier, make_info(1, 5_000), payload(1, 5_000))
    with pytest.raises(TierUnavailableError, match="Input/output error"):
        tier.flush()
    with pytest.raises(TierUnavailableError, match="an earlier sync failed"):
        tier.seal(early, durable=True)
    assert_absent(tier, info)
    assert_counts(tier, [], [])
    late = put_some(tier, 7, durable=True)
    assert found_after_crash(tmp_path / "disk") == [late]
    tier.close()


def test_row_of_a_commit_in_doubt_is_deleted_before_its_region_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(tmp_path / "disk", 1 << 20)
    lost, heir = (make_info(seed, tier.max_frame_bytes) for seed in (1, 2))
    commit = DiskIndex.commit

    def unsure(index: DiskIndex, deletes: Iterable[bytes], rows: Sequence[PackedRow]) -> int:
        commit(index, deletes, rows)
        raise TierUnavailableError("disk", "the commit was lost")

    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "commit", unsure)
        with pytest.raises(TierUnavailableError, match="the commit was lost"):
            put(tier, lost, bytes_of(lost), durable=True)
    assert_absent(tier, lost)
    assert "the commit was lost" in tier.write_error
    with pytest.raises(TierUnavailableError, match="the commit was lost"):
        tier.reserve(heir)
    tier.flush()
    assert tier.write_error == ""
    assert put(tier, heir, bytes_of(heir), durable=True)
    tier.close()
    tier = open_disk(tmp_path / "disk", 1 << 20)
    assert tier.dropped_rows == 0
    assert list(tier.scan()) == [heir]
    tier.close()
