"""Reports of benchmarks: a table, a line of JSON, an SVG chart; and their timers."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Report:
    """The values of one benchmark by key, each with its baseline."""

    bench: str
    values: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: float, measured: str, against: str = "") -> None:
        """Add one value; *measured* and *against* describe it."""
        self.values[key] = round(value, 4)
        self.rows.append((key, f"{value:.3f}", measured, against))

    def note(self, name: str, figure: str, measured: str) -> None:
        self.rows.append((name, figure, measured, ""))

    def skip(self, keys: Sequence[str], reason: str) -> None:
        self.skipped.update(dict.fromkeys(keys, reason))
        self.rows += [(key, "skipped", reason, "") for key in keys]

    def print(self, *, only_json: bool) -> None:
        """Print the table (unless *only_json*), then the JSON line."""
        if not only_json:
            print(f"{self.bench} on {platform.processor() or platform.machine()}")
            rows = [("key", "value", "measured", "against"), *self.rows]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)))
        skipped = {"skipped": self.skipped} if self.skipped else {}
        print(json.dumps({"bench": self.bench, "values": self.values, **skipped}))


Part: TypeAlias = Callable[[Report, Path], None]


def parser_of(text: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with *text* as description; ``--only`` selects *parts*."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    if names := list(parts):
        what = f"some of {', '.join(names)}"
        parser.add_argument(
            "--only", nargs="+", choices=names, default=names, metavar="PART", help=what
        )
    return parser


def run_parts(
    bench: str, parts: Mapping[str, Part], argv: Sequence[str] | None, text: str | None
) -> None:
    """Run the *parts* selected by the flags, each with its own folder, and print."""
    options, report = parser_of(text, parts).parse_args(argv), Report(bench)
    for name in (name for name in parts if name in options.only):
        with TemporaryDirectory(prefix=f"kvstore-{bench}-") as folder:
            parts[name](report, Path(folder))
    report.print(only_json=options.json)


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of *work*, over all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def gbps(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / seconds / 1e9:.2f} GB/s"


def paired(
    one: Callable[[], object], other: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Return the best seconds of both, run alternately so that load affects both alike."""
    return in_turns(lambda: timed(one), lambda: timed(other), repeats)[1:]


def in_turns(
    one: Callable[[], float], other: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Run both alternately, *rounds* times; each returns the seconds it took.

    Return the median of other / one over the rounds, which is robust to bursts of load, and the
    best seconds of each.
    """
    pairs = [(one(), other()) for _ in range(rounds)]
    ratio = median(other_s / one_s for one_s, other_s in pairs)
    return ratio, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


Estimate = tuple[float, float, float]
"""A figure and its 95 % interval."""
_RESAMPLES = 2000


def resampled(value: Callable[[NDArray[np.intp]], float], count: int) -> Estimate:
    """Return *value* of *count* cases, and its bootstrap percentile interval.

    Efron, Bootstrap methods: another look at the jackknife, 1979, section 2.
    """
    picks = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile([value(pick) for pick in picks], [0.025, 0.975])
    return value(np.arange(count)), float(low), float(high)


def median_of(found: Sequence[float]) -> Estimate:
    values = np.array(found)
    return resampled(lambda pick: float(np.median(values[pick])), len(values))


WIDTH, HEIGHT = 720, 360
_COLOURS = ("#2a6f97", "#e07a5f", "#81b29a", "#6d597a", "#f2a541", "#3d405b")


def line_chart(
    path: Path,
    title: str,
    axes: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Draw one line of points (x, y) for each name; x is logarithmic, y starts at 0."""
    left, right, top, bottom = 70, 550, 44, HEIGHT - 48
    points = [point for line in series.values() for point in line]
    low, high = (math.log10(end(x for x, _ in points)) for end in (min, max))
    most = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(x) - low) / (high - low or 1.0)
        return left + share * (right - left), bottom - y / most * (bottom - top)

    parts = [_text(12, 24, title), _text(left, HEIGHT - 10, f"{axes[0]} across, {axes[1]} up")]
    for step in range(5):
        y = place(10**low, most * step / 4)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#cccccc"/>')
        parts.append(_text(left - 8, y + 4, f"{most * step / 4:.3g}", "end"))
    marks = sorted({x for x, _ in points})
    parts += [_text(place(x, 0)[0], bottom + 18, f"{x:g}", "middle") for x in marks]
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in sorted(line)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(right + 12, top + 18 * number + 8, name, colour=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head += f' width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    path.write_text("\n".join([head, back, *parts, "</svg>"]) + "\n")


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#333333") -> str:
    style = f'text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
