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
