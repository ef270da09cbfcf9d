"""Every policy by the contract; LRU, hints and learned scores against plain oracles."""

from __future__ import annotations

import json
import math
import random
from itertools import islice

import numpy as np
import pytest
from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule
from contracts.policy import PolicyContract, above, keep_none, row, rows, tell
from data.traces.train_scorer import to_json
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import POLICIES, REPLACED_POLICIES
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
from kvstore.server.eviction.lru import DiscardHintEviction, LruEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy


class NamedPolicyContract(PolicyContract):
    """The contract for the policy that is called ``name``, beside the history it ranks by."""

    name = ""

    @override
    def make_policy(self) -> EvictionPolicy:
        return make_policy(self.name, AccessHistory())

    @override
    def make_pair(self) -> tuple[EvictionPolicy, AccessHistory]:
        history = AccessHistory()
        return make_policy(self.name, history), history


class TestLru(NamedPolicyContract):
    name = "lru"


class TestMarconi(NamedPolicyContract):
    name = "marconi"


class TestDiscardBit(NamedPolicyContract):
    name = "discard_hint"


class TestLearned(NamedPolicyContract):
    name = "learned"


class TestHitDensity(NamedPolicyContract):
    name = "hit_density"


def test_every_policy_that_has_a_name_is_held_to_the_contract() -> None:
    assert {kind.name for kind in NamedPolicyContract.__subclasses__()} == set(POLICIES)


def test_a_name_that_is_no_policys_is_refused_with_those_that_are_or_its_successor() -> None:
    with pytest.raises(InvalidRequestError, match="hit_density"):
        make_policy("fifo", AccessHistory())
    with pytest.raises(InvalidRequestError, match="chunk_tokens"):
        AccessHistory(0)
    for name, successor in REPLACED_POLICIES.items():
        with pytest.raises(InvalidRequestError, match=f"{name}.*: {successor}, which replaces"):
            make_policy(name, AccessHistory())


class LeafLru(PlainLeaves):
    """Of the leaves that may go, the one used longest ago."""

    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=self.used.__getitem__)


class PlainDiscard(PlainLeaves):
    """First what is labelled to be discarded."""

    def __init__(self, history: AccessHistory) -> None:
        super().__init__()
        self.history = history

    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda leaf: (self.history.reuse_of(leaf) != 1, self.used[leaf]))


def test_any_schedule_agrees_with_the_plain_oracle() -> None:
    for seed in range(60):
        agree_on_any_schedule(LruEviction(), LeafLru(), seed)


def test_any_schedule_with_hints_agrees_with_the_plain_model() -> None:
    for seed in range(20):
        draw, history = random.Random(seed), AccessHistory()
        policy, model = DiscardHintEviction(history), PlainDiscard(history)
        for _ in range(200):
            number, other = draw.randrange(24), draw.randrange(24)
            match draw.randrange(5):
                case 0 | 1:
                    tell(history, number, 0.0, 0.0)
                    history.hint(rows([number]), draw.randrange(3))
                    policy.insert(row(number), above(number), 100, 0.0)
                    model.insert(row(number), above(number), 100)
                case 2:
                    policy.touch(rows([number, other]), 0.0)
                    model.touch([row(number), row(other)])
                case 3:
                    history.hint(rows([number, other]), draw.randrange(3))
                case 4:
                    for victim in model.victims((), 2):
                        policy.remove(victim)
                        model.remove(victim)
            kept = [row(n) for n in range(24) if draw.random() < 0.1]
            assert list(policy.victims(kept.__contains__, 0.0)) == model.victims(kept, 99)


class BySize:
    """Keeps what is large; moves the clock by what a decision is to take."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now_s, self.takes_s = 0.0, takes_s
        self.asked: list[Features] = []

    def score(self, features: Features) -> NDArray[np.float64]:
        self.asked.append(features)
        self.now_s += self.takes_s
        return features[:, FEATURES.index("size_bytes")]

    def clock(self) -> float:
        return self.now_s


def fill(policy: LruEviction, count: int) -> None:
    for chunk in range(1, count + 1):
        policy.insert(chunk, NO_ROW, 1000 - chunk, 0.0)


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> BySize:
    monkeypatch.setattr(learned, "CANDIDATES", 16)
    return BySize()


def test_the_least_scores_of_the_oldest_leaves_go_first(scorer: BySize) -> None:
    policy = LearnedEviction(AccessHistory(), scorer.score)
    fill(policy, 40)
    # Of 1 to 16 the quarter with the least, then 1 to 12 and the next four are looked at.
    assert list(islice(policy.victims(keep_none, 0.0), 8)) == [16, 15, 14, 13, 20, 19, 18, 17]


def test_a_scorer_that_is_too_slow_is_not_heard_and_lru_decides() -> None:
    for seed in range(3):
        scorer = BySize(takes_s=2 * BUDGET_S)
        policy = LearnedEviction(AccessHistory(), scorer.score, clock=scorer.clock)
        agree_on_any_schedule(policy, LeafLru(), seed)
        assert policy.fallbacks == len(scorer.asked) > 50


def test_one_that_gets_slow_on_the_way_leaves_the_rest_to_lru(scorer: BySize) -> None:
    scorer.takes_s = 0.9 * BUDGET_S
    policy = LearnedEviction(AccessHistory(), scorer.score, clock=scorer.clock)
    fill(policy, 30)
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


@pytest.mark.parametrize("is_another", [True, False])
def test_uses_are_remembered_over_an_eviction_but_not_for_another_chunk(is_another: bool) -> None:
    history = AccessHistory()
    policy = LearnedEviction(history, BySize().score)
    history.seen_chain(np.array([1]), NO_ROW, InsertInfo(), 0.0)
    policy.insert(1, NO_ROW, 100, 0.0)
    policy.touch(np.array([1]), 0.0)
    policy.remove(1)
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


def test_weights_that_are_not_as_they_were_written_are_refused() -> None:
    def changed(**fields: object) -> str:
        return json.dumps({**json.loads(WEIGHTS.read_text()), **fields})

    for text in [
        *("", "[1]", "[" * 100_000, changed(version=2), changed(features=["age_s"])),
        *(changed(stumps=[[0, 1.0, 2.0, 3.0]]), changed(stumps=[[0, 1.0]]), changed(sha256=None)),
    ]:
        with pytest.raises(InvalidRequestError, match="weights"):
            StumpScorer.from_json(text)
    for count in (0, MAX_STUMPS + 1):
        with pytest.raises(InvalidRequestError, match="stumps"):
            StumpScorer([Stump(0, 0.0, 0.0, 0.0)] * count)
