"""Counts that have labels: what lookups found and for whom, what moved where, how long calls took.

All are bounded: tiers and timed methods are few, and of tenants the first so many have a row.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_TENANTS = 64
"""Tenants that are counted on their own; all further ones are counted together."""
OTHERS = "others"

TIMED = ("Lookup", "Get", "Put", "Reserve", "Commit", "Release")
"""Calls whose times are kept: what each request of an engine waits for."""
BOUNDS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0,
)  # fmt: skip
"""Times up to so many seconds are counted together; the last count is of all longer ones."""


class Flows:
    """What was copied from one tier to another, in chunks and bytes. Thread-safe."""

    def __init__(self) -> None:
        self._moved: dict[tuple[str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def note(self, source: str, target: str, size_bytes: int) -> None:
        """A chunk of so many bytes was copied."""
        with self._lock:
            chunks, moved_bytes = self._moved.get((source, target), (0, 0))
            self._moved[source, target] = (chunks + 1, moved_bytes + size_bytes)

    def snapshot(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return chunks and bytes by source and target."""
        with self._lock:
            return dict(self._moved)


@dataclass(frozen=True, slots=True)
class Finds:
    """Chunks that were asked for, by whom and where they were found first."""

    tiers: Mapping[str, int]
    asked: Mapping[str, int]
    """By tenant."""
    ready: Mapping[str, int]


class FindTally:
    """Counts what lookups asked for and found. Thread-safe."""

    def __init__(self) -> None:
        self._tiers: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._lock = threading.Lock()

    def note(
        self, tenant: str, asked: int, sources: NDArray[np.uint8], names: Sequence[str]
    ) -> None:
        """A lookup of *asked* chunks found some, of which *sources* index *names*, the tiers."""
        by_tier = np.bincount(sources).tolist()
        with self._lock:
            if tenant not in self._asked and len(self._asked) >= MAX_TENANTS:
                tenant = OTHERS
            self._asked[tenant] = self._asked.get(tenant, 0) + asked
            self._ready[tenant] = self._ready.get(tenant, 0) + len(sources)
            for name, count in zip(names, by_tier, strict=False):
                if count:
                    self._tiers[name] = self._tiers.get(name, 0) + count

    def snapshot(self) -> Finds:
        """Return all counts at one instant."""
        with self._lock:
            return Finds(dict(self._tiers), dict(self._asked), dict(self._ready))


@dataclass(frozen=True, slots=True)
class Times:
    """Calls of one method: how many took no longer than each of BOUNDS_S, and longer; seconds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    total_s: float = 0.0

    @property
    def calls(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def since(self, before: Times) -> Times:
        """Return those that came after *before*."""
        counts = (now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Times(tuple(counts), self.total_s - before.total_s)

    def quantile_s(self, share: float) -> float | None:
        """Return the time that *share* of the calls took at most, about; None without calls.

        Within a count times are taken to be spread evenly; what is over the last bound counts as
        it.
        """
        left, below = share * self.calls, 0.0
        if not self.calls:
            return None
        for count, bound in zip(self.counts, BOUNDS_S, strict=False):
            if count and left <= count:
                return below + (bound - below) * left / count
            left, below = left - count, bound
        return BOUNDS_S[-1]


class CallTimes:
    """How long calls took in the server, by method; of TIMED alone. Thread-safe."""

    def __init__(self) -> None:
        self._counts = {name: [0] * (len(BOUNDS_S) + 1) for name in TIMED}
        self._totals_s = dict.fromkeys(TIMED, 0.0)
        self._lock = threading.Lock()

    def note(self, method: str, took_s: float) -> None:
        """A call of *method* ended after *took_s* seconds."""
        name = method.rpartition("/")[2]
        counts = self._counts.get(name)
        if counts is None:
            return
        at = bisect_left(BOUNDS_S, took_s)
        with self._lock:
            counts[at] += 1
            self._totals_s[name] += took_s

    def snapshot(self) -> dict[str, Times]:
        """Return the times of each method."""
        with self._lock:
            return {
                name: Times(tuple(counts), self._totals_s[name])
                for name, counts in self._counts.items()
            }
