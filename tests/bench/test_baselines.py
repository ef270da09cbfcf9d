"""The baselines of bench.policy: the contract of policies, and whom each evicts."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from bench.baselines import (
    BASELINES,
    GdsfEviction,
    LfuEviction,
    MarconiLinearEviction,
    S3FifoEviction,
    make_any,
)
from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule, play
from contracts.policy import PolicyContract, everyone, keep_none
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import POLICIES
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy


class BaselineContract(PolicyContract):
    """The contract for the baseline that is called ``name``, beside the history it ranks by."""

    name = ""

    @override
    def make_policy(self) -> EvictionPolicy:
        return make_any(self.name, AccessHistory())

    @override
    def make_pair(self) -> tuple[EvictionPolicy, AccessHistory]:
        history = AccessHistory()
        return make_any(self.name, history), history


class TestLfu(BaselineContract):
    name = "lfu"


class TestGdsf(BaselineContract):
    name = "gdsf"


class TestS3Fifo(BaselineContract):
    name = "s3fifo"


def test_a_baseline_is_no_policy_of_the_server() -> None:
    assert not set(BASELINES) & set(POLICIES)


# --- LFU


@pytest.mark.parametrize(
    ("events", "order"),
    [
        ("1 2 3", "123"),
        ("1 2 3 t1", "231"),
        ("1 2 3 t1 t1 t2", "321"),
        ("1 2 3 t1 t2 t3", "123"),
        ("1 2 3 t11 t2 t2 t3", "132"),
        ("1 2<1 3", "213"),
        ("1 2<1 3 t2", "321"),
        ("1 2<1 3 t12 t3", "213"),
        ("1 2<1 3<1 t2", "321"),
        ("1 t1 t1 -1 1 2 t2", "12"),
        ("1 2 1", "21"),
        ("1 2<1 t1 t1 3 t3 -2", "31"),
    ],
)
def test_what_was_used_least_goes_first_and_of_several_the_oldest(events: str, order: str) -> None:
    policy = LfuEviction()
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


class PlainLfu(PlainLeaves):
    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda chunk: (self.uses[chunk], self.used[chunk]))


@pytest.mark.parametrize("seed", range(30))
def test_lfu_agrees_with_its_plain_model_on_any_schedule(seed: int) -> None:
    agree_on_any_schedule(LfuEviction(), PlainLfu(), seed)


# --- GDSF


@pytest.mark.parametrize(
    ("events", "order"),
    [
        ("1 2 3", "123"),
        ("1 2 3 t1", "231"),
        ("1 2 3 t1 t1 t2", "321"),
        ("1 2<1 3 t2", "321"),
        # 1 has 3; the clock goes to 1 with 2 and to 2 with 3, so 4 comes with 3 and is used to 4.
        ("1 t1 t1 2 ! 3 ! 4", "14"),
        ("1 t1 t1 2 ! 3 ! 4 t4", "14"),
        # Without a clock 1, which was used twice more than the others, would stay.
        ("1 t1 t1 2 ! 3 ! 4 !", "4"),
        ("1 t1 t1 2 ! 3 ! 4 t1 !", "1"),
    ],
)
def test_what_is_used_no_more_is_overtaken_by_what_comes(events: str, order: str) -> None:
    policy = GdsfEviction(AccessHistory())
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


def test_deleting_what_is_used_most_does_not_push_the_clock_ahead() -> None:
    policy = GdsfEviction(AccessHistory())
    play(policy, "1 2 5 t1 t1 t1 t1 t1 t5 t5 t5 -1 3")
    assert everyone(policy) == [2, 3, 5]


def put(
    policy: GdsfEviction, history: AccessHistory, row: int, flops: float, size_bytes: int
) -> None:
    history.seen_chain(np.array([row]), NO_ROW, InsertInfo(flops=flops), 0.0)
    policy.insert(row, NO_ROW, size_bytes, 0.0)


def test_a_chunk_whose_bytes_save_less_goes_first() -> None:
    history = AccessHistory()
    policy = GdsfEviction(history)
    put(policy, history, 1, 2e9, 100)
    put(policy, history, 2, 1e9, 100)
    put(policy, history, 3, 2e9, 400)
    put(policy, history, 4, 8e9, 400)
    assert everyone(policy) == [3, 2, 1, 4]


def test_without_flops_all_chunks_are_worth_the_same_whatever_their_size() -> None:
    history = AccessHistory()
    policy = GdsfEviction(history)
    for row, size_bytes in ((1, 1000), (2, 1), (3, 100)):
        put(policy, history, row, 0.0, size_bytes)
    assert everyone(policy) == [1, 2, 3]


def test_a_unit_of_flops_makes_no_difference() -> None:
    orders = []
    for unit in (1.0, 1e3, 1e15):
        history = AccessHistory()
        policy = GdsfEviction(history)
        for row in range(1, 9):
            put(policy, history, row, unit * (row * 7 % 5 + 1), 100)
        policy.touch(np.array([3, 4]), 0.0)
        orders.append(everyone(policy))
    assert orders[0] == orders[1] == orders[2]


class PlainGdsf(PlainLeaves):
    """Clock and uses in whole numbers, as no flops are known."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.priority: dict[int, int] = {}

    @override
    def came(self, chunk: int) -> None:
        self.priority[chunk] = self.clock + 1

    @override
    def touched(self, chunk: int) -> None:
        self.priority[chunk] = self.clock + self.uses[chunk]

    @override
    def remove(self, chunk: int) -> None:
        others = [self.priority[leaf] for leaf in self.leaves() if leaf != chunk]
        if chunk in self.tree:
            self.clock = max(self.clock, min([self.priority[chunk], *others]))
        super().remove(chunk)

    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda chunk: (self.priority[chunk], self.used[chunk]))


@pytest.mark.parametrize("seed", range(30))
def test_gdsf_agrees_with_its_plain_model_on_any_schedule(seed: int) -> None:
    agree_on_any_schedule(GdsfEviction(AccessHistory()), PlainGdsf(), seed)


# --- S3-FIFO


def half(history: AccessHistory) -> S3FifoEviction:
    """Return one whose new chunks have half of the bytes, and are kept after one use."""
    return S3FifoEviction(history, small_share=0.5, promote_uses=1)


@pytest.mark.parametrize(
    ("events", "order"),
    [
        # In the order they came, used or not.
        ("1 2 3", "123"),
        ("1 2 3 1", "231"),
        # A use in the small queue is what leads to the main one, behind all that are there.
        ("1 2 3 t1", "231"),
        # After 3 more than half of the bytes are in the main queue, which then gives up 1.
        ("1 2 3 4 t1 t2", "3142"),
        ("1 2 3 4 t1 t2 ! ! 5", "452"),
        # One evicted from the small queue is a ghost, and comes back into the main one.
        ("1 2 3 ! 1 4", "2341"),
        # There is a ghost for half of the chunks: 1 is none any more after 2 went.
        ("1 2 3 ! ! 1 4", "314"),
        # Leaves first: 1 stays where it is until nothing continues it.
        ("1 2<1 3", "213"),
        # A chunk that is continued is in the main queue once it is used enough: 1 is, before 2.
        ("1 2<1 3 t12", "231"),
        ("1 2<1 3<2 4", "3214"),
    ],
)
def test_new_chunks_go_first_unless_they_were_used(events: str, order: str) -> None:
    policy = half(AccessHistory())
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


def test_a_use_in_the_main_queue_is_worth_another_round() -> None:
    policy = half(AccessHistory())
    play(policy, "1 2 3 4 t1 t2 !")
    assert everyone(policy) == [1, 4, 2]
    play(policy, "t1")
    assert everyone(policy) == [2, 4, 1]
    play(policy, "t2 t2")
    assert everyone(policy) == [1, 4, 2]


def test_a_ghost_is_forgotten_after_as_many_evictions_as_the_main_queue_has_places() -> None:
    came_back = []
    for evictions in range(12):
        policy = half(AccessHistory())
        for row in range(1, 11):
            policy.insert(row, NO_ROW, 100, 0.0)
        policy.remove(1)
        for row in range(20, 20 + evictions):
            policy.insert(row, NO_ROW, 100, 0.0)
            policy.remove(row)
        policy.insert(1, NO_ROW, 100, 0.0)
        came_back.append(_is_main(policy, 1))
    assert came_back == [True] * 5 + [False] * 7


def _is_main(policy: S3FifoEviction, row: int) -> bool:
    """Whether a chunk that comes now, of half of all bytes, goes before the row."""
    policy.insert(50, NO_ROW, 2000, 0.0)
    order = everyone(policy)
    return order.index(50) < order.index(row)


def test_a_row_that_is_another_chunks_now_is_no_ghost() -> None:
    orders = []
    for is_new in (False, True):
        history = AccessHistory()
        policy = half(history)
        history.seen_chain(np.array([1]), NO_ROW, NO_INFO, 0.0)
        play(policy, "1 2 3 !")
        if is_new:
            history.forget_all(np.array([1]))
            history.seen_chain(np.array([1]), NO_ROW, NO_INFO, 0.0)
        else:
            history.requested(np.array([1]), 1, 0.0)
        play(policy, "1 4")
        orders.append(everyone(policy))
    assert orders == [[2, 3, 4, 1], [2, 3, 1, 4]]


def test_one_choice_passes_over_a_bounded_number_of_chunks() -> None:
    policy = half(AccessHistory())
    count = 1000
    for row in range(1, count):
        policy.insert(row, NO_ROW, 100, 0.0)
    policy.touch(np.arange(1, count), 0.0)
    asked: list[int] = []

    def keep(row: int) -> bool:
        asked.append(row)
        return False

    victim = next(policy.victims(keep, 0.0))
    assert victim == asked[-1]
    assert len(asked) == 65
    policy.remove(victim)
    asked.clear()
    assert next(policy.victims(keep, 0.0)) == 130
    assert asked[0] == 66


def test_a_round_for_a_leaf_is_one_for_the_chain_that_it_ends() -> None:
    """1 to 7 have a use left in the main queue; the round that 7 gets takes it from all."""
    policy = S3FifoEviction(AccessHistory(), small_share=0.01, promote_uses=1)
    chain = np.arange(1, 9)
    policy.insert_chain(chain, NO_ROW, 100, 0.0)
    policy.touch(chain, 0.0)
    policy.touch(chain, 0.0)
    asked: list[int] = []

    def keep(row: int) -> bool:
        asked.append(row)
        return False

    assert list(policy.victims(keep, 0.0)) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert asked == [8, 8, 7, 7, 6, 5, 4, 3, 2, 1]


class Paper:
    """Algorithm 1 of the paper over chunks that nothing continues, evicting one at a time."""

    def __init__(self, small_share: float, promote_uses: int) -> None:
        self.small_share, self.promote_uses = small_share, promote_uses
        self.small, self.main, self.ghosts = deque[int](), deque[int](), list[int]()
        self.uses: dict[int, int] = {}

    def access(self, row: int, room: int) -> list[int]:
        """Return who is evicted for it, when there is room for so many."""
        if row in self.uses:
            self.uses[row] = min(3, self.uses[row] + 1)
            return []
        gone = []
        while len(self.uses) >= room:
            gone.append(self.evict())
            del self.uses[gone[-1]]
        limit = math.ceil((1 - self.small_share) * (len(self.uses) + 1))
        queue = self.main if row in self.ghosts[-limit:] else self.small
        if row in self.ghosts:
            self.ghosts[self.ghosts.index(row)] = -1
        queue.append(row)
        self.uses[row] = 0
        return gone

    def evict(self) -> int:
        while True:
            all_chunks = len(self.small) + len(self.main)
            if self.small and len(self.small) >= self.small_share * all_chunks:
                row = self.small.popleft()
                if self.uses[row] < self.promote_uses:
                    self.ghosts.append(row)
                    return row
                self.uses[row] = 0
            elif self.main:
                row = self.main.popleft()
                if not self.uses[row]:
                    return row
                self.uses[row] -= 1
            self.main.append(row)


@pytest.mark.parametrize("terms", [(0.1, 2), (0.3, 1), (0.5, 1)])
@pytest.mark.parametrize("seed", range(10))
def test_without_continuations_it_does_what_the_paper_says(
    terms: tuple[float, int], seed: int
) -> None:
    draw = random.Random(seed)
    share, uses = terms
    policy = S3FifoEviction(AccessHistory(), small_share=share, promote_uses=uses)
    paper = Paper(share, uses)
    for _ in range(3000):
        row = 1 + min(draw.randrange(200), draw.randrange(200))
        gone = paper.access(row, 50)
        for expected in gone:
            victim = next(policy.victims(keep_none, 0.0))
            assert victim == expected
            policy.remove(victim)
        policy.insert(row, NO_ROW, 100, 0.0)


# --- Marconi's score with a linear recency


def test_a_chunk_whose_bytes_save_more_stays_the_longer_the_greater_alpha_is() -> None:
    places = []
    for alpha in (0.0, 0.05, 0.2, 2.0):
        history = AccessHistory()
        policy = MarconiLinearEviction(history, alpha)
        for chunk in range(1, 30):
            history.seen_chain(
                np.array([chunk]), NO_ROW, InsertInfo(flops=9e9 if chunk == 1 else 1e9), 0.0
            )
            policy.insert(chunk, NO_ROW, 100, 0.0)
        places.append(everyone(policy).index(1))
    assert places == sorted(set(places))
    assert places[0] == 0
    assert places[-1] == 28
