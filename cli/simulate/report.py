"""What simulations print: a table, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvstore.cli.plot import line_chart
from kvstore.cli.simulate.simulator import Outcome
from kvstore.cli.tables import Grid, open_console
from kvstore.proto.errors import InvalidRequestError

_GIB = float(1 << 30)
PLOT_SUFFIXES = (".svg", ".png")


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
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequestError("plot", path.name, f"end it in {' or '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InvalidRequestError("plot", str(path), "name a file in a folder that exists")


def plot_outcomes(path: Path, title: str, outcomes: Sequence[Outcome]) -> Path:
    """Draw the tokens hit against the capacity, a line a policy; return the file.

    An SVG, drawn without a library. A PNG needs matplotlib: where that is missing, an SVG of the
    same name is drawn.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in outcomes:
        point = (max(one.capacity_bytes, 1) / _GIB, 100 * one.token_hit_rate)
        lines.setdefault(one.policy, []).append(point)
    if path.suffix.lower() == ".png" and _draw_png(path, title, lines):
        return path
    path = path.with_suffix(".svg")
    ticks = sorted({round(x, 2) for line in lines.values() for x, _ in line} - {0.0})
    line_chart(path, title, ("GiB (log)", "% of the prompts' tokens hit"), lines, ticks)
    return path


def _draw_png(path: Path, title: str, lines: dict[str, list[tuple[float, float]]]) -> bool:
    """Draw with matplotlib; False where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.2, 3.8))
    axes = figure.add_subplot(title=title, xlabel="GiB", ylabel="% of the prompts' tokens hit")
    for name, line in lines.items():
        axes.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    return True
