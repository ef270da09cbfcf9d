"""The MissLog: the latest lookups that found less than they asked for, and engines' own counts."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from heapq import nsmallest
from typing import NamedTuple

from kvstore.proto.text import printable
from kvstore.proto.types import Match
from kvstore.proto.wire import REFUSED
from kvstore.server.security.sessions import Session
from kvstore.server.store.explain import ChunkFacts

MAX_MISSES = 1024
MAX_REPORTS = 256
"""Sessions whose engine's counts are remembered, those that ended included."""

MAX_COUNTS = 64
MAX_NAME_CHARS = 64

MAX_REASONS = 4
MAX_REASON_CHARS = 240
"""Of one of them; a longer one is cut."""


class LoggedMiss(NamedTuple):
    """One lookup of *asked* chunks. *facts* were known then of the first that was not found."""

    at_s: float
    session: Session
    facts: ChunkFacts
    asked: int
    ready: int
    pending: int


class Report(NamedTuple):
    """What an engine counted since its birth, as its client last options."""

    at_s: float
    session: Session
    counts: Mapping[str, int]


class MissLog:
    """Bounded and in memory only. Thread-safe; *clock* returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._misses: deque[LoggedMiss] = deque(maxlen=MAX_MISSES)
        self._reports: OrderedDict[int, Report] = OrderedDict()
        # Guards both; held for appends and copies of lists only.
        self._lock = threading.Lock()

    def note(self, session: Session, asked: int, match: Match, facts: ChunkFacts) -> None:
        """Take note of a lookup that found less than it asked for."""
        miss = LoggedMiss(self._clock(), session, facts, asked, match.ready, match.pending)
        with self._lock:
            self._misses.append(miss)

    def report(self, session: Session, counts: Mapping[str, int]) -> None:
        """Take note of what an engine counted; what is over the limits is left out, reasons last.

        A heartbeat may not fail for it: the session would end.
        """
        reasons = (pair for pair in counts.items() if pair[0].startswith(REFUSED))
        named = (
            pair
            for pair in counts.items()
            if len(pair[0]) <= MAX_NAME_CHARS and not pair[0].startswith(REFUSED)
        )
        fit = nsmallest(MAX_REASONS, reasons)
        fit += nsmallest(MAX_COUNTS - len(fit), named)
        kept = {_kept(name): count for name, count in fit}
        if not kept:
            return
        with self._lock:
            self._reports.pop(session.session_id, None)
            if len(self._reports) >= MAX_REPORTS:
                self._reports.popitem(last=False)
            self._reports[session.session_id] = Report(self._clock(), session, kept)

    def misses(self, count: int) -> list[LoggedMiss]:
        """Return the last *count* misses, the latest first."""
        with self._lock:
            latest = list(self._misses)
        return latest[::-1][:count]

    def reports(self) -> list[Report]:
        """Return what engines counted, the latest first."""
        with self._lock:
            return list(reversed(self._reports.values()))


def _kept(name: str) -> str:
    if len(name) > MAX_REASON_CHARS:
        name = f"{name[: MAX_REASON_CHARS - 3]}..."
    return printable(name)
