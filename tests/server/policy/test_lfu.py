"""Order tests of LfuEviction, by hand and against the plainest model there is."""

from __future__ import annotations

import numpy as np
import pytest
from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule, play
from contracts.policy import everyone
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.history import NO_FACTS, History
from kvstore.server.policy.lfu import LfuEviction


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
    policy = LfuEviction(History())
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


class PlainLfu(PlainLeaves):
    @override
    def choose(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda chunk: (self.uses[chunk], self.used[chunk]))


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_agrees_with_the_plain_model(seed: int) -> None:
    agree_on_any_schedule(LfuEviction(History()), PlainLfu(), seed)


@pytest.mark.parametrize(("remembers", "order"), [(True, [2, 1]), (False, [1, 2])])
def test_the_count_goes_on_after_an_eviction_only_if_asked_for(
    *, remembers: bool, order: list[int]
) -> None:
    history = History()
    policy = LfuEviction(history, remembers=remembers)
    for chunk in (1, 2):
        history.seen(chunk, NO_ROW, NO_FACTS, 0.0)
    history.asked(np.array([1]), 1, 0.0)
    play(policy, "1 2")
    assert everyone(policy) == order


def test_a_count_that_is_full_stays_full() -> None:
    policy = LfuEviction(History())
    play(policy, "1 2")
    for _ in range(1 << 16):
        policy.touch(np.array([1]), 0.0)
    play(policy, "t2")
    assert everyone(policy) == [2, 1]
