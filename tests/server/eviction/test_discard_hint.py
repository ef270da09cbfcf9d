"""Order tests of DiscardHintEviction, by hand and against the plainest model there is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from contracts.plain_leaves import PlainLeaves, play
from contracts.policy import above, everyone, keep_none, row, rows
from typing_extensions import override

from kvstore.cli.simulate import BlockReplay
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.lru import DiscardHintEviction, LruEviction


def knowing(discarded: str, kept: str = "") -> DiscardHintEviction:
    history = AccessHistory()
    for name in "123456":
        reuse = 1 if name in discarded else 2 if name in kept else 0
        history.seen_chain(np.array([int(name)]), NO_ROW, InsertInfo(reuse=reuse), 0.0)
    return DiscardHintEviction(history)


@pytest.mark.parametrize(
    ("discarded", "events", "order"),
    [
        ("", "1 2 3 t1", "231"),
        ("3", "1 2 3", "312"),
        ("13", "1 2 3 t1", "312"),
        ("123", "1 2 3 t2", "132"),
        # A parent that is discarded waits for what continues it, and then goes next.
        ("1", "1 2<1 3", "213"),
        ("12", "1 2<1 3", "213"),
        ("12", "3 1 2<1", "213"),
        ("1", "3 1 2<1 t3 t12", "321"),
        # One that is not discarded takes its place by its use.
        ("2", "1 2<1 3 t1", "231"),
    ],
)
def test_the_discarded_go_first_and_lru_decides_among_equals(
    discarded: str, events: str, order: str
) -> None:
    policy = knowing(discarded)
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


def test_a_keep_hint_is_as_good_as_none() -> None:
    policy = knowing("", kept="1")
    play(policy, "1 2 3")
    assert everyone(policy) == [1, 2, 3]


def test_a_hint_that_comes_later_is_followed_and_so_is_the_next() -> None:
    history = AccessHistory()
    policy = DiscardHintEviction(history)
    for chunk in (1, 2, 3, 4):
        history.seen_chain(np.array([chunk]), NO_ROW, NO_INFO, 0.0)
    play(policy, "1 2 3 4")
    history.hint(np.array([3]), 1)
    assert everyone(policy) == [3, 1, 2, 4]
    history.hint(np.array([2, 4]), 1)
    assert everyone(policy) == [2, 3, 4, 1]
    history.hint(np.array([3]), 2)
    assert everyone(policy) == [2, 4, 1, 3]
    play(policy, "t4 -2")
    assert everyone(policy) == [4, 1, 3]


class PlainDiscard(PlainLeaves):
    def __init__(self, history: AccessHistory) -> None:
        super().__init__()
        self.history = history

    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda leaf: (self.history.reuse_of(leaf) != 1, self.used[leaf]))


@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_agrees_with_the_plain_model(seed: int) -> None:
    draw = random.Random(seed)
    history = AccessHistory()
    policy, model = DiscardHintEviction(history), PlainDiscard(history)
    for _ in range(200):
        number = draw.randrange(24)
        match draw.randrange(5):
            case 0 | 1:
                history.seen_chain(
                    np.array([row(number)]), above(number), InsertInfo(reuse=draw.randrange(3)), 0.0
                )
                policy.insert(row(number), above(number), 100, 0.0)
                model.insert(row(number), above(number), 100)
            case 2:
                numbers = [draw.randrange(24) for _ in range(draw.randrange(5))]
                policy.touch(rows(numbers), 0.0)
                model.touch([row(one) for one in numbers])
            case 3:
                history.hint(rows([number, draw.randrange(24)]), draw.randrange(3))
            case 4:
                for victim in model.victims((), 2):
                    policy.remove(victim)
                    model.remove(victim)
        assert list(policy.victims(keep_none, 0.0)) == model.victims((), 99)


def hits(policy: LruEviction | DiscardHintEviction, history: AccessHistory, wrong: float) -> int:
    """Half of 20 prompts come again and again, the others once; hints are wrong so often."""
    draw = random.Random(3)
    replay = BlockReplay(policy, history, 12)
    for number in range(2000):
        again = draw.random() < 0.5
        block = draw.randrange(10) if again else 100 + number
        is_wrong = draw.random() < wrong
        replay.request([block], 1, float(number), InsertInfo(reuse=2 if again != is_wrong else 1))
    return replay.hit_blocks


def test_right_hints_are_worth_much_and_wrong_ones_cost_as_much() -> None:
    """It is not robust, and says so."""
    lru = hits(LruEviction(), AccessHistory(), 0.0)
    right, wrong = AccessHistory(), AccessHistory()
    assert hits(DiscardHintEviction(right), right, 0.0) > 1.3 * lru
    assert hits(DiscardHintEviction(wrong), wrong, 1.0) < 0.3 * lru
