"""Simulations: traces replayed on policies and capacities; a table, JSON and a plot of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from kvstore.cli.output import Grid, open_console
from kvstore.cli.plot import line_chart
from kvstore.cli.simulate.blocks import HYBRID, Outcome, Terms, replay_blocks
from kvstore.cli.simulate.states import HYBRID_POLICIES, footprint_bytes, replay_states
from kvstore.cli.trace_format import BlockTrace, SegmentLine, TraceLines, make_blocks, read_trace
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES, policy_instead_of

_GIB = float(1 << 30)


def names_of(policies: str, model: str) -> list[str]:
    """Return the policies in a list with commas; all there are for ``all``.

    Raises InvalidRequestError for one that the model's simulator does not have.
    """
    known = HYBRID_POLICIES if model == HYBRID else POLICIES
    names = list(known) if policies == "all" else policies.split(",")
    for name in names:
        if name not in known:
            raise InvalidRequestError("policy", name, policy_instead_of(name, (*known, "or all")))
    return names


class Simulator:
    """A trace that was read once, and replayed as often as there are policies and capacities."""

    def __init__(self, path: Path) -> None:
        """Read the trace. Raises InvalidRequestError and OSError, as ``read_trace``."""
        self._name = path.name
        self._lines: TraceLines = read_trace(path)
        self._blocks: dict[int, BlockTrace] = {}

    def run(self, terms: Terms) -> Outcome:
        """Replay the trace. Raises InvalidRequestError when it cannot be, saying why."""
        if terms.model == HYBRID:
            footprint = self._states_bytes if "%" in terms.capacity else 0
            return replay_states(self._segments, terms, footprint)
        trace = self._blocks.get(terms.block_tokens)
        if trace is None:
            trace = self._blocks[terms.block_tokens] = make_blocks(self._lines, terms.block_tokens)
        return replay_blocks(trace, terms)

    @cached_property
    def _segments(self) -> list[SegmentLine]:
        lines = [line for line in self._lines if isinstance(line, SegmentLine)]
        if not lines:
            fix = "a state is of one token's position, and blocks do not say which: use attention"
            raise InvalidRequestError(f"model for {self._name}", HYBRID, fix)
        return lines

    @cached_property
    def _states_bytes(self) -> int:
        return footprint_bytes(self._segments)


def outcomes_as_json(outcomes: Sequence[Outcome]) -> str:
    """Return one JSON object, or a list of them when there are several."""
    rows = [
        {name: value for name, value in asdict(one).items() if value is not None}
        for one in outcomes
    ]
    return json.dumps(rows[0] if len(rows) == 1 else rows)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a table with a row each."""
    table = Grid(
        *("policy", "GiB", "tokens hit", "blocks hit", "PFLOPs saved", "evictions", "requests/s")
    )
    for one in outcomes:
        table.add_row(
            one.policy,
            f"{one.capacity_bytes / _GIB:.2f}",
            f"{one.token_hit_rate:.2%}",
            "-" if one.block_hit_rate is None else f"{one.block_hit_rate:.2%}",
            f"{one.flops_saved / 1e15:.1f}",
            "-" if one.evictions is None else str(one.evictions),
            f"{one.requests_per_s:.0f}",
        )
    open_console().print(table)


def check_plot(path: Path) -> None:
    """Raise InvalidRequestError unless *path* can be plotted to."""
    if path.suffix.lower() != ".svg":
        raise InvalidRequestError("plot", path.name, "end it in .svg")
    if not path.parent.is_dir():
        raise InvalidRequestError("plot", str(path), "name a file in a folder that exists")


def plot_outcomes(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Draw the tokens hit against the capacity, a line a policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in outcomes:
        point = (max(one.capacity_bytes, 1) / _GIB, 100 * one.token_hit_rate)
        lines.setdefault(one.policy, []).append(point)
    ticks = sorted({round(x, 2) for line in lines.values() for x, _ in line} - {0.0})
    line_chart(path, title, ("GiB (log)", "% of the prompts' tokens hit"), lines, ticks)
