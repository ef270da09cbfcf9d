"""Whether LRU would have hit more: the bound on what a policy that learns can lose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.server.policy.asked_report import Report

BUDGET = 0.005
"""Hits that may be lost to LRU, as a share of what is asked for. What a change back to LRU finds
gone is lost besides, and not known before: so there is nothing on top of that share. A smaller
share is used up by less than one prompt of a small cache, and then nothing more is learnt."""

WARM_REQUESTS = 100
"""Requests from which to learn before anything is done otherwise than LRU does it."""

WINDOW_CHUNKS = 1 << 18
"""Of what was asked for before these, half is forgotten."""


class RegretGuard:
    """Counts the hits of a policy and those that LRU would have had, and says who is ahead.

    LRU holds the chunks that were asked for last. So a chunk would have been hit if it had waited
    no longer than the one that is just among them: its stack distance (Mattson, Gecsei, Slutz
    and Traiger, IBM Systems Journal 9(2), 1970), with the counts of those who wait for a stack.
    While the policy is behind by more than the budget it is to do as LRU does, which costs no
    more hits, until the budget has grown by what was asked for since.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Chunks that were here when asked for, since the last ``judge``."""
        self.lru_age_s = np.inf
        """How long a chunk may have waited for LRU to have it still."""
        self.share = 1.0
        """How much of what is asked for and known was ever here."""
        self.prefers_lru = True
        self._requests = 0.0
        self._is_warm = False
        """Whether there was something to learn from."""
        self._asked = 0.0
        self._behind = 0.0

    def judge(self, report: Report, mine: NDArray[np.bool_]) -> None:
        """Take note of what was asked for since the last call, and of it what was ever here."""
        if len(mine):
            self.share += 0.1 * (max(float(mine.mean()), 0.01) - self.share)
        lru_hits = int(np.count_nonzero(report.ages_s[mine] <= self.lru_age_s))
        self._asked += report.chunks * self.share
        self._requests += report.requests
        if not self.prefers_lru:  # else the difference is no policy's doing
            self._behind += lru_hits - self.hits
        self.hits = 0
        if self._asked > WINDOW_CHUNKS:
            self._asked /= 2
            self._behind /= 2
            self._requests /= 2
        self._is_warm = self._is_warm or self._requests >= WARM_REQUESTS
        self.prefers_lru = not self._is_warm or self._behind > BUDGET * self._asked
