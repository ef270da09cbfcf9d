"""Token hit rates of a hybrid model's cache beside the best of the published systems.

Replays data/traces/dev_*.jsonl at three capacities each, with the model ``hybrid-7b``. The bars are
the better of SGLang+ and Marconi, each as its authors' artifact ran online on the same traces and
capacities (vLLM+ is below both everywhere). No server has this cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lib.report import Report
from bench.lib.traces import Tokens, read_segments, tokens_of
from kvstore.cli.simulate import SegmentLine
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import NO_GHOSTS, GhostLimits, StateCache
from kvstore.server.eviction.states.ranks import STATE_CLASSES, HitDensityRank, LeafLruRank, LruRank
from kvstore.server.eviction.states.tree import HYBRID_7B, CheckpointTree, HybridModel

BARS = {
    "dev_chat_lmsyslike_sps1_n100": {2: 24.97, 5: 55.82, 20: 92.31},
    "dev_chat_sharegptlike_sps2_n100": {5: 47.72, 10: 68.55, 30: 92.68},
    "dev_ragshared_qps2_n900": {10: 29.17, 20: 39.03, 60: 55.55},
    "dev_mooncakesess_b0": {20: 14.99, 50: 27.56, 150: 34.00},
    "dev_swelike_sps0.5_art7.5_n60": {40: 42.54, 80: 43.67, 160: 43.72},
    "dev_agentappend_sps0.25_art7.5_n60": {20: 43.66, 60: 93.99, 120: 93.99},
}
"""Percent of input tokens hit, by trace and capacity in GB (10^9)."""
DEFAULT = "hit_density"
PRIOR_WEIGHT = 0.3


class StateRequest(NamedTuple):
    """One request of a trace: its prompt and then its answer, int32 [n]."""

    tokens: Tokens
    prompt_tokens: int
    time_s: float


_RANKS = {"lru": LruRank, "sglang": LeafLruRank, DEFAULT: HitDensityRank}
HYBRID_POLICIES = tuple(_RANKS)
"""The policies that have a form for states. ``sglang`` remembers nothing of what was evicted."""


def make_states(policy: str, model: HybridModel, capacity_bytes: int) -> StateCache:
    """Return an empty cache of states. Raises InvalidRequestError."""
    if policy not in _RANKS:
        fix = f"has no form for states of a hybrid model; one of {', '.join(_RANKS)} has"
        raise InvalidRequestError("policy", policy, fix)
    if capacity_bytes < 0:
        raise InvalidRequestError("capacity_bytes", capacity_bytes, "at least 0")
    limits = NO_GHOSTS if policy == "sglang" else GhostLimits.of(model, capacity_bytes)
    return StateCache(model, capacity_bytes, limits, _RANKS[policy])


def state_requests(lines: Iterable[SegmentLine]) -> Iterator[StateRequest]:
    for line in lines:
        tokens = tokens_of((*line.inputs, line.output))
        yield StateRequest(tokens, line.input_tokens, line.time_s)


def play(requests: Iterable[StateRequest], states: StateCache) -> list[int]:
    return [states.request(*one) for one in requests]


class HybridRow(NamedTuple):
    """One trace at one capacity, and how many points of input tokens are hit above its bar."""

    trace: str
    capacity_gb: int
    difference: float


def hybrid_rows() -> Iterator[HybridRow]:
    for trace, bars in BARS.items():
        lines = read_segments(trace)
        asked = max(1, sum(line.input_tokens for line in lines))
        for capacity_gb, bar in bars.items():
            states = make_states(DEFAULT, HYBRID_7B, capacity_gb * 10**9)
            hit = sum(play(state_requests(lines), states))
            yield HybridRow(trace, capacity_gb, 100.0 * hit / asked - bar)


def add_hybrid(report: Report) -> None:
    rows = list(hybrid_rows())
    worst = min(rows, key=lambda row: row.difference)
    mean = sum(row.difference for row in rows) / len(rows)
    measured = f"points of token hit rate, {len(rows)} points, {DEFAULT}"
    report.add("hybrid_mean_vs_bar", mean, measured, "at least 2.5")
    where = f"{worst.trace} at {worst.capacity_gb} GB"
    report.add("hybrid_worst_vs_bar", worst.difference, where, "at least -0.25")


def learn_prior() -> NDArray[np.float64]:
    """Return the counts that ``read_prior`` reads, as whole numbers: (2, 21, 40)."""
    counts = np.zeros((2, STATE_CLASSES, 40))
    for trace, bars in BARS.items():
        lines = read_segments(trace)
        for capacity_gb in bars:
            counts += _counts(lines, capacity_gb * 10**9) / len(bars)
    return np.round(counts * PRIOR_WEIGHT)


def _counts(lines: list[SegmentLine], capacity_bytes: int) -> NDArray[np.float64]:
    ranks: list[HitDensityRank] = []

    def cold(tree: CheckpointTree) -> HitDensityRank:
        ranks.append(HitDensityRank(tree, warm=False))
        return ranks[0]

    limits = GhostLimits.of(HYBRID_7B, capacity_bytes)
    play(state_requests(lines), StateCache(HYBRID_7B, capacity_bytes, limits, cold))
    table, end_s = ranks[0].table, lines[-1].time_s
    table.settle(end_s)
    return np.stack(table.counts(end_s, STATE_CLASSES))
