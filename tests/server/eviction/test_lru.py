"""LruEviction and DiscardHintEviction against the plainest oracles there are; their queues."""

from __future__ import annotations

import random
from array import array

from contracts.plain_leaves import PlainLeaves, agree_on_any_schedule
from contracts.policy import above, row, rows, tell
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from typing_extensions import override

from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import ClassQueues, DiscardHintEviction, LruEviction
from kvstore.server.eviction.policy import Columns


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


_KINDS, _ROWS = 3, 40


def _queues(order: array[int], limit: int = 1) -> ClassQueues:
    """Return queues with room for as many rows as *order* has."""
    columns = Columns()
    columns.reach(len(order))
    return ClassQueues(order, columns, limit)


def _backwards(queues: ClassQueues, kind: int) -> list[int]:
    return list(queues.walk_back(kind, with_late=False))


class QueuesMachine(RuleBasedStateMachine):
    """Rows come to the end or in between, and go from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.order = array("Q", bytes(8 * (_ROWS + 1)))
        self.queues = _queues(self.order, _KINDS)
        self.model: dict[int, int] = {}
        self.tick = 1000

    @rule(row=st.integers(1, _ROWS), kind=st.integers(0, _KINDS - 1))
    def append(self, row: int, kind: int) -> None:
        if row not in self.model:
            self.tick += 1
            self.order[row] = self.tick
            self.queues.append(row, kind)
            self.model[row] = kind

    @rule(row=st.integers(1, _ROWS), kind=st.integers(0, _KINDS - 1), at=st.integers(0, 1000))
    def place(self, row: int, kind: int, at: int) -> None:
        taken = {self.order[other] for other in self.model}
        if row not in self.model and at not in taken:
            self.order[row] = at
            self.queues.place(row, kind)
            self.model[row] = kind

    @rule(row=st.integers(1, _ROWS))
    def remove(self, row: int) -> None:
        if self.model.pop(row, None) is not None:
            self.queues.remove(row)

    @invariant()
    def every_queue_is_in_order(self) -> None:
        for kind in range(_KINDS):
            rows = sorted(
                (r for r, k in self.model.items() if k == kind), key=self.order.__getitem__
            )
            assert list(self.queues.walk(kind)) == rows
            back = _backwards(self.queues, kind)
            ends = self.queues.ends(_KINDS)[2 * kind : 2 * kind + 2]
            assert ends.tolist() == [(rows or [0])[0], (back or [0])[0]]
            assert back == [row for row in reversed(rows) if row in back]
            assert list(self.queues.walk_back(kind)) == rows[::-1]
            assert set(back) <= set(rows)

    @invariant()
    def classes_are_those_with_rows(self) -> None:
        assert self.queues.kinds() == sorted(set(self.model.values()))


TestQueues = QueuesMachine.TestCase
TestQueues.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_row_far_from_both_ends_waits_aside_and_comes_in_its_turn() -> None:
    order = array("Q", [0, *(10 * at for at in range(1, 101)), 505])
    queues = _queues(order)
    for at in range(1, 101):
        queues.append(at, 0)
    queues.place(101, 0)
    assert list(queues.walk()) == [*range(1, 51), 101, *range(51, 101)]
    assert 101 not in _backwards(queues, 0)
    for at in range(1, 51):
        queues.remove(at)
    assert queues.ends(1).tolist() == [101, 100]
    queues.remove(101)
    assert list(queues.walk()) == list(range(51, 101))
