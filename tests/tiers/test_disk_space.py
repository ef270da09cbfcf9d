"""The allocator against bytes; what of a disk is wasted, what goes together in scattered room."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.chunks import make_info
from contracts.shelf import bytes_of, put
from helpers.disk_process import EXTENT_BYTES, open_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.proto.errors import InvalidRequestError, TierFullError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.allocator import FreeList, Span, adjacent_run
from kvstore.tiers.disk import DiskTier, file_bytes_for
from kvstore.tiers.disk_io import BLOCK_BYTES

GIB = 1 << 30
TOKEN_BYTES = {"8B": 131_072, "70B": 327_680, "MLA": 70_272, "7B": 57_344, "small": 12_288}
"""KV bytes of a token: of models of 8, 70 and 7 billion parameters, a latent and a small one."""
MIXES = {
    "one model": ("8B",),
    "two models": ("8B", "7B"),
    "five models": tuple(TOKEN_BYTES),
    "small and large": ("small", "70B"),
}
HEADER_BYTES = 4096


def frame_bytes(draw: random.Random, models: tuple[str, ...]) -> int:
    """Return the size of a frame: five of six are whole chunks, the others a prompt's last."""
    tokens = 256 if draw.random() < 0.85 else draw.randrange(16, 256)
    return HEADER_BYTES + tokens * TOKEN_BYTES[draw.choice(models)]


class Churn:
    """A disk tier's space under churn: the oldest goes for the newest, as ``Moves`` does it.

    Only space is real here; ``chunks`` maps a seed to extent, offset and info.
    """

    def __init__(self, capacity_bytes: int, seed: int, size_of: Callable[[random.Random], int]):
        size = file_bytes_for(capacity_bytes, 256 << 20)
        full, rest = divmod(capacity_bytes, size)
        self.extents = [FreeList(size, BLOCK_BYTES) for _ in range(full)]
        self.extents += [FreeList(rest, BLOCK_BYTES)] * (rest > 0)
        self.capacity_bytes = capacity_bytes
        self.chunks: OrderedDict[int, tuple[int, int, ChunkInfo]] = OrderedDict()
        self.frame_bytes = 0
        self.rounds = 0
        """Evictions that were not for want of bytes, but for want of bytes in one piece."""
        self._draw = random.Random(seed)
        self._size_of = size_of

    def put(self, seed: int) -> None:
        info = make_info(seed, self._size_of(self._draw))
        while (place := self._allocate(info.size_bytes)) is None:
            used = sum(holes.used_bytes for holes in self.extents)
            if used + info.size_bytes > self.capacity_bytes:
                self._delete(next(iter(self.chunks)))
            else:
                self.rounds += 1
                for victim in self._in_the_way(info.size_bytes):
                    self._delete(victim)
        self.chunks[seed] = (*place, info)
        self.frame_bytes += info.size_bytes

    def touch(self) -> None:
        """Use some old chunk again, so that age is not the order of places."""
        self.chunks.move_to_end(self._draw.choice([*self.chunks][:64]))

    def _allocate(self, size_bytes: int) -> tuple[int, int] | None:
        for number, holes in enumerate(self.extents):
            offset = holes.allocate(size_bytes)
            if offset is not None:
                return number, offset
        return None

    def _delete(self, seed: int) -> None:
        number, offset, info = self.chunks.pop(seed)
        self.extents[number].free_range(offset, info.size_bytes)
        self.frame_bytes -= info.size_bytes

    def _in_the_way(self, size_bytes: int) -> list[int]:
        number, _, oldest = next(iter(self.chunks.values()))
        holes, seeds = self.extents[number], {}
        spans = holes.holes()
        for seed, (extent, offset, info) in self.chunks.items():
            if extent == number:
                seeds[info.key] = seed
                spans.append(Span(offset, offset + holes.rounded(info.size_bytes), info.key))
        keys = adjacent_run(spans, oldest.key, size_bytes)
        return [seeds[key] for key in keys]


@pytest.mark.parametrize("mix", MIXES)
def test_at_most_a_twentieth_is_wasted_when_full_under_churn(mix: str) -> None:
    churn = Churn(64 * GIB, 5, lambda draw: frame_bytes(draw, MIXES[mix]))
    unused: list[float] = []
    count = 0
    while len(unused) < 2_000:
        churn.put(count)
        churn.touch()
        count += 1
        if churn.rounds and len(churn.chunks) < count - 1_000:
            unused.append(1 - churn.frame_bytes / churn.capacity_bytes)
    # All that no frame lies in: rounding, holes, and what the last eviction freed too much.
    assert sum(unused) / len(unused) <= 0.05
    assert max(unused) <= 0.06


def test_room_that_is_scattered_is_one_eviction_away() -> None:
    churn = Churn(16 * GIB, 7, lambda draw: frame_bytes(draw, MIXES["five models"]))
    before = 0
    for count in range(1_500):
        churn.put(count)
        churn.touch()
        assert churn.rounds - before <= 1
        before = churn.rounds
    assert churn.rounds > 50


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_disk(tmp_path, EXTENT_BYTES)
    yield tier
    tier.close()


def test_neighbours_in_the_way_make_room_when_they_go(tier: DiskTier) -> None:
    infos = [make_info(seed, 64 << 10) for seed in range(16)]
    for info in infos:
        put(tier, info, bytes_of(info))
    for info in infos[::2]:
        tier.delete(info.key)
    wanted = make_info(99, 200 << 10)
    with pytest.raises(TierFullError) as caught:
        tier.reserve(wanted)
    assert caught.value.free_bytes > wanted.size_bytes
    keys = tier.eviction_run(infos[5].key, wanted.size_bytes, "default")
    assert infos[5].key in keys
    assert len(keys) == 2
    for key in keys:
        assert tier.delete(key)
    assert put(tier, wanted, bytes_of(wanted))


def test_what_cannot_be_in_the_way_is_not_named(tier: DiskTier) -> None:
    info = make_info(1, 64 << 10)
    put(tier, info, bytes_of(info))
    assert tier.eviction_run(info.key, 1 << 10, "default") == [info.key]
    assert tier.eviction_run(info.key, 1 << 10, "another") == []
    assert tier.eviction_run(make_info(2, 1).key, 1 << 10, "default") == []


def test_a_run_ends_at_reservations_and_at_the_end(tier: DiskTier) -> None:
    first, second = make_info(1, 64 << 10), make_info(3, 64 << 10)
    put(tier, first, bytes_of(first))
    reservation = tier.reserve(make_info(2, 64 << 10))
    put(tier, second, bytes_of(second))
    assert tier.eviction_run(first.key, EXTENT_BYTES, "default") == [first.key]
    assert tier.eviction_run(second.key, EXTENT_BYTES, "default") == [second.key]
    tier.abort(reservation)
    assert tier.eviction_run(first.key, EXTENT_BYTES, "default") == [first.key, second.key]


_SIZES = st.one_of(st.integers(1, 40), st.integers(1, 400))


class AllocatorAgainstBytes(RuleBasedStateMachine):
    """The allocator beside a map with one mark per granule."""

    @initialize(granules=st.integers(1, 300), granule=st.sampled_from([1, 3, 64]))
    def start(self, granules: int, granule: int) -> None:
        self.granule = granule
        self.space = FreeList(granules * granule, granule)
        self.taken = bytearray(granules)
        self.live: dict[int, int] = {}

    def _granules(self, size_bytes: int) -> int:
        return -(-size_bytes // self.granule)

    def _longest_run(self) -> int:
        return max(len(run) for run in bytes(self.taken).split(b"\x01"))

    def _mark(self, offset: int, size_bytes: int) -> None:
        first, count = offset // self.granule, self._granules(size_bytes)
        assert not any(self.taken[first : first + count])
        assert first + count <= len(self.taken)
        self.taken[first : first + count] = b"\x01" * count
        self.live[offset] = count

    @rule(size_bytes=_SIZES)
    def allocate(self, size_bytes: int) -> None:
        fits = self._granules(size_bytes) <= self._longest_run()
        offset = self.space.allocate(size_bytes)
        assert (offset is not None) is fits
        if offset is not None:
            assert offset % self.granule == 0
            self._mark(offset, size_bytes)

    @rule(data=st.data())
    def allocate_exactly_a_hole(self, data: st.DataObject) -> None:
        runs = [len(run) for run in bytes(self.taken).split(b"\x01") if run]
        if runs:
            size_bytes = data.draw(st.sampled_from(runs)) * self.granule
            offset = self.space.allocate(size_bytes)
            assert offset is not None
            self._mark(offset, size_bytes)

    @rule(first=st.integers(-2, 310), size_bytes=_SIZES)
    def claim(self, first: int, size_bytes: int) -> None:
        stop = first + self._granules(size_bytes)
        free = first >= 0 and stop <= len(self.taken) and not any(self.taken[first:stop])
        assert self.space.reserve_at(first * self.granule, size_bytes) is free
        if free:
            self._mark(first * self.granule, size_bytes)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        first, count = offset // self.granule, self.live.pop(offset)
        self.space.free_range(offset, count * self.granule)
        self.taken[first : first + count] = bytes(count)

    @invariant()
    def counts_agree(self) -> None:
        used = sum(self.taken) * self.granule
        assert self.space.used_bytes == used
        assert self.space.largest_free_bytes == self._longest_run() * self.granule

    def teardown(self) -> None:
        if not hasattr(self, "space"):
            return
        for offset, count in self.live.items():
            self.space.free_range(offset, count * self.granule)
        capacity = len(self.taken) * self.granule
        assert self.space.largest_free_bytes == capacity
        assert self.space.used_bytes == 0
        assert self.space.allocate(capacity) == 0


TestAllocatorAgainstBytes = AllocatorAgainstBytes.TestCase
TestAllocatorAgainstBytes.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, print_blob=True
)


@given(st.integers(1, 1 << 50), st.sampled_from([1, 64, 4096]))
def test_rounding_is_to_the_next_granule(size_bytes: int, granule: int) -> None:
    rounded = FreeList(1 << 20, granule).rounded(size_bytes)
    assert rounded % granule == 0
    assert 0 <= rounded - size_bytes < granule


def test_the_largest_disks_are_allocated_whole_and_nothing_is_not() -> None:
    space = FreeList(1 << 45, 1)
    assert space.allocate(1 << 45) == 0
    assert space.allocate(1) is None
    for size_bytes in (0, -1):
        with pytest.raises(InvalidRequestError):
            space.allocate(size_bytes)
        assert not space.reserve_at(0, size_bytes)
    assert not space.reserve_at(-64, 64)


def test_ranges_off_the_granules_or_beyond_the_end_are_not_claimed() -> None:
    space = FreeList(4096, 64)
    for offset, size_bytes in ((32, 64), (4096, 64), (4032, 65), (0, 4097)):
        assert not space.reserve_at(offset, size_bytes)
    assert space.used_bytes == 0
