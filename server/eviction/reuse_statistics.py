"""What is learnt as requests come: hits a second of residency, by class and age, and for the value
rule how likely a chunk is requested again before a slower tier evicts it.
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
"""How much older the start of a slot is than that of the next, at least."""


class AgeSlots:
    """Counts of members by class, and by when each came.

    A member is counted in the slot of time in which it came; slots close to one another for their
    age are merged (an exponential histogram, Datar et al., SODA 2002), so there are fewer than
    300. Times are never before those of earlier calls. Memory: 4 bytes a class and slot.
    """

    def __init__(self) -> None:
        self._starts_s = np.array([-np.inf])
        self._counts = np.zeros((1, _FIRST_CLASSES), np.int32)
        self._until_s = -np.inf
        """All that were counted came up to here."""

    def open(self, now_s: float) -> None:
        """Let there be slots for those that came since the last call."""
        if now_s <= self._until_s:
            return
        starts_s = now_s - _OPENED_S[::-1]
        starts_s = starts_s[starts_s > self._until_s]
        if np.isfinite(self._until_s):
            starts_s = np.concatenate(([np.nextafter(self._until_s, np.inf)], starts_s))
        self._merge(now_s, np.concatenate((self._starts_s, starts_s)))
        self._until_s = now_s

    def _merge(self, now_s: float, starts_s: Floats) -> None:
        """Keep those of *starts_s* that are apart; those behind the present ones are empty."""
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

    def add(self, classes: Classes, came_s: Floats, change: int) -> None:
        """Count members by when they came (*change* 1), or no more (-1)."""
        self._widen(int(classes.max(initial=0)) + 1)
        slots = np.searchsorted(self._starts_s, came_s, side="right") - 1
        places = slots * self._counts.shape[1]
        places += classes
        # By one index, which numpy adds at several times as fast as by two.
        np.add.at(self._counts.reshape(-1), places, np.int32(change))

    def _widen(self, classes: int) -> None:
        slots, width = self._counts.shape
        if classes > width:
            more = np.zeros((slots, max(classes, 2 * width) - width), np.int32)
            self._counts = np.concatenate((self._counts, more), axis=1)

    def by_bin(self, now_s: float, ends_s: Floats, classes: int) -> Floats:
        """Return members of *classes* by bin of age, ending at *ends_s*: (classes, bins)."""
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


AGE_BINS = 40
"""Bins of age: one up to a second, then three an octave; the last has no end."""

EDGES_S = 2.0 ** (np.arange(AGE_BINS - 1) / 3)
"""Where each bin ends, in seconds; the end belongs to the bin."""

WIDTHS_S = np.diff(2.0 ** (np.arange(AGE_BINS) / 3), prepend=0.0)
"""How long each bin is, in seconds; of the last, what it would be."""

_STRENGTH = 100.0
"""The weight of a coarser class in a class, in chunks, beside its own count."""

_FIRST_HAZARDS = np.full(AGE_BINS, 0.01)
"""What is taken for true before anything happened: the older, the less there is to hope for."""

_FIRST_HAZARDS[0] *= WIDTHS_S[0] / WIDTHS_S[1]
_CLASSES_AT_ONCE = 128
"""Classes that one refresh works out; of more, it takes turns."""

_STEP_CLASSES = 32
"""A refresh of so many classes takes a step, one of more as many: so that no step is long."""

_NO_CLASSES, _NO_TIMES = np.empty(0, np.uint16), np.empty(0)
_NOTED = 1 << 13
"""Events that are kept until they are counted."""


def bins_of(ages_s: Floats) -> NDArray[np.intp]:
    """Return the bins of ages; below zero, as a clock that jumped makes them, is the first."""
    return np.searchsorted(EDGES_S, ages_s)


def gittins(hazards: Floats, widths_s: Floats) -> Floats:
    """Return the most hits a second that keeping for some time promises, by age.

    *hazards*: (classes, bins), the chance of being asked for in a bin once it is reached.
    ``G[c, a] = max over h >= a of (sum of S h(x)) / (sum of S w(x) (1 - h(x) / 2))`` for x from a
    to h, where S is the chance to be waiting still at x: the index of Gittins (1979), for an
    eviction that may take place after any bin. Shape of the result: (classes, bins).
    """
    by_age = np.ascontiguousarray(hazards.T)
    bins = len(by_age)
    stays = 1.0 - by_age
    # Hits and seconds, of the bin itself and of the time from it to the end of each.
    gains = np.stack((by_age, widths_s[:bins, None] * (1.0 - 0.5 * by_age)), axis=1)
    sums = np.zeros((2, *by_age.shape))
    ratios = np.empty_like(by_age)
    found = np.empty_like(by_age)
    for age in range(bins - 1, -1, -1):
        # Behind *age*, what lies ahead counts for those that are still waiting then.
        ahead, ratio = sums[:, age:], ratios[age:]
        ahead *= stays[age]
        ahead += gains[age][:, None]
        np.divide(ahead[0], ahead[1], out=ratio)
        np.maximum.reduce(ratio, axis=0, out=found[age])
    return found.T


Noted = tuple[Classes, Floats, float]
"""Events that are not counted yet: classes of chunks, since when they waited, and when."""


def _joined(events: list[Noted]) -> tuple[Classes, Floats, Floats]:
    """Return one column of each, and clear the list."""
    times_s = np.repeat([event[2] for event in events], [len(event[0]) for event in events])
    classes = np.concatenate([_NO_CLASSES, *(event[0] for event in events)])
    since_s = np.concatenate([_NO_TIMES, *(event[1] for event in events)])
    events.clear()
    return classes, since_s, times_s


class DensityTable:
    """Hits per second of residency of a class at an age, from what became of chunks like it.

    A chunk waits, from one request for it to the next. Then the table counts its class and age;
    those that still wait count as censored at the age they have, on a tier or evicted. The hazard
    of a bin is that of the class, drawn to that of a coarser class and that to that of all (each
    with the weight of *strength* chunks); ``values`` has its Gittins index. After LHD (Beckmann
    et al., NSDI 2018), whose classes and ages these are too.

    Events are only noted, by the arrays that are passed; ``refresh`` counts them and works the
    table out, in a time that does not depend on how many chunks wait. Times never go back. At
    most 2^13 events and those of one call are noted. 1.6 kB a class.
    """

    def __init__(self, coarse: NDArray[np.intp], strength: float = _STRENGTH) -> None:
        """*coarse* has the coarser class of each, itself for a coarser one; new ones may change."""
        limit = len(coarse)
        self._strength = strength
        self._coarse = coarse
        self._asked = np.zeros((limit, AGE_BINS))
        self._forgotten = np.zeros((limit, AGE_BINS))
        """Chunks forgotten while they waited, by the age they had."""
        self.waiting = AgeSlots()
        self._turn = 0
        self._came: list[Noted] = []
        self._asked_for: list[Noted] = []
        self._lost: list[Noted] = []
        self._moved: list[tuple[Classes, Classes, Floats]] = []
        self._noted = 0
        self.values = np.repeat(gittins(_FIRST_HAZARDS[None], WIDTHS_S), limit, axis=0)
        """Hits per second of residency. Shape: (classes, bins)."""

    def learned(self, asked: Floats, forgotten: Floats) -> None:
        """Start from another run's counts, (classes, bins): what waited there was forgotten."""
        self._asked += asked
        self._forgotten += forgotten

    def ended(self, classes: int) -> tuple[Floats, Floats]:
        """Return what was counted of chunks that wait no more: asked for, and forgotten."""
        return self._asked[:classes].copy(), self._forgotten[:classes].copy()

    # --- events

    def wait(self, classes: Classes, now_s: float) -> None:
        """Chunks begin to wait."""
        self._came.append((classes, _NO_TIMES, now_s))
        self._note(len(classes), now_s)

    def requested(self, classes: Classes, since_s: Floats, now_s: float) -> None:
        """Chunks were asked for that waited since then, and wait no longer."""
        self._asked_for.append((classes, since_s, now_s))
        self._note(len(classes), now_s)

    def forgotten(self, classes: Classes, since_s: Floats, now_s: float) -> None:
        """Chunks that waited are known no longer; what becomes of them will not be seen."""
        self._lost.append((classes, since_s, now_s))
        self._note(len(classes), now_s)

    def moved(self, classes: Classes, others: Classes, since_s: Floats, now_s: float) -> None:
        """Chunks that wait since then are of *others* and not of *classes*."""
        self._moved.append((classes, others, since_s))
        self._note(len(classes), now_s)

    def _note(self, count: int, now_s: float) -> None:
        self._noted += max(count, 8)  # what the arrays themselves take is like as many
        if self._noted > _NOTED:
            self.settle(now_s)

    def settle(self, now_s: float) -> None:
        """Count the events noted."""
        waiting = self.waiting
        waiting.open(now_s)
        came, _, came_s = _joined(self._came)
        waiting.add(came, came_s, 1)
        for classes, others, since_s in self._moved:
            waiting.add(classes, since_s, -1)
            waiting.add(others, since_s, 1)
        for ended, counts in ((self._asked_for, self._asked), (self._lost, self._forgotten)):
            left, since_s, left_s = _joined(ended)
            waiting.add(left, since_s, -1)
            places = bins_of(left_s - since_s)
            places += left * np.intp(AGE_BINS)
            np.add.at(counts.reshape(-1), places, 1.0)
        self._moved.clear()
        self._noted = 0

    # --- the table

    def refresh(self, now_s: float, classes: int) -> None:
        """Count what was noted and work out ``values`` of *classes*; of many, a part a call."""
        for _ in self.refreshing(now_s, classes):
            pass

    def refreshing(self, now_s: float, classes: int) -> Iterator[None]:
        """Do as ``refresh`` does in steps: one ``next`` is a step.

        The values are those of before until the last step, and those of the first step's time
        then. A step takes some 0.4 ms, and there are at most six.
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
        """Return those asked for and those not, at the last ``settle``: both (classes, bins)."""
        ends = self._forgotten[:classes] + self.waiting.by_bin(now_s, EDGES_S, classes)
        return self._asked[:classes].copy(), ends

    def _hazards(self, now_s: float, classes: int, first: int, last: int) -> Floats:
        """Return the hazards of the classes from *first* to *last*, of all *classes* that are."""
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
        """Return the hazards of the bins of (..., bins), drawn *towards* others."""
        at_risk = np.cumsum(ends[..., ::-1], axis=-1)[..., ::-1]
        return (asked + self._strength * towards) / (at_risk + self._strength)


LENGTHS = 4
LENGTH_TOKENS = 8192
"""Prompts differ by how often they have so many tokens, up to three times."""
FREQUENCIES = 3
KINDS = 2 * LENGTHS * 2 * FREQUENCIES
FAMILIAR_CHUNKS = 2
"""A prompt of which so many chunks were known continues another; one may be a system prompt."""
STAY_WEIGHT = 0.01
_PRIOR_HITS, _PRIOR_CHUNKS = 1.0, 2.0
"""What is assumed of a kind before anything is known: half of it comes again."""


def reuse_chance(
    requests: float, hits: NDArray[np.float64], age_s: float, until_s: float = math.inf
) -> float:
    """Return the chance that a chunk, not asked for since *age_s*, is before *until_s*.

    It is hits with ages between / (*requests* - hits before), of all of its kind; *hits* are by
    bin of a DensityTable. Requests that none followed yet count as not followed: an estimate from
    below, which spares writes.
    """
    at, end = bins_of(np.array([age_s, until_s])).tolist()
    end = AGE_BINS if until_s == math.inf else max(at + 1, end)
    found = float(hits[at:end].sum())
    left = requests - float(hits[:at].sum())
    return min(1.0, (found + _PRIOR_HITS) / (max(left, found) + _PRIOR_CHUNKS))


class ReuseForecast:
    """The chance of each chunk that *history* remembers, by a kind of its own.

    A kind is how often it was asked for (1, 2, more), whether it ends its prompt, how long that
    was, and whether the prompt continued a known one: few, which are soon known well. ``requested``
    comes before that of *history*, ``seen`` after it. One byte a row. Not thread-safe.
    """

    def __init__(self, history: AccessHistory, chunk_tokens: int = 256) -> None:
        self.history = history
        self._chunk_tokens = chunk_tokens
        self._requests, self._hits = np.zeros(KINDS), np.zeros((KINDS, AGE_BINS))
        """By kind, and by age at the next."""
        self._columns = Columns()
        self._kinds: array[int] = self._columns.add("B")
        self._stay_s = 0.0

    def requested(self, rows: Rows, chunks: int, now_s: float) -> None:
        """A prompt of *chunks* chunks is looked up, whose first *rows* are known."""
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
        """A chunk was stored that no tier had: if it is new it continues its parent's prompt."""
        self._columns.reach(max(row, parent))
        history = self.history
        if history.hits[row] != 1 or history.last_s[row] < history.time_s(now_s):
            return
        above = self._kinds[parent] // (FREQUENCIES * 2) if parent else 0
        context = above // LENGTHS * LENGTHS + self._length(history.chunks.item(row))
        self._kinds[row] = (context * 2 + (not facts.tokens_full)) * FREQUENCIES
        self._requests[self._kinds[row]] += 1

    def chance(self, row: int, now_s: float) -> float:
        """Return the chance that a chunk is asked for before the slow tier would give it up."""
        if not self.history.hits_of(row) or row >= len(self._kinds):
            return 1.0
        age_s = self._age_s(row, now_s)
        until_s = age_s + self._stay_s if self._stay_s else math.inf
        kind = self._kinds[row]
        return reuse_chance(float(self._requests[kind]), self._hits[kind], age_s, until_s)

    def evicted(self, row: int, now_s: float) -> None:
        """The slow tier evicted a chunk, which shows how long it keeps what is not asked for."""
        if not self.history.hits_of(row):
            return
        age_s = self._age_s(row, now_s)
        self._stay_s += STAY_WEIGHT * (age_s - self._stay_s) if self._stay_s else age_s

    def _age_s(self, row: int, now_s: float) -> float:
        return max(0.0, self.history.time_s(now_s) - self.history.last_s.item(row))
