"""The gpu tier on the CPU as its device: the same class, and what waits for what."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.chunks import make_info, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, bytes_of, open_files, put
from contracts.tier import TierContract
from helpers.device_frames import frame_on_device
from helpers.slow_device import SlowDevice, SlowStream
from typing_extensions import override

from kvstore.proto.device import HostDevice, open_device
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.gpu import BLOCK_HEADER_BYTES, GRANULE_BYTES, GpuTier

ARENA_BYTES = 64 << 10
PIECE_BYTES = 1000
"""Small, so that one frame takes several pieces of staging memory."""


@pytest.fixture(autouse=True)
def no_file_is_left_open() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


def contract_of(device: torch.device, piece_bytes: int) -> type[TierContract]:
    class Contract(TierContract):
        @override
        def make_tier(self, capacity_bytes: int, tmp_path: Path) -> GpuTier:
            return GpuTier(capacity_bytes, open_device(device), piece_bytes)

    return Contract


class TestGpuTierContract(contract_of(torch.device("cpu"), 4096)):  # type: ignore[misc]
    """On the CPU, through staging memory of a page."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGpuTierContractOnCuda(contract_of(torch.device("cuda", 0), 1 << 20)):  # type: ignore[misc]
    """On a CUDA device."""


@pytest.fixture
def tier() -> Iterator[GpuTier]:
    tier = GpuTier(ARENA_BYTES, HostDevice(), PIECE_BYTES)
    yield tier
    tier.close()


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def slow(device: SlowDevice) -> Iterator[GpuTier]:
    tier = GpuTier(ARENA_BYTES, device, PIECE_BYTES)
    yield tier
    device.fails = False
    tier.close()


def _put(tier: GpuTier, info: ChunkInfo) -> None:
    assert put(tier, info, bytes_of(info))


# --- sizes and places


def test_an_arena_too_small_for_a_frame_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes"):
        GpuTier(GRANULE_BYTES + BLOCK_HEADER_BYTES - 1, HostDevice())


def test_frames_lie_on_lines_of_device_memory_behind_their_generation(tier: GpuTier) -> None:
    infos = [make_info(seed, 1 + 300 * seed) for seed in range(5)]
    for info in infos:
        _put(tier, info)
        place = tier.locate(info.key)
        assert place is not None
        assert place.offset % GRANULE_BYTES == 0
        assert bytes(frame_on_device(tier, info.key).numpy()) == bytes_of(info).tobytes()
        assert _generation(tier, info) == place.generation


def _generation(tier: GpuTier, info: ChunkInfo) -> int:
    """The word before the frame, as another process sees it."""
    place = tier.locate(info.key)
    assert place is not None
    return _word(tier, place.offset)


def _word(tier: GpuTier, offset: int) -> int:
    descriptor = tier.arena_file()
    try:
        with mmap.mmap(descriptor, tier.capacity_bytes, prot=mmap.PROT_READ) as memory:
            return int.from_bytes(memory[offset - 8 : offset], "little")
    finally:
        os.close(descriptor)


def test_a_deleted_frames_generation_is_odd_before_its_room_is_used_again(tier: GpuTier) -> None:
    info = make_info(1, 5000)
    _put(tier, info)
    place = tier.locate(info.key)
    assert place is not None
    tier.delete(info.key)
    assert _word(tier, place.offset) == place.generation + 1


def test_the_tenant_of_a_frame_is_known(tier: GpuTier) -> None:
    info = make_info(1, 100)
    reservation = tier.reserve(info, "red")
    tier.write(reservation, bytes_of(info))
    tier.seal(reservation)
    assert tier.tenant_of(info.key) == "red"
    assert tier.tenant_of(make_info(2, 1).key) == "default"


# --- staged and straight copies


@pytest.mark.parametrize("is_known", [False, True], ids=["staged", "straight"])
def test_bytes_go_up_and_come_down_whole(tier: GpuTier, is_known: bool) -> None:
    for size in (1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 7777):
        data, out = payload(3, size), np.zeros(size, np.uint8)
        data.flags.writeable = False
        ends = [tier.device.register(memory) for memory in (data, out)] if is_known else []
        info = make_info(size, size)
        assert put(tier, info, data)
        assert tier.read(info.key, out)
        assert np.array_equal(out, data)
        for end in ends:
            assert end is not None
            end()
        assert not tier.device.is_registered(out)


# --- what waits for what


def test_a_frame_is_visible_only_once_its_copy_is_done(slow: GpuTier, device: SlowDevice) -> None:
    info = make_info(1, 700)
    reservation = slow.reserve(info)
    slow.write(reservation, bytes_of(info))
    up = device.streams[0]
    assert up.done == 0, "a write that fits the staging memory does not wait for the device"
    assert_absent(slow, info)
    assert slow.seal(reservation)
    assert up.done > 0
    assert_holds(slow, info, bytes_of(info))


def test_a_writer_may_reuse_its_memory_at_once(slow: GpuTier, device: SlowDevice) -> None:
    for is_known in (False, True):
        info = make_info(1 + is_known, 3 * PIECE_BYTES)
        data = bytes_of(info).copy()
        end = device.register(data) if is_known else None
        reservation = slow.reserve(info)
        slow.write(reservation, data)
        data[:] = 0
        assert slow.seal(reservation)
        if end is not None:
            end()
        assert_holds(slow, info, bytes_of(info))


def test_a_filler_waits_for_what_is_still_on_its_way_into_the_room(
    slow: GpuTier, device: SlowDevice
) -> None:
    before = slow.reserve(make_info(1, 700))
    slow.write(before, bytes_of(before.info))
    slow.abort(before)
    info = make_info(2, 700)
    engine = device.stream()
    assert isinstance(engine, SlowStream)
    reservation = slow.reserve(info)
    engine.copy(slow.opened(reservation, engine), torch.from_numpy(bytes_of(info)))
    engine.run()
    assert slow.seal(reservation)
    assert_holds(slow, info, bytes_of(info))


# --- a device that fails


def test_a_device_that_fails_leaves_nothing_visible_and_no_room_taken(
    slow: GpuTier, device: SlowDevice
) -> None:
    info = make_info(1, 700)
    reservation = slow.reserve(info)
    slow.write(reservation, bytes_of(info))
    device.fails = True
    with pytest.raises(TierUnavailableError):
        slow.seal(reservation)
    assert_absent(slow, info)
    assert_counts(slow, [], [])
    reservation = slow.reserve(info)
    with pytest.raises(TierUnavailableError):
        slow.write(reservation, bytes_of(info))
    slow.abort(reservation)
    assert_counts(slow, [], [])


def test_a_device_that_comes_back_is_used_again(slow: GpuTier, device: SlowDevice) -> None:
    info = make_info(1, 3 * PIECE_BYTES)
    _put(slow, info)
    device.fails = True
    with pytest.raises(TierUnavailableError):
        slow.read(info.key, np.zeros(info.size_bytes, np.uint8))
    with pytest.raises(TierUnavailableError):
        slow.delete(info.key)
    assert_counts(slow, [], [])
    device.fails = False
    for _ in range(3):
        _put(slow, info)
        assert_holds(slow, info, bytes_of(info))
        slow.delete(info.key)


class _FullDevice(HostDevice):
    """Has memory for an arena and none for staging."""

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        raise TierUnavailableError("gpu", "no pinned memory on purpose")


def test_a_tier_that_cannot_start_gives_its_arena_back() -> None:
    with pytest.raises(TierUnavailableError, match="pinned"):
        GpuTier(ARENA_BYTES, _FullDevice())


# --- misuse


def test_reservation_of_another_tier_is_not_taken_for_ones_own(tier: GpuTier) -> None:
    other = GpuTier(ARENA_BYTES, HostDevice())
    foreign, own = other.reserve(make_info(1, 100)), tier.reserve(make_info(1, 100))
    tier.abort(foreign)
    assert_counts(tier, [], [own])
    other.close()


def test_closed_tier_takes_nothing_and_has_nothing(tier: GpuTier) -> None:
    info = make_info(1, 100)
    _put(tier, info)
    reservation = tier.reserve(make_info(2, 100))
    tier.close()
    with pytest.raises(TierUnavailableError):
        tier.reserve(info)
    with pytest.raises(InvalidRequestError):
        tier.write(reservation, payload(1, 100))
    tier.abort(reservation)
    assert_absent(tier, info)
    assert_counts(tier, [], [])
