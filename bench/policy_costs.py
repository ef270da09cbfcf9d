"""What a policy costs: time for each eviction, memory for each chunk."""

from __future__ import annotations

import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import override

from bench.state_caches import make_states
from kvstore.cli.simulate import BlockTrace, Terms, replay_blocks
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows, make_policy
from kvstore.server.eviction.states.cache import StateCache
from kvstore.server.eviction.states.tree import HYBRID_7B

MEMORY_CHUNKS = 100_000
STATE_PROMPTS = 5_000
"""Each ends in a node of its own, and half of them part from the one before in another."""

_TOKEN_BYTES = 4
_STATE_PROMPT_TOKENS = 24
_PROMPT_CHUNKS = 16


class TimedEviction(EvictionPolicy):
    """A policy with a stopwatch: what it takes to name each victim and to remove it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._named_s: deque[float] = deque()
        self.spent_us = array("d")
        """One figure a victim, in us."""

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self._policy.insert(row, parent, size_bytes, now_s)

    @override
    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        self._policy.insert_chain(rows, parent, size_bytes, now_s)

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        self._policy.touch(rows, now_s)

    @override
    def remove(self, row: int) -> None:
        started = time.perf_counter()
        self._policy.remove(row)
        if self._named_s:
            spent_s = self._named_s.popleft() + time.perf_counter() - started
            self.spent_us.append(1e6 * spent_s)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._named_s.clear()
        started = time.perf_counter()
        for victim in self._policy.victims(keep, now_s):
            self._named_s.append(time.perf_counter() - started)
            yield victim
            started = time.perf_counter()

    @override
    def __len__(self) -> int:
        return len(self._policy)


def eviction_us(trace: BlockTrace, policy: str, size: str) -> tuple[float, float, int]:
    """Return the mean and the 99th percentile in us of evictions in a replay, and how many."""
    history = AccessHistory(trace.block_tokens)
    timed = TimedEviction(make_policy(policy, history))
    replay_blocks(trace, Terms(policy, size), (timed, history))
    spent = np.frombuffer(timed.spent_us) if timed.spent_us else np.zeros(1)
    return float(spent.mean()), float(np.percentile(spent, 99)), len(timed.spent_us)


def bare_loop_per_s(trace: BlockTrace) -> float:
    """Return the blocks a second of a loop that asks a dictionary once for each: the limit here."""
    rows, starts = trace.rows.tolist(), trace.starts.tolist()
    last: dict[int, float] = {}
    started = time.perf_counter()
    for at, now_s in enumerate(trace.times_s.tolist()):
        for row in rows[starts[at] : starts[at + 1]]:
            last[row] = now_s
    return len(rows) / max(time.perf_counter() - started, 1e-9)


def bytes_per_node(policy: str, chunks: int | None = None) -> float:
    """Return Python's memory for each of many chunks: a policy's, and what is remembered."""
    count = MEMORY_CHUNKS if chunks is None else chunks
    make_policy(policy, AccessHistory())  # what is imported for it
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        history = AccessHistory()
        made = make_policy(policy, history)
        for start in range(1, count + 1, _PROMPT_CHUNKS):
            rows = np.arange(start, start + _PROMPT_CHUNKS)
            history.seen_chain(rows, NO_ROW, InsertInfo(flops=1e12), float(start))
            made.insert_chain(rows, NO_ROW, 1 << 20, float(start))
            history.requested(rows, len(rows), start + 1.0)
            made.touch(rows, start + 1.0)
        return (tracemalloc.get_traced_memory()[0] - before) / len(made)
    finally:
        tracemalloc.stop()


def state_bytes_per_node(policy: str, held: bool, prompts: int | None = None) -> float:
    """Return Python's memory for each node of a cache of states, all with a state or almost none.

    What is remembered of evicted ones is in it, and what the rank knows. Left out are the token
    ids of edges, four bytes each: they are what a node stands for, as the key of a chunk is.
    """
    count = STATE_PROMPTS if prompts is None else prompts
    model, each = HYBRID_7B, _STATE_PROMPT_TOKENS * HYBRID_7B.kv_bytes_per_token
    states = 2 * count if held else count // 20
    make_states(policy, model, 0)  # what is imported for it
    rng = np.random.default_rng(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = make_states(policy, model, states * (model.state_bytes + each))
        assert isinstance(cache, StateCache)
        for at in range(count):
            tokens = rng.integers(0, 32_000, _STATE_PROMPT_TOKENS).astype(np.int32)
            tokens[:8] = at // 2
            cache.request(tokens, len(tokens) - 4, float(at))
        spent = tracemalloc.get_traced_memory()[0] - before
        return (spent - _TOKEN_BYTES * cache.tree.tokens) / cache.tree.nodes
    finally:
        tracemalloc.stop()
