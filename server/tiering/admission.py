"""Tier admission: which chunks a slower tier is given a copy of, and when.

Writes wear media out and take their time from reads, so a copy is made on evidence only. What
the published stores do is here by name, beside the rule that weighs what a copy is worth.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError

LEAST_CHANCE = 0.1
"""The price of an idle tier. On the Mooncake conversation trace it writes a sixth to a fifth
less than write-through and finds more; above 0.15 a large tier begins to lose hits."""
SECOND_ASKING = 2
_BUSY_FROM, _BUSY_TO = 0.5, 0.8


class Trigger(IntEnum):
    """When a tier may be offered a copy."""

    stored = 0
    asked = 1
    leaving = 2
    """Evicted from the tier above, with no copy below."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """A chunk without a copy on the tier, and what is known of it.

    ``hits`` counts askings, the first included, those before an eviction too. ``chance`` is that
    of another before the tier would evict it. ``load_s`` is the estimated load from the tier and
    ``compute_s`` what computing the chunk takes instead; 0 where nobody told.
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
    def saved_share(self) -> float:
        """The part of computing it that a load spares; all of it where nobody told."""
        if not self.compute_s:
            return 1.0
        return max(0.0, 1.0 - self.load_s / self.compute_s)


class TierAdmission(ABC):
    """Decides for one tier. Keeps nothing of any chunk."""

    looks_ahead: ClassVar[bool] = False
    """Whether it asks for more than the moment: hits and chances."""

    def admits(self, offer: CopyRequest, pressure: float) -> bool:
        """Whether to make the copy. *pressure* is 0 for an idle tier, 1 for one that is behind.

        Never where loading takes as long as computing; always where chunks on the tier would
        be orphaned.
        """
        if offer.is_needed and offer.moment is Trigger.leaving:
            return True
        return offer.saved_share > 0 and self._is_worth(offer, pressure)

    @abstractmethod
    def _is_worth(self, offer: CopyRequest, pressure: float) -> bool:
        """Whether this rule makes the copy, which would save something."""


class WriteThrough(TierAdmission):
    """A copy of everything, at once, and again of what was lost (HiCache's ``write_through``)."""

    @override
    def _is_worth(self, offer: CopyRequest, pressure: float) -> bool:
        return offer.moment is not Trigger.asked


class WriteBack(TierAdmission):
    """A copy of what the tier above evicts (HiCache's ``write_back``)."""

    @override
    def _is_worth(self, offer: CopyRequest, pressure: float) -> bool:
        return offer.moment is Trigger.leaving


class AdmitOnSecondAccess(TierAdmission):
    """A copy of what was asked for twice (HiCache's ``write_through_selective``, AIBrix's HOT).

    The first asking may have been before an eviction: whoever counts ``hits`` remembers ghosts.
    """

    looks_ahead = True

    @override
    def _is_worth(self, offer: CopyRequest, pressure: float) -> bool:
        return offer.hits >= SECOND_ASKING


class ValueBasedAdmission(TierAdmission):
    """A copy, on eviction, of what is worth more than the tier's price.

    The value of a copy is the chance of a hit times the computing that it spares; per byte it is
    compared with a price that rises with the tier's pressure. Chunks of one model take about as
    many bytes and seconds a token, so the price is stated for such: the chance below which a
    load that spares all computing is not worth its bytes. At pressure 1 nothing is.
    """

    looks_ahead = True

    def __init__(self, least_chance: float = LEAST_CHANCE) -> None:
        if not 0 <= least_chance <= 1:
            raise InvalidRequestError("least_chance", least_chance, "from 0 to 1")
        self._least = least_chance

    def price(self, pressure: float) -> float:
        """Return the least value that is stored."""
        pressure = min(1.0, max(0.0, pressure))
        return self._least + (1.0 - self._least) * pressure

    @override
    def _is_worth(self, offer: CopyRequest, pressure: float) -> bool:
        value = offer.chance * offer.saved_share
        return offer.moment is Trigger.leaving and value >= self.price(pressure) and pressure < 1


_BY_NAME: dict[str, type[TierAdmission]] = {
    "through": WriteThrough,
    "evict": WriteBack,
    "selective": AdmitOnSecondAccess,
    "auto": ValueBasedAdmission,
}
ADMISSIONS = tuple(_BY_NAME)


def make_admission(name: str) -> TierAdmission:
    """Return the admission called *name*. Raises InvalidRequestError."""
    if name not in _BY_NAME:
        raise InvalidRequestError("admission", name, f"use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]()


class Pressure:
    """How far behind a tier's writes are, from 0 to 1.

    The greater of two: the share of time it was writing of late, from one half (none) to four
    fifths (full), and the share of its queue that is full. *window_s* is what "of late" means:
    the time in which a burst is forgotten to about a third.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._busy = 0.0
        self._at_s = 0.0

    def note(self, seconds: float, now_s: float) -> None:
        """Take note of a write of *seconds* that ended at *now_s*."""
        self._busy = self._faded(now_s) + max(0.0, seconds) / self._window_s
        self._at_s = now_s

    def _faded(self, now_s: float) -> float:
        past_s = max(0.0, now_s - self._at_s)  # a clock that jumps back fades nothing
        return self._busy * math.exp(-past_s / self._window_s)

    def level(self, queued_share: float, now_s: float) -> float:
        """Return the pressure now; *queued_share* is how full its queue of writes is."""
        busy_share = (self._faded(now_s) - _BUSY_FROM) / (_BUSY_TO - _BUSY_FROM)
        return min(1.0, max(0.0, queued_share, busy_share))
