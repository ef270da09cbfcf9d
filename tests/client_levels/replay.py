"""Requests over a link whose bandwidth changes, under our controller and under CacheGen's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.client.levels import (
    MISSING,
    RECOMPUTE,
    LevelledChunk,
    LinkMeter,
    PlanTerms,
    Progress,
    plan,
)

CONSTANT_RECOMPUTE_S = 0.2
"""What CacheGen's artifact takes any chunk to cost the engine."""


@dataclass(frozen=True)
class Trace:
    """Bandwidth in steps of ``step_s``: uniform between two bounds, as in CacheGen's artifact."""

    bytes_per_s: tuple[float, ...]
    step_s: float

    @classmethod
    def uniform(
        cls, seed: int, low_gbps: float = 0.1, high_gbps: float = 10.0, step_s: float = 0.1
    ) -> Trace:
        draw = random.Random(seed)
        return cls(tuple(draw.uniform(low_gbps, high_gbps) * 1e9 / 8 for _ in range(4096)), step_s)

    def now(self, at_s: float) -> float:
        return self.bytes_per_s[int(at_s / self.step_s) % len(self.bytes_per_s)]

    def transfer(self, size_bytes: float, at_s: float) -> float:
        """When *size_bytes* that set out at *at_s* have arrived."""
        while True:
            end_s = (int(at_s / self.step_s) + 1) * self.step_s
            possible = (end_s - at_s) * self.now(at_s + 1e-9)
            if possible >= size_bytes:
                return at_s + size_bytes / self.now(at_s + 1e-9)
            size_bytes -= possible
            at_s = end_s


@dataclass(frozen=True)
class Outcome:
    """When everything was there, and what was lost, by token."""

    ready_s: float
    distortion: float
    recomputed: int


Replay = Callable[[Sequence[LevelledChunk], PlanTerms, Trace], Outcome]


def cachegen(chunks: Sequence[LevelledChunk], terms: PlanTerms, trace: Trace) -> Outcome:
    """The artifact's ``config_selection``: it knows the bandwidth, shares the deadline equally
    and takes the best level that fits a share, else the engine. One thing after another.
    """
    at_s = distortion = 0.0
    context = recomputed = 0
    share_s = terms.deadline_s / len(chunks)
    for chunk in chunks:
        speed = trace.now(at_s)
        levels = reversed(range(len(chunk.end_bytes)))
        level = next((k for k in levels if chunk.end_bytes[k] / speed < share_s), None)
        if level is None:
            at_s += terms.prefill.seconds(chunk.tokens, context)
            recomputed += 1
        else:
            at_s = trace.transfer(chunk.end_bytes[level], at_s)
            distortion += chunk.tokens * chunk.distortion[level]
        context += chunk.tokens
    return Outcome(at_s + _last_decode_s(chunks, terms), distortion, recomputed)


def ours(chunks: Sequence[LevelledChunk], terms: PlanTerms, trace: Trace) -> Outcome:
    """Plans again after every piece that came, from what the link gave until then."""
    meter = LinkMeter(5.05e9 / 8)
    levels = list(Progress((MISSING,) * len(chunks)).levels)
    at_s = engine_s = there_s = 0.0
    starts = [sum(c.tokens for c in chunks[:i]) for i in range(len(chunks))]
    while True:
        progress = Progress(tuple(levels), at_s, engine_s)
        found = plan(chunks, progress, terms, meter.estimate())
        for index, action in enumerate(found.actions):
            if action != RECOMPUTE or levels[index] == RECOMPUTE or MISSING in levels[:index]:
                continue
            levels[index] = RECOMPUTE
            after_loads_s = at_s if max(levels[:index], default=RECOMPUTE) >= 0 else 0.0
            engine_s = max(engine_s, after_loads_s)
            engine_s += terms.prefill.seconds(chunks[index].tokens, starts[index])
        progress = Progress(tuple(levels), at_s, engine_s)
        fetch = found.next_fetch(chunks, progress.levels)
        if fetch is None and MISSING not in levels:
            break
        assert fetch is not None, (found, levels)
        if levels[fetch.chunk] >= 0 and max(at_s, engine_s) >= terms.deadline_s:
            break
        end_s = trace.transfer(fetch.stop - fetch.start, at_s)
        meter.observe(fetch.stop - fetch.start, end_s - at_s)
        at_s = there_s = end_s
        levels[fetch.chunk] = fetch.level
    loss = sum(
        c.tokens * c.distortion[level]
        for c, level in zip(chunks, levels, strict=True)
        if level >= 0
    )
    ready_s = max(there_s + _last_decode_s(chunks, terms), engine_s)
    return Outcome(ready_s, loss, levels.count(RECOMPUTE))


def _last_decode_s(chunks: Sequence[LevelledChunk], terms: PlanTerms) -> float:
    """Earlier chunks are decoded while later ones load."""
    return chunks[-1].raw_bytes / terms.decode_bytes_per_s
