import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.proto.errors import InvalidRequestError
from kvstore.tiers.allocator import FreeList

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


@pytest.mark.parametrize(("capacity", "granule"), [(1, 1), (4096, 64), (3 * 7**9, 3), (1 << 45, 1)])
def test_empty_allocator_fits_its_whole_capacity(capacity: int, granule: int) -> None:
    allocator = FreeList(capacity, granule)
    assert allocator.largest_free_bytes == capacity
    assert allocator.allocate(capacity) == 0
    assert allocator.largest_free_bytes == 0
    assert allocator.allocate(1) is None
    allocator.free_range(0, capacity)
    assert allocator.allocate(capacity + 1) is None
    assert allocator.largest_free_bytes == capacity


def test_hole_of_exactly_the_asked_size_is_found_among_near_misses() -> None:
    allocator = FreeList(1 << 20, 1)
    sizes = [1_000 + at for at in range(24)]
    held = []
    for size in sizes:
        held.append((allocator.allocate(size), size))
        assert allocator.allocate(1) is not None
    rest = allocator.allocate(allocator.largest_free_bytes)
    assert rest is not None
    random.Random(1).shuffle(held)
    for offset, size in held:
        assert offset is not None
        allocator.free_range(offset, size)
    random.Random(2).shuffle(sizes)
    assert all(allocator.allocate(size) is not None for size in sizes)
    assert allocator.largest_free_bytes == 0


@given(st.integers(1, 1 << 50), st.sampled_from([1, 64, 4096]))
def test_rounding_is_to_the_next_granule(size_bytes: int, granule: int) -> None:
    rounded = FreeList(1 << 20, granule).rounded(size_bytes)
    assert rounded % granule == 0
    assert 0 <= rounded - size_bytes < granule


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (-64, 64),
        (32, 64),
        (0, 0),
        (0, -1),
        (4096, 64),
        (4032, 65),
        (1024, 64),
        (960, 65),
        (0, 4096),
    ],
)
def test_claim_refuses_what_no_free_range_covers(offset: int, size_bytes: int) -> None:
    allocator = FreeList(4096, 64)
    assert allocator.reserve_at(1024, 100)
    assert allocator.reserve_at(offset, size_bytes) is False
    assert allocator.used_bytes == 128
    assert allocator.reserve_at(0, 1024)
    assert allocator.reserve_at(1152, 4096 - 1152)
    assert allocator.used_bytes == 4096


def test_a_restart_rebuilds_the_same_allocator_in_any_order() -> None:
    draw = random.Random(3)
    before = FreeList(1 << 20, 64)
    held: dict[int, int] = {}
    for _ in range(2_000):
        size_bytes = draw.randrange(1, 9_000)
        offset = before.allocate(size_bytes)
        if offset is not None:
            held[offset] = size_bytes
        elif held:
            gone = draw.choice(list(held))
            before.free_range(gone, held.pop(gone))
    for order in (sorted(held), draw.sample(list(held), len(held))):
        after = FreeList(1 << 20, 64)
        assert all(after.reserve_at(offset, held[offset]) for offset in order)
        assert not any(after.reserve_at(offset, held[offset]) for offset in order)
        assert after.used_bytes == before.used_bytes
        assert after.largest_free_bytes == before.largest_free_bytes


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_empty_allocations_are_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidRequestError):
        FreeList(4096, 64).allocate(size_bytes)
