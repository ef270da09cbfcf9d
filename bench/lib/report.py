"""How a benchmark reports: a table, one line of JSON, and charts as SVG files; and how it times."""

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


@dataclass(slots=True)
class Report:
    """Values of one benchmark by key, with what each was compared to."""

    bench: str
    values: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: float, measured: str, against: str = "") -> None:
        """Add one value; *measured* and *against* say what it is made of."""
        self.values[key] = round(value, 4)
        self.rows.append((key, f"{value:.3f}", measured, against))

    def note(self, name: str, figure: str, measured: str) -> None:
        """Add a row to the table alone."""
        self.rows.append((name, figure, measured, ""))

    def skip(self, keys: Sequence[str], reason: str) -> None:
        """Leave *keys* out of the values, saying why."""
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


def parser_of(text: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that *text* describes; ``--only`` names some *parts*."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    if names := list(parts):
        what = f"some of {', '.join(names)}"
        parser.add_argument(
            "--only", nargs="+", choices=names, default=names, metavar="PART", help=what
        )
    return parser


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of *work*, those of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of *work*."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_s(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest of *repeats* runs, in seconds."""
    return min(timed(work) for _ in range(repeats))


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Return the best seconds of both, run in turns so that a busy machine hits both alike."""
    pairs = [(timed(ours), timed(theirs)) for _ in range(repeats)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Run both *rounds* times in turns; each returns the seconds it took.

    Return the median of theirs / ours over the rounds, which a machine that is busy now and
    then cannot move far, and the best seconds of each.
    """
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratio = median(their_s / our_s for our_s, their_s in pairs)
    return ratio, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


WIDTH, _ROW, _LEFT = 720, 26, 260
_COLOURS = (
    "#2a6f97", "#e07a5f", "#81b29a", "#6d597a", "#f2a541", "#3d405b",
    "#c1121f", "#8ecae6", "#606c38", "#d4a5a5", "#9a031e", "#5f0f40",
)  # fmt: skip
_INK, _FAINT = "#333333", "#cccccc"


def bar_chart(path: Path, title: str, bars: Sequence[tuple[str, float, float]]) -> None:
    """Draw one row a (name, value, bound): the value as a bar, the bound as a tick across it."""
    height = 68 + _ROW * len(bars)
    widest = max([1.0, *(max(value, bound) for _, value, bound in bars)])
    scale = (WIDTH - _LEFT - 90) / widest
    parts = [_text(12, 24, title, 15)]
    for top, (name, value, bound) in zip(range(44, height, _ROW), bars, strict=False):
        colour, tick = _COLOURS[value < bound], _LEFT + bound * scale
        parts += [
            _text(_LEFT - 10, top + 14, name, anchor="end"),
            _shape("rect", x=_LEFT, y=top, width=max(1, value * scale), height=18, fill=colour),
            _shape("line", x1=tick, y1=top - 3, x2=tick, y2=top + _ROW - 5, stroke=_INK),
            _text(_LEFT + max(value, bound) * scale + 8, top + 14, f"{value:.2f}"),
        ]
    parts.append(_text(_LEFT, height - 10, "the mark is the bar each has to reach", 11))
    _write(path, height, parts)


def line_chart(
    path: Path,
    title: str,
    axes: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Draw points (x, y), joined, one line a name; x is logarithmic, y starts at 0."""
    height, left, right, top, bottom = 360, 70, 170, 44, 48
    points = [point for line in series.values() for point in line]
    low, high = (math.log10(end(x for x, _ in points)) for end in (min, max))
    most = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(x) - low) / (high - low or 1.0)
        room = height - bottom - top
        return left + share * (WIDTH - left - right), height - bottom - y / most * room

    parts = [_text(12, 24, title, 15)]
    for step in range(5):
        (x1, y1), (x2, _) = place(10**low, most * step / 4), place(10**high, 0)
        parts.append(_shape("line", x1=x1, y1=y1, x2=x2, y2=y1, stroke=_FAINT))
        parts.append(_text(left - 8, y1 + 4, f"{most * step / 4:.3g}", anchor="end"))
    parts += [
        _text(place(x, 0)[0], height - bottom + 18, f"{x:g}", anchor="middle")
        for x in sorted({x for x, _ in points})
    ]
    parts.append(_text(left, height - 10, f"{axes[0]} across, {axes[1]} up", 11))
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in sorted(line)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(_shape("polyline", points=joined, fill="none", stroke=colour))
        parts += [_shape("circle", cx=x, cy=y, r=3, fill=colour) for x, y in places]
        parts.append(_text(WIDTH - right + 12, top + 18 * number + 8, name, colour=colour))
    _write(path, height, parts)


def _text(
    x: float, y: float, words: str, size: int = 12, anchor: str = "start", colour: str = _INK
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _shape(kind: str, **fields: float | str) -> str:
    values = {name: f"{one:.1f}" if isinstance(one, float) else one for name, one in fields.items()}
    text = " ".join(f'{name}="{value}"' for name, value in values.items())
    return f"<{kind} {text}/>"


def _write(path: Path, height: int, parts: Sequence[str]) -> None:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    back = _shape("rect", width=WIDTH, height=height, fill="white")
    path.write_text("\n".join([head, back, *parts, "</svg>"]) + "\n")
