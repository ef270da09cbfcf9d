"""So many a second and no more: of log lines, and of what is written down of strangers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from threading import Lock
from typing import Any

import structlog

LINES_PER_S = 20
"""Of log lines of one kind; more are counted in the next one."""

REFUSED = "refused"
"""The event of a refused call; its ``error`` is a class's name."""


class RateLimit:
    """A token bucket that a second fills: *per_s* at once, and so many a second in the long run.

    Thread-safe; *clock* returns monotonic seconds. ``left_out`` counts what was refused since
    something was taken.
    """

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = float(per_s)
        self._clock = clock
        self._left, self._at = self._per_s, clock()
        self.left_out = 0
        self._lock = Lock()  # guards the three above

    def take(self) -> int | None:
        """Take one. Return how many were left out before it; None when it is left out itself."""
        with self._lock:
            now = self._clock()
            self._left = min(self._per_s, self._left + self._per_s * (now - self._at))
            self._at = now
            if self._left < 1.0:
                self.left_out += 1
                return None
            self._left -= 1.0
            left_out, self.left_out = self.left_out, 0
            return left_out


class LogLimit:
    """Keeps callers from filling the log: of lines with one event so many a second, of refusals for
    each class of error.

    A processor for structlog.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limits: dict[tuple[str, str], RateLimit] = {}

    def __call__(
        self, logger: object, name: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return *fields*, with what was left out before; raise DropEvent to leave it out too."""
        event = str(fields.get("event"))
        kind = (event, str(fields.get("error")) if event == REFUSED else "")
        limit = self._limits.get(kind)
        if limit is None:
            limit = self._limits.setdefault(kind, RateLimit(LINES_PER_S, self._clock))
        left_out = limit.take()
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            fields["left_out"] = left_out
        return fields
