"""The disk tier past the page cache, on a real file system."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_frame, make_info, make_representation
from contracts.shelf import assert_holds, bytes_of, open_files, put
from contracts.tier import TierContract
from helpers.disk_process import EXTENT_BYTES, INDEX_BYTES, open_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.frame import header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.tiers import disk_io
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_io import BLOCK_BYTES, BOUNCE_BUFFERS, BOUNCE_BYTES, DirectIO, FileIO

FILE_BYTES = 3 * BOUNCE_BYTES


def open_direct(path: Path, capacity_bytes: int = 4 << 20) -> DiskTier:
    return DiskTier(
        (path, capacity_bytes),
        file_bytes=EXTENT_BYTES,
        index_bytes=INDEX_BYTES,
        is_direct=True,
        clock=lambda: 0.0,
    )


class TestDirectDiskTier(TierContract):
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        return open_direct(tmp_path / "disk", capacity_bytes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(bytes(FILE_BYTES))
    return path


def _noise(seed: int, size_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


_RANGES = st.tuples(st.integers(0, FILE_BYTES - 1), st.integers(0, 2 * BOUNCE_BYTES))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 99))
def test_any_frame_is_written_and_no_other_block(
    file: Path, data: st.DataObject, seed: int
) -> None:
    io = DirectIO()
    descriptor = os.open(file, os.O_RDWR | io.open_flags)
    want = bytearray(file.read_bytes())
    for _ in range(3):
        offset, size = data.draw(_RANGES)
        offset -= offset % BLOCK_BYTES
        chunk = _noise(seed, min(size, FILE_BYTES - offset))
        io.write(descriptor, offset, chunk)
        end = offset + len(chunk)
        want[offset:end] = chunk.tobytes()
        want[end : end + -end % BLOCK_BYTES] = bytes(-end % BLOCK_BYTES)
    os.close(descriptor)
    io.close()
    assert file.read_bytes() == want


@settings(max_examples=60, deadline=None)
@given(_RANGES, st.integers(0, 64))
@pytest.mark.parametrize("io", [FileIO(), DirectIO()], ids=["cached", "direct"])
def test_any_range_is_read_and_nothing_beside_it(
    file: Path, io: FileIO, wanted: tuple[int, int], skew: int
) -> None:
    noise, (offset, size) = _noise(7, FILE_BYTES), wanted
    file.write_bytes(noise.tobytes())
    descriptor = os.open(file, os.O_RDWR | io.open_flags)
    room = np.full(skew + size + 1, 7, np.uint8)
    is_whole = io.read(descriptor, offset, room[skew:-1])
    os.close(descriptor)
    assert is_whole is (offset + size <= FILE_BYTES or not size)
    if is_whole:
        assert np.array_equal(room[skew:-1], noise[offset : offset + size])
    assert (room[:skew] == 7).all()
    assert room[-1] == 7


def test_what_one_way_wrote_the_other_reads(tmp_path: Path) -> None:
    infos = [make_info(seed, 5_003 * (seed + 1)) for seed in range(9)]
    for round_number, opener in enumerate((open_direct, open_disk, open_direct)):
        tier = opener(tmp_path, 4 << 20)
        assert tier.dropped_rows == 0
        for info in infos[: 3 * round_number]:
            assert_holds(tier, info, bytes_of(info))
        for info in infos[3 * round_number : 3 * round_number + 3]:
            put(tier, info, bytes_of(info), durable=True)
        tier.close()


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_a_file_system_without_direct_reads_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    direct: set[int] = set()
    real_open, real_read = os.open, os.preadv

    def opened(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = real_open(path, flags, *rest)  # type: ignore[arg-type]
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def read(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_read(descriptor, *rest)  # type: ignore[arg-type]

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, "preadv", read)
        with pytest.raises(
            TierUnavailableError, match=f"{tmp_path} is on a file system without direct .*--disk-d"
        ):
            open_direct(tmp_path)
    assert open_files() == before
    assert os.listdir(tmp_path) == ["LOCK"]
    open_direct(tmp_path).close()


def test_no_more_buffers_are_made_than_the_limit(tmp_path: Path) -> None:
    tier = open_direct(tmp_path, 32 << 20)
    infos = [make_info(seed, EXTENT_BYTES - BLOCK_BYTES) for seed in range(24)]
    for info in infos:
        put(tier, info, bytes_of(info))

    def read(number: int) -> bool:
        info = infos[number % len(infos)]
        out = np.empty(info.size_bytes, np.uint8)
        assert tier.read(info.key, out)
        return np.array_equal(out, bytes_of(info))

    with ThreadPoolExecutor(3 * BOUNCE_BUFFERS) as pool:
        assert all(pool.map(read, range(96)))
    io = tier._files.io
    assert isinstance(io, DirectIO)
    assert len(io._free.queue) == BOUNCE_BUFFERS
    assert any(buffer is not None for buffer in io._free.queue)
    tier.close()
    assert io._free.queue == [None] * BOUNCE_BUFFERS


def test_reading_ahead_is_left_to_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, how: told.append((at, size)))
    monkeypatch.setattr(FileIO, "is_near", lambda *_: False)
    for tier, count in ((open_disk(tmp_path / "a"), 3), (open_direct(tmp_path / "b"), 0)):
        infos = [make_info(seed, 9_000) for seed in range(3)]
        for info in infos:
            put(tier, info, bytes_of(info))
        tier.prefetch([make_info(99, 1).key, *(info.key for info in infos)])
        assert len(told) == count
        told.clear()
        tier.close()


def test_what_the_page_cache_has_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: set[int] = set()
    told: list[tuple[int, int]] = []
    read = os.preadv

    def preadv(fd: int, outs: list[memoryview], at: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT and at in missing:
            raise BlockingIOError(errno.EAGAIN, "it is not there")
        return read(fd, outs, at)  # a file system of the test's may not know RWF_NOWAIT

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, how: told.append((at, size)))
    monkeypatch.setattr(disk_io, "PROBE_BYTES", 4096)
    tier, info = open_disk(tmp_path / "a"), make_info(0, 9_000)
    put(tier, info, bytes_of(info))
    tier.prefetch([info.key])
    assert not told
    for at in (0, 4096, 8192, 8999):
        missing = {at}
        tier.prefetch([info.key])
        assert told.pop() == (0, 9_000)
    tier.close()


@pytest.mark.parametrize("kept_bytes", [0, 200_000, 500_000])
def test_a_checked_read_of_a_file_that_was_cut_says_so(tmp_path: Path, kept_bytes: int) -> None:
    info, frame = make_frame(1, 256, representation=make_representation(3, 2, 128))
    tier = open_disk(tmp_path / "a")
    put(tier, info, frame)
    place = tier.file_place(info.key)
    assert place is not None
    os.truncate(tmp_path / "a" / "extents" / f"{place.number:04}.kv", place.offset + kept_bytes)
    out = np.empty_like(frame)
    check = FrameVerifier(out, info.key, header_bytes(info.layout))
    with pytest.raises(TierUnavailableError, match="ends early"):
        tier.read(info.key, out, 0, check)
    tier.close()
