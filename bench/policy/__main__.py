"""Hit rates of the default eviction policy and leaf-LRU on the traces of the checkout.

Blocks hit are shares of those requested; differences are in percentage points. Replays have no
server and no bytes, and give the same hits at every run; times are those of one busy process.
``--learn`` prints prior.txt instead.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.lib import TRACES
from bench.lib.report import Report, parser_of
from bench.lib.traces import read_blocks
from bench.policy.hybrid import add_hybrid, learn_prior, state_bytes_per_node
from bench.policy.tiers import compare_writes
from kvstore.cli.simulate import BlockReplay, BlockTrace, Outcome, replay_blocks
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.hit_density import HitDensityEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy

CONVERSATION = "mooncake_conversation_trace"
BARS = {"1%": 0.100, "5%": 0.224, "10%": 0.293, "25%": 0.354}
"""Sizes, as shares of the trace's footprint, and the lower bar on the conversation trace."""
DEFAULT = "hit_density"
COSTS_SIZE = "5%"
HINTS_SHARE = 0.05
DISCARD, KEEP = 1, 2
MEMORY_CHUNKS = 100_000

_HINT_SEED = 5
_PROMPT_CHUNKS = 16


def replay(trace: str, size: str, policy: str) -> Outcome:
    return replay_blocks(read_blocks(trace), policy, size)


def compare_all(report: Report) -> None:
    gaps = []
    for trace in sorted((path.stem for path in TRACES.glob("*.jsonl")), reverse=True):
        for size, bar in BARS.items():
            ours, lru = (replay(trace, size, name).block_hit_rate for name in (DEFAULT, "lru"))
            where = f"{trace} at {size}: {ours:.2%} to {lru:.2%}"
            gaps.append((100 * (ours - lru), where))
            if trace == CONVERSATION:
                measured = f"blocks hit at {size} of the footprint; leaf-LRU {lru:.4f}"
                key = f"mooncake_conversation_{size.rstrip('%')}pct"
                report.add(key, ours, measured, f"at least {bar:.3f}")
    report.add("worst_vs_lru", *min(gaps), "at least -0.5")


# --- the gain of one bit from the engine


def add_hints(report: Report) -> None:
    """Add the blocks hit without a reuse hint, and with one that is correct for 90 % and 50 %.

    The hint of a prompt is whether any of its blocks, except the first, which all share, is
    requested later; it is flipped for a share of the prompts.
    """
    trace = read_blocks(CONVERSATION)
    none = second_half(trace, None)
    useless = second_half(trace, flipped(trace, 0.5))
    right = second_half(trace, flipped(trace, 0.1))
    report.add("hint_90_5pct", right, "blocks hit, 5%, second half", "at least 0.319")
    report.add("hint_none", none, "the same without a hint")
    report.add("hint_50_cost", 100 * (none - useless), "points lost", "at most 1")


def flipped(trace: BlockTrace, wrong: float) -> NDArray[np.bool_]:
    """Return for each prompt whether it is used again, flipped for a share *wrong* of them."""
    later: set[int] = set()
    used = np.zeros(len(trace.requests), np.bool_)
    for at, one in reversed(list(enumerate(trace.requests))):
        used[at] = any(block in later for block in one.chain[1:] or one.chain)
        later.update(one.chain)
    return used ^ (np.random.default_rng(_HINT_SEED).random(len(used)) < wrong)


def second_half(trace: BlockTrace, hints: NDArray[np.bool_] | None) -> float:
    """Return the share of blocks hit in the second half; the first trains the policy."""
    history = AccessHistory(trace.block_tokens)
    places = int(HINTS_SHARE * trace.blocks)
    cache = BlockReplay(HitDensityEviction(history), history, places)
    blocks = hits = 0
    for at, one in enumerate(trace.requests):
        if at == len(trace.requests) // 2:
            blocks, hits = cache.blocks, cache.hit_blocks
        reuse = 0 if hints is None else KEEP if hints[at] else DISCARD
        facts = InsertInfo(one.is_full, reuse=reuse, prompt_chunks=len(one.chain))
        cache.request(one.chain, one.time_s, facts)
    return (cache.hit_blocks - hits) / (cache.blocks - blocks)


# --- time for each eviction, memory for each chunk


def stopwatch(policy: EvictionPolicy) -> list[float]:
    """Time how long *policy* takes to choose and to remove each victim.

    Returns a list that grows by the microseconds of each victim.
    """
    victims, remove = policy.victims, policy.remove
    spent_us: list[float] = []
    chosen_s: deque[float] = deque()

    def choosing(keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        chosen_s.clear()
        started = time.perf_counter()
        for victim in victims(keep, now_s):
            chosen_s.append(time.perf_counter() - started)
            yield victim
            started = time.perf_counter()

    def removing(row: int) -> None:
        started = time.perf_counter()
        remove(row)
        if chosen_s:
            spent_us.append(1e6 * (chosen_s.popleft() + time.perf_counter() - started))

    policy.victims, policy.remove = choosing, removing  # type: ignore[method-assign]
    return spent_us


def eviction_us(trace: BlockTrace, policy: str, size: str) -> tuple[float, float, int]:
    """Return the mean and 99th percentile in us of evictions in a replay, and their number."""
    history = AccessHistory(trace.block_tokens)
    made = make_policy(policy, history)
    spent_us = stopwatch(made)
    replay_blocks(trace, policy, size, made=(made, history))
    return float(np.mean(spent_us)), float(np.percentile(spent_us, 99)), len(spent_us)


def bytes_per_node(policy: str) -> float:
    """Return Python's memory a chunk: of a policy and its access history."""
    make_policy(policy, AccessHistory())  # imports its modules
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        history = AccessHistory()
        made = make_policy(policy, history)
        for start in range(1, MEMORY_CHUNKS + 1, _PROMPT_CHUNKS):
            rows = np.arange(start, start + _PROMPT_CHUNKS)
            history.seen_chain(rows, NO_ROW, InsertInfo(flops=1e12), float(start))
            made.insert_chain(rows, NO_ROW, 1 << 20, float(start))
            history.requested(rows, len(rows), start + 1.0)
            made.touch(rows, start + 1.0)
        return (tracemalloc.get_traced_memory()[0] - before) / len(made)
    finally:
        tracemalloc.stop()


def add_costs(report: Report, trace: str = CONVERSATION) -> None:
    mean_us, p99_us, count = eviction_us(read_blocks(trace), DEFAULT, COSTS_SIZE)
    where = f"{count} evictions of {DEFAULT}, {trace} at {COSTS_SIZE}: to choose and to remove one"
    report.add("evict_us_mean", mean_us, where, "at most 20")
    report.add("evict_us_p99", p99_us, "the same", "at most 500")
    node_bytes = bytes_per_node(DEFAULT)
    what = f"of {DEFAULT}, with the access history"
    report.add("bytes_per_node", node_bytes, what, "at most 200")
    found = {held: state_bytes_per_node(held=held) for held in (True, False)}
    what = f"of a cache of states, token ids left out; evicted ones {found[False]:.0f}"
    report.add("state_bytes_per_node", max(found.values()), what, "at most 300")
    speeds = {name: replay(trace, COSTS_SIZE, name).requests_per_s for name in (DEFAULT, "lru")}
    measured = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    report.add("blocks_per_s", min(speeds.values()), measured, "at least 200000")


PARTS: dict[str, Callable[[Report], None]] = {
    "lru": compare_all,
    "hybrid": add_hybrid,
    "hints": add_hints,
    "tiers": lambda report: compare_writes(report, read_blocks(CONVERSATION)),
    "costs": add_costs,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--learn", action="store_true", help="print prior.txt")
    flags = parser.parse_args(argv)
    if flags.learn:
        for row in learn_prior().astype(int).reshape(-1, 20).tolist():
            print(*row)
        return
    report = Report("policy")
    for name in flags.only:
        PARTS[name](report)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
