import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_counts, bytes_of, get, open_files
from contracts.tier import TierContract
from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, unpack_places
from kvstore.tiers.cpu import CpuTier

SLAB_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def no_file_is_left_open() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


class TestCpuTierContract(TierContract):
    @override
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> CpuTier:
        return CpuTier(capacity_bytes, slab_bytes=1 << 20)


@pytest.fixture
def tier() -> Iterator[CpuTier]:
    tier = CpuTier(4 * SLAB_BYTES, SLAB_BYTES)
    yield tier
    tier.close()


def _put(tier: CpuTier, info: ChunkInfo, tenant: str = "default") -> Place:
    reservation = tier.reserve(info, tenant)
    tier.write(reservation, bytes_of(info))
    assert tier.seal(reservation)
    place = tier.locate(info.key)
    assert place is not None
    return place


def test_rows_of_places_say_what_locate_says(tier: CpuTier) -> None:
    infos = [make_info(seed, 30_000 + seed) for seed in range(6)]
    places = [_put(tier, info) for info in infos]
    assert len({place.number for place in places}) > 1
    keys = [infos[4].key, ChunkKey(bytes(32)), infos[0].key, infos[5].key]
    rows = unpack_places(tier.place_rows(keys))
    assert rows[1] == NOWHERE
    for row, place in zip(
        (rows[0], rows[2], rows[3]), (places[4], places[0], places[5]), strict=True
    ):
        assert (row.number, row.offset, row.size_bytes, row.generation) == (
            place.number, place.offset, place.size_bytes, place.generation,
        )  # fmt: skip
        assert (row.reach, row.tier) == (Reach.memory, 0)
    assert tier.place_rows([]) == b""


def test_sizes_that_make_no_arena_are_refused() -> None:
    slabs = [(1 << 20, size, "slab_bytes") for size in (0, 2048, 6144, -4096)]
    for capacity, slab, field in (*slabs, (4095, 4096, "capacity_bytes"), (0, 4096, "cap")):
        with pytest.raises(InvalidRequestError, match=field):
            CpuTier(capacity, slab)


def test_capacity_is_whole_slabs_and_slabs_appear_when_needed() -> None:
    before = open_files()
    tier = CpuTier(3 * SLAB_BYTES - 1, SLAB_BYTES)
    assert tier.capacity_bytes == 2 * SLAB_BYTES
    assert open_files() == before
    first = _put(tier, make_info(1, tier.max_frame_bytes))
    second = _put(tier, make_info(2, tier.max_frame_bytes))
    assert first.number != second.number
    assert tier.stats().used_bytes == tier.capacity_bytes
    with pytest.raises(TierFullError):
        tier.reserve(make_info(3, 1))
    tier.close()


def test_absent_chunks_have_no_place(tier: CpuTier) -> None:
    info = make_info(1, 100)
    reservation = tier.reserve(info)
    assert tier.locate(info.key) is None
    assert tier.peek(info.key) is None
    assert tier.chunks_sharing_block(info.key) == []
    tier.abort(reservation)


def test_view_and_peek_share_the_slab_without_a_copy(tier: CpuTier) -> None:
    info = make_info(1, 1000)
    reservation = tier.reserve(info)
    view = tier.view(reservation)
    assert view.shape == (1000,)
    view[:] = bytes_of(info)
    assert tier.seal(reservation)
    peeked = tier.peek(info.key)
    assert peeked is not None
    assert np.shares_memory(view, peeked)
    assert np.array_equal(peeked, bytes_of(info))
    with pytest.raises(ValueError, match="read-only"):
        peeked[0] = 1


def test_reservation_of_another_tier_is_not_taken_for_ones_own(tier: CpuTier) -> None:
    other = CpuTier(SLAB_BYTES, SLAB_BYTES)
    foreign, own = other.reserve(make_info(1, 100)), tier.reserve(make_info(1, 100))
    tier.abort(foreign)
    assert_counts(tier, [], [own])
    other.close()


@pytest.mark.parametrize("spare_files", [0, 1])
def test_out_of_files_is_a_tier_that_cannot_be_used_and_stays_as_it_was(
    tier: CpuTier, spare_files: int
) -> None:
    info = make_info(1, tier.max_frame_bytes)
    _put(tier, info)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare_files, hard))
    try:
        with pytest.raises(TierUnavailableError):
            tier.reserve(make_info(2, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_counts(tier, [info], [])
    _put(tier, make_info(2, 100))


def test_closed_tier_takes_nothing_and_has_nothing(tier: CpuTier) -> None:
    info = make_info(1, 100)
    _put(tier, info)
    reservation = tier.reserve(make_info(2, 100))
    tier.close()
    with pytest.raises(TierUnavailableError):
        tier.reserve(info)
    with pytest.raises(InvalidRequestError):
        tier.write(reservation, payload(1, 100))
    tier.abort(reservation)
    assert get(tier, info) is None
    assert_counts(tier, [], [])


def test_bytes_peeked_before_close_stay_readable_and_hold_no_file_once_dropped() -> None:
    before = open_files()
    tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
    info = make_info(1, 1000)
    _put(tier, info)
    peeked: Bytes | None = tier.peek(info.key)
    assert peeked is not None
    tier.close()
    assert np.array_equal(peeked, bytes_of(info))
    del peeked
    assert open_files() == before


def test_a_chunk_costs_little_memory_besides_its_info() -> None:
    tier = CpuTier(64 << 20, 64 << 20)
    infos = [make_info(seed, 1000) for seed in range(20_000)]
    tier.abort(tier.reserve(infos[0]))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for info in infos:
            assert tier.seal(tier.reserve(info))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(infos) <= 400
    tier.close()
