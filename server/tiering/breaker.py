"""A circuit breaker: after repeated failures a medium is not used for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

logger = structlog.get_logger(__name__)


class Breaker:
    """Closed (in use), open (not used), or half open (one attempt is allowed).

    Thread-safe. Logs each opening and closing under *name*; *clock* returns monotonic seconds.
    """

    def __init__(self, name: str, failures: int, retry_ms: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._limit = failures
        self._retry_s = retry_ms / 1000
        self._clock = clock
        self._failed = 0
        self._open_until = 0.0
        self._reason = ""
        self._lock = threading.Lock()  # guards the fields above

    def allows(self) -> bool:
        """Whether the medium may be tried now. An open breaker allows one attempt per period."""
        with self._lock:
            if self._failed < self._limit:
                return True
            now = self._clock()
            if now < self._open_until:
                return False
            self._open_until = now + self._retry_s
            return True

    @property
    def is_open(self) -> bool:
        """Whether the medium is not used now; the check consumes no attempt."""
        with self._lock:
            return self._failed >= self._limit and self._clock() < self._open_until

    @property
    def reason(self) -> str:
        """The last failure; empty while closed."""
        with self._lock:
            return self._reason if self._failed >= self._limit else ""

    def succeed(self) -> None:
        """Close after the medium answered."""
        with self._lock:
            was_open = self._failed >= self._limit
            self._failed = 0
            self._reason = ""
        if was_open:
            logger.warning("circuit breaker closed", medium=self._name)

    def fail(self, reason: str) -> None:
        """Count a failure of the medium."""
        with self._lock:
            self._failed += 1
            self._reason = reason
            if self._failed >= self._limit:
                self._open_until = self._clock() + self._retry_s
            has_opened = self._failed == self._limit
        if has_opened:
            logger.warning(
                "circuit breaker opened",
                medium=self._name, failures=self._limit, retry_s=self._retry_s, reason=reason,
            )  # fmt: skip
