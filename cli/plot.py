"""Plots as SVG files written by hand: a few shapes and words, no library."""

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
    parts = [_text(12, 24, title, size=15)]
    for row, (name, value, bound) in enumerate(bars):
        top = 44 + _ROW * row
        colour = _COLOURS[0] if value >= bound else _COLOURS[1]
        parts += [
            _text(_LEFT - 10, top + 14, name, anchor="end"),
            _box(_LEFT, top, max(1.0, value * scale), _ROW - 8, colour),
            _line((_LEFT + bound * scale, top - 3), (_LEFT + bound * scale, top + _ROW - 5), _INK),
            _text(_LEFT + max(value, bound) * scale + 8, top + 14, f"{value:.2f}"),
        ]
    parts.append(_text(_LEFT, height - 10, "the mark is the bar each has to reach", size=11))
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
        return left + share * (WIDTH - left - right), height - bottom - y / most * (
            height - top - bottom
        )

    parts = [_text(12, 24, title, size=15)]
    for step in range(5):
        y = most * step / 4
        start, end = place(10**low, y), place(10**high, y)
        parts += [
            _line(start, end, _FAINT),
            _text(left - 8, start[1] + 4, f"{y:.3g}", anchor="end"),
        ]
    for x in ticks or sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], height - bottom + 18, f"{x:g}", anchor="middle"))
    parts.append(_text(left, height - 10, f"{axes[0]} across, {axes[1]} up", size=11))
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(x, y) for x, y in sorted(line)]
        path_points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(WIDTH - right + 12, top + 18 * number + 8, name, colour=colour))
    _write(path, height, parts)


def _text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = _INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _write(path: Path, height: int, parts: Sequence[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    )
    back = _box(0, 0, WIDTH, height, "white")
    path.write_text("\n".join([head, back, *parts, "</svg>"]) + "\n")
