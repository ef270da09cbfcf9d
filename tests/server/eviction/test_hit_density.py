"""Order tests of HitDensityEviction: LRU until it has learnt, then by what was learnt."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import numpy as np
from contracts.policy import above, everyone, keep_none, row, rows
from numpy.typing import NDArray

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import (
    NO_INFO,
    AccessHistory,
    InsertInfo,
    RefreshReport,
)
from kvstore.server.eviction.hit_density import (
    BUDGET,
    CAP_S,
    WARM_REQUESTS,
    HitDensityEviction,
    LruSafeguard,
)
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.reuse_statistics import AGE_BINS


class Tier:
    """A policy that has learnt what the test says, and a history that tells it of events."""

    def __init__(self, *, clock: Callable[[], float] | None = None):
        self.history = AccessHistory()
        self.policy = HitDensityEviction(self.history, clock=clock)
        self.policy._guard.is_active = False

    def store(
        self,
        chunk: int,
        parent: int,
        at_s: float,
        facts: InsertInfo = NO_INFO,
        size_bytes: int = 100,
    ) -> None:
        self.history.seen_chain(np.array([chunk]), parent, facts, at_s)
        self.policy.insert(chunk, parent, size_bytes, at_s)

    def ask(self, at_s: float, *chunks: int) -> None:
        self.history.requested(np.array(chunks), len(chunks), at_s)
        self.policy.touch(np.array(chunks), at_s)

    def promise(self, chunk: int, *by_bin: float) -> None:
        """Let the class of a chunk promise these, the last for all older ages."""
        values = [*by_bin, *[by_bin[-1]] * (AGE_BINS - len(by_bin))]
        self.history.table.values[self.history.classes[chunk]] = values

    def victims(self, at_s: float) -> list[int]:
        return list(self.policy.victims(keep_none, at_s))


def test_what_promises_least_goes_first_whenever_it_was_used() -> None:
    tier = Tier()
    for chunk in (1, 2, 3):
        tier.store(chunk, NO_ROW, float(chunk))
    tier.ask(4.0, 1)
    tier.promise(1, 0.001)
    tier.promise(2, 0.5)
    assert tier.victims(5.0) == [1, 2, 3]
    tier.promise(1, 0.7)
    assert tier.victims(5.0) == [2, 3, 1]


def test_of_one_class_the_oldest_and_the_newest_are_candidates() -> None:
    tier = Tier()
    for chunk in (1, 2, 3):
        tier.store(chunk, NO_ROW, 10.0 * chunk)
    tier.promise(1, 0.1, *[0.1] * 5, 0.9)  # what has waited for long is the best to keep
    assert tier.victims(30.5) == [3, 1, 2]


def test_an_exposed_parent_goes_by_its_own_class_and_use() -> None:
    tier = Tier()
    tier.store(1, NO_ROW, 1.0)
    tier.store(2, 1, 1.0, InsertInfo(tokens_full=False))
    tier.store(3, NO_ROW, 2.0)
    tier.promise(2, 0.1)
    tier.promise(3, 0.5)
    assert tier.victims(3.0) == [2, 1, 3]
    tier.promise(1, *np.linspace(0.9, 0.1, AGE_BINS))
    assert tier.victims(1e4) == [2, 1, 3]
    tier.policy.remove(2)
    assert tier.victims(1e4) == [1, 3]


def test_the_smaller_of_two_that_promise_the_same_stays() -> None:
    tier = Tier()
    tier.store(1, NO_ROW, 1.0, size_bytes=100)
    tier.store(2, NO_ROW, 2.0, size_bytes=400)
    assert tier.victims(2.0) == [2, 1]


def test_a_hint_moves_a_chunk_among_those_that_had_it() -> None:
    tier = Tier()
    for chunk in (1, 2, 3):
        tier.store(chunk, NO_ROW, float(chunk))
    tier.history.hint(np.array([2]), 1)
    tier.promise(2, 0.0)
    assert tier.victims(4.0) == [2, 1, 3]
    tier.history.hint(np.array([2]), 0)
    assert tier.victims(4.0) == [1, 2, 3]


def test_what_has_learnt_nothing_evicts_as_lru_does() -> None:
    for seed in range(6):
        draw = random.Random(seed)
        history = AccessHistory()
        policy, lru = HitDensityEviction(history), LruEviction()
        for step in range(200):
            number, at_s = draw.randrange(24), float(step)
            if draw.random() < 0.5:
                history.seen_chain(np.array([row(number)]), above(number), NO_INFO, at_s)
                for each in (policy, lru):
                    each.insert(row(number), above(number), 100, at_s)
            elif draw.random() < 0.8:
                asked = rows([draw.randrange(24) for _ in range(3)])
                history.requested(asked, 3, at_s)
                for each in (policy, lru):
                    each.touch(asked, at_s)
            else:
                for each in (policy, lru):
                    each.remove(row(number))
            assert everyone(policy) == everyone(lru)


def test_a_decision_that_takes_too_long_ends_in_the_order_of_lru() -> None:
    times = iter(np.arange(0, 100, 2 * CAP_S).tolist())
    tier = Tier(clock=lambda: next(times))
    for chunk in (1, 2, 3, 4):
        tier.store(chunk, NO_ROW, float(chunk))
    tier.ask(5.0, 2)
    tier.promise(2, 0.0)
    assert tier.victims(6.0) == [2, 1, 3, 4]  # what was decided already stands
    assert tier.policy.fallbacks == 1
    tier.ask(7.0, 1)
    assert tier.victims(8.0)[1:] == [4, 2, 1] or tier.victims(8.0)[1:] == [3, 4, 1]


def report(
    ages_s: list[float], chunks: int, requests: int = 10
) -> tuple[RefreshReport, NDArray[np.bool_]]:
    known = RefreshReport(np.zeros(len(ages_s), np.intp), np.array(ages_s), chunks, requests, 0.0)
    return known, np.ones(len(ages_s), np.bool_)


def test_nothing_is_done_otherwise_than_lru_until_there_was_something_to_learn_from() -> None:
    guard = LruSafeguard()
    for _ in range(WARM_REQUESTS // 10 - 1):
        guard.judge(*report([], 100))
        assert guard.is_active
    guard.judge(*report([], 100))
    assert not guard.is_active


def test_who_falls_behind_lru_does_as_lru_until_the_budget_has_grown() -> None:
    guard = LruSafeguard()
    guard.lru_age_s = 50.0
    guard.judge(*report([], 1000, WARM_REQUESTS))
    share = round(1000 * BUDGET)
    guard.judge(*report([1.0] * 2 * share + [90.0] * 40, 1000))
    assert not guard.is_active  # all of the budget of two thousand, and no more
    guard.judge(*report([1.0] * 6 * share, 1000))
    assert guard.is_active
    for _ in range(4):
        guard.judge(*report([], 1000))
        assert guard.is_active
    guard.judge(*report([], 1000))
    assert not guard.is_active  # eight shares of eight thousand


def test_old_losses_are_forgotten_by_half() -> None:
    guard = LruSafeguard()
    guard.judge(*report([1.0] * 1000, 1000, WARM_REQUESTS))
    guard.judge(*report([1.0] * 4000, 4000))
    before = guard._behind
    guard.judge(*report([], 1 << 18))
    assert guard._behind == before / 2


def test_the_first_victims_cost_no_look_at_the_others() -> None:
    tier = Tier()
    for chunk in range(1, 5_000):
        tier.store(chunk, NO_ROW, float(chunk))
    looks = 0

    def keep(_: int) -> bool:
        nonlocal looks
        looks += 1
        return False

    assert len(list(islice(tier.policy.victims(keep, 5_000.0), 3))) == 3
    assert looks == 3
