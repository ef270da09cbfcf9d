"""Token hit rates of a hybrid model's cache against the best published systems.

Replays data/traces/dev_*.jsonl at three capacities each, with the model ``hybrid-7b``. The bars are
the better of SGLang+ and Marconi, from their authors' artifacts on the same traces and capacities
(vLLM+ is below both everywhere). The server does not have this cache.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from bench.lib.report import Report
from bench.lib.traces import read_segments, tokens_of
from bench.policy.state_cache import STATE_CLASSES, StateCache
from bench.policy.state_tree import HYBRID_7B
from kvstore.cli.simulate import SegmentLine

BARS = {
    "dev_chat_lmsyslike_sps1_n100": {2: 24.97, 5: 55.82, 20: 92.31},
    "dev_chat_sharegptlike_sps2_n100": {5: 47.72, 10: 68.55, 30: 92.68},
    "dev_ragshared_qps2_n900": {10: 29.17, 20: 39.03, 60: 55.55},
    "dev_mooncakesess_b0": {20: 14.99, 50: 27.56, 150: 34.00},
    "dev_swelike_sps0.5_art7.5_n60": {40: 42.54, 80: 43.67, 160: 43.72},
    "dev_agentappend_sps0.25_art7.5_n60": {20: 43.66, 60: 93.99, 120: 93.99},
}
"""Percent of input tokens hit, by trace and capacity in GB (10^9)."""
PRIOR_WEIGHT = 0.3
PROMPTS = 5_000
"""Each ends in its own node; half of them share a prefix with the one before."""
_PROMPT_TOKENS = 24
_TOKEN_BYTES = 4


def play(lines: Iterable[SegmentLine], cache: StateCache) -> int:
    """Serve the requests of *lines*; return how many input tokens were hit."""
    return sum(
        cache.request(tokens_of((*line.inputs, line.output)), line.input_tokens, line.time_s)
        for line in lines
    )


def differences() -> Iterator[tuple[float, str]]:
    """Yield the input tokens hit above each bar, in points, and the name of that bar."""
    for trace, bars in BARS.items():
        lines = read_segments(trace)
        requested = max(1, sum(line.input_tokens for line in lines))
        for capacity_gb, bar in bars.items():
            hit = play(lines, StateCache(HYBRID_7B, capacity_gb * 10**9))
            yield 100.0 * hit / requested - bar, f"{trace} at {capacity_gb} GB"


def add_hybrid(report: Report) -> None:
    rows = list(differences())
    mean = sum(difference for difference, _ in rows) / len(rows)
    measured = f"points of token hit rate, {len(rows)} points"
    report.add("hybrid_mean_vs_bar", mean, measured, "at least 2.5")
    report.add("hybrid_worst_vs_bar", *min(rows), "at least -0.25")


def learn_prior() -> NDArray[np.float64]:
    """Return the counts that ``read_prior`` reads, as whole numbers: (2, 21, 40)."""
    counts = np.zeros((2, STATE_CLASSES, 40))
    for trace, bars in BARS.items():
        lines = read_segments(trace)
        for capacity_gb in bars:
            cache, end_s = StateCache(HYBRID_7B, capacity_gb * 10**9, warm=False), lines[-1].time_s
            play(lines, cache)
            cache.table.settle(end_s)
            counts += np.stack(cache.table.counts(end_s, STATE_CLASSES)) / len(bars)
    return np.round(counts * PRIOR_WEIGHT)


def state_bytes_per_node(*, held: bool) -> float:
    """Return Python's memory a node of a cache of states; *held*: all have a state, or almost none.

    Includes ghosts and the density table, but not the token ids of edges (four bytes each), as
    chunk keys are not included either.
    """
    each = HYBRID_7B.state_bytes + _PROMPT_TOKENS * HYBRID_7B.kv_bytes_per_token
    rng = np.random.default_rng(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = StateCache(HYBRID_7B, each * (2 * PROMPTS if held else PROMPTS // 20))
        for at in range(PROMPTS):
            tokens = rng.integers(0, 32_000, _PROMPT_TOKENS).astype(np.int32)
            tokens[:8] = at // 2
            cache.request(tokens, len(tokens) - 4, float(at))
        spent = tracemalloc.get_traced_memory()[0] - before
        return (spent - _TOKEN_BYTES * cache.tree.tokens) / cache.tree.nodes
    finally:
        tracemalloc.stop()
