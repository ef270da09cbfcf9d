"""How many bytes a day a tier may write: a token bucket, and what a copy costs beyond it."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey

DAY_S = 86_400.0
BURSTS_A_DAY = 24
"""An hour's share may be written at once."""
FIRST_PRICE = 0.5
"""The least value of a copy once the budget is spent; it rises to 1 with an hour's share owed."""
MAX_AWAITED = 4096
"""Copies that were admitted and not written yet; of more the oldest are taken for given up."""


class WriteBudget:
    """The writes of one tier, at most *bytes_a_day* over time and an hour's share at once.

    Copies are paid for when they are admitted, so that a full queue of them cannot overrun it.
    Those that nobody asked about (durable puts) are paid for as they are written, into debt if
    need be. Not thread-safe: the owner locks. Times are seconds on the caller's clock; one that
    goes back earns nothing, one that leaps ahead an hour's share at most.

    Raises InvalidRequestError.
    """

    def __init__(self, bytes_a_day: int, now_s: float) -> None:
        if bytes_a_day <= 0:
            raise InvalidRequestError("bytes_a_day", bytes_a_day, "above 0")
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
        """Return the least value of a copy that leaves memory: 0 within the budget.

        Of a chance times the share of computing that a load spares. Above 1, so that nothing is
        worth it, with more than an hour's share of debt.
        """
        debt = -self.left_bytes(now_s)
        if debt < 0:
            return 0.0
        share = debt / self._burst_bytes
        return FIRST_PRICE + (1.0 - FIRST_PRICE) * share if share <= 1 else 2.0

    def admitted(self, key: ChunkKey, size_bytes: int) -> None:
        """A copy of about *size_bytes* will be written: it is paid for."""
        self._left_bytes -= size_bytes - self._awaited.pop(key, 0)
        self._awaited[key] = size_bytes
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def cancelled(self, key: ChunkKey) -> None:
        """A copy that was paid for is not written after all."""
        self._left_bytes += self._awaited.pop(key, 0)

    def note_write(self, key: ChunkKey, size_bytes: int) -> None:
        """A copy was written, whoever asked for it."""
        self._left_bytes -= size_bytes - self._awaited.pop(key, 0)
