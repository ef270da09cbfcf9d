"""Charts as SVG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH = 720
_ROW = 26
_LEFT = 260
_COLOURS = (
    "#2a6f97", "#e07a5f", "#81b29a", "#6d597a", "#f2a541", "#3d405b",
    "#c1121f", "#8ecae6", "#606c38", "#d4a5a5", "#9a031e", "#5f0f40",
)  # fmt: skip
_INK, _FAINT = "#333333", "#cccccc"


def bar_chart(path: Path, title: str, bars: Sequence[tuple[str, float, float]]) -> None:
    """Draw one row a (name, value, bound): the value as a bar, the bound as a tick across it."""
    height = 44 + _ROW * len(bars) + 24
    widest = max([1.0, *(max(value, bound) for _, value, bound in bars)])
    scale = (WIDTH - _LEFT - 90) / widest
    parts = [_text(12, 24, title, 15)]
    for row, (name, value, bound) in enumerate(bars):
        top = 44 + _ROW * row
        colour = _COLOURS[0] if value >= bound else _COLOURS[1]
        tick = _LEFT + bound * scale
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
    ticks: Sequence[float] = (),
) -> None:
    """Draw points (x, y), joined, one line a name; x is logarithmic, y starts at 0.

    *ticks* are the x that are written below; every one that has a point when there are none.
    """
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
        for x in ticks or sorted({x for x, _ in points})
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
