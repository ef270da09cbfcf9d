"""Whether a chunk is worth the memory of a faster tier: its value against what that gives up."""

from __future__ import annotations

from kvstore.proto.errors import InvalidRequestError

PRICE_WEIGHT = 1 / 64
"""What one victim adds to the price."""

LEAST_SHARE = 0.25
"""Of the price, what a chunk must be worth: a second read says more than the mean of its kind."""


class EvictionValue:
    """What a byte of a tier is worth to it: the mean value of those that it gave up of late.

    The value of a chunk on a tier is the chance that it is asked for before it would go, times
    the seconds that a hit there saves, over its bytes. A tier that gave up nothing yet has room,
    and takes everything: its price is 0. Not thread-safe: the owner locks.
    """

    def __init__(self, weight: float = PRICE_WEIGHT) -> None:
        if not 0 < weight <= 1:
            raise InvalidRequestError("weight", weight, "above 0, 1 at most")
        self._weight = weight
        self._price = 0.0
        self._is_known = False

    @property
    def per_byte(self) -> float:
        """The price, in seconds a byte."""
        return self._price

    def note_eviction(self, value_per_byte: float) -> None:
        """The tier evicts a chunk of this value."""
        step = value_per_byte - self._price
        self._price += step * self._weight if self._is_known else step
        self._is_known = True

    def takes(self, value_per_byte: float) -> bool:
        """Whether a chunk of this value, read a second time, is worth what has to go for it."""
        return value_per_byte >= LEAST_SHARE * self._price


def value_per_byte(chance: float, saved_s: float, size_bytes: int) -> float:
    """Return the seconds that a byte of a chunk is expected to save; 0 where nothing is saved."""
    return chance * max(0.0, saved_s) / max(1, size_bytes)
