"""The Mirror: what is remembered of sampled chunks, under the rows that their shadows have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.policy.asked_report import Report
from kvstore.server.policy.density import DensityTable
from kvstore.server.policy.history import History
from kvstore.server.policy.radix import Rows


class _SampledTable(DensityTable):
    """Another table's values, for policies that see a share of its chunks."""

    def __init__(self, table: DensityTable, rate: Callable[[], float]) -> None:
        self._of = table
        self._rate = rate

    @property
    def values(self) -> NDArray[np.float64]:  # type: ignore[override]
        """The other's."""
        return self._of.values

    @property
    def version(self) -> int:  # type: ignore[override]
        """The other's."""
        return self._of.version

    @override
    def recency_s(self, now_s: float, count: float) -> float:
        return self._of.recency_s(now_s, count / self._rate())


class Mirror(History):
    """A History of few rows that learns nothing itself: it is copied into from another.

    Its classes, table and clock are the other's, so that policies in the shadows rank by what
    was learnt from all chunks and not from the sample alone. *rate* returns the share of chunks
    that is in the sample.
    """

    def __init__(self, history: History, rate: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.kinds = history.kinds
        self.table = _SampledTable(history.table, rate)
        self._of = history
        self._rate = rate

    @override
    def time_s(self, now_s: float) -> float:
        return self._of.time_s(now_s)

    def copy(self, theirs: int, row: int) -> None:
        """Remember of *row* what the other History does of its row *theirs*."""
        self.reach(row)
        other = self._of
        if theirs >= len(other.hits):
            return
        self.last_s[row] = other.last_s[theirs]
        self.hits[row] = other.hits[theirs]
        self.classes[row] = other.classes[theirs]
        self.flops[row] = other.flops[theirs]
        self.own[row] = other.own[theirs]

    def follow(self, theirs: Sequence[int], rows: Sequence[int]) -> None:
        """As ``copy`` for each, of chunks whose class changed by a hint."""
        for their, row in zip(theirs, rows, strict=True):
            self.copy(their, row)
        if rows:
            for follower in self.followers:
                follower(np.array(rows, np.intp))

    def watch(self, report: Report, rows: Rows, is_known: NDArray[np.bool_]) -> None:
        """Pass a report of the other on: *rows* are those here of what *is_known* of it."""
        chunks = round(report.chunks * self._rate())
        passed = Report(rows, report.ages_s[is_known], chunks, report.requests, report.time_s)
        for watcher in self.watchers:
            watcher(passed)

    def is_another(self, theirs: int, row: int) -> bool:
        """Whether the row *theirs* has become another chunk's since it was copied to *row*.

        Then it was seen once, and at another time. An unknown row is nobody's.
        """
        other = self._of
        if theirs >= len(other.hits) or other.hits[theirs] != 1:
            return False
        return other.last_s[theirs] != self.last_s[row]
