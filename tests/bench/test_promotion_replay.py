"""Promotion by value on a trace, where it costs neither hits nor time."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.tier_replay import LoadModel, TierReplay, TierTerms
from typing_extensions import override

from kvstore.proto.types import KEY_BYTES, ChunkKey
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import (
    BY_VALUE,
    EvictionValue,
    PromoteOnSecondHit,
    Trigger,
)

MODEL = LoadModel()


class Promoting(TierReplay):
    """What the slow tier has is read there, and comes up at its second read if it is worth it."""

    is_weighed = False
    promoted = 0

    def begin(self, *, is_weighed: bool) -> None:
        self.is_weighed = is_weighed
        self._reads = PromoteOnSecondHit(1 << 16)
        self._price = EvictionValue()

    def _value(self, row: int, now_s: float) -> float:
        saved_s = MODEL.block_bytes * (1 / MODEL.slow_bytes_per_s - 1 / MODEL.fast_bytes_per_s)
        return self._forecast.chance(row, now_s) * max(0.0, saved_s) / MODEL.block_bytes

    @override
    def _bring(self, row: int, mine: set[int], now_s: float) -> bool:
        if row in self._slow.here and row not in self._fast.here:
            is_due = self._reads.is_due(ChunkKey(row.to_bytes(KEY_BYTES, "little")))
            if self.is_weighed and is_due:
                is_due = self._price.takes(self._value(row, now_s))
            if not is_due:
                return True
            self.promoted += 1
        return super()._bring(row, mine, now_s)

    @override
    def _offer(self, row: int, moment: Trigger, mine: set[int], now_s: float) -> None:
        if moment is Trigger.leaving:
            self._price.note_eviction(self._value(row, now_s))
        super()._offer(row, moment, mine, now_s)


def trace(count: int = 300) -> list[Sequence[int]]:
    """Conversations that grow, a few documents that many ask about, and prompts that come once."""
    draw = random.Random(5)
    fresh = iter(range(1, 1_000_000))
    talks = [[next(fresh) for _ in range(4)] for _ in range(20)]
    documents = [[next(fresh) for _ in range(8)] for _ in range(12)]
    prompts: list[Sequence[int]] = []
    for _ in range(count):
        kind = draw.random()
        if kind < 0.4:
            talk = draw.choice(talks)
            talk += [next(fresh) for _ in range(2)] if len(talk) < 24 else []
            prompts.append(tuple(talk))
        elif kind < 0.7:
            prompts.append((*documents[int(12 * draw.random() ** 2)], next(fresh)))
        else:
            prompts.append(tuple(next(fresh) for _ in range(8)))
    return prompts


def run(*, is_weighed: bool) -> tuple[float, float, int, int]:
    """Return the hit rate, the mean time of a prompt, and blocks promoted and written."""
    forecast = ReuseForecast(AccessHistory(MODEL.block_tokens), MODEL.block_tokens)
    terms = TierTerms(60, 300)
    replay = Promoting(LruEviction(), LruEviction(), terms, BY_VALUE, forecast)
    replay.begin(is_weighed=is_weighed)
    times = []
    for at, rows in enumerate(trace()):
        found = replay.request(rows, float(at))
        times.append(MODEL.seconds(len(rows) * MODEL.block_tokens, *found))
    assert not replay.orphans()
    counts = replay.counts
    return counts.hit_rate, MODEL.mean_s(times), replay.promoted, counts.written


def test_weighed_promotion_loses_neither_hits_nor_time_and_is_the_same_each_time() -> None:
    plain, weighed = run(is_weighed=False), run(is_weighed=True)
    assert weighed == run(is_weighed=True)
    assert weighed[0] >= plain[0] > 0.2
    assert weighed[1] <= plain[1]
    assert 0 < weighed[2] <= plain[2]
    assert weighed[3] <= plain[3]
