"""Long runs of events for policies: requests that are stored, and anything in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy

_ROOM = 60
_SIZES = (1, 100, 4096, 1 << 34)


def _keep_none(_: int) -> bool:
    return False


def evicted_by(
    policy: EvictionPolicy, history: AccessHistory, seed: int, hints: Sequence[int]
) -> list[int]:
    """Return whom 400 requests evict, when there is room for 60 chunks, then all that are left.

    *hints* are those of reuse that are drawn from.
    """
    draw = random.Random(seed)
    here: dict[int, None] = {}
    evicted: list[int] = []
    for now_s in range(400):
        start = 1 + draw.randrange(40) * 16
        chain = list(range(start, start + draw.randrange(17)))
        known = next((at for at, one in enumerate(chain) if one not in here), len(chain))
        found = np.array(chain[:known], np.intp)
        history.requested(found, len(chain), now_s)
        policy.touch(found, now_s)
        history.hint(found, draw.choice(hints))
        for at in range(known, len(chain)):
            while len(here) >= _ROOM:
                victim = next(policy.victims(chain.__contains__, now_s))
                policy.remove(victim)
                del here[victim]
                evicted.append(victim)
            parent = chain[at - 1] if at else NO_ROW
            facts = InsertInfo(flops=1e9 * at, reuse=draw.choice(hints))
            history.seen_chain(np.array([chain[at]]), parent, facts, now_s)
            policy.insert(chain[at], parent, 100, now_s)
            here[chain[at]] = None
    everything = list(policy.victims(_keep_none, 400.0))
    assert sorted(everything) == sorted(here)
    return evicted + everything


def fuzz(policy: EvictionPolicy, history: AccessHistory, seed: int, events: int) -> None:
    """Let anything happen to 300 rows with any parents, and compare who is here with a set."""
    draw = random.Random(seed)
    here: set[int] = set()
    now_s = 0.0
    for event in range(events):
        now_s += draw.choice([0.0, 0.1, 1.0, 60.0, -1.0, 1e6, -1e6])
        row, parent = draw.randrange(1, 300), draw.randrange(300)
        chain = np.array([draw.randrange(1, 300) for _ in range(draw.randrange(6))], np.intp)
        match draw.randrange(8):
            case 0 | 1:
                facts = InsertInfo(flops=draw.choice([0.0, 1e9, 1e12]), reuse=draw.randrange(3))
                history.seen_chain(np.array([row]), parent, facts, now_s)
                policy.insert(row, parent, draw.choice(_SIZES), now_s)
                here.add(row)
            case 2:
                history.seen_chain(chain, parent, InsertInfo(flops=1e9 * event), now_s)
                policy.insert_chain(chain, parent, draw.choice(_SIZES), now_s)
                here.update(chain.tolist())
            case 3 | 4:
                history.requested(chain, len(chain) + draw.randrange(3), now_s)
                policy.touch(chain, now_s)
            case 5:
                history.hint(chain, draw.randrange(3))
            case 6:
                policy.remove(row)
                here.discard(row)
                if draw.random() < 0.5:
                    history.forget_all(np.array([row]))
            case 7:
                kept = {draw.randrange(1, 300) for _ in range(draw.randrange(20))}
                gone = list(islice(policy.victims(kept.__contains__, now_s), draw.randrange(12)))
                assert here.issuperset(gone)
                assert kept.isdisjoint(gone)
                deque(map(policy.remove, gone), maxlen=0)
                here.difference_update(gone)
        assert len(policy) == len(here)
        if event % 500 == 0:
            assert sorted(policy.victims(_keep_none, now_s)) == sorted(here)
    assert sorted(policy.victims(_keep_none, now_s)) == sorted(here)
