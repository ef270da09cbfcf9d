"""Order tests of S3FifoEviction, by hand and against the queues as the paper has them."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from contracts.plain_leaves import play
from contracts.policy import everyone, keep_none

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.history import NO_FACTS, History
from kvstore.server.policy.s3fifo import AIBRIX_TERMS, PAPER_TERMS, S3FifoEviction, S3FifoTerms

HALF = S3FifoTerms(small_share=0.5, promote_uses=1)


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
    policy = S3FifoEviction(History(), HALF)
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


def test_a_use_in_the_main_queue_is_worth_another_round() -> None:
    policy = S3FifoEviction(History(), HALF)
    play(policy, "1 2 3 4 t1 t2 !")
    assert everyone(policy) == [1, 4, 2]
    play(policy, "t1")
    assert everyone(policy) == [2, 4, 1]
    play(policy, "t2 t2")
    assert everyone(policy) == [1, 4, 2]


def test_the_terms_of_the_paper_and_of_aibrix_differ_in_what_leads_to_the_main_queue() -> None:
    """One use is enough for AIBrix, and two for the paper."""
    for terms, order in ((AIBRIX_TERMS, [2, 3, 1]), (PAPER_TERMS, [1, 2, 3])):
        policy = S3FifoEviction(History(), terms)
        play(policy, "1 2 3 t1")
        assert everyone(policy) == order


@pytest.mark.parametrize(
    ("share", "uses", "what"),
    [(0.0, 1, "small_share"), (1.0, 1, "small_share"), (0.1, 0, "promote"), (0.1, 4, "promote")],
)
def test_terms_that_make_no_queues_are_refused(share: float, uses: int, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        S3FifoTerms(share, uses)


def test_a_ghost_is_forgotten_after_as_many_evictions_as_the_main_queue_has_places() -> None:
    came_back = []
    for evictions in range(12):
        policy = S3FifoEviction(History(), HALF)
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
        history = History()
        policy = S3FifoEviction(history, HALF)
        history.seen(1, NO_ROW, NO_FACTS, 0.0)
        play(policy, "1 2 3 !")
        if is_new:
            history.forget(1)
            history.seen(1, NO_ROW, NO_FACTS, 0.0)
        else:
            history.asked(np.array([1]), 1, 0.0)
        play(policy, "1 4")
        orders.append(everyone(policy))
    assert orders == [[2, 3, 4, 1], [2, 3, 1, 4]]


def test_one_choice_passes_over_a_bounded_number_of_chunks() -> None:
    policy = S3FifoEviction(History(), HALF)
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
    policy = S3FifoEviction(History(), S3FifoTerms(0.01, 1))
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

    def __init__(self, terms: S3FifoTerms) -> None:
        self.terms = terms
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
        limit = math.ceil((1 - self.terms.small_share) * (len(self.uses) + 1))
        queue = self.main if row in self.ghosts[-limit:] else self.small
        if row in self.ghosts:
            self.ghosts[self.ghosts.index(row)] = -1
        queue.append(row)
        self.uses[row] = 0
        return gone

    def evict(self) -> int:
        while True:
            all_chunks = len(self.small) + len(self.main)
            if self.small and len(self.small) >= self.terms.small_share * all_chunks:
                row = self.small.popleft()
                if self.uses[row] < self.terms.promote_uses:
                    self.ghosts.append(row)
                    return row
                self.uses[row] = 0
            elif self.main:
                row = self.main.popleft()
                if not self.uses[row]:
                    return row
                self.uses[row] -= 1
            self.main.append(row)


@pytest.mark.parametrize("terms", [PAPER_TERMS, AIBRIX_TERMS, HALF])
@pytest.mark.parametrize("seed", range(10))
def test_without_continuations_it_does_what_the_paper_says(terms: S3FifoTerms, seed: int) -> None:
    draw = random.Random(seed)
    policy, paper = S3FifoEviction(History(), terms), Paper(terms)
    for _ in range(3000):
        row = 1 + min(draw.randrange(200), draw.randrange(200))
        gone = paper.access(row, 50)
        for expected in gone:
            victim = next(policy.victims(keep_none, 0.0))
            assert victim == expected
            policy.remove(victim)
        policy.insert(row, NO_ROW, 100, 0.0)
