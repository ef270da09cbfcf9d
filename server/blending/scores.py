"""Cache-Craft's scores: how much of a chunk's KV must be recomputed after another prefix.

Agarwal et al., "Cache-Craft: Managing Chunk-Caches for Efficient Retrieval-Augmented
Generation", SIGMOD 2025 (arXiv 2502.15734), equations 3 to 12. Attention masses come from
engines; without a report, chunks count by their tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvstore.proto.types import DIGEST_BYTES, MAX_CHUNK_TOKENS

UNKNOWN_IMPACT = 1.0
"""The impact of a chunk without reports: more than any measured one."""

NO_IMPACT = 0.5
"""The impact of a chunk that attends to nothing before it: the minimum of equation 11."""


class Context(NamedTuple):
    """A chunk before another one: its content, its tokens, and the attention paid to it."""

    content: Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    tokens: Annotated[int, Field(gt=0)]
    mass: Annotated[float, Field(ge=0)]


def context_impact(context: Sequence[Context], intra_mass: float, tokens: int) -> float:
    """Return CCI, equations 9 to 11: 0.5 to 1. *intra_mass*: attention to its own tokens."""
    outer = sum(one.mass / (tokens * one.tokens) for one in context)
    inner = intra_mass / (tokens * tokens)
    if not outer:
        return NO_IMPACT
    return 1.0 / (1.0 + math.exp(-min(outer / inner, 50.0))) if inner else 1.0


def prefix_overlap(context: Sequence[Context], places: Mapping[bytes, int], before: int) -> float:
    """Return beta' of equation 8: the share of *context* present before index *before*, in order.

    *places* gives the first index of each content in the new prompt. A chunk without context has
    an overlap of 1 at the start of a prompt, else 0.
    """
    if not context:
        return float(before == 0)
    whole = sum(one.mass for one in context)
    if not whole:
        return 0.0
    common = [one for one in context if places.get(one.content, before) < before]
    share = min(1.0, sum(one.mass for one in common) / whole)
    pairs = [places[one.content] > places[two.content] for one, two in combinations(common, 2)]
    # Gamma of equation 7: the share of pairs in another order than before.
    return share * (1.0 - (sum(pairs) / len(pairs) if pairs else 0.0))


def fix_overhead(impact: float, overlap: float) -> float:
    """Return CFO of equation 12: the share to recompute; the paper's factor is 1, see Gates."""
    return min(1.0, max(0.0, impact * (1.0 - overlap)))


MAX_PRIORITY_BYTES = 16 << 20
"""Limit for all contents; the least recently reported ones are dropped."""

OVERHEAD_BYTES = 256
"""Overhead counted per content, to bound very short ones too."""

_EWMA_WEIGHT = 0.25
_HIGHEST = 255

Scores = NDArray[np.float32]
Levels = NDArray[np.uint8]


class TokenPriorities:
    """One byte per token, by content. Not thread-safe: the owner locks.

    The scores of each report are converted to ranks, 0 to 255, so that layers and units do not
    matter, and averaged (moving average, weight 0.25). At most *limit_bytes* are kept.
    """

    def __init__(self, limit_bytes: int = MAX_PRIORITY_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._levels: OrderedDict[bytes, Levels] = OrderedDict()
        self.size_bytes = 0

    def note(self, name: bytes, scores: Scores) -> None:
        """Add the scores of one report; -1 for tokens that were not measured.

        If some were not measured, the others are reordered among their previous levels; a content
        without levels is then ignored.
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
            before = known[measured]
            wanted = np.empty_like(before)
            wanted[np.argsort(scores[measured], kind="stable")] = np.sort(before)
            mixed[measured] = _mean(before, wanted)
        if known is None:
            self.size_bytes += len(mixed) + OVERHEAD_BYTES
        self._levels[name] = mixed
        self._levels.move_to_end(name)
        while self.size_bytes > self._limit_bytes and self._levels:
            _, oldest = self._levels.popitem(last=False)
            self.size_bytes -= len(oldest) + OVERHEAD_BYTES

    def levels(self, name: bytes) -> bytes:
        """Return a byte for each token of a content; empty if unknown."""
        known = self._levels.get(name)
        return b"" if known is None else known.tobytes()


def ranks(scores: Scores) -> Levels:
    """Return (tokens) as ranks, 0 to 255; of equal ones the first is lower."""
    count = len(scores)
    assert 1 <= count <= MAX_CHUNK_TOKENS
    order = np.empty(count, np.intp)
    order[np.argsort(scores, kind="stable")] = np.arange(count)
    return (order * _HIGHEST // max(1, count - 1)).astype(np.uint8)


def _mean(known: Levels, fresh: Levels) -> Levels:
    step = _EWMA_WEIGHT * (fresh.astype(np.float32) - known)
    return np.rint(known + step).astype(np.uint8)
