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

from kvstore.proto.errors import printable

_GAP = "  "
_LEAST_WRAPPED = 12
"""Width that a column that wraps has at least, or its longest word has."""


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

    Where that would break a word, each row becomes lines of ``heading: value``.
    """

    def __init__(self, *headings: str, wraps: int = 1) -> None:
        self._rows: list[Sequence[str]] = [headings]
        self._wraps = wraps

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each heading."""
        self._rows.append([printable(" ".join(cell.split("\n"))) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for *console*: as lines as long as they are, where it is no terminal."""
        columns = list(zip(*self._rows, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        gaps = len(_GAP) * (len(widths) - 1)
        least = [*widths[: -self._wraps], *map(_least_width, columns[-self._wraps :])]
        least = list(map(min, widths, least))
        if not console.is_terminal or sum(widths) + gaps <= options.max_width:
            yield from map(Text, self._lines(widths))
        elif sum(least) + gaps <= options.max_width:
            spare = options.max_width - sum(least) - gaps
            for at in range(-self._wraps, 0):
                more = min(spare, widths[at] - least[at])
                least[at], spare = least[at] + more, spare - more
            yield self._wrapped(least)
        else:
            yield from map(Text, self._records())

    def _lines(self, widths: Sequence[int]) -> Iterator[str]:
        for row in self._rows:
            padded = (
                f"{cell}{' ' * (width - cell_len(cell))}"
                for cell, width in zip(row, widths, strict=True)
            )
            yield _GAP.join(padded).rstrip()

    def _wrapped(self, widths: Sequence[int]) -> Table:
        headings, *rows = self._rows
        columns = [
            Column(name, width=width, overflow="fold")
            for name, width in zip(headings, widths, strict=True)
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


def _least_width(column: Sequence[str]) -> int:
    return max(_LEAST_WRAPPED, *(cell_len(word) for cell in column for word in cell.split()))
