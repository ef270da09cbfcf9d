"""What commands print: text that nothing obeys, in plain columns that are not cut.

On a terminal the last columns may wrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from kvstore.proto.text import printable

_GAP = "  "
_LEAST_WRAPPED = 12
"""Cells that a column that wraps has at least; with fewer, a row takes lines of its own."""


class _PlainConsole(Console):
    """A Console that takes every text as it is: no control characters reach the terminal."""

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console() -> Console:
    """Return the console of standard output: what is printed is neither cut nor read as markup."""
    return _PlainConsole(soft_wrap=True, highlight=False, markup=False, emoji=False)


class Grid:
    """Rows below headings. On a terminal that is too narrow the last *wraps* columns wrap.

    Where that is not enough each row becomes lines of ``heading: value``: an id stays in one piece.
    """

    def __init__(self, *headings: str, wraps: int = 1) -> None:
        self._rows: list[Sequence[str]] = [headings]
        self._wraps = wraps

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each heading."""
        self._rows.append([printable(" ".join(cell.split("\n"))) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for *console*: as lines as long as they are, where it is no terminal."""
        widths = [max(map(cell_len, column)) for column in zip(*self._rows, strict=True)]
        whole = sum(widths) + len(_GAP) * (len(widths) - 1)
        fixed = whole - sum(widths[len(widths) - self._wraps :])
        if not console.is_terminal or whole <= options.max_width:
            yield from map(Text, self._lines(widths))
        elif fixed + self._wraps * _LEAST_WRAPPED <= options.max_width:
            yield self._wrapped()
        else:
            yield from map(Text, self._records())

    def _lines(self, widths: Sequence[int]) -> Iterator[str]:
        for row in self._rows:
            padded = (
                f"{cell}{' ' * (width - cell_len(cell))}"
                for cell, width in zip(row, widths, strict=True)
            )
            yield _GAP.join(padded).rstrip()

    def _wrapped(self) -> Table:
        headings, *rows = self._rows
        fixed = len(headings) - self._wraps
        columns = [
            Column(name, no_wrap=at < fixed, overflow="fold") for at, name in enumerate(headings)
        ]
        table = Table(*columns, box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def _records(self) -> Iterator[str]:
        headings, *rows = self._rows
        width = max(map(cell_len, headings))
        for at, row in enumerate(rows):
            if at:
                yield ""
            for name, cell in zip(headings, row, strict=True):
                yield f"{name + ':':<{width + 1}} {cell}"
