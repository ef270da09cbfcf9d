"""The dashboard's drawings, as SVG inside the page. A table beside each says the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.server.web.markup import Html, joined, tag

_WIDTH, _HEIGHT = 360, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 66, 10, 26
_LINES = 4
"""Lines that look different; further ones look like the first ones again."""


def what_if_chart(curves: Mapping[str, Mapping[float, float]]) -> Html:
    """Return the hit ratio by times a tier's size, a line for each tier; empty without any.

    Scales are powers of two, ratios from 0 to 1.
    """
    known = {tier: curve for tier, curve in curves.items() if len(curve) > 1}
    if not known:
        return Html("")
    scales = sorted({scale for curve in known.values() for scale in curve})
    places = {
        scale: _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / (len(scales) - 1)
        for at, scale in enumerate(scales)
    }
    parts = [*_frame(), *(_x_label(x, f"{scale:g}x") for scale, x in places.items())]
    ends: list[tuple[float, int, str]] = []
    for number, (tier, curve) in enumerate(known.items()):
        points = [(places[scale], _y(ratio)) for scale, ratio in sorted(curve.items())]
        parts.append(_line(points, number))
        ends.append((points[-1][1], number, tier))
    free_y = 0.0
    for end_y, number, tier in sorted(ends):
        y = max(end_y, free_y)  # below the label above it, so that both can be read
        free_y = y + 12
        style = f"label label{number % _LINES}"
        parts.append(tag("text", tier, x=_WIDTH - _RIGHT + 6, y=round(y + 4, 1), class_=style))
    return _svg("Hit ratio by times the size of each tier", parts)


def trend_chart(ratios: Sequence[float | None], seconds: float) -> Html:
    """Return the hit ratio over the last *seconds*; gaps where nothing was asked for."""
    if len(ratios) < 2 or all(ratio is None for ratio in ratios):
        return Html("")
    step = (_WIDTH - _LEFT - _RIGHT) / (len(ratios) - 1)
    parts = [*_frame(), _x_label(_LEFT, _ago(seconds)), _x_label(_WIDTH - _RIGHT, "now")]
    points: list[tuple[float, float]] = []
    for at, ratio in enumerate([*ratios, None]):
        if ratio is not None:
            points.append((_LEFT + step * at, _y(ratio)))
        elif points:
            parts.append(_line(points if len(points) > 1 else [*points, _beside(points[0])], 0))
            points = []
    latest = next(ratio for ratio in reversed(ratios) if ratio is not None)
    x = round(_WIDTH - _RIGHT + 6, 1)
    parts.append(tag("text", f"{latest:.1%}", x=x, y=round(_y(latest) + 4, 1), class_="label"))
    return _svg(f"Hit ratio over the last {_ago(seconds).removeprefix('-')}", parts)


def _beside(point: tuple[float, float]) -> tuple[float, float]:
    return point[0] + 1.5, point[1]


def _ago(seconds: float) -> str:
    return f"-{seconds / 60:.0f} min" if seconds >= 90 else f"-{seconds:.0f} s"


def _y(ratio: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, ratio))


def _frame() -> list[Html]:
    parts = []
    for percent in (0, 50, 100):
        y = round(_y(percent / 100), 1)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        label = tag("text", f"{percent} %", x=_LEFT - 6, y=y + 4, class_="axis", text_anchor="end")
        parts.append(label)
    return parts


def _x_label(x: float, label: str) -> Html:
    y = _HEIGHT - _BOTTOM + 16
    return tag("text", label, x=round(x, 1), y=y, class_="axis", text_anchor="middle")


def _line(points: Sequence[tuple[float, float]], number: int) -> Html:
    told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return tag("polyline", points=told, class_=f"line line{number % _LINES}")


def _svg(title: str, parts: Sequence[Html]) -> Html:
    inner = joined([tag("title", title), *parts])
    return tag("svg", inner, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="chart", role="img")
