"""Prompts of more users than a trace has: copies of it that share what all its prompts share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from kvstore.cli.simulate import BlockTrace, make_blocks, read_trace

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"

SHARED = 0.01
"""Blocks that more of a trace's prompts have than this share are the same in every copy."""

SHIFT_S = 60.0
"""Copies begin within so many seconds of each other."""


@lru_cache(maxsize=2)
def load(name: str) -> BlockTrace:
    """Return a trace of data/traces as chains of blocks. Raises InvalidRequestError, OSError."""
    return make_blocks(read_trace(TRACES / f"{name}.jsonl"))


def shared_rows(trace: BlockTrace) -> frozenset[int]:
    """Return the rows that more than SHARED of the prompts have."""
    least = SHARED * trace.requests
    return frozenset(row for row, n in Counter(trace.rows.tolist()).items() if n > least)


def prompts(trace: BlockTrace, copies: int, seed: int = 1) -> Iterator[list[int]]:
    """Yield the chains of *copies* of a trace in the order of their times, each shifted a little.

    A chain has the blocks that its prompt can name: its answer is none of them.
    """
    random = Random(seed)
    shared = shared_rows(trace)
    shifts = [random.uniform(0, SHIFT_S) for _ in range(copies)]
    times = np.concatenate([trace.times_s + shift for shift in shifts])
    starts, known, rows = trace.starts.tolist(), trace.known.tolist(), trace.rows.tolist()
    for place in np.argsort(times, kind="stable").tolist():
        copy, request = divmod(place, trace.requests)
        chain = rows[starts[request] : starts[request] + known[request]]
        if chain and copy:
            past = copy * len(trace.parents)
            chain = [row if row in shared else row + past for row in chain]
        if chain:
            yield chain
