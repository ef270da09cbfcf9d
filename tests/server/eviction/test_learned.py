"""LearnedEviction: whom a scorer picks, what it is told, and what happens when it is slow."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from contracts.plain_leaves import play
from contracts.policy import above, everyone, keep_none, row, rows
from data.traces.train_scorer import to_json
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction import learned
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.learned import (
    BUDGET_S,
    FEATURES,
    MAX_STUMPS,
    WEIGHTS,
    Features,
    LearnedEviction,
    Stump,
    StumpScorer,
)
from kvstore.server.eviction.lru import LruEviction


class BySize:
    """Keeps what is large; moves the clock by what a decision is to take."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.takes_s = takes_s
        self.asked: list[Features] = []

    def score(self, features: Features) -> NDArray[np.float64]:
        self.asked.append(features)
        self.now_s += self.takes_s
        return features[:, FEATURES.index("size_bytes")]

    def clock(self) -> float:
        return self.now_s


def fill(policy: LruEviction, count: int, size_of: Callable[[int], int]) -> None:
    for chunk in range(1, count + 1):
        policy.insert(chunk, NO_ROW, size_of(chunk), 0.0)


@pytest.fixture
def _few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "CANDIDATES", 16)


@pytest.mark.usefixtures("_few_candidates")
def test_the_least_scores_of_the_oldest_leaves_go_first() -> None:
    policy = LearnedEviction(AccessHistory(), BySize().score)
    fill(policy, 40, lambda chunk: 1000 - chunk)
    # Of 1 to 16 the quarter with the least, then 1 to 12 and the next four are looked at.
    assert list(islice(policy.victims(keep_none, 0.0), 8)) == [16, 15, 14, 13, 20, 19, 18, 17]


@pytest.mark.usefixtures("_few_candidates")
def test_of_equal_scores_the_oldest_goes_first() -> None:
    policy = LearnedEviction(AccessHistory(), BySize().score)
    fill(policy, 20, lambda chunk: 100)
    policy.touch(np.array([1, 2]), 0.0)
    assert everyone(policy) == [*range(3, 21), 2, 1]


@pytest.mark.usefixtures("_few_candidates")
def test_a_chunk_that_is_kept_is_no_candidate() -> None:
    scorer = BySize()
    policy = LearnedEviction(AccessHistory(), scorer.score)
    fill(policy, 40, lambda chunk: chunk)
    assert next(policy.victims(lambda chunk: chunk < 20, 0.0)) == 20
    assert scorer.asked[0][:, 1].tolist() == list(range(20, 36))


def schedule(policies: list[LruEviction], seed: int) -> None:
    """Tell all policies the same and compare whom they name with what the first does."""
    draw = random.Random(seed)
    for _ in range(150):
        number = draw.randrange(100)
        numbers = [draw.randrange(100) for _ in range(3)]
        size_bytes = draw.randrange(1, 1000)
        for policy in policies:
            policy.insert(row(number), above(number), size_bytes, 0.0)
            policy.touch(rows(numbers), 0.0)
        kept = {row(one) for one in range(100) if draw.random() < 0.2}
        first, *others = (list(policy.victims(kept.__contains__, 0.0)) for policy in policies)
        assert all(other == first for other in others)
        for victim in first[: draw.randrange(4)]:
            for policy in policies:
                policy.remove(victim)


def test_a_scorer_that_is_too_slow_is_not_heard_and_lru_decides() -> None:
    for seed in range(2):
        scorer = BySize(takes_s=2 * BUDGET_S)
        policy = LearnedEviction(AccessHistory(), scorer.score, clock=scorer.clock)
        schedule([LruEviction(), policy], seed)
        assert policy.fallbacks == len(scorer.asked) > 50


def test_a_scorer_that_keeps_its_time_is_heard() -> None:
    scorer = BySize(takes_s=0.9 * BUDGET_S)
    policy = LearnedEviction(AccessHistory(), scorer.score, clock=scorer.clock)
    fill(policy, 20, lambda chunk: 1000 - chunk)
    assert next(policy.victims(keep_none, 0.0)) == 20
    assert policy.fallbacks == 0


@pytest.mark.usefixtures("_few_candidates")
def test_one_that_gets_slow_on_the_way_leaves_the_rest_to_lru() -> None:
    scorer = BySize()
    policy = LearnedEviction(AccessHistory(), scorer.score, clock=scorer.clock)
    fill(policy, 30, lambda chunk: 1000 - chunk)
    victims = policy.victims(keep_none, 0.0)
    assert list(islice(victims, 4)) == [16, 15, 14, 13]
    scorer.takes_s = 1.0
    assert list(victims) == [*range(1, 13), *range(17, 31)]
    assert policy.fallbacks == 1


def test_features_are_those_of_the_uses_there_were() -> None:
    history = AccessHistory()
    policy = LearnedEviction(history, BySize().score)
    for chunk, flops in ((1, 1e9), (2, 3e9)):
        history.seen_chain(np.array([chunk]), NO_ROW, InsertInfo(flops=flops), 100.0)
        policy.insert(chunk, NO_ROW, 4096, 100.0)
    for now_s in (110.0, 130.0):
        policy.touch(np.array([1]), now_s)
    first, second = policy.features([1, 2], 150.0).tolist()
    assert first == [20.0, 4096.0, 3.0, 15.0, 1.0]
    assert second == [50.0, 4096.0, 1.0, math.inf, 1.5]


def test_a_clock_that_goes_back_makes_no_ages_below_zero() -> None:
    policy = LearnedEviction(AccessHistory(), BySize().score)
    policy.insert(1, NO_ROW, 100, 1000.0)
    policy.touch(np.array([1]), 10.0)
    assert policy.features([1], -5.0).min() >= 0.0


@pytest.mark.parametrize("is_another", [True, False])
def test_uses_are_remembered_over_an_eviction_but_not_for_another_chunk(
    *, is_another: bool
) -> None:
    history = AccessHistory()
    policy = LearnedEviction(history, BySize().score)
    history.seen_chain(np.array([1]), NO_ROW, InsertInfo(), 0.0)
    play(policy, "1 t1 -1")
    if is_another:
        history.forget_all(np.array([1]))
        history.seen_chain(np.array([1]), NO_ROW, InsertInfo(), 50.0)
    else:
        history.requested(np.array([1]), 1, 50.0)
    policy.insert(1, NO_ROW, 100, 50.0)
    uses, gap_s = policy.features([1], 50.0)[0, 2:4].tolist()
    assert (uses, gap_s) == ((1.0, math.inf) if is_another else (3.0, 25.0))


def test_a_score_is_the_sum_of_what_each_stump_says() -> None:
    scorer = StumpScorer([Stump(0, 10.0, 1.0, -2.0), Stump(2, 1.0, 0.0, 4.0)])
    features = np.zeros((4, len(FEATURES)))
    features[:, 0] = [10.0, 10.5, 3.0, math.inf]
    features[:, 2] = [1.0, 1.0, 2.0, 2.0]
    assert scorer.score(features).tolist() == [1.0, -2.0, 5.0, 2.0]


def test_the_weights_that_are_shipped_can_be_read_and_tell_chunks_apart() -> None:
    scorer = StumpScorer.from_json(WEIGHTS.read_text())
    assert to_json(scorer) == WEIGHTS.read_text().strip()
    features = np.full((2, len(FEATURES)), 1.0)
    features[:, 0] = [20.0, 20.0]
    features[:, 2] = [1.0, 5.0]
    once, often = scorer.score(features)
    assert once < often


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(WEIGHTS.read_text()), **fields})


def test_weights_that_are_not_as_they_were_written_are_refused() -> None:
    for text in [
        "",
        "[1]",
        "[" * 100_000,
        changed(version=2),
        changed(features=["age_s"]),
        changed(stumps=[[0, 1.0, 2.0, 3.0]]),
        changed(stumps=[[0, 1.0]]),
        changed(sha256=None),
    ]:
        with pytest.raises(InvalidRequestError, match="weights"):
            StumpScorer.from_json(text)


def test_the_number_of_stumps_has_a_limit() -> None:
    for count in [0, MAX_STUMPS + 1]:
        with pytest.raises(InvalidRequestError, match="stumps"):
            StumpScorer([Stump(0, 0.0, 0.0, 0.0)] * count)
