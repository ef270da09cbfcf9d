"""What the policies hit on the traces of the checkout, beside each other and leaf-LRU.

Blocks hit are shares of those asked for; differences are in points of 100. Replays have no
server and no bytes, and hit the same whenever they run; times are those of one busy process.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.policy_costs import (
    bare_loop_per_s,
    bytes_per_node,
    eviction_us,
    state_bytes_per_node,
)
from bench.policy_grid import (
    CONVERSATION,
    POLICIES,
    SIZES,
    TRACES,
    Cell,
    Grid,
    all_cells,
    fill,
    read_blocks,
    replay,
    worst_gap,
)
from bench.policy_hints import hint_keys
from bench.policy_hybrid import hybrid_keys
from bench.policy_tiers import BlockRequest, two_tier_keys, two_tier_table
from bench.report import Report, parse_flags
from kvstore.cli.simulate import BlockLine, read_trace

DEFAULT = POLICIES[0]
COSTS_SIZE = "5%"


def compare(report: Report, traces: Sequence[str]) -> None:
    """The grid: the default beside LRU, and every cell in the table."""
    grid = fill(all_cells(traces))
    if CONVERSATION in traces:
        add_conversation(report, grid)
    gap = worst_gap(grid, DEFAULT, ("lru",))
    report.add("worst_vs_lru", gap.points, gap.where, "at least -0.5")
    for trace in traces:
        for size in SIZES:
            found = {name: grid[Cell(trace, size, name)] for name in POLICIES}
            hits = ", ".join(f"{name} {one.block_hit_rate:.2%}" for name, one in found.items())
            report.note(trace, size, hits)


def add_conversation(report: Report, grid: Grid) -> None:
    """The four points of Mooncake's conversation trace."""
    bars = {"1%": 0.100, "5%": 0.224, "10%": 0.293, "25%": 0.354}
    for size in SIZES:
        ours, lru = (grid[Cell(CONVERSATION, size, name)] for name in (DEFAULT, "lru"))
        key = f"mooncake_conversation_{size.rstrip('%')}pct"
        measured = f"blocks hit at {size} of the footprint; leaf-LRU {lru.block_hit_rate:.4f}"
        report.add(key, ours.block_hit_rate or 0.0, measured, f"at least {bars[size]:.3f}")


def add_costs(report: Report, trace: str) -> None:
    """Time and memory."""
    blocks = read_blocks(trace)
    mean_us, p99_us, count = eviction_us(blocks, DEFAULT, COSTS_SIZE)
    where = f"{count} evictions of {DEFAULT}, {trace} at {COSTS_SIZE}: to name and to remove one"
    report.add("evict_us_mean", mean_us, where, "at most 20")
    report.add("evict_us_p99", p99_us, "the same", "at most 500")
    report.add(
        "bytes_per_node", bytes_per_node(DEFAULT), f"of {DEFAULT}, with what is remembered",
        "at most 200",
    )  # fmt: skip
    found = {held: state_bytes_per_node(DEFAULT, held) for held in (True, False)}
    report.add(
        "state_bytes_per_node", max(found.values()),
        f"of a cache of states, token ids left out; evicted ones {found[False]:.0f}", "at most 300",
    )  # fmt: skip
    cells = {name: Cell(trace, COSTS_SIZE, name) for name in (DEFAULT, "lru")}
    speeds = {name: replay(cell).requests_per_s for name, cell in cells.items()}
    measured = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    measured += f"; a dictionary asked once a block, nothing else: {bare_loop_per_s(blocks):.0f}"
    report.add("blocks_per_s", min(speeds.values()), measured, "at least 200000")


def add_tiers(report: Report, trace: str) -> None:
    """Two tiers: the value rule beside write-through."""
    requests = [
        BlockRequest(line.time_s, line.input_tokens, line.block_ids)
        for line in read_trace(TRACES / f"{trace}.jsonl")
        if isinstance(line, BlockLine)
    ]
    rows = two_tier_table(requests)
    found = two_tier_keys(rows)
    report.add(
        "two_tier_bytes_ratio", found["two_tier_bytes_ratio"],
        "bytes written over those of write-through, the worst size", "at most 0.88",
    )  # fmt: skip
    report.add(
        "two_tier_hit_diff", found["two_tier_hit_diff"], "points, the worst size", "at least 0"
    )
    for row in rows:
        size = f"{row.fast_share:.0%}/{row.slow_share:.0%}"
        text = f"hit {row.hit_rate:.2%}, {row.written_bytes / 1e9:.0f} GB, {row.mean_s:.3f} s"
        report.note(f"two tiers {row.admission}", size, text)


def main(argv: Sequence[str] | None = None) -> None:
    """Replay everything and print the report."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("policy")
    traces = sorted((path.stem for path in TRACES.glob("*.jsonl")), reverse=True)
    compare(report, traces)
    hybrid_keys(report)
    hint_keys(report)
    add_tiers(report, CONVERSATION)
    add_costs(report, CONVERSATION)
    report.print(only_json=only_json)


if __name__ == "__main__":
    main()
