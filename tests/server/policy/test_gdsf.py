"""Order tests of GdsfEviction, by hand and against the plainest model there is."""

from __future__ import annotations

import numpy as np
import pytest
from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule, play
from contracts.policy import everyone
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.gdsf import GdsfEviction
from kvstore.server.policy.history import Facts, History


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
    policy = GdsfEviction(History())
    play(policy, events)
    assert everyone(policy) == [int(name) for name in order]


def test_deleting_what_is_used_most_does_not_push_the_clock_ahead() -> None:
    policy = GdsfEviction(History())
    play(policy, "1 2 5 t1 t1 t1 t1 t1 t5 t5 t5 -1 3")
    assert everyone(policy) == [2, 3, 5]


def put(policy: GdsfEviction, history: History, row: int, flops: float, size_bytes: int) -> None:
    history.seen(row, NO_ROW, Facts(flops=flops), 0.0)
    policy.insert(row, NO_ROW, size_bytes, 0.0)


def test_a_chunk_whose_bytes_save_less_goes_first() -> None:
    history = History()
    policy = GdsfEviction(history)
    put(policy, history, 1, 2e9, 100)
    put(policy, history, 2, 1e9, 100)
    put(policy, history, 3, 2e9, 400)
    put(policy, history, 4, 8e9, 400)
    assert everyone(policy) == [3, 2, 1, 4]


def test_without_flops_all_chunks_are_worth_the_same_whatever_their_size() -> None:
    history = History()
    policy = GdsfEviction(history)
    for row, size_bytes in ((1, 1000), (2, 1), (3, 100)):
        put(policy, history, row, 0.0, size_bytes)
    assert everyone(policy) == [1, 2, 3]
    unweighed = GdsfEviction(history, weighs_flops=False)
    put(unweighed, history, 1, 9e9, 100)
    put(unweighed, history, 2, 1e9, 100)
    assert everyone(unweighed) == [1, 2]


def test_a_unit_of_flops_makes_no_difference() -> None:
    orders = []
    for unit in (1.0, 1e3, 1e15):
        history = History()
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
def test_any_schedule_agrees_with_the_plain_model(seed: int) -> None:
    agree_on_any_schedule(GdsfEviction(History()), PlainGdsf(), seed)
