"""Order tests of LruEviction, against a table and against the plainest oracle there is."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import islice

import numpy as np
import pytest
from contracts.policy import PolicyContract, Tree, above, everyone, row, rows
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.lru import LruEviction


class TestLruContract(PolicyContract):
    @override
    def make_policy(self) -> LruEviction:
        return LruEviction()


def play(events: str) -> LruEviction:
    """``1`` inserts row 1, ``2<1`` one that continues it, ``t12`` touches, ``-1`` removes."""
    policy = LruEviction()
    for event in events.split():
        if event[0] == "t":
            policy.touch(np.array([int(name) for name in event[1:]]), 0.0)
        elif event[0] == "-":
            policy.remove(int(event[1]))
        else:
            policy.insert(int(event[0]), int(event[2]) if "<" in event else NO_ROW, 100, 0.0)
    return policy


@pytest.mark.parametrize(
    ("events", "order"),
    [
        ("1 2 3", "123"),
        ("1 2 3 t1", "231"),
        ("1 2 3 1", "231"),
        ("1 2 3 t1 t2 t3", "123"),
        ("1 2<1 3<2", "321"),
        ("1 2<1 3", "213"),
        ("1 2<1 3 t2", "321"),
        ("1 2<1 3 t12", "321"),
        ("1 2<1 3<1 t2", "321"),
        ("1 2<1 3<1 t12 t13", "231"),
        ("1 2<1 3<2 4<2 t123 4", "3421"),
        ("2<1 3 1", "231"),
        ("1 2<1 3 -2", "13"),
        ("1 2<1 3<2 -2", "13"),
        ("1 2<1 3<2 -2 2<1", "321"),
        ("1 2<1 -1 3", "23"),
        ("1 2 -1 1", "21"),
    ],
)
def test_victims_come_in_the_order_of_use_leaves_first(events: str, order: str) -> None:
    assert everyone(play(events)) == [int(name) for name in order]


def test_the_end_of_a_chain_counts_as_older_than_its_beginning() -> None:
    policy = play("1 2<1 3<2 4 5<4 6<5 t456 t123")
    assert everyone(policy) == [6, 5, 4, 3, 2, 1]


def test_a_chunk_that_is_exposed_late_takes_its_place_by_its_use() -> None:
    """1 was used alone between 3 and 4, then lost its child: neither oldest nor newest."""
    policy = play("1 2<1 3 t1 4 5 -2")
    assert everyone(policy) == [3, 1, 4, 5]
    policy.touch(np.array([3]), 0.0)
    assert everyone(policy) == [1, 4, 5, 3]
    policy.insert(2, 1, 100, 0.0)
    assert everyone(policy) == [4, 5, 3, 2, 1]
    policy.remove(2)
    policy.remove(1)
    assert everyone(policy) == [4, 5, 3]


def test_a_chunk_named_twice_in_a_chain_is_used_once() -> None:
    policy = play("1 2 3 t1212")
    assert everyone(policy) == [3, 2, 1]
    assert everyone(play("1 2<1 3 t1212")) == [3, 2, 1]


class LeafLru:
    """Leaf-LRU as one would say it: of the leaves that may go, the one used longest ago."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.used: dict[int, int] = {}
        self.time = 0

    def _use(self, chunk: int) -> None:
        self.time += 1
        self.used[chunk] = self.time

    def insert(self, chunk: int, parent: int) -> None:
        self.tree[chunk] = parent
        self._use(chunk)

    def touch(self, chunks: list[int]) -> None:
        for chunk in reversed([chunk for chunk in chunks if chunk in self.tree]):
            self._use(chunk)

    def remove(self, chunk: int) -> None:
        self.tree.pop(chunk, None)
        self.used.pop(chunk, None)

    def victims(self, kept: Collection[int], limit: int) -> list[int]:
        left = dict(self.tree)
        chosen: list[int] = []
        while len(chosen) < limit:
            leaves = [c for c in left if c not in left.values() and c not in kept]
            if not leaves:
                break
            chosen.append(min(leaves, key=self.used.__getitem__))
            del left[chosen[-1]]
        return chosen


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_agrees_with_the_plain_oracle(seed: int) -> None:
    draw = random.Random(seed)
    policy, oracle = LruEviction(), LeafLru()
    for _ in range(300):
        number = draw.randrange(24)
        match draw.randrange(5):
            case 0 | 1:
                policy.insert(row(number), above(number), 100, 0.0)
                oracle.insert(row(number), above(number))
            case 2:
                numbers = [draw.randrange(24) for _ in range(draw.randrange(5))]
                policy.touch(rows(numbers), 0.0)
                oracle.touch([row(number) for number in numbers])
            case 3:
                policy.remove(row(number))
                oracle.remove(row(number))
        kept = [row(n) for n in range(24) if draw.random() < 0.2]
        limit = draw.randrange(25)
        victims = list(islice(policy.victims(kept.__contains__, 0.0), limit))
        assert victims == oracle.victims(kept, limit)
