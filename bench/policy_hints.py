"""What one bit from the engine is worth: replays with a hint of reuse that is wrong at times.

The hint says of each prompt whether any of its blocks but the first (which all prompts of the
trace share) is asked for later. It is flipped for a share of the prompts. Counted is the second
half of the trace, once the first has taught how far the hint can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.policy_grid import CONVERSATION, TRACES
from bench.report import Report
from kvstore.cli.simulate import BlockLine, BlockReplay, read_trace
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.hit_density import HitDensityEviction

SHARE = 0.05
"""Size of the cache, of the trace's footprint."""

DISCARD, KEEP = 1, 2
_SEED = 5


def hint_keys(report: Report, trace: str = CONVERSATION) -> None:
    """Add what is hit without a hint, with one that is right mostly, and right half the time."""
    lines = read_trace(TRACES / f"{trace}.jsonl")
    requests = [line for line in lines if isinstance(line, BlockLine)]
    none = second_half(requests, None)
    right = second_half(requests, flipped(requests, 0.1))
    useless = second_half(requests, flipped(requests, 0.5))
    report.add("hint_90_5pct", right, "blocks hit, 5%, second half", "at least 0.319")
    report.add("hint_none", none, "the same without a hint")
    report.add("hint_50_cost", 100 * (none - useless), "points lost", "at most 1")


def flipped(requests: Sequence[BlockLine], wrong: float) -> NDArray[np.bool_]:
    """Return for each prompt whether it is used again, flipped for a share *wrong* of them."""
    later: set[int] = set()
    used = np.zeros(len(requests), np.bool_)
    for at in range(len(requests) - 1, -1, -1):
        blocks = requests[at].block_ids
        used[at] = any(block in later for block in blocks[1:] or blocks)
        later.update(blocks)
    return used ^ (np.random.default_rng(_SEED).random(len(requests)) < wrong)


def second_half(
    requests: Sequence[BlockLine], keeps: NDArray[np.bool_] | None, share: float = SHARE
) -> float:
    """Return the share of blocks hit in the second half, with a hint for each prompt or none."""
    footprint = len({block for request in requests for block in request.block_ids})
    history = AccessHistory(requests[0].block_tokens)
    replay = BlockReplay(HitDensityEviction(history), history, int(share * footprint))
    blocks = hits = 0
    for at, request in enumerate(requests):
        if at == len(requests) // 2:
            blocks, hits = replay.blocks, replay.hit_blocks
        reuse = 0 if keeps is None else KEEP if keeps[at] else DISCARD
        full = request.input_tokens % request.block_tokens == 0
        facts = InsertInfo(full, reuse=reuse, prompt_chunks=len(request.block_ids))
        replay.request(request.block_ids, 1, request.time_s, facts)
    return (replay.hit_blocks - hits) / (replay.blocks - blocks)
