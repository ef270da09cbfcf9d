"""How many wait, by class and by how long: counted in slots of time that widen with age."""

from __future__ import annotations

from bisect import bisect_left
from operator import neg

import numpy as np
from numpy.typing import NDArray

_NEWEST_S = 0.5
_OLDEST_S = 2.0**13
_FIRST_CLASSES = 32
_STEPS = 12
_OPENED_S = _NEWEST_S * 2.0 ** (np.arange(14 * _STEPS + 1) / _STEPS)
_KEPT_RATIO = 1.05
"""How much older the start of a slot is than that of the next, at least."""


class AgeSlots:
    """Counts of members by class, and by when each came.

    A histogram over exact ages would have to look at every member again and again, as all of
    them age. Here a member is counted in the slot of time in which it came; slots close to one
    another for their age are merged (an exponential histogram, Datar et al., SODA 2002), so there
    are fewer than 300 whatever their members are. Times are never before those of earlier calls.
    Memory: 4 bytes a class and slot.
    """

    def __init__(self) -> None:
        self._starts_s = np.array([-np.inf])
        self._counts = np.zeros((1, _FIRST_CLASSES), np.int32)
        self._until_s = -np.inf
        """All that were counted came up to here."""

    def open(self, now_s: float) -> None:
        """Let there be slots for those who came since the last call."""
        if now_s <= self._until_s:
            return
        starts_s = now_s - _OPENED_S[::-1]
        starts_s = starts_s[starts_s > self._until_s]
        if np.isfinite(self._until_s):
            starts_s = np.concatenate(([np.nextafter(self._until_s, np.inf)], starts_s))
        self._merge(now_s, np.concatenate((self._starts_s, starts_s)))
        self._until_s = now_s

    def _merge(self, now_s: float, starts_s: NDArray[np.float64]) -> None:
        """Keep those of *starts_s* that are apart; nobody is in those behind the present ones."""
        kept = [0]
        most_s = np.inf
        # From old to young, so that a start that was kept once is kept as it ages.
        ages_s = (now_s - starts_s).tolist()
        first = max(1, bisect_left(ages_s, -_OLDEST_S, key=neg) - 1)
        for slot in range(first, len(ages_s)):
            age_s = ages_s[slot]
            if _NEWEST_S <= age_s <= most_s:
                kept.append(slot)
                most_s = age_s / _KEPT_RATIO
        counts = self._counts
        old = bisect_left(kept, len(counts))
        merged = np.zeros((len(kept), counts.shape[1]), np.int32)
        merged[:old] = counts[kept[:old]]
        for at, slot in enumerate(kept[:old]):
            until = kept[at + 1] if at + 1 < old else len(counts)
            if slot + 1 < until:
                merged[at] += np.add.reduce(counts[slot + 1 : until], axis=0, dtype=np.int32)
        self._starts_s, self._counts = starts_s[kept], merged

    def add(
        self,
        classes: NDArray[np.uint16],
        came_s: NDArray[np.float64],
        counts: NDArray[np.int32] | int,
    ) -> None:
        """Count members by when they came: *counts* of each, or 1; no more where that is -1."""
        self._widen(int(classes.max(initial=0)) + 1)
        slots = np.searchsorted(self._starts_s, came_s, side="right") - 1
        places = slots * self._counts.shape[1]
        places += classes
        # By one index, which numpy adds at several times as fast as by two.
        np.add.at(self._counts.reshape(-1), places, np.asarray(counts, np.int32))

    def _widen(self, classes: int) -> None:
        slots, width = self._counts.shape
        if classes > width:
            more = np.zeros((slots, max(classes, 2 * width) - width), np.int32)
            self._counts = np.concatenate((self._counts, more), axis=1)

    def by_bin(
        self, now_s: float, ends_s: NDArray[np.float64], classes: int
    ) -> NDArray[np.float64]:
        """Return the members by class and bin of age, of the classes below *classes*.

        *ends_s*: where each bin but the last ends. Shape: (classes, bins).
        """
        ages_s = now_s - self._starts_s
        middles_s = ages_s / 2
        middles_s[:-1] += ages_s[1:] / 2
        middles_s[0] = ages_s[1] if len(ages_s) > 1 else 0.0
        self._widen(classes)
        # From old to young, so bins fall: each has slots that lie together.
        bins = np.searchsorted(ends_s, middles_s)
        first = np.flatnonzero(np.diff(bins, prepend=-1))
        found = np.zeros((len(ends_s) + 1, classes))
        counts = self._counts[:, :classes]
        ends = [*first[1:].tolist(), len(bins)]
        # Row by row, which is faster along this axis than reduceat.
        for slot, end, age in zip(first.tolist(), ends, bins[first].tolist(), strict=True):
            found[age] = np.add.reduce(counts[slot:end], axis=0, dtype=np.int32)
        return np.ascontiguousarray(found.T)

    def age_s(self, now_s: float, count: float) -> float:
        """Return how long ago the earliest of the last *count* members came; inf for all."""
        ages_s = now_s - self._starts_s[::-1]
        behind = np.cumsum(self._counts.sum(axis=1)[::-1])
        slot = int(np.searchsorted(behind, count, side="right"))
        if slot >= len(ages_s) - 1:
            return np.inf
        before, youngest_s = (behind[slot - 1], ages_s[slot - 1]) if slot else (0, 0.0)
        share = (count - before) / (behind[slot] - before)
        return float(youngest_s + share * (ages_s[slot] - youngest_s))

    def __len__(self) -> int:
        return len(self._starts_s)
