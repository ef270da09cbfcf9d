"""Plots as SVG files, drawn by what ``kvstore simulate`` draws with."""

from __future__ import annotations

from kvstore.cli.plot import bar_chart, line_chart

__all__ = ["bar_chart", "line_chart"]
