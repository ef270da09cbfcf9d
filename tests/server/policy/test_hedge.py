"""Weights of experts: who is trusted, how soon, and what is lost until then."""

from __future__ import annotations

import math
import random

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.policy.hedge import Hedge


def test_the_first_begins_with_as_much_as_all_others() -> None:
    assert Hedge(4).weights == [0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3]
    assert Hedge(1).weights == [1.0]


def test_leaders_have_half_of_the_weight_between_them() -> None:
    assert Hedge(5, 2).weights == [0.25, 0.25, 0.5 / 3, 0.5 / 3, 0.5 / 3]
    assert Hedge(2, 2).weights == [0.5, 0.5]


@pytest.mark.parametrize("wrong", [0, 4])
def test_there_are_no_more_leaders_than_experts(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match="leaders"):
        Hedge(3, wrong)


@pytest.mark.parametrize("wrong", [0, -1])
def test_there_has_to_be_an_expert(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match="experts"):
        Hedge(wrong)


def test_a_round_says_what_each_gained() -> None:
    hedge = Hedge(3)
    with pytest.raises(InvalidRequestError, match="gains"):
        hedge.learn([1.0, 2.0])
    assert hedge.weights == Hedge(3).weights


def test_while_all_gain_the_same_nothing_changes() -> None:
    hedge = Hedge(3)
    for _ in range(100):
        hedge.learn([7.0, 7.0, 7.0])
    assert hedge.weights == pytest.approx([0.5, 0.25, 0.25])


@pytest.mark.parametrize("best", range(4))
def test_who_is_always_ahead_is_soon_trusted_alone(best: int) -> None:
    hedge = Hedge(4)
    for _ in range(20):
        hedge.learn([11.0 if one == best else 10.0 for one in range(4)])
    assert hedge.weights[best] > 0.99


def test_those_that_take_turns_keep_about_their_shares() -> None:
    hedge = Hedge(2)
    for turn in range(200):
        hedge.learn([float(turn % 2), float(1 - turn % 2)])
    assert max(hedge.weights) < 0.7


def test_who_is_best_may_change() -> None:
    hedge = Hedge(2)
    for gains in [[2.0, 1.0]] * 300 + [[1.0, 2.0]] * 150:
        hedge.learn(gains)
    assert hedge.weights[1] > 0.9


def test_the_unit_of_gains_does_not_matter() -> None:
    random.seed(3)
    rounds = [[random.random() for _ in range(3)] for _ in range(60)]
    small, large = Hedge(3), Hedge(3)
    for gains in rounds:
        small.learn(gains)
        large.learn([1000.0 * gain for gain in gains])
    assert small.weights == pytest.approx(large.weights)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_to_the_best_is_bounded(seed: int) -> None:
    """Theorem 8 of the paper, of rounds whose gains are within 1, and the prior's share."""
    rng = random.Random(seed)
    hedge, mine, sums, rounds = Hedge(4), 0.0, [0.0] * 4, 40
    for _ in range(rounds):
        gains = [rng.random() for _ in range(4)]
        mine += sum(weight * gain for weight, gain in zip(hedge.weights, gains, strict=True))
        sums = [total + gain for total, gain in zip(sums, gains, strict=True)]
        hedge.learn(gains)
    size = math.log(6)
    assert max(sums) - mine < math.sqrt(rounds * size) + 4 * size / 3 + 2


def test_weights_add_up_to_one_whatever_the_gains() -> None:
    hedge = Hedge(3)
    for gains in ([0.0, 0.0, 0.0], [1e12, 0.0, 1.0], [0.0, 1e-12, 0.0], [0.0, 1e12, 1e12]):
        hedge.learn(gains)
        assert sum(hedge.weights) == pytest.approx(1.0)
        assert min(hedge.weights) >= 0.0
