"""Connections over which what a thread reads next is on its way already."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket

from kvstore.tiers.redis_fill import Step
from kvstore.tiers.redis_lines import Lines


@dataclass(frozen=True, slots=True)
class _Kept:
    lines: Lines
    line: socket
    asked: Sequence[Step]


class Rows:
    """One connection a thread, from one fill to the next. Thread-safe.

    Whoever asks for anything else than what is coming hangs up on it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def keep(self, lines: Lines, line: socket, asked: Sequence[Step]) -> None:
        """Keep a borrowed *line*, on which the first steps of the next fill were asked."""
        self._of_thread.kept = _Kept(lines, line, asked)

    def take(self, lines: Lines, steps: Sequence[Step]) -> tuple[socket, int] | None:
        """Return the line on which some of *steps* were asked, and how many; else hang up."""
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        if kept is None:
            return None
        count = len(kept.asked)
        if kept.lines is lines and steps[:count] == kept.asked:
            self._of_thread.kept = None
            return kept.line, count
        self.end()
        return None

    def end(self) -> None:
        """Hang up on what is coming to the calling thread."""
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        if kept is not None:
            self._of_thread.kept = None
            kept.lines.give_back(kept.line, is_clean=False)
