"""How long a blend waits for the store: what loads take lately, some slack, and never long.

What was waited for in vain is lost, as the prompt is computed then: a store that is late costs as
much more than a full prefill as it was waited for.
"""

from __future__ import annotations

import math
import threading

MOST = 0.5
"""Of what a full prefill takes: however long loads take."""
SLACK = 0.1
"""Of the same: however quick they are."""
TIMES = 2.0
"""What loads may take beyond what they took lately."""
FIRST_S = 1.0
"""Until a full prefill was measured."""
_EWMA_WEIGHT = 0.25
_FADES = 0.8
"""What is left of the slowest load, one load later."""


class Patience:
    """Learns from full prefills and from loads. Any thread may call."""

    def __init__(self) -> None:
        self._token_s = math.nan
        self._byte_s = math.nan
        self._lock = threading.Lock()  # guards both

    def note_full(self, tokens: int, seconds: float) -> None:
        """Take note of a full prefill."""
        found = seconds / tokens
        with self._lock:
            known = found if math.isnan(self._token_s) else self._token_s
            self._token_s = known + _EWMA_WEIGHT * (found - known)

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Take note of what a whole plan's loads took."""
        if size_bytes <= 0:
            return
        with self._lock:
            faded = 0.0 if math.isnan(self._byte_s) else _FADES * self._byte_s
            self._byte_s = max(seconds / size_bytes, faded)

    def note_late(self, size_bytes: int, waited_s: float) -> None:
        """Take note of loads that were given up: the next ones are waited for twice as long, so
        that a store that became slower is found to be so.
        """
        self.note_load(size_bytes, waited_s)

    def within_s(self, tokens: int, size_bytes: int) -> float:
        """Return how long loads of *size_bytes* are waited for, in all, of a prompt of *tokens*."""
        with self._lock:
            full_s, load_s = self._token_s * tokens, self._byte_s * size_bytes
        if math.isnan(full_s):
            return FIRST_S
        if math.isnan(load_s):
            return MOST * full_s
        return min(MOST * full_s, TIMES * load_s + SLACK * full_s)
