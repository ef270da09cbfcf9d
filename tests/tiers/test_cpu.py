import fcntl
import mmap
import os
import random
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from contracts.chunks import make_info, make_representation, payload
from contracts.shelf import assert_counts, assert_holds, bytes_of, fill_up, get, open_files
from contracts.tier import TierContract
from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkInfo, ChunkKey, KVLayout
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, unpack_places
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.locations import LocationTable

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


class Client:
    """A process of *tenant* that maps a slab read-only, as the Unix socket lets it."""

    def __init__(self, tier: CpuTier, place: Place, tenant: str = "default") -> None:
        fd = tier.slab_file(place.number, tenant)
        try:
            self._map = mmap.mmap(fd, tier.slab_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def slab(self) -> bytes:
        return self._map[:]

    def word(self, place: Place) -> int:
        return int.from_bytes(self._map[place.offset - 8 : place.offset], "little")

    def frame(self, place: Place) -> bytes:
        return self._map[place.offset : place.offset + place.size_bytes]

    def read(self, place: Place) -> bytes | None:
        before = self.word(place)
        copy = self.frame(place)
        return copy if before == self.word(place) == place.generation else None

    def close(self) -> None:
        self._map.close()


_INTRUDER = """
import fcntl, mmap, os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])

def refused(act):
    try:
        act()
    except PermissionError:
        return True
    return False

again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
acts = [
    lambda: mmap.mmap(fd, size),
    lambda: mmap.mmap(again, size),
    lambda: os.pwrite(fd, b"x", 64),
    lambda: os.pwrite(again, b"x", 64),
    lambda: os.ftruncate(fd, size // 2),
    lambda: os.ftruncate(fd, size * 2),
    lambda: os.posix_fallocate(fd, size, 4096),
    lambda: fcntl.fcntl(fd, 1033, 8),
]
print([refused(act) for act in acts])
private = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
private[64:68] = b"mine"
"""


def test_a_client_can_neither_write_nor_resize_a_slab(tier: CpuTier) -> None:
    info = make_info(1, 1000)
    place = _put(tier, info)
    fd = tier.slab_file(place.number, "default")
    child = [sys.executable, "-c", _INTRUDER, str(fd), str(SLAB_BYTES)]
    done = subprocess.run(child, pass_fds=[fd], capture_output=True, text=True, check=True)
    os.close(fd)
    assert done.stdout.strip() == str([True] * 8)
    assert_holds(tier, info, bytes_of(info))
    other = make_info(2, 1000)
    _put(tier, other)
    assert_holds(tier, other, bytes_of(other))


def test_slab_is_closed_to_children_that_were_not_given_it(tier: CpuTier) -> None:
    place = _put(tier, make_info(1, 1000))
    fd = tier.slab_file(place.number, "default")
    flags = fcntl.fcntl(fd, fcntl.F_GETFD)
    os.close(fd)
    assert flags & fcntl.FD_CLOEXEC


def test_generation_changes_when_a_chunk_is_deleted(tier: CpuTier) -> None:
    place = _put(tier, make_info(1, 1000))
    client = Client(tier, place)
    assert client.word(place) == place.generation
    assert place.generation % 2 == place.offset % 64 == 0
    assert client.read(place) == bytes(bytes_of(make_info(1, 1000)))
    tier.delete(make_info(1, 1000).key)
    assert client.word(place) == place.generation + 1
    client.close()


def test_generation_changes_when_a_reservation_ends_without_a_chunk(tier: CpuTier) -> None:
    sealed = _put(tier, make_info(1, 1000))
    client = Client(tier, sealed)
    aborted, refused = tier.reserve(make_info(2, 1000)), tier.reserve(make_info(1, 1000))
    places = [aborted.place, refused.place]
    tier.abort(aborted)
    assert not tier.seal(refused)
    for place in places:
        assert isinstance(place, Place)
        assert client.word(place) == place.generation + 1
    client.close()


def test_place_taken_again_has_a_generation_of_its_own(tier: CpuTier) -> None:
    first = _put(tier, make_info(1, 1000))
    client = Client(tier, first)
    tier.delete(make_info(1, 1000).key)
    second = _put(tier, make_info(2, 1000))
    assert (second.number, second.offset) == (first.number, first.offset)
    assert second.generation > first.generation
    assert client.read(first) is None
    assert client.read(second) == bytes(bytes_of(make_info(2, 1000)))
    client.close()


def test_readers_of_shared_memory_never_take_reused_room_for_their_chunk() -> None:
    tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
    keeper = make_info(0, 64)
    client = Client(tier, _put(tier, keeper))
    known: list[tuple[Place, ChunkInfo]] = []
    done = Event()

    def read() -> int:
        good = 0
        while not done.is_set() or not good:
            for place, info in known[-3:]:
                copy = client.read(place)
                if copy is not None:
                    good += 1
                    assert copy == bytes(bytes_of(info))
        return good

    draw = random.Random(1)
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for seed in range(1, 400):
            info = make_info(seed, draw.randrange(20_000, 50_000))
            known.append((_put(tier, info), info))
            if seed < 399:
                assert tier.delete(info.key)
        done.set()
        assert all(reader.result(timeout=60) > 0 for reader in readers)
    client.close()
    tier.close()


def test_tenants_never_share_a_slab(tier: CpuTier) -> None:
    places = {
        tenant: {_put(tier, make_info(seed, 500), tenant).number for seed in range(at, 40, 2)}
        for at, tenant in enumerate(("a", "b"))
    }
    assert len(places["a"]) == len(places["b"]) == 1
    assert not places["a"] & places["b"]


def test_tenant_cannot_use_the_holes_in_another_tenants_slabs() -> None:
    tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
    info = make_info(1, 100)
    _put(tier, info, "a")
    with pytest.raises(TierFullError) as caught:
        tier.reserve(make_info(2, 100), "b")
    assert caught.value.free_bytes == SLAB_BYTES - tier.allocated_bytes(100)
    assert_counts(tier, [info], [])
    assert tier.delete(info.key)
    _put(tier, make_info(2, 100), "b")
    tier.close()


def test_slab_that_changes_hands_is_a_new_file_and_the_old_one_shows_nothing_of_it() -> None:
    tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
    mine, theirs = make_info(1, 30_000), make_info(2, tier.max_frame_bytes - 4096)
    old = _put(tier, mine, "a")
    spy = Client(tier, old, "a")
    assert spy.read(old) == bytes(bytes_of(mine))
    tier.delete(mine.key)
    left_behind = spy.slab()
    new = _put(tier, theirs, "b")
    assert new.number != old.number
    assert spy.slab() == left_behind
    assert spy.read(old) is None
    owner = Client(tier, new, "b")
    assert owner.frame(new) == bytes(bytes_of(theirs))
    assert not any(owner.slab()[new.offset + new.size_bytes :])
    assert not any(owner.slab()[: new.offset - 8])
    with pytest.raises(InvalidRequestError):
        tier.slab_file(old.number, "a")
    spy.close()
    owner.close()
    tier.close()


def test_emptied_slab_stays_with_its_tenant_until_another_needs_it() -> None:
    tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
    first = _put(tier, make_info(1, 1000), "a")
    tier.delete(make_info(1, 1000).key)
    assert _put(tier, make_info(2, 1000), "a").number == first.number
    tier.close()


def test_slab_of_another_tenant_is_denied(tier: CpuTier) -> None:
    place = _put(tier, make_info(1, 100), "a")
    os.close(tier.slab_file(place.number, "a"))
    with pytest.raises(PermissionDeniedError):
        tier.slab_file(place.number, "b")
    with pytest.raises(InvalidRequestError):
        tier.slab_file(place.number + 1_000_000, "a")


def test_slab_ids_never_repeat_within_a_process() -> None:
    seen = []
    for _ in range(3):
        tier = CpuTier(SLAB_BYTES, SLAB_BYTES)
        seen.append(_put(tier, make_info(1, 100)).number)
        tier.close()
    assert len(set(seen)) == 3


def test_residents_are_the_sealed_chunks_of_one_slab_in_order_of_sealing(tier: CpuTier) -> None:
    infos = [make_info(seed, SLAB_BYTES // 4) for seed in range(6)]
    places = [_put(tier, info) for info in infos]
    pending = tier.reserve(make_info(9, 100))
    for info, place in zip(infos, places, strict=True):
        together = [
            other.key
            for other, there in zip(infos, places, strict=True)
            if there.number == place.number
        ]
        assert tier.chunks_sharing_block(info.key) == together
    gone = tier.chunks_sharing_block(infos[1].key)
    tier.delete(infos[1].key)
    assert tier.chunks_sharing_block(infos[0].key) == [key for key in gone if key != infos[1].key]
    tier.abort(pending)


def test_evicting_the_residents_of_a_slab_lets_another_tenant_in() -> None:
    tier = CpuTier(2 * SLAB_BYTES, SLAB_BYTES)
    sealed, _ = fill_up(tier, [make_info(seed, 9_000) for seed in range(40)])
    with pytest.raises(TierFullError):
        tier.reserve(make_info(99, 40_000), "b")
    for key in tier.chunks_sharing_block(sealed[0].key):
        assert tier.delete(key)
    _put(tier, make_info(99, 40_000), "b")
    assert_holds(tier, make_info(99, 40_000), bytes_of(make_info(99, 40_000)))
    tier.close()


def test_threads_of_several_tenants_never_see_each_others_bytes() -> None:
    tier = CpuTier(12 * SLAB_BYTES, SLAB_BYTES)

    def work(thread: int) -> int:
        draw, tenant, done = random.Random(thread), f"tenant {thread % 4}", 0
        for step in range(60):
            info = make_info(1_000 * thread + step, draw.randrange(100, 20_000))
            try:
                place = _put(tier, info, tenant)
            except TierFullError:
                continue
            client = Client(tier, place, tenant)
            assert client.read(place) == bytes(bytes_of(info))
            assert tier.chunks_sharing_block(info.key)
            client.close()
            assert tier.delete(info.key)
            done += 1
        return done

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    assert_counts(tier, [], [])
    tier.close()


# --- the table of locations


def place(info: ChunkInfo, number: int = 0) -> Place:
    return Place(number, Reach.memory, 0, 64 * info.size_bytes, info.size_bytes, number << 40)


def test_the_largest_values_of_every_field_are_kept() -> None:
    table = LocationTable()
    most = (1 << 64) - 1
    info = replace(make_info(1, most), codec_id=(1 << 16) - 1, prefill_flops=float(1 << 70))
    at = Place((1 << 32) - 1, Reach.peer, 255, most, most, most)
    assert table.info(table.seal(info, at)) == info
    assert table.location(info.key) == at


def test_more_layouts_than_are_shared_are_told_apart() -> None:
    table = LocationTable()
    representation = make_representation(1)
    infos = [
        replace(make_info(seed, 100), layout=KVLayout.of(representation, 16 + seed))
        for seed in range(1500)
    ]
    rows = [table.seal(info, place(info)) for info in infos]
    assert [table.info(row) for row in rows] == infos
