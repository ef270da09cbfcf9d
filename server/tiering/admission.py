"""Admission: which chunks a tier is given a copy of, and when.

Writes wear media out and take time from reads, so a copy is made on evidence only. And what is
worth promoting, and which recurrent states are kept.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from kvstore.proto.types import ChunkKey

LEAST_CHANCE = 0.1
"""The price of an idle tier. On the Mooncake conversation trace it writes a sixth to a fifth
less than write-through and finds more; above 0.15 a large tier begins to lose hits."""
_BUSY_FROM, _BUSY_TO = 0.5, 0.8


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value, limit: int) -> bool:
    """Put *key* last into *table*. Return whether the oldest went for it, beyond *limit*."""
    table[key] = value
    table.move_to_end(key)
    if len(table) <= limit:
        return False
    table.popitem(last=False)
    return True


class Trigger(IntEnum):
    """When a tier may be offered a copy."""

    stored = 0
    asked = 1
    leaving = 2
    """Evicted from the tier above, with no copy below."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A chunk without a copy on the tier, and what is known of it.

    ``hits`` counts requests, the first included, those before an eviction too. ``chance`` is that
    of another before the tier would evict it. ``load_s`` is the estimated load from the tier and
    ``compute_s`` what computing the chunk takes instead; 0 where that is not known.
    """

    moment: Trigger
    size_bytes: int
    hits: int = 1
    chance: float = 1.0
    load_s: float = 0.0
    compute_s: float = 0.0
    is_needed: bool = False
    """Chunks that continue it are on the tier, and of no use without it."""

    @property
    def value(self) -> float:
        """The chance of a hit, times the part of computing that it spares; all, if not known."""
        saved = max(0.0, 1.0 - self.load_s / self.compute_s) if self.compute_s else 1.0
        return self.chance * saved


@dataclass(frozen=True, slots=True)
class TierAdmission:
    """Which copies a tier is given: at these ``triggers``, after ``least_hits`` requests.

    With ``least_value`` it weighs what a copy is worth against a price that rises with the tier's
    pressure: the chance below which a load that spares all computing is not worth its bytes.
    """

    triggers: frozenset[Trigger]
    least_hits: int = 0
    least_value: float | None = None
    looks_ahead: bool = False
    """Whether it needs hits and chances."""

    def admits(self, offer: CopyRequest, pressure: float) -> bool:
        """Whether to make the copy. *pressure* is 0 for an idle tier, 1 for one that is behind.

        Never where loading takes as long as computing; always where chunks on the tier would
        be orphaned.
        """
        if offer.is_needed and offer.moment is Trigger.leaving:
            return True
        if offer.compute_s and offer.load_s >= offer.compute_s:
            return False
        if offer.moment not in self.triggers or offer.hits < self.least_hits:
            return False
        return self.least_value is None or (pressure < 1 and offer.value >= self.price(pressure))

    def price(self, pressure: float) -> float:
        """Return the least value that is stored."""
        least = self.least_value or 0.0
        return least + (1.0 - least) * min(1.0, max(0.0, pressure))


_LEAVING = frozenset({Trigger.leaving})
WRITE_THROUGH = TierAdmission(frozenset({Trigger.stored, Trigger.leaving}))
"""A copy of everything, at once, and again of what was lost (HiCache's ``write_through``)."""
WRITE_BACK = TierAdmission(_LEAVING)
"""A copy of what the tier above evicts (HiCache's ``write_back``)."""
SECOND_ACCESS = TierAdmission(frozenset(Trigger), least_hits=2, looks_ahead=True)
"""A copy of what was requested twice (HiCache's ``write_through_selective``, AIBrix's HOT), the
first time maybe before an eviction."""
BY_VALUE = TierAdmission(_LEAVING, least_value=LEAST_CHANCE, looks_ahead=True)
"""A copy, on eviction, of what is worth more than the tier's price."""
ADMISSIONS: Mapping[str, TierAdmission] = {
    "through": WRITE_THROUGH,
    "evict": WRITE_BACK,
    "selective": SECOND_ACCESS,
    "auto": BY_VALUE,
}


PRESSURE_WINDOW_S = 10.0
"""In which a burst of writes is forgotten to about a third."""


class Pressure:
    """How far behind a tier's writes are, from 0 to 1.

    The greater of two: the share of time it was writing of late, from one half (none) to four
    fifths (full), and the share of its queue that is full.
    """

    def __init__(self) -> None:
        self._busy = 0.0
        self._at_s = 0.0

    def note(self, seconds: float, now_s: float) -> None:
        """Take note of a write of *seconds* that ended at *now_s*."""
        self._busy = self._faded(now_s) + max(0.0, seconds) / PRESSURE_WINDOW_S
        self._at_s = now_s

    def _faded(self, now_s: float) -> float:
        past_s = max(0.0, now_s - self._at_s)  # a clock that jumps back fades nothing
        return self._busy * math.exp(-past_s / PRESSURE_WINDOW_S)

    def level(self, queued_share: float, now_s: float) -> float:
        """Return the pressure now; *queued_share* is how full its queue of writes is."""
        busy_share = (self._faded(now_s) - _BUSY_FROM) / (_BUSY_TO - _BUSY_FROM)
        return min(1.0, max(0.0, queued_share, busy_share))


DAY_S = 86_400.0
BURSTS_A_DAY = 24
"""An hour's share may be written at once."""
FIRST_PRICE = 0.5
"""The least value of a copy once the budget is spent; it rises to 1 with an hour's share owed."""
MAX_AWAITED = 4096
"""Copies that were admitted and not written yet; of more the oldest count as dropped."""


class WriteBudget:
    """The writes of one tier, at most *bytes_a_day* over time and an hour's share at once.

    Copies are paid for when they are admitted, so that a full queue of them cannot overrun it;
    those that need no admission (durable puts) as they are written, into debt if need be. Not
    thread-safe: the owner locks.
    """

    def __init__(self, bytes_a_day: int, now_s: float) -> None:
        self.bytes_a_day = bytes_a_day
        self._burst_bytes = bytes_a_day / BURSTS_A_DAY
        self._left_bytes = self._burst_bytes
        self._at_s = now_s
        self._awaited: OrderedDict[ChunkKey, int] = OrderedDict()

    def left_bytes(self, now_s: float) -> float:
        """Return what may be written now; below 0 for what was written beyond that."""
        earned = max(0.0, now_s - self._at_s) * self.bytes_a_day / DAY_S
        self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._at_s = now_s
        return self._left_bytes

    def price(self, now_s: float) -> float:
        """Return the least value of a copy that leaves memory: 0 within the budget, and above 1, so
        that nothing is worth it, with more than an hour's share of debt.
        """
        debt = -self.left_bytes(now_s)
        if debt < 0:
            return 0.0
        share = debt / self._burst_bytes
        return FIRST_PRICE + (1.0 - FIRST_PRICE) * share if share <= 1 else 2.0

    def admitted(self, key: ChunkKey, size_bytes: int) -> None:
        """A copy of about *size_bytes* will be written: it is paid for."""
        self.note_write(key, size_bytes)
        remember(self._awaited, key, size_bytes, MAX_AWAITED)

    def note_write(self, key: ChunkKey, size_bytes: int) -> None:
        """A copy was written, admitted or not; of 0 bytes: it is not written after all."""
        self._left_bytes -= size_bytes - self._awaited.pop(key, 0)


class PromoteOnSecondHit:
    """Names a chunk at its second read, and then forgets it, so that it may come again later.

    Most prompts are read once; what is read twice tends to be read on (the reasoning of 2Q,
    Johnson and Shasha, VLDB 1994, with its first queue only). At most *limit* chunks are
    remembered, the latest. Not thread-safe: the owner locks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()

    def is_due(self, key: ChunkKey) -> bool:
        """Count a read; return whether the chunk should be promoted now."""
        if self._once.pop(key, self) is None:
            return True
        remember(self._once, key, None, self._limit)
        return False

    def forget(self, key: ChunkKey) -> None:
        """Count the next read as the first."""
        self._once.pop(key, None)


PRICE_WEIGHT = 1 / 64
"""What one victim adds to the price."""

LEAST_SHARE = 0.25
"""Of the price, what a chunk must be worth: a second read says more than the mean of its kind."""


class EvictionValue:
    """What a byte of a tier is worth to it: the mean value of the chunks that it evicted of late.

    The value of a chunk on a tier is the chance of a request before it would be evicted, times the
    seconds that a hit there saves, over its bytes. A tier that evicted nothing yet has room, and
    takes everything. Not thread-safe: the owner locks.
    """

    def __init__(self) -> None:
        self.per_byte: float | None = None
        """The price, in seconds a byte; None before the first eviction."""

    def note_eviction(self, value_per_byte: float) -> None:
        """The tier evicts a chunk of this value."""
        before = value_per_byte if self.per_byte is None else self.per_byte
        self.per_byte = before + PRICE_WEIGHT * (value_per_byte - before)

    def takes(self, value_per_byte: float) -> bool:
        """Whether a chunk of this value, read a second time, is worth what has to go for it."""
        return value_per_byte >= LEAST_SHARE * (self.per_byte or 0.0)


MAX_REMEMBERED = 1 << 14
"""Partings, and as many states turned away, the latest. About 6 MB of each."""


class StateAdmission:
    """Decides whether the state that a chunk is put with is worth its bytes. Thread-safe.

    As Marconi admits (Pan et al., MLSys 2025, section 4.2): at the last token of a put, for
    prompts that go on from there, and where a lookup left what is known, for those that branch. A
    state that was turned away is remembered, and admitted when it comes again.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        # Ordered: a plain dictionary looks for its first entry among those that were deleted.
        self._partings: OrderedDict[ChunkKey, None] = OrderedDict()
        self._turned_away: OrderedDict[ChunkKey, None] = OrderedDict()
        self._lock = threading.Lock()  # guards both

    def parted(self, key: ChunkKey) -> None:
        """A lookup went no further than *key* in what is known."""
        with self._lock:
            remember(self._partings, key, None, self._limit)

    def admits(self, key: ChunkKey, *, is_end: bool) -> bool:
        """Whether to keep the state of *key*; one that is not kept is remembered."""
        with self._lock:
            if self._turned_away.pop(key, self) is None or is_end or key in self._partings:
                return True
            remember(self._turned_away, key, None, self._limit)
            return False

    def forget(self, key: ChunkKey) -> None:
        """A state was not turned away after all: it is kept, or never came."""
        with self._lock:
            self._turned_away.pop(key, None)

    def has_turned_away(self, key: ChunkKey) -> bool:
        """Whether the state of *key* was turned away, and did not come again."""
        with self._lock:
            return key in self._turned_away
