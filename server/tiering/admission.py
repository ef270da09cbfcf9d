"""Admission: which copies a tier stores and when, what is promoted, which states are kept.

Writes wear media out and take time from reads, so a copy is made on evidence only.
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
    """Put *key* last into *table*. Return whether that dropped the oldest, beyond *limit*."""
    table[key] = value
    table.move_to_end(key)
    if len(table) <= limit:
        return False
    table.popitem(last=False)
    return True


class Trigger(IntEnum):
    """The event that offers a tier a copy."""

    stored = 0
    asked = 1
    leaving = 2
    """Evicted from the tier above, with no copy below."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A chunk without a copy on the tier, and its statistics.

    ``hits`` counts all requests, also those before an eviction. ``chance`` is the probability of
    another before the tier would evict it. ``load_s`` is the estimated load time from the tier and
    ``compute_s`` the time to compute the chunk instead; 0 if unknown.
    """

    moment: Trigger
    size_bytes: int
    hits: int = 1
    chance: float = 1.0
    load_s: float = 0.0
    compute_s: float = 0.0
    is_needed: bool = False
    """Chunks that continue it are on the tier, and useless without it."""

    @property
    def value(self) -> float:
        """The chance of a hit times the share of computing that it saves; 1 if unknown."""
        saved = max(0.0, 1.0 - self.load_s / self.compute_s) if self.compute_s else 1.0
        return self.chance * saved


@dataclass(frozen=True, slots=True)
class TierAdmission:
    """Which copies a tier stores: at these ``triggers``, after ``least_hits`` requests.

    With ``least_value`` a copy's value is compared with a price that rises with the tier's
    pressure: the chance below which a load that saves all computing is not worth its bytes.
    """

    triggers: frozenset[Trigger]
    least_hits: int = 0
    least_value: float | None = None
    looks_ahead: bool = False
    """Whether it needs hits and chances."""

    def admits(self, offer: CopyRequest, pressure: float) -> bool:
        """Whether to make the copy. *pressure* is 0 for an idle tier, 1 for a saturated one.

        Never if loading takes as long as computing; always if chunks on the tier would lose
        their parent.
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
"""Copies every chunk at once, and on eviction if the copy is gone (HiCache ``write_through``)."""
WRITE_BACK = TierAdmission(_LEAVING)
"""Copies chunks that the tier above evicts (HiCache's ``write_back``)."""
SECOND_ACCESS = TierAdmission(frozenset(Trigger), least_hits=2, looks_ahead=True)
"""Copies chunks requested twice (HiCache's ``write_through_selective``, AIBrix's HOT); a request
before an eviction counts."""
BY_VALUE = TierAdmission(_LEAVING, least_value=LEAST_CHANCE, looks_ahead=True)
"""Copies, on eviction, chunks worth more than the tier's price."""
ADMISSIONS: Mapping[str, TierAdmission] = {
    "through": WRITE_THROUGH,
    "evict": WRITE_BACK,
    "selective": SECOND_ACCESS,
    "auto": BY_VALUE,
}


PRESSURE_WINDOW_S = 10.0
"""Time constant in which the weight of a write decays to about a third."""


class Pressure:
    """Write pressure of a tier, from 0 to 1.

    The greater of two: the recent share of time spent writing, scaled from one half (0) to four
    fifths (1), and the fullness of its write queue.
    """

    def __init__(self) -> None:
        self._busy = 0.0
        self._at_s = 0.0

    def note(self, seconds: float, now_s: float) -> None:
        """Record a write of *seconds* that ended at *now_s*."""
        self._busy = self._faded(now_s) + max(0.0, seconds) / PRESSURE_WINDOW_S
        self._at_s = now_s

    def _faded(self, now_s: float) -> float:
        past_s = max(0.0, now_s - self._at_s)  # a clock that jumps back fades nothing
        return self._busy * math.exp(-past_s / PRESSURE_WINDOW_S)

    def level(self, queued_share: float, now_s: float) -> float:
        """Return the pressure now; *queued_share* is the fullness of the write queue."""
        busy_share = (self._faded(now_s) - _BUSY_FROM) / (_BUSY_TO - _BUSY_FROM)
        return min(1.0, max(0.0, queued_share, busy_share))


DAY_S = 86_400.0
BURSTS_A_DAY = 24
"""An hour's share may be written in one burst."""
FIRST_PRICE = 0.5
"""Least value of a copy once the budget is spent; rises to 1 at an hour's share of debt."""
MAX_AWAITED = 4096
"""Copies admitted and not written yet; beyond it the oldest count as dropped."""


class WriteBudget:
    """The writes of one tier: at most *bytes_a_day* over time, in bursts of an hour's share.

    A copy is charged when admitted, so that a full queue cannot overrun the budget; a copy that
    needs no admission (durable puts) when written, into debt if necessary. Not thread-safe: the
    owner locks.
    """

    def __init__(self, bytes_a_day: int, now_s: float) -> None:
        self.bytes_a_day = bytes_a_day
        self._burst_bytes = bytes_a_day / BURSTS_A_DAY
        self._left_bytes = self._burst_bytes
        self._at_s = now_s
        self._awaited: OrderedDict[ChunkKey, int] = OrderedDict()

    def left_bytes(self, now_s: float) -> float:
        """Return the bytes that may be written now; negative for debt."""
        earned = max(0.0, now_s - self._at_s) * self.bytes_a_day / DAY_S
        self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._at_s = now_s
        return self._left_bytes

    def price(self, now_s: float) -> float:
        """Return the least value of a copy that leaves memory: 0 within the budget; above 1, which
        admits nothing, with more than an hour's share of debt.
        """
        debt = -self.left_bytes(now_s)
        if debt < 0:
            return 0.0
        share = debt / self._burst_bytes
        return FIRST_PRICE + (1.0 - FIRST_PRICE) * share if share <= 1 else 2.0

    def admitted(self, key: ChunkKey, size_bytes: int) -> None:
        """Charge for an admitted copy of about *size_bytes*."""
        self.note_write(key, size_bytes)
        remember(self._awaited, key, size_bytes, MAX_AWAITED)

    def note_write(self, key: ChunkKey, size_bytes: int) -> None:
        """Record a written copy, admitted or not; 0 bytes refund one that is not written."""
        self._left_bytes -= size_bytes - self._awaited.pop(key, 0)


class PromoteOnSecondHit:
    """Selects a chunk at its second read, then forgets it, so that it can be selected again.

    Most prompts are read once; a chunk read twice tends to be read again (as in 2Q, Johnson and
    Shasha, VLDB 1994, with its first queue only). The latest *limit* chunks are remembered. Not
    thread-safe: the owner locks.
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
"""Weight of one victim in the moving average."""

LEAST_SHARE = 0.25
"""Share of the price that a chunk must be worth: its second read is better evidence than the
mean of its class."""


class EvictionValue:
    """The value of a byte of a tier: the moving average over the chunks that it evicted.

    The value of a chunk on a tier is the chance of a request before its eviction, times the seconds
    that a hit there saves, divided by its bytes. A tier without evictions has free space and takes
    all chunks. Not thread-safe: the owner locks.
    """

    def __init__(self) -> None:
        self.per_byte: float | None = None
        """The price, in seconds a byte; None before the first eviction."""

    def note_eviction(self, value_per_byte: float) -> None:
        """Record the eviction of a chunk of this value."""
        before = value_per_byte if self.per_byte is None else self.per_byte
        self.per_byte = before + PRICE_WEIGHT * (value_per_byte - before)

    def takes(self, value_per_byte: float) -> bool:
        """Whether a chunk of this value, read a second time, is worth the eviction of others."""
        return value_per_byte >= LEAST_SHARE * (self.per_byte or 0.0)


MAX_REMEMBERED = 1 << 14
"""Limit of branch points and of rejected states; about 6 MB each."""


class StateAdmission:
    """Decides whether the state of a chunk is worth its bytes. Thread-safe.

    As in Marconi (Pan et al., MLSys 2025, section 4.2) it admits states at the last token of a put,
    for prompts that continue there, and where a lookup left the known prefix, for those that
    branch. A rejected state is remembered, and admitted when it is put again.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        # Ordered: a plain dictionary scans deleted entries to find its first one.
        self._partings: OrderedDict[ChunkKey, None] = OrderedDict()
        self._turned_away: OrderedDict[ChunkKey, None] = OrderedDict()
        self._lock = threading.Lock()  # guards both

    def parted(self, key: ChunkKey) -> None:
        """Record that the known prefix of a lookup ended at *key*."""
        with self._lock:
            remember(self._partings, key, None, self._limit)

    def admits(self, key: ChunkKey, *, is_end: bool) -> bool:
        """Whether to store the state of *key*; a rejected one is remembered."""
        with self._lock:
            if self._turned_away.pop(key, self) is None or is_end or key in self._partings:
                return True
            remember(self._turned_away, key, None, self._limit)
            return False

    def forget(self, key: ChunkKey) -> None:
        """Forget a rejection: the state is stored, or never arrived."""
        with self._lock:
            self._turned_away.pop(key, None)

    def has_turned_away(self, key: ChunkKey) -> bool:
        """Whether the state of *key* was rejected, and not put again."""
        with self._lock:
            return key in self._turned_away
