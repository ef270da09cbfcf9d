"""The adaptive policy for each tenant apart: each gets what suits what it asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import numpy as np

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.adaptive import AdaptiveEviction
from kvstore.server.policy.history import History
from kvstore.server.policy.partitions import NO_QUOTA, PartitionedEviction

HALF = 60
"""Chunks that each tenant's share has room for."""


def moving(draw: random.Random) -> Iterator[int]:
    """Odd rows: a set that is asked for again and again and then never more, as LRU likes it."""
    for phase in range(10_000):
        for _ in range(12):
            yield from (1 + 2 * (50 * phase + at) for at in range(50))


def scanned(draw: random.Random) -> Iterator[int]:
    """Even rows: a few that always return between floods that never do, as LFU likes it."""
    fresh = 1000
    while True:
        yield from (2 + 2 * at for at in draw.sample(range(40), 40))
        yield from (2 * (fresh + at) for at in range(80))
        fresh += 80


def ask(policy: PartitionedEviction, here: set[int], row: int, now_s: float) -> None:
    if row in here:
        policy.touch(np.array([row], np.intp), now_s)
        return
    if len(here) >= 2 * HALF:
        victim = next(policy.victims(lambda one: False, now_s))
        policy.remove(victim)
        here.discard(victim)
    here.add(row)
    policy.insert(row, NO_ROW, 1, now_s)


def test_two_tenants_follow_what_suits_each() -> None:
    history = History()
    policy = PartitionedEviction(
        lambda: AdaptiveEviction(history, ("lfu", "lru")),
        lambda row: 1 + (row % 2 == 0),
        (NO_QUOTA,) * 3,
        2 * HALF,
    )
    here: set[int] = set()
    draw = random.Random(1)
    pairs = zip(moving(draw), scanned(draw), strict=False)
    for at, (one, other) in enumerate(islice(pairs, 3600)):
        ask(policy, here, one, float(at))
        ask(policy, here, other, float(at))
    mover, scanner = policy.parts[1], policy.parts[2]
    assert isinstance(mover, AdaptiveEviction)
    assert isinstance(scanner, AdaptiveEviction)
    assert (mover.why().policy, scanner.why().policy) == ("lru", "lfu")
    assert mover.why().hit_ratios["lru"] > scanner.why().hit_ratios["lru"]  # type: ignore[operator]
