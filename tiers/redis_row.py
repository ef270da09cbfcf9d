"""Connections over which what a thread reads next is on its way already."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from socket import socket
from weakref import finalize

from kvstore.tiers.redis_fill import Step
from kvstore.tiers.redis_lines import Lines


class _Kept:
    """A borrowed line, given back at the latest when the thread has ended that keeps it."""

    def __init__(self, lines: Lines, line: socket, asked: Sequence[Step]) -> None:
        self.lines, self.line, self.asked = lines, line, asked
        self._end = finalize(self, lines.give_back, line, is_clean=False)
        self._end.atexit = False

    def release(self) -> socket:
        """Return the line to whoever goes on with it."""
        self._end.detach()
        return self.line

    def end(self) -> None:
        """Hang up."""
        self._end()


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
            return kept.release(), count
        self.end()
        return None

    def end(self) -> None:
        """Hang up on what is coming to the calling thread."""
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        if kept is not None:
            self._of_thread.kept = None
            kept.end()
