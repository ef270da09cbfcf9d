"""Marconi and hit density: whom their scores name, and what they learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule
from contracts.policy import above, everyone, keep_none, row, rows
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction import marconi
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo, RefreshReport
from kvstore.server.eviction.hit_density import (
    BUDGET,
    CAP_S,
    WARM_REQUESTS,
    HitDensityEviction,
    LruSafeguard,
)
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.marconi import (
    EFFICIENCIES,
    LEAST_DENSITY,
    MOST_DENSITY,
    AlphaTuner,
    FlopDensity,
    MarconiEviction,
    ScoredEviction,
    efficiency_class,
)
from kvstore.server.eviction.policy import EvictionPolicy
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


def normal(value: float, values: list[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 1.0


class PlainMarconi(PlainLeaves):
    """S(n) = norm(recency) + alpha norm(efficiency), of all candidates, for each victim."""

    def __init__(self, kinds: list[int], alpha: float) -> None:
        super().__init__()
        self.kinds = kinds
        self.alpha = alpha

    def recency(self, chunk: int) -> float:
        return 1 / (self.time + 1 - self.used[chunk])

    def efficiency(self, chunk: int) -> float:
        return EFFICIENCIES[self.kinds[chunk]]

    @override
    def choose(self, leaves: list[int]) -> int:
        recencies = [self.recency(leaf) for leaf in leaves]
        efficiencies = [self.efficiency(leaf) for leaf in leaves]

        def score(chunk: int) -> tuple[float, int]:
            recency = normal(self.recency(chunk), recencies)
            return (
                recency + self.alpha * normal(self.efficiency(chunk), efficiencies),
                self.used[chunk],
            )

        return min(leaves, key=score)


def test_queues_by_class_name_whom_the_score_of_every_candidate_does() -> None:
    for seed, alpha in enumerate([0.0, 0.1, 0.7, 1.0, 1.5, 5.0] * 4):
        draw = random.Random(seed)
        kinds = [draw.randrange(4) * 11 for _ in range(32)]
        policy = ScoredEviction(lambda chunk, _, kinds=kinds: kinds[chunk], alpha)  # type: ignore[misc]
        agree_on_any_schedule(policy, PlainMarconi(kinds, alpha), seed)


def test_an_alpha_that_is_no_weight_is_refused() -> None:
    for alpha in [-0.1, float("nan"), float("inf")]:
        with pytest.raises(InvalidRequestError, match="alpha"):
            MarconiEviction(AccessHistory(), alpha)


def test_every_density_has_the_class_that_is_nearest() -> None:
    assert efficiency_class(LEAST_DENSITY) == 0
    assert efficiency_class(MOST_DENSITY) == len(EFFICIENCIES) - 1
    for density in np.geomspace(LEAST_DENSITY, MOST_DENSITY, 999).tolist():
        assert 0.95 < EFFICIENCIES[efficiency_class(density)] / density < 1.05


ALPHAS = (0.0, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _few_alphas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marconi, "ALPHAS", ALPHAS)


@pytest.fixture
def let_win(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make shadows that are good where alpha is one's, and LRU elsewhere."""

    def let(good: float) -> None:
        def make(kinds: Sequence[int], alpha: float) -> EvictionPolicy:
            return Favourite(kinds, is_good=alpha == good)

        monkeypatch.setattr(marconi, "_make_shadow", make)

    return let


class Favourite(LruEviction):
    """Keeps the chunk of the highest class, if alpha is its own."""

    def __init__(self, kinds: Collection[int], *, is_good: bool) -> None:
        super().__init__()
        self.kinds, self.best, self.is_good = list(kinds), max(kinds), is_good

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        order = list(super().victims(keep, now_s))
        yield from sorted(order, key=self._is_best) if self.is_good else order

    def _is_best(self, chunk: int) -> bool:
        return chunk < len(self.kinds) and self.kinds[chunk] == self.best


def tune(*, twice: bool = False, until: int = 400) -> tuple[AlphaTuner, int]:
    """Let one chunk come again after every four others that never do; return the tuner, and
    after how many requests it knew."""
    tuner = AlphaTuner()
    for number in range(400):
        is_again = number % 5 <= twice and number < until
        tuner.requested([(1, 10, 8)] if is_again else [])
        if not is_again:
            tuner.stored(NO_ROW, 2 + number % 90, 10, 0)
        if number == 10:
            tuner.evicting(30)
        if tuner.alpha is not None:
            return tuner, number + 1
    return tuner, 400


def test_the_alpha_that_saves_most_is_taken(let_win: Callable[[float], None]) -> None:
    for good in ALPHAS:
        let_win(good)
        assert tune()[0].alpha == good


def test_the_first_alpha_stays_unless_another_saves_clearly_more(
    let_win: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for twice in a row the chunk is found once by LRU too: half of what can be."""
    let_win(0.5)
    for hysteresis, alpha in ((0.9, 0.5), (1.1, 0.0)):
        monkeypatch.setattr(marconi, "HYSTERESIS", hysteresis)
        assert tune(twice=True)[0].alpha == alpha
    let_win(7.0)
    assert tune()[0].alpha == 0.0


def test_only_the_last_requests_count(
    let_win: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk that one alpha would have kept was asked for in the first requests alone."""
    let_win(0.5)
    for scored, alpha in ((500, 0.5), (20, 0.0)):
        monkeypatch.setattr(marconi, "SCORED_REQUESTS", scored)
        assert tune(until=30)[0].alpha == alpha


def test_the_replay_is_done_in_slices_that_are_no_longer_than_the_limit(
    let_win: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_win(0.5)
    knew = {}
    for chunks in (1, 3, 1000):
        monkeypatch.setattr(marconi, "SLICE_CHUNKS", chunks)
        knew[chunks] = tune()[1]
    recorded = 55 * len(ALPHAS)
    assert knew[1] - 55 >= recorded - 3
    assert abs((knew[1] - 55) / 3 - (knew[3] - 55)) <= 2
    assert knew[1000] == 56


def test_what_is_recorded_has_a_limit_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marconi, "RECORDED_CHUNKS", 100)
    monkeypatch.setattr(marconi, "SLICE_CHUNKS", 10**6)
    tuner = AlphaTuner()
    for number in range(5000):
        tuner.requested([(1 + one, 10, 0) for one in range(number % 130)])
        assert len(tuner._recorded) == 100
    tuner.evicting(1000)
    for _ in range(30_000):
        tuner.requested([(1, 10, 0)])
    assert tuner.alpha == 0.0
    assert not len(tuner._recorded)


def test_a_policy_takes_over_the_alpha_that_its_tuner_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of many flops come again after a while, those of few never do."""
    monkeypatch.setattr(marconi, "ALPHAS", (0.0, 1.0))
    monkeypatch.setattr(marconi, "SLICE_CHUNKS", 10_000)
    history = AccessHistory()
    policy = MarconiEviction(history)
    here: dict[int, None] = {}
    fresh = 100
    for number in range(400):
        chunk = 1 + number % 5 if number % 10 == 0 else (fresh := fresh + 1)
        dear = chunk < 100
        known = np.array([chunk] if chunk in here else [], np.intp)
        policy.touch(known, 0.0)
        if not len(known):
            history.seen_chain(
                np.array([chunk]), NO_ROW, InsertInfo(flops=9e9 if dear else 1e9), 0.0
            )
            while len(here) >= 8:
                victim = next(policy.victims(keep_none, 0.0))
                policy.remove(victim)
                del here[victim]
            policy.insert(chunk, NO_ROW, 100, 0.0)
            here[chunk] = None
        if number == 30:
            assert policy.alpha == 0.0
    assert policy.alpha == 1.0


def density_of(*flops: float) -> FlopDensity:
    """Rows from 1 on of these flops, 0 where they are not known."""
    history = AccessHistory()
    for number, each in enumerate(flops, 1):
        history.seen_chain(np.array([number]), NO_ROW, InsertInfo(flops=each), 0.0)
    return FlopDensity(history)


def test_a_density_is_a_multiple_of_the_mean_so_far() -> None:
    density = density_of(1e9, 3e9, 2e9)
    assert [density.of(1, 100), density.of(2, 100)] == [1.0, 1.5]
    assert density.of(3, 200) == pytest.approx(1e7 / (5e7 / 3))
    density = density_of(0.0, 500.0)  # what is not known counts as the mean and changes nothing
    assert density.of(1, 100) == density.of(99, 100) == density.of(2, 0) == density.of(2, 100) == 1


def test_a_lie_about_one_chunk_does_not_last() -> None:
    for flops in [1e308, 5e-324]:
        density = density_of(flops, 1e9)
        assert LEAST_DENSITY <= density.of(1, 1) <= MOST_DENSITY
        for _ in range(400_000):
            density.of(2, 100)
        assert density.of(2, 100) == pytest.approx(1.0, rel=0.01)
        for _ in range(10):
            assert LEAST_DENSITY <= density.of(1, 1 << 50) <= MOST_DENSITY
        assert 0.2 < density.of(2, 100) < 5.0
