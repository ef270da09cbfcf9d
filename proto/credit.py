"""Credit: what a receiver of parts lets a sender have under way to it. Sans I/O."""

from __future__ import annotations

from typing import ClassVar

from kvstore.proto.bulk import MAX_CREDIT_BYTES, PART_COST_BYTES, WINDOW_BYTES
from kvstore.proto.errors import InvalidRequestError


def cost(payload_bytes: int) -> int:
    """Return what a part takes of the credit."""
    return payload_bytes + PART_COST_BYTES


class Budget:
    """What a sender may still send. Not thread-safe.

    ``limit_bytes`` bounds what may be granted at once: a receiver cannot make a sender queue
    more than that for it.
    """

    limit_bytes: ClassVar[int] = MAX_CREDIT_BYTES

    def __init__(self) -> None:
        self._left_bytes = 0

    def grant(self, credit_bytes: int) -> None:
        """Take note of a grant. Raises InvalidRequestError past the limit."""
        if self._left_bytes + credit_bytes > self.limit_bytes:
            raise InvalidRequestError("credit_bytes", credit_bytes, f"at most {self.limit_bytes}")
        self._left_bytes += credit_bytes

    def spend(self, payload_bytes: int) -> bool:
        """Take the cost of a part out; False, and nothing taken, when it is not covered."""
        price = cost(payload_bytes)
        if price > self._left_bytes:
            return False
        self._left_bytes -= price
        return True


class Window:
    """What a receiver has granted and got. Not thread-safe."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._under_way_bytes = 0
        self._consumed_bytes = 0

    def open(self) -> int:
        """Return the first grant."""
        self._under_way_bytes = self._window_bytes
        return self._window_bytes

    def receive(self, payload_bytes: int) -> None:
        """Take note of a part. Raises InvalidRequestError when it was not covered."""
        self._under_way_bytes -= cost(payload_bytes)
        if self._under_way_bytes < 0:
            raise InvalidRequestError("credit", payload_bytes, "wait for credit before sending")

    def consume(self, payload_bytes: int) -> int:
        """Take note that a part was dealt with; return what to grant now, mostly 0."""
        self._consumed_bytes += cost(payload_bytes)
        if self._consumed_bytes < self._window_bytes // 4:
            return 0
        due, self._consumed_bytes = self._consumed_bytes, 0
        self._under_way_bytes += due
        return due
