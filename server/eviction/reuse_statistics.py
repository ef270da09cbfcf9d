"""Statistics learnt from requests: hits per second of residency by class and age, and for
admission the chance that a chunk is requested again before a slower tier evicts it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from operator import neg
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.policy import Columns, Rows

if TYPE_CHECKING:  # it imports this module
    from kvstore.server.eviction.access_history import AccessHistory, InsertInfo

Classes = NDArray[np.uint16]
Floats = NDArray[np.float64]

_NEWEST_S = 0.5
_OLDEST_S = 2.0**13
_FIRST_CLASSES = 32
_STEPS = 12
_OPENED_S = _NEWEST_S * 2.0 ** (np.arange(14 * _STEPS + 1) / _STEPS)
_KEPT_RATIO = 1.05
"""Least ratio of the ages of two successive slot starts."""


class AgeSlots:
    """Counts of members by class and arrival time.

    A member is counted in the time slot of its arrival; slots close together relative to their age
    are merged (an exponential histogram, Datar et al., SODA 2002), so there are fewer than 300.
    Times must not decrease between calls. Memory: 4 bytes a class and slot.
    """

    def __init__(self) -> None:
        self._starts_s = np.array([-np.inf])
        self._counts = np.zeros((1, _FIRST_CLASSES), np.int32)
        self._until_s = -np.inf
        """Latest arrival that the slots cover."""

    def open(self, now_s: float) -> None:
        """Add slots for arrivals since the last call."""
        if now_s <= self._until_s:
            return
        starts_s = now_s - _OPENED_S[::-1]
        starts_s = starts_s[starts_s > self._until_s]
        if np.isfinite(self._until_s):
            starts_s = np.concatenate(([np.nextafter(self._until_s, np.inf)], starts_s))
        self._merge(now_s, np.concatenate((self._starts_s, starts_s)))
        self._until_s = now_s

    def _merge(self, now_s: float, starts_s: Floats) -> None:
        """Keep those of *starts_s* that are far enough apart; new ones at the end are empty."""
        kept = [0]
        most_s = np.inf
        # From old to young, so that a start once kept stays as it ages.
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

    def add(self, classes: Classes, arrived_s: Floats, change: int) -> None:
        """Add members by arrival time (*change* 1), or remove them (-1)."""
        self._widen(int(classes.max(initial=0)) + 1)
        slots = np.searchsorted(self._starts_s, arrived_s, side="right") - 1
        places = slots * self._counts.shape[1]
        places += classes
        # A flat index: numpy adds several times faster than with two.
        np.add.at(self._counts.reshape(-1), places, np.int32(change))

    def _widen(self, classes: int) -> None:
        slots, width = self._counts.shape
        if classes > width:
            more = np.zeros((slots, max(classes, 2 * width) - width), np.int32)
            self._counts = np.concatenate((self._counts, more), axis=1)

    def by_bin(self, now_s: float, ends_s: Floats, classes: int) -> Floats:
        """Return members of *classes* by bin of age; *ends_s* end the bins: (classes, bins)."""
        ages_s = now_s - self._starts_s
        middles_s = ages_s / 2
        middles_s[:-1] += ages_s[1:] / 2
        middles_s[0] = ages_s[1] if len(ages_s) > 1 else 0.0
        self._widen(classes)
        # From old to young, so bins fall: the slots of a bin are adjacent.
        bins = np.searchsorted(ends_s, middles_s)
        first = np.flatnonzero(np.diff(bins, prepend=-1))
        found = np.zeros((len(ends_s) + 1, classes))
        counts = self._counts[:, :classes]
        ends = [*first[1:].tolist(), len(bins)]
        # Row by row: faster along this axis than reduceat.
        for slot, end, age in zip(first.tolist(), ends, bins[first].tolist(), strict=True):
            found[age] = np.add.reduce(counts[slot:end], axis=0, dtype=np.int32)
        return np.ascontiguousarray(found.T)

    def age_s(self, now_s: float, count: float) -> float:
        """Return the age of the earliest of the last *count* members; inf for all."""
        ages_s = now_s - self._starts_s[::-1]
        behind = np.cumsum(self._counts.sum(axis=1)[::-1])
        slot = int(np.searchsorted(behind, count, side="right"))
        if slot >= len(ages_s) - 1:
            return np.inf
        before, youngest_s = (behind[slot - 1], ages_s[slot - 1]) if slot else (0, 0.0)
        share = (count - before) / (behind[slot] - before)
        return float(youngest_s + share * (ages_s[slot] - youngest_s))


AGE_BINS = 40
"""Bins of age: one up to a second, then three per octave; the last has no end."""

EDGES_S = 2.0 ** (np.arange(AGE_BINS - 1) / 3)
"""Inclusive end of each bin, in seconds."""

WIDTHS_S = np.diff(2.0 ** (np.arange(AGE_BINS) / 3), prepend=0.0)
"""Width of each bin, in seconds; the last as if it had an end."""

_STRENGTH = 100.0
"""The weight of a coarser class in a class, in chunks, beside its own count."""

_FIRST_HAZARDS = np.full(AGE_BINS, 0.01)
"""The prior: older chunks have less value."""

_FIRST_HAZARDS[0] *= WIDTHS_S[0] / WIDTHS_S[1]
_CLASSES_AT_ONCE = 128
"""Classes computed by one refresh; more are done round-robin."""

_STEP_CLASSES = 32
"""Classes per step of a refresh, so that no step takes long."""

_NO_CLASSES, _NO_TIMES = np.empty(0, np.uint16), np.empty(0)
_NOTED = 1 << 13
"""Events buffered until they are counted."""


def bins_of(ages_s: Floats) -> NDArray[np.intp]:
    """Return the bins of ages; negative ages, after a clock jump, are in the first."""
    return np.searchsorted(EDGES_S, ages_s)


def gittins(hazards: Floats, widths_s: Floats) -> Floats:
    """Return the most expected hits per second of keeping a chunk for some time, by age.

    *hazards*: (classes, bins), the chance of a request in a bin once it is reached.
    ``G[c, a] = max over h >= a of (sum of S h(x)) / (sum of S w(x) (1 - h(x) / 2))`` for x from a
    to h, where S is the chance of still waiting at x: the index of Gittins (1979), for an eviction
    that may take place after any bin. Shape of the result: (classes, bins).
    """
    by_age = np.ascontiguousarray(hazards.T)
    bins = len(by_age)
    stays = 1.0 - by_age
    # Hits and seconds: of each bin, and sums from a bin to each later one.
    gains = np.stack((by_age, widths_s[:bins, None] * (1.0 - 0.5 * by_age)), axis=1)
    sums = np.zeros((2, *by_age.shape))
    ratios = np.empty_like(by_age)
    found = np.empty_like(by_age)
    for age in range(bins - 1, -1, -1):
        # Later bins count for the chunks that still wait after *age*.
        ahead, ratio = sums[:, age:], ratios[age:]
        ahead *= stays[age]
        ahead += gains[age][:, None]
        np.divide(ahead[0], ahead[1], out=ratio)
        np.maximum.reduce(ratio, axis=0, out=found[age])
    return found.T


Noted = tuple[Classes, Floats, float]
"""Buffered events: classes of chunks, the starts of their waits, and the time of the event."""


def _joined(events: list[Noted]) -> tuple[Classes, Floats, Floats]:
    """Return the events as three columns, and clear the list."""
    times_s = np.repeat([event[2] for event in events], [len(event[0]) for event in events])
    classes = np.concatenate([_NO_CLASSES, *(event[0] for event in events)])
    since_s = np.concatenate([_NO_TIMES, *(event[1] for event in events)])
    events.clear()
    return classes, since_s, times_s


class DensityTable:
    """Hits per second of residency of a class at an age, from the outcomes of its chunks.

    A chunk waits from one request for it to the next. Then the table counts its class and age;
    chunks that still wait, on a tier or evicted, count as censored at their age. The hazard of a
    bin is that of the class, shrunk towards that of a coarser class, which is shrunk towards that
    of all (each with the weight of *strength* chunks); ``values`` has its Gittins index. Classes
    and ages follow LHD (Beckmann et al., NSDI 2018).

    Events are buffered, without a copy of their arrays; ``refresh`` counts them and computes the
    table, in a time that does not depend on how many chunks wait. Times must not decrease. At most
    2^13 events and those of one call are buffered. 1.6 kB a class.
    """

    def __init__(self, coarse: NDArray[np.intp], strength: float = _STRENGTH) -> None:
        """*coarse* maps classes to their coarser class, which maps to itself; it may grow."""
        limit = len(coarse)
        self._strength = strength
        self._coarse = coarse
        self._asked = np.zeros((limit, AGE_BINS))
        self._forgotten = np.zeros((limit, AGE_BINS))
        """Chunks forgotten while they waited, by age."""
        self.waiting = AgeSlots()
        self._turn = 0
        self._arrived: list[Noted] = []
        self._requested: list[Noted] = []
        self._lost: list[Noted] = []
        self._moved: list[tuple[Classes, Classes, Floats]] = []
        self._noted = 0
        self.values = np.repeat(gittins(_FIRST_HAZARDS[None], WIDTHS_S), limit, axis=0)
        """Hits per second of residency. Shape: (classes, bins)."""

    def learned(self, asked: Floats, forgotten: Floats) -> None:
        """Add counts of an earlier run, (classes, bins)."""
        self._asked += asked
        self._forgotten += forgotten

    def ended(self, classes: int) -> tuple[Floats, Floats]:
        """Return the counts of chunks that no longer wait: requested, and forgotten."""
        return self._asked[:classes].copy(), self._forgotten[:classes].copy()

    # --- events

    def wait(self, classes: Classes, now_s: float) -> None:
        """Record chunks that begin to wait."""
        self._arrived.append((classes, _NO_TIMES, now_s))
        self._note(len(classes), now_s)

    def requested(self, classes: Classes, since_s: Floats, now_s: float) -> None:
        """Record requests for chunks that waited since *since_s*, which ends their wait."""
        self._requested.append((classes, since_s, now_s))
        self._note(len(classes), now_s)

    def forgotten(self, classes: Classes, since_s: Floats, now_s: float) -> None:
        """Record chunks that are forgotten while they wait; their outcome stays unknown."""
        self._lost.append((classes, since_s, now_s))
        self._note(len(classes), now_s)

    def moved(self, classes: Classes, others: Classes, since_s: Floats, now_s: float) -> None:
        """Move chunks that wait since *since_s* from *classes* to *others*."""
        self._moved.append((classes, others, since_s))
        self._note(len(classes), now_s)

    def _note(self, count: int, now_s: float) -> None:
        self._noted += max(count, 8)  # the arrays' overhead equals about 8 events
        if self._noted > _NOTED:
            self.settle(now_s)

    def settle(self, now_s: float) -> None:
        """Count the buffered events."""
        waiting = self.waiting
        waiting.open(now_s)
        arrived, _, arrived_s = _joined(self._arrived)
        waiting.add(arrived, arrived_s, 1)
        for classes, others, since_s in self._moved:
            waiting.add(classes, since_s, -1)
            waiting.add(others, since_s, 1)
        for ended, counts in ((self._requested, self._asked), (self._lost, self._forgotten)):
            left, since_s, left_s = _joined(ended)
            waiting.add(left, since_s, -1)
            places = bins_of(left_s - since_s)
            places += left * np.intp(AGE_BINS)
            np.add.at(counts.reshape(-1), places, 1.0)
        self._moved.clear()
        self._noted = 0

    # --- the table

    def refresh(self, now_s: float, classes: int) -> None:
        """Count buffered events and compute ``values`` of *classes*, or a part if they are many."""
        for _ in self.refreshing(now_s, classes):
            pass

    def refreshing(self, now_s: float, classes: int) -> Iterator[None]:
        """Refresh in steps, one per ``next``.

        The last step replaces all values by those of the first step's time. A step takes about
        0.4 ms, and there are at most six.
        """
        self.settle(now_s)
        yield
        first = self._turn if self._turn < classes else 0
        last = self._turn = min(first + _CLASSES_AT_ONCE, classes)
        hazards = self._hazards(now_s, classes, first, last)
        values = np.empty_like(hazards)
        yield
        for start in range(0, len(hazards), _STEP_CLASSES):
            if start:
                yield
            part = slice(start, start + _STEP_CLASSES)
            values[part] = gittins(hazards[part], WIDTHS_S)
        self.values[first:last] = values

    def counts(self, now_s: float, classes: int) -> tuple[Floats, Floats]:
        """Return chunks requested and not, at the last ``settle``: both (classes, bins)."""
        ends = self._forgotten[:classes] + self.waiting.by_bin(now_s, EDGES_S, classes)
        return self._asked[:classes].copy(), ends

    def _hazards(self, now_s: float, classes: int, first: int, last: int) -> Floats:
        """Return the hazards of classes *first* to *last* out of *classes*."""
        asked, ends = self.counts(now_s, classes)
        ends += asked
        all_hazards = self._shrunk(asked.sum(0), ends.sum(0), _FIRST_HAZARDS)
        coarse = self._coarse[:classes]
        places = (coarse * AGE_BINS)[:, None] + np.arange(AGE_BINS)
        sums = (np.bincount(places.ravel(), counts.ravel()) for counts in (asked, ends))
        coarser_asked, coarser_ends = (each.reshape(-1, AGE_BINS).astype(float) for each in sums)
        coarser = self._shrunk(coarser_asked, coarser_ends, all_hazards)
        return self._shrunk(asked[first:last], ends[first:last], coarser[coarse[first:last]])

    def _shrunk(self, asked: Floats, ends: Floats, towards: Floats) -> Floats:
        """Return the hazards of bins (..., bins), shrunk *towards* others."""
        at_risk = np.cumsum(ends[..., ::-1], axis=-1)[..., ::-1]
        return (asked + self._strength * towards) / (at_risk + self._strength)


LENGTHS = 4
LENGTH_TOKENS = 8192
"""Prompts are classed by this many tokens, in LENGTHS steps."""
FREQUENCIES = 3
KINDS = 2 * LENGTHS * 2 * FREQUENCIES
FAMILIAR_CHUNKS = 2
"""A prompt with this many known chunks continues another; one may be a system prompt."""
STAY_WEIGHT = 0.01
_PRIOR_HITS, _PRIOR_CHUNKS = 1.0, 2.0
"""The prior of a kind: half of its chunks are requested again."""


def reuse_chance(
    requests: float, hits: NDArray[np.float64], age_s: float, until_s: float = math.inf
) -> float:
    """Return the chance that a chunk last requested *age_s* ago is requested before age *until_s*.

    It is hits at ages between / (*requests* - earlier hits), over all of its kind; *hits* are by
    bin of a DensityTable. Requests not yet followed by another count as never followed: a lower
    bound, which saves writes.
    """
    at, end = bins_of(np.array([age_s, until_s])).tolist()
    end = AGE_BINS if until_s == math.inf else max(at + 1, end)
    found = float(hits[at:end].sum())
    left = requests - float(hits[:at].sum())
    return min(1.0, (found + _PRIOR_HITS) / (max(left, found) + _PRIOR_CHUNKS))


class ReuseForecast:
    """The chance of reuse of each chunk in *history*, by its kind.

    A kind is the number of requests (1, 2, more), whether the chunk ends its prompt, the prompt's
    length, and whether the prompt continued a known one: few kinds, which are soon known well. Call
    ``requested`` before that of *history*, ``seen`` after it. One byte a row. Not thread-safe.
    """

    def __init__(self, history: AccessHistory, chunk_tokens: int = 256) -> None:
        self.history = history
        self._chunk_tokens = chunk_tokens
        self._requests, self._hits = np.zeros(KINDS), np.zeros((KINDS, AGE_BINS))
        """Requests by kind, and hits by kind and age."""
        self._columns = Columns()
        self._kinds: array[int] = self._columns.add("B")
        self._stay_s = 0.0

    def requested(self, rows: Rows, chunks: int, now_s: float) -> None:
        """Record a lookup of a prompt of *chunks* chunks, whose first *rows* are known."""
        history = self.history
        rows = rows[rows < len(history.hits)]
        hits = history.hits[rows]
        rows, hits = rows[hits > 0], hits[hits > 0]
        if not len(rows):
            return
        self._columns.reach(int(rows.max()))
        kinds = np.frombuffer(self._kinds, np.uint8)
        ages_s = history.time_s(now_s) - history.last_s[rows]
        np.add.at(self._hits, (kinds[rows], bins_of(ages_s)), 1.0)
        is_end = kinds[rows] // FREQUENCIES % 2
        context = (len(rows) >= FAMILIAR_CHUNKS) * LENGTHS + self._length(chunks)
        fresh = (context * 2 + is_end) * FREQUENCIES + np.minimum(hits, FREQUENCIES - 1)
        kinds[rows] = fresh
        self._requests += np.bincount(kinds[rows], minlength=KINDS)

    def _length(self, chunks: int) -> int:
        return min(LENGTHS - 1, chunks * self._chunk_tokens // LENGTH_TOKENS)

    def seen(self, row: int, parent: int, facts: InsertInfo, now_s: float) -> None:
        """Record a stored chunk that no tier had; a new one continues its parent's prompt."""
        self._columns.reach(max(row, parent))
        history = self.history
        if history.hits[row] != 1 or history.last_s[row] < history.time_s(now_s):
            return
        above = self._kinds[parent] // (FREQUENCIES * 2) if parent else 0
        context = above // LENGTHS * LENGTHS + self._length(history.chunks.item(row))
        self._kinds[row] = (context * 2 + (not facts.tokens_full)) * FREQUENCIES
        self._requests[self._kinds[row]] += 1

    def chance(self, row: int, now_s: float) -> float:
        """Return the chance that a chunk is requested before the slow tier would evict it."""
        if not self.history.hits_of(row) or row >= len(self._kinds):
            return 1.0
        age_s = self._age_s(row, now_s)
        until_s = age_s + self._stay_s if self._stay_s else math.inf
        kind = self._kinds[row]
        return reuse_chance(float(self._requests[kind]), self._hits[kind], age_s, until_s)

    def evicted(self, row: int, now_s: float) -> None:
        """Record an eviction of the slow tier, which shows how long it keeps idle chunks."""
        if not self.history.hits_of(row):
            return
        age_s = self._age_s(row, now_s)
        self._stay_s += STAY_WEIGHT * (age_s - self._stay_s) if self._stay_s else age_s

    def _age_s(self, row: int, now_s: float) -> float:
        return max(0.0, self.history.time_s(now_s) - self.history.last_s.item(row))
