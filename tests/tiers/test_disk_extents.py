"""Whose an extent is, and what a descriptor of it shows."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_info
from contracts.shelf import assert_absent, assert_counts, assert_holds, bytes_of
from helpers.disk_process import EXTENT_BYTES, INDEX_BYTES, open_disk
from structlog.testing import capture_logs

from kvstore.proto.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkInfo
from kvstore.proto.unix_socket import Place
from kvstore.tiers.disk import DEFAULT_FILE_BYTES, DiskTier, file_bytes_for
from kvstore.tiers.disk_index import DiskIndex, owner_key

FRAME_BYTES = EXTENT_BYTES // 4


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Two extents of four frames each."""
    tier = open_disk(tmp_path / "disk", 2 * EXTENT_BYTES)
    yield tier
    tier.close()


def put_for(tier: DiskTier, tenant: str, seed: int, size_bytes: int = FRAME_BYTES) -> ChunkInfo:
    info = make_info(seed, size_bytes)
    reservation = tier.reserve(info, tenant)
    tier.write(reservation, bytes_of(info))
    assert tier.seal(reservation)
    return info


def place_of(tier: DiskTier, info: ChunkInfo) -> Place:
    place = tier.file_place(info.key)
    assert place is not None
    return place


def read_file(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def test_descriptor_can_neither_be_written_to_nor_cut_nor_outlives_an_exec(tier: DiskTier) -> None:
    descriptor = tier.extent_file(place_of(tier, put_for(tier, "a", 1)).number, "a")
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
            os.ftruncate(descriptor, 0)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(descriptor)


def test_an_extent_is_refused_to_other_tenants_and_by_unknown_numbers(tier: DiskTier) -> None:
    place = place_of(tier, put_for(tier, "a", 1))
    with pytest.raises(PermissionDeniedError, match="another tenant"):
        tier.extent_file(place.number, "b")
    with pytest.raises(InvalidRequestError, match="look the chunk up again"):
        tier.extent_file(99, "a")
    with pytest.raises(InvalidRequestError, match="look the chunk up again"):
        tier.extent_file(1 - place.number, "a")  # nobody's yet


def test_a_removed_extent_takes_nothing_more_and_what_it_has_is_read_by_the_server_alone(
    tier: DiskTier,
) -> None:
    info = put_for(tier, "a", 1)
    tier.flush()
    number = place_of(tier, info).number
    tier._files.by_number[number].path.unlink()
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(TierUnavailableError, match=r"it was removed .* restart the server"):
                tier.flush()
    assert [line["log_level"] for line in logs] == ["warning"], "once"
    with pytest.raises(InvalidRequestError, match="look the chunk up again"):
        tier.extent_file(number, "a")
    assert tier.file_place(info.key) is None, "who looks it up anew is not sent there again"
    assert_holds(tier, info, bytes_of(info))
    with pytest.raises(TierUnavailableError, match="it was removed"):
        put_for(tier, "a", 2)
    assert "restart the server" in tier.write_error


def test_tenants_share_no_extent(tier: DiskTier) -> None:
    ours = [put_for(tier, "a", seed) for seed in range(3)]
    theirs = [put_for(tier, "b", seed) for seed in range(10, 13)]
    assert {place_of(tier, info).number for info in ours} == {0}
    assert {place_of(tier, info).number for info in theirs} == {1}
    assert tier.chunks_sharing_block(ours[1].key) == [info.key for info in ours]
    assert tier.chunks_sharing_block(theirs[0].key) == [info.key for info in theirs]
    assert tier.chunks_sharing_block(make_info(99, 1).key) == []
    assert [tier.tenant_of(info.key) for info in (ours[0], theirs[0])] == ["a", "b"]


def test_a_tenant_gets_no_room_in_anothers_extent(tier: DiskTier) -> None:
    put_for(tier, "a", 1)
    put_for(tier, "b", 2)
    with pytest.raises(TierFullError) as caught:
        put_for(tier, "c", 3)
    assert caught.value.free_bytes == 6 * FRAME_BYTES
    assert tier.stats().used_bytes == 2 * FRAME_BYTES


def test_freed_residents_make_room_for_another_tenant_in_a_new_file(
    tier: DiskTier, tmp_path: Path
) -> None:
    gone = [put_for(tier, "a", seed) for seed in range(4)]
    kept = put_for(tier, "b", 9)
    old = place_of(tier, gone[0]).number
    descriptor = tier.extent_file(old, "a")
    before = read_file(descriptor)
    for key in tier.chunks_sharing_block(gone[2].key):
        assert tier.delete(key)
    news = [put_for(tier, "c", seed) for seed in range(20, 24)]
    new = place_of(tier, news[0]).number
    assert new not in (old, place_of(tier, kept).number)
    assert read_file(descriptor) == before
    os.close(descriptor)
    with pytest.raises(InvalidRequestError):
        tier.extent_file(old, "a")
    with pytest.raises(InvalidRequestError):
        tier.extent_file(old, "c")
    for info in [*news, kept]:
        assert_holds(tier, info, bytes_of(info))
    assert_counts(tier, [kept, *news], [])
    names = sorted(file.name for file in (tmp_path / "disk" / "extents").iterdir())
    assert names == ["0001.kv", "0002.kv"]


def test_new_file_shows_nothing_of_the_tenant_before(tier: DiskTier) -> None:
    for seed in range(4):
        put_for(tier, "a", seed)
    put_for(tier, "b", 9)
    for seed in range(4):
        tier.delete(make_info(seed, 1).key)
    place = place_of(tier, put_for(tier, "c", 20, 100))
    descriptor = tier.extent_file(place.number, "c")
    content = np.frombuffer(read_file(descriptor), np.uint8).copy()
    os.close(descriptor)
    content[place.offset : place.offset + 100] = 0
    assert not content.any()


def test_an_extent_in_use_does_not_change_hands(tier: DiskTier) -> None:
    reservation = tier.reserve(make_info(1, FRAME_BYTES), "a")
    put_for(tier, "b", 2)
    with pytest.raises(TierFullError):
        tier.reserve(make_info(3, FRAME_BYTES), "c")
    tier.abort(reservation)
    info = put_for(tier, "c", 3)
    assert_holds(tier, info, bytes_of(info))


def test_an_extent_that_cannot_be_made_anew_is_missing_until_it_can(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = put_for(tier, "a", 1), put_for(tier, "b", 2)
    tier.delete(first.key)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(TierFullError):
                tier.reserve(make_info(3, FRAME_BYTES), "c")
    assert_holds(tier, second, bytes_of(second))
    third = put_for(tier, "c", 3)
    assert_holds(tier, third, bytes_of(third))
    assert_counts(tier, [second, third], [])


def test_owners_and_places_survive_a_restart(tier: DiskTier, tmp_path: Path) -> None:
    ours, theirs = put_for(tier, "a", 1), put_for(tier, "b", 2)
    places = [place_of(tier, info) for info in (ours, theirs)]
    tier.close()
    again = open_disk(tmp_path / "disk", 2 * EXTENT_BYTES)
    assert again.dropped_rows == 0
    assert [place_of(again, info) for info in (ours, theirs)] == places
    os.close(again.extent_file(places[1].number, "b"))
    with pytest.raises(PermissionDeniedError):
        again.extent_file(places[1].number, "a")
    more = put_for(again, "b", 3)
    assert place_of(again, more).number == places[1].number
    again.close()


def test_an_empty_extent_keeps_its_owner_over_a_restart(tier: DiskTier, tmp_path: Path) -> None:
    first = put_for(tier, "a", 1)
    extent = place_of(tier, first).number
    tier.delete(first.key)
    tier.close()
    again = open_disk(tmp_path / "disk", 2 * EXTENT_BYTES)
    assert place_of(again, put_for(again, "a", 2)).number == extent
    assert place_of(again, put_for(again, "b", 3)).number != extent
    again.close()


def without_owners(path: Path) -> None:
    """Make the index one of before extents had owners."""
    index = DiskIndex(path / "index", INDEX_BYTES)
    index.open(lambda row: True, ExitStack())
    index.commit([owner_key(extent) for extent in index.owners], [])
    index.close()


def test_chunks_of_an_extent_without_an_owner_are_served_but_not_shared(
    tier: DiskTier, tmp_path: Path
) -> None:
    infos = [put_for(tier, "a", seed) for seed in range(4)]
    tier.close()
    without_owners(tmp_path / "disk")
    again = open_disk(tmp_path / "disk", 2 * EXTENT_BYTES)
    assert again.dropped_rows == 0
    for info in infos:
        assert_holds(again, info, bytes_of(info))
        assert again.file_place(info.key) is None
        with pytest.raises(InvalidRequestError):
            again.extent_file(0, "a")
        with pytest.raises(InvalidRequestError):
            again.extent_file(0, "default")
    again.close()


def test_written_extent_that_nobody_owns_is_made_anew_at_the_start(
    tier: DiskTier, tmp_path: Path
) -> None:
    info = put_for(tier, "a", 1)
    tier.delete(info.key)
    tier.close()
    without_owners(tmp_path / "disk")
    again = open_disk(tmp_path / "disk", 2 * EXTENT_BYTES)
    assert_absent(again, info)
    names = sorted(file.name for file in (tmp_path / "disk" / "extents").iterdir())
    assert names == ["0001.kv", "0002.kv"]
    for seed in (2, 3):
        extent = place_of(again, put_for(again, f"tenant {seed}", seed, 100)).number
        descriptor = again.extent_file(extent, f"tenant {seed}")
        assert bytes_of(info).tobytes()[:64] not in read_file(descriptor)
        os.close(descriptor)
    again.close()


def test_tenants_that_take_turns_never_see_each_others_bytes(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, 3 * EXTENT_BYTES)

    def work(thread: int) -> int:
        tenant, done = f"tenant {thread}", 0
        for step in range(80):
            try:
                info = put_for(tier, tenant, 1_000 * thread + step, 50_000)
            except TierFullError:
                continue
            place = place_of(tier, info)
            descriptor = tier.extent_file(place.number, tenant)
            found = os.pread(descriptor, place.size_bytes, place.offset)
            os.close(descriptor)
            assert found == bytes_of(info).tobytes()
            assert tier.delete(info.key)
            done += 1
        return done

    with ThreadPoolExecutor(5) as pool:
        assert sum(pool.map(work, range(5))) >= 80
    assert_counts(tier, [], [])
    tier.close()


def test_reading_a_chunk_while_its_extent_goes_is_a_miss_or_its_bytes(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, EXTENT_BYTES)

    def write(thread: int) -> None:
        for step in range(60):
            try:
                put_for(tier, f"tenant {thread}", 100 * thread + step, 30_000)
            except TierFullError:
                continue
            tier.delete(make_info(100 * thread + step, 1).key)

    def read() -> int:
        out, found = np.empty(30_000, np.uint8), 0
        for info in [make_info(seed, 30_000) for seed in range(160)] * 8:
            if tier.read(info.key, out):
                assert np.array_equal(out, bytes_of(info))
                found += 1
        return found

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(write, thread) for thread in range(2)]
        counts = [pool.submit(read) for _ in range(2)]
        for job in jobs:
            job.result()
        for count in counts:
            count.result()
    assert_counts(tier, [], [])
    tier.close()
    with pytest.raises(TierUnavailableError, match="closed"):
        tier.extent_file(0, "tenant 0")


def test_new_tier_has_about_sixteen_extents_that_hold_eight_frames_each() -> None:
    for gib in (1, 4, 16, 100, 1024):
        extent = file_bytes_for(gib << 30, 32 << 20)
        assert extent <= DEFAULT_FILE_BYTES * 33 // 32
        frames = extent // ((32 << 20) + 8192)
        assert frames * (32 << 20) >= 0.96 * extent or extent < 256 << 20
        assert extent == DEFAULT_FILE_BYTES * 33 // 32 or 15 <= (gib << 30) // extent <= 31
    for frame in (1, 100 << 20, (256 << 20) + 1, 1 << 30):
        assert file_bytes_for(4 << 20, frame) > frame


def test_a_crash_after_an_extent_changed_hands_shows_nobody_anothers_bytes(
    tier: DiskTier, tmp_path: Path
) -> None:
    gone, kept = put_for(tier, "a", 1), put_for(tier, "b", 2)
    tier.flush()
    tier.delete(gone.key)
    late = put_for(tier, "c", 3)
    extent = place_of(tier, late).number
    shutil.copytree(tmp_path / "disk", tmp_path / "crashed")
    again = open_disk(tmp_path / "crashed", 2 * EXTENT_BYTES)
    assert again.dropped_rows == 1
    assert_counts(again, [kept], [])
    for tenant in ("a", "b", "c"):
        with pytest.raises(InvalidRequestError):
            again.extent_file(extent, tenant)
    heir = put_for(again, "a", 4)
    assert place_of(again, heir).number not in (0, 1, extent)
    again.close()


def test_a_crash_before_the_owner_is_committed_leaves_an_extent_for_anyone(
    tier: DiskTier, tmp_path: Path
) -> None:
    info = put_for(tier, "a", 1)
    shutil.copytree(tmp_path / "disk", tmp_path / "crashed")
    again = open_disk(tmp_path / "crashed", 2 * EXTENT_BYTES)
    assert_counts(again, [], [])
    for seed, tenant in ((2, "b"), (3, "c")):
        extent = place_of(again, put_for(again, tenant, seed, 100)).number
        descriptor = again.extent_file(extent, tenant)
        assert bytes_of(info).tobytes()[:64] not in read_file(descriptor)
        os.close(descriptor)
    again.close()
