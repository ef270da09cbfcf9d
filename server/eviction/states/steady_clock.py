"""A clock that never goes back, over one that may."""

from __future__ import annotations

import math

from kvstore.proto.errors import InvalidRequestError


class SteadyClock:
    """Seconds that stand still while the caller's go back, and then go on with them."""

    def __init__(self) -> None:
        self._latest_s = -math.inf
        self._ahead_s = 0.0

    def time_s(self, now_s: float) -> float:
        """Return the time at the caller's *now_s*: not before any that was returned.

        Raises InvalidRequestError for times that are no numbers.
        """
        if not math.isfinite(now_s):
            raise InvalidRequestError("now_s", now_s, "finite seconds")
        time_s = now_s + self._ahead_s
        if time_s < self._latest_s:
            self._ahead_s += self._latest_s - time_s
            time_s = self._latest_s
        self._latest_s = time_s
        return time_s
