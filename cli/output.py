"""What commands print: JSON, or text that no terminal obeys, in plain columns that are not cut.

On a terminal the last columns may wrap; elsewhere each row is one line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typing_extensions import override

from kvstore.cli.app import EXIT_NOT_HELD
from kvstore.proto.errors import printable

if TYPE_CHECKING:  # rich takes longer to import than most commands run
    from rich.console import Console, ConsoleOptions, RenderResult

T = TypeVar("T")
Report = Callable[[int, int], None]
"""Called with how many are done, of how many."""

LOG_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""
_GAP = "  "
_MIN_WRAPPED = 12
"""Minimum width of a column that wraps, unless its longest word is longer."""
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def open_console() -> Console:
    """Return the console of standard output: what is printed is neither cut nor read as markup."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        """Takes every text as it is: no control characters reach the terminal."""

        @override
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return Plain(soft_wrap=True, highlight=False, markup=False, emoji=False)


class Grid:
    """Rows below headings. On a terminal that is too narrow the last *wraps* columns wrap.

    Where that would break a word, each row becomes lines of ``heading: value``.
    """

    def __init__(self, *headings: str, wraps: int = 1) -> None:
        self._rows: list[Sequence[str]] = [headings]
        self._wraps = wraps

    def add_row(self, *cells: object) -> None:
        """Add a row with a cell for each heading."""
        self._rows.append([printable(" ".join(str(cell).split("\n"))) for cell in cells])

    def __bool__(self) -> bool:
        """Whether there is a row."""
        return len(self._rows) > 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for *console*: as lines as long as they are, where it is no terminal."""
        from rich.cells import cell_len, set_cell_size
        from rich.table import Column, Table
        from rich.text import Text

        headings, *rows = self._rows
        columns = list(zip(*self._rows, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - options.max_width
        if over <= 0 or not console.is_terminal:
            for row in self._rows:
                cells = map(set_cell_size, row, widths)
                yield Text(_GAP.join(cells).rstrip())
            return
        for at in range(len(widths) - 1, len(widths) - self._wraps - 1, -1):
            words = (word for cell in columns[at] for word in cell.split())
            least = max(_MIN_WRAPPED, *map(cell_len, words))
            cut = max(0, min(over, widths[at] - least))
            widths[at], over = widths[at] - cut, over - cut
        if over > 0:
            longest = max(map(cell_len, headings))
            for at, row in enumerate(rows):
                lines = zip(headings, row, strict=True)
                text = "\n".join(f"{name + ':':<{longest + 1}} {cell}" for name, cell in lines)
                yield Text("\n" * bool(at) + text)
            return
        made = map(lambda name, width: Column(name, width=width, overflow="fold"), headings, widths)
        table = Table(*made, box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def show(data: object, text: Iterable[str | Grid], as_json: bool, *, held: bool = True) -> None:
    """Print *data* as JSON, or else the lines and tables of *text*.

    Ends the command with 1 unless what it was to find out *held*.
    """
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        console = open_console()
        for part in text:
            console.print(part)
    if not held:
        raise typer.Exit(EXIT_NOT_HELD)


def as_dict(found: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a protobuf message for JSON.

    Bytes become hexadecimal digits, enumerations their names, parts that are not set null. What
    each message says of its server is left out.
    """
    if is_dataclass(found):
        rows = ((one.name.removeprefix("is_"), getattr(found, one.name)) for one in fields(found))
        return {name: _as_json(value) for name, value in rows}
    values = {}
    for field in found.DESCRIPTOR.fields:
        is_absent = field.message_type and not field.is_repeated and not found.HasField(field.name)
        values[field.name] = None if is_absent else _as_json(getattr(found, field.name))
    values.pop("server", None)
    return values


def _as_json(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR") or is_dataclass(value):
        return as_dict(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "items"):
        return dict(sorted(value.items()))
    is_row = hasattr(value, "__len__") and not isinstance(value, str)
    return list(map(_as_json, value)) if is_row else value


def readable_size(size_bytes: float) -> str:
    """Return *size_bytes* to one decimal in the unit that suits it."""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_SIZES[unit]}" if unit else f"{size_bytes:.0f} B"


def readable_time(seconds: float) -> str:
    """Return *seconds* in the unit that suits them."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# --- progress of long work, on standard error


@contextmanager
def progress(what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Yield what shows how far *what* is: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        last_s = clock()

        def note(done: int, total: int) -> None:
            nonlocal last_s
            if clock() - last_s >= LOG_EVERY_S:
                last_s = clock()
                print(f"kvstore: {what}: {done} of {total}", file=sys.stderr, flush=True)

        yield note
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def followed(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield *items*, and show how many of them are done."""
    with progress(what) as report:
        for number, item in enumerate(items):
            report(number, len(items))
            yield item
