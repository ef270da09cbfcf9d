"""Order tests of LruEviction, against a table and against the plainest oracle there is."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from contracts.policy import ALL, PolicyContract, info, keep_none, key, tree_info
from typing_extensions import override

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.policy.lru import LruEviction


class TestLruContract(PolicyContract):
    @override
    def make_policy(self) -> LruEviction:
        return LruEviction()


def play(events: str) -> LruEviction:
    """``1`` inserts chunk 1, ``2<1`` one that continues it, ``t12`` touches, ``-1`` removes."""
    policy = LruEviction()
    for event in events.split():
        if event[0] == "t":
            policy.touch([key(int(name)) for name in event[1:]])
        elif event[0] == "-":
            policy.remove(key(int(event[1])))
        else:
            policy.insert(info(int(event[0]), int(event[2]) if "<" in event else None))
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
    assert play(events).victims(ALL, keep_none, ALL) == [key(int(name)) for name in order]


def test_the_end_of_a_chain_counts_as_older_than_its_beginning() -> None:
    policy = play("1 2<1 3<2 4 5<4 6<5")
    policy.touch([key(4), key(5), key(6)])
    policy.touch([key(1), key(2), key(3)])
    assert policy.victims(ALL, keep_none, ALL) == [key(n) for n in (6, 5, 4, 3, 2, 1)]


def test_victims_stop_as_soon_as_enough_is_freed() -> None:
    policy = LruEviction()
    for number, size_bytes in enumerate((10, 20, 30, 40)):
        policy.insert(info(number, None, size_bytes))
    assert policy.victims(30, keep_none, ALL) == [key(0), key(1)]
    assert policy.victims(31, keep_none, ALL) == [key(0), key(1), key(2)]
    assert policy.victims(30, lambda chunk: chunk == key(1), ALL) == [key(0), key(2)]


class LeafLru:
    """Leaf-LRU as one would say it: of the leaves that may go, the one used longest ago."""

    def __init__(self) -> None:
        self.infos: dict[ChunkKey, ChunkInfo] = {}
        self.used: dict[ChunkKey, int] = {}
        self.time = 0

    def _use(self, chunk: ChunkKey) -> None:
        self.time += 1
        self.used[chunk] = self.time

    def insert(self, chunk: ChunkInfo) -> None:
        self.infos[chunk.key] = chunk
        self._use(chunk.key)

    def touch(self, keys: list[ChunkKey]) -> None:
        for chunk in reversed([chunk for chunk in keys if chunk in self.infos]):
            self._use(chunk)

    def remove(self, chunk: ChunkKey) -> None:
        self.infos.pop(chunk, None)
        self.used.pop(chunk, None)

    def victims(self, need_bytes: int, kept: Collection[ChunkKey], limit: int) -> list[ChunkKey]:
        left = dict(self.infos)
        chosen: list[ChunkKey] = []
        while need_bytes > 0 and len(chosen) < limit:
            parents = {chunk.parent_key for chunk in left.values()}
            leaves = [chunk for chunk in left if chunk not in parents and chunk not in kept]
            if not leaves:
                break
            chosen.append(min(leaves, key=self.used.__getitem__))
            need_bytes -= left.pop(chosen[-1]).size_bytes
        return chosen


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_agrees_with_the_plain_oracle(seed: int) -> None:
    draw = random.Random(seed)
    policy, oracle = LruEviction(), LeafLru()
    for _ in range(300):
        number = draw.randrange(24)
        match draw.randrange(5):
            case 0 | 1:
                policy.insert(tree_info(number))
                oracle.insert(tree_info(number))
            case 2:
                keys = [key(draw.randrange(24)) for _ in range(draw.randrange(5))]
                policy.touch(keys)
                oracle.touch(keys)
            case 3:
                policy.remove(key(number))
                oracle.remove(key(number))
        kept = [key(n) for n in range(24) if draw.random() < 0.2]
        need_bytes, limit = draw.randrange(2_000), draw.randrange(25)
        victims = policy.victims(need_bytes, kept.__contains__, limit)
        assert victims == oracle.victims(need_bytes, kept, limit)
