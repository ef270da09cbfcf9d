"""Token priorities: which tokens of a content are worth recomputing, learned from reports."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import MAX_CHUNK_TOKENS

MAX_PRIORITY_BYTES = 16 << 20
"""Of all contents; those that nobody reported on for longest are forgotten."""

OVERHEAD_BYTES = 256
"""What a content takes beside its bytes, so that very short ones are bounded, too."""

_EWMA_WEIGHT = 0.25
_HIGHEST = 255

Scores = NDArray[np.float32]
Levels = NDArray[np.uint8]


class TokenPriorities:
    """A byte a token by content. Not thread-safe: the owner locks.

    Each report's scores become ranks, 0 to 255, so that layers and units do not matter, and enter
    a moving mean (weight 0.25). At most *limit_bytes* are kept.
    """

    def __init__(self, limit_bytes: int = MAX_PRIORITY_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._levels: OrderedDict[bytes, Levels] = OrderedDict()
        self._bytes = 0

    def note(self, name: bytes, scores: Scores) -> None:
        """Take in the scores of one report; -1 for tokens that were not measured.

        Where some were not, those that were are put in order among the levels they had before;
        nothing is learned then of a content that has none yet.
        """
        known = self._levels.get(name)
        if known is not None and len(known) != len(scores):
            return
        measured = scores >= 0
        if measured.all():
            fresh = ranks(scores)
            mixed = fresh if known is None else _mean(known, fresh)
        elif known is None or not measured.any():
            return
        else:
            mixed = known.copy()
            order = np.argsort(scores[measured], kind="stable")
            places = np.flatnonzero(measured)
            fresh = np.sort(known[places])
            wanted = np.empty_like(fresh)
            wanted[order] = fresh
            mixed[places] = _mean(known[places], wanted)
        self._keep(name, mixed)

    def _keep(self, name: bytes, levels: Levels) -> None:
        if name not in self._levels:
            self._bytes += len(levels) + OVERHEAD_BYTES
        self._levels[name] = levels
        self._levels.move_to_end(name)
        while self._bytes > self._limit_bytes and self._levels:
            _, oldest = self._levels.popitem(last=False)
            self._bytes -= len(oldest) + OVERHEAD_BYTES

    def levels(self, name: bytes) -> bytes:
        """Return a byte for each token of a content; empty when nothing is known of it."""
        known = self._levels.get(name)
        return b"" if known is None else known.tobytes()

    def forget(self, name: bytes) -> None:
        """A content is gone."""
        gone = self._levels.pop(name, None)
        if gone is not None:
            self._bytes -= len(gone) + OVERHEAD_BYTES

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._levels)


def ranks(scores: Scores) -> Levels:
    """Return the rank of each score among all of them, 0 to 255; of equal ones the first is lower.

    scores: (tokens), at least one.
    """
    count = len(scores)
    assert 1 <= count <= MAX_CHUNK_TOKENS
    order = np.empty(count, np.intp)
    order[np.argsort(scores, kind="stable")] = np.arange(count)
    return (order * _HIGHEST // max(1, count - 1)).astype(np.uint8)


def _mean(known: Levels, fresh: Levels) -> Levels:
    step = _EWMA_WEIGHT * (fresh.astype(np.float32) - known)
    return np.rint(known + step).astype(np.uint8)
