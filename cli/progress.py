"""Progress of long work: a bar on standard error, where that is somebody's terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

Told = Callable[[int, int], None]
"""Called with how many are done, of how many."""


@contextmanager
def progress(what: str) -> Iterator[Told]:
    """Yield what shows how far *what* is; it shows nothing in pipes and files."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def followed(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield *items*, and show how many of them were dealt with."""
    with progress(what) as told:
        for number, item in enumerate(items):
            told(number, len(items))
            yield item
