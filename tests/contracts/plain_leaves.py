"""The plainest model of a policy that evicts leaves first, and schedules to compare with it."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import islice

from contracts.policy import Tree, above, row, rows

from kvstore.server.eviction.policy import EvictionPolicy


class PlainLeaves:
    """Of the leaves that may go the least by rank goes, found by looking at all of them."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.sizes: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.time = 0

    def insert(self, chunk: int, parent: int, size_bytes: int) -> None:
        if chunk in self.tree:
            self.touch([chunk])
            return
        self.tree[chunk] = parent
        self.sizes[chunk] = size_bytes
        self.time += 1
        self.used[chunk] = self.time

    def touch(self, chunks: list[int]) -> None:
        here = [chunk for chunk in chunks if chunk in self.tree]
        for chunk in reversed(here):
            self.time += 1
            self.used[chunk] = self.time

    def remove(self, chunk: int) -> None:
        if chunk in self.tree:
            del self.tree[chunk]

    def choose(self, leaves: list[int]) -> int:
        """Return which of the leaves goes first."""
        raise NotImplementedError

    def leaves(self) -> list[int]:
        return [chunk for chunk in self.tree if chunk not in self.tree.values()]

    def victims(self, kept: Collection[int], limit: int) -> list[int]:
        whole, chosen = dict(self.tree), list[int]()
        while len(chosen) < limit:
            leaves = [chunk for chunk in self.leaves() if chunk not in kept]
            if not leaves:
                break
            chosen.append(self.choose(leaves))
            del self.tree[chosen[-1]]
        self.tree = whole
        return chosen


def agree_on_any_schedule(policy: EvictionPolicy, model: PlainLeaves, seed: int) -> None:
    """Let both see 300 events and hold each answer against the other's."""
    draw = random.Random(seed)
    for _ in range(300):
        number = draw.randrange(24)
        match draw.randrange(6):
            case 0 | 1:
                size_bytes = draw.choice([10, 100, 1000])
                policy.insert(row(number), above(number), size_bytes, 0.0)
                model.insert(row(number), above(number), size_bytes)
            case 2 | 3:
                numbers = [draw.randrange(24) for _ in range(draw.randrange(5))]
                policy.touch(rows(numbers), 0.0)
                model.touch([row(one) for one in numbers])
            case 4:
                policy.remove(row(number))
                model.remove(row(number))
            case 5:
                for victim in model.victims((), draw.randrange(3)):
                    policy.remove(victim)
                    model.remove(victim)
        kept = [row(n) for n in range(24) if draw.random() < 0.2]
        limit = draw.randrange(25)
        victims = list(islice(policy.victims(kept.__contains__, 0.0), limit))
        assert victims == model.victims(kept, limit)
