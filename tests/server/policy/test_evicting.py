"""What is done at once is what is done one by one: runs that come, and victims that go."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.history import Facts, History
from kvstore.server.policy.hit_density import HitDensityEviction
from kvstore.server.policy.registry import POLICIES, make_policy

_ROOM = 400


class Cache:
    """A policy told of prompts, at once where it can be, or by the calls that name it all."""

    def __init__(self, name: str, *, at_once: bool) -> None:
        self.history = History(16)
        self.policy: EvictionPolicy = make_policy(name, self.history)
        self.at_once = at_once
        self.here: set[int] = set()
        self.next_row = 1
        self.gone: list[int] = []

    def ask(self, known: list[int], count: int, now_s: float, facts: Facts) -> list[int]:
        """Touch a chain and continue it by *count* new chunks; return all of it."""
        found = np.array(known, np.intp)
        self.history.asked(found, len(known) + count, now_s)
        self.policy.touch(found, now_s)
        first = self.next_row
        new = list(range(first, first + count))
        parent = known[-1] if known else NO_ROW
        self.make_room(count, {*known, *new}, now_s)
        if not count:
            return known
        self.next_row += count
        rows = np.array(new, np.intp)
        if self.at_once:
            self.history.meet(first, count, parent, facts, now_s)
            self.policy.insert_run(first, count, parent, 100, now_s)
        else:
            self.history.seen_chain(rows, parent, facts, now_s)
            self.policy.insert_chain(rows, parent, 100, now_s)
        self.here.update(new)
        return known + new

    def make_room(self, count: int, kept: set[int], now_s: float) -> None:
        most = len(self.here) + count - _ROOM
        if most <= 0:
            return
        keep = kept.__contains__
        if self.at_once:
            victims = self.policy.evict(most, keep, now_s)
        else:
            victims = list(islice(self.policy.victims(keep, now_s), most))
            self.policy.remove_all(victims)
        self.here.difference_update(victims)
        self.gone += victims


def replay(name: str, seed: int, *, at_once: bool) -> Cache:
    """Replay prompts that continue earlier ones from anywhere in them."""
    draw = random.Random(seed)
    cache = Cache(name, at_once=at_once)
    chains: list[list[int]] = [[]]
    now_s = 0.0
    for _ in range(900):
        now_s += draw.choice((0.0, 0.2, 3.0, 40.0))
        chain = draw.choice(chains[-30:])
        known = chain[: draw.randrange(len(chain) + 1)]
        missing = next((at for at, row in enumerate(known) if row not in cache.here), len(known))
        facts = Facts(tokens_full=draw.random() < 0.7, reuse=draw.randrange(3), group=7)
        chains.append(cache.ask(known[:missing], draw.randrange(30), now_s, facts))
    return cache


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_at_once_the_same_go_in_the_same_order(name: str, seed: int) -> None:
    at_once, in_steps = (replay(name, seed, at_once=which) for which in (True, False))
    assert len(at_once.gone) > 1_000
    assert at_once.gone == in_steps.gone
    assert len(at_once.policy) == len(at_once.here)


def test_leaves_whose_place_is_far_from_an_end_go_in_that_order_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a place is looked for in one step, many a bared parent is not near an end."""
    monkeypatch.setattr("kvstore.server.policy.class_queues._STEPS", 1)
    learnt = False
    for seed in range(3):
        at_once, in_steps = (replay("hit_density", seed, at_once=which) for which in (True, False))
        assert at_once.gone == in_steps.gone
        assert isinstance(at_once.policy, HitDensityEviction)
        learnt = learnt or not at_once.policy._guard.prefers_lru
    assert learnt, "nothing was chosen otherwise than LRU chooses"
