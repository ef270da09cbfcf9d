"""Every trace at every size under every policy: the grid behind the comparisons of bench.policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.baselines import BASELINES, make_any
from kvstore.cli.simulate import BlockTrace, Outcome, Terms, make_blocks, read_trace, replay_blocks
from kvstore.server.eviction.access_history import AccessHistory

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
CONVERSATION = "mooncake_conversation_trace"
SIZES = ("1%", "5%", "10%", "25%")
"""Of the trace's footprint."""

POLICIES = ("hit_density", "lru", *BASELINES)
"""The default first."""

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: the trace by its file's stem."""

    trace: str
    size: str
    policy: str


Grid = dict[Cell, Outcome]


@lru_cache(maxsize=2)
def read_blocks(trace: str) -> BlockTrace:
    """Return a trace of the checkout by its file's stem."""
    return make_blocks(read_trace(TRACES / f"{trace}.jsonl"))


def replay(cell: Cell) -> Outcome:
    """Replay one cell, in this process."""
    trace = read_blocks(cell.trace)
    history = AccessHistory(trace.block_tokens)
    policy = make_any(cell.policy, history), history
    return replay_blocks(trace, Terms(cell.policy, cell.size), policy)


def all_cells(traces: Iterable[str], sizes: Sequence[str] = SIZES) -> list[Cell]:
    """Return a cell for each trace, size and policy, the longest first."""
    return [Cell(trace, size, name) for trace in traces for name in POLICIES for size in sizes]


def fill(cells: Sequence[Cell], workers: int = WORKERS) -> Grid:
    """Replay all cells, some at once; what they hit does not depend on that."""
    if workers == 1:
        return {cell: replay(cell) for cell in cells}
    with ProcessPoolExecutor(workers) as pool:
        return dict(zip(cells, pool.map(replay, cells), strict=True))


def points(grid: Grid, cell: Cell) -> float:
    """Return the blocks hit, in percent."""
    return 100 * grid[cell].block_hit_rate


@dataclass(frozen=True, slots=True)
class Gap:
    """Where a policy stands worst against others, in points of blocks hit."""

    points: float
    where: str


def worst_gap(grid: Grid, policy: str, others: Sequence[str]) -> Gap:
    """Return the least of *policy* minus the best of *others*, over all traces and sizes."""
    gaps = []
    for trace, size in sorted({(cell.trace, cell.size) for cell in grid}):
        ours = points(grid, Cell(trace, size, policy))
        best = max(points(grid, Cell(trace, size, name)) for name in others)
        gaps.append((ours - best, f"{trace} at {size}: {ours:.2f} to {best:.2f}"))
    return Gap(*min(gaps))
