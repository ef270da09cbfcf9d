"""The WhatIf: what a tier's hit ratio would be if it were smaller or larger, from a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import KEY_BYTES, ChunkKey

SCALES = (0.5, 1.0, 2.0, 4.0)
"""The sizes that are tried, as multiples of the tier's."""

WHAT_IF_NODES = 1_024
"""Sampled chunks that are remembered; the sample is halved before there are more."""

LEAST_SAMPLED = 256
"""Sampled chunks that have to be asked for before the curve says anything."""

WINDOW_CHUNKS = 1 << 16
"""Sampled chunks asked for until what came before counts half."""

_KEY_WORDS = KEY_BYTES // 8
_SCALES = np.array(SCALES)
_ALL = 1 << 64
_NEVER = np.iinfo(np.int64).max

Ids = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size: *scale* times the tier's. *hit_ratio* is of chunks; None while it is unknown."""

    scale: float
    hit_ratio: float | None


def identities(keys: Sequence[ChunkKey]) -> Ids:
    """Return 64 bits of each key, of its namespace and its chain digest: spread evenly by these."""
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _KEY_WORDS)
    return words[:, 0] ^ words[:, 2]


class WhatIf:
    """The live curve of hit ratio against size of one tier, were its policy leaf-LRU.

    Every lookup is told, with the chunks that are missing too, as those are put next. Chunks
    whose identity is below a threshold are sampled (SHARDS: Waldspurger et al., FAST 2015,
    section 3), and a request's are told by how many others were used since: under LRU that
    answers for all sizes at once (Mattson et al., 1970). The end of a prompt is used before
    what begins it, which is leaf-LRU, and chunks count as hit up to the first that is not.
    Where more or fewer chunks than the rate says are in the sample, the difference is taken for
    hits, as it is the most popular chunks that make it (SHARDS-adj, their section 3.4).

    A lookup costs one comparison of its keys, and some array operations when it has sampled
    ones. Not thread-safe: the owner locks.
    """

    def __init__(self, capacity_bytes: int, limit_nodes: int = WHAT_IF_NODES) -> None:
        """For a tier of *capacity_bytes*. Raises InvalidRequestError."""
        if capacity_bytes <= 0 or limit_nodes < 1:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give the tier's size")
        self._capacity_bytes = capacity_bytes
        self._limit_nodes = limit_nodes
        self._halvings = 0
        self._slots: dict[int, int] = {}
        """Where the last use of each sampled chunk stands."""
        self._used = np.zeros(2 * limit_nodes, np.int64)
        self._tick = 0
        self._expected = 0.0
        """Sampled chunks that there should have been."""
        self._sampled = 0.0
        self._seen = 0
        self._hits = np.zeros(len(SCALES))

    @property
    def rate(self) -> float:
        """The share of chunks that is in the sample: 1, or a half, a quarter and so on."""
        return 1.0 / (1 << self._halvings)

    def asked(self, ids: Ids, chunk_bytes: int, now_s: float) -> None:
        """A lookup asked for a chain: (chunks,) of ``identities``, each of about *chunk_bytes*."""
        chunks = self._capacity_bytes / max(1, chunk_bytes)
        while SCALES[-1] * chunks * self.rate > self._limit_nodes:
            self._halve()
        self._expected += len(ids) * self.rate
        if self._halvings:
            ids = ids[ids < np.uint64(_ALL >> self._halvings)]
        if not len(ids):
            return
        sampled = list(dict.fromkeys(ids.tolist()))
        for start in range(0, len(sampled), self._limit_nodes):
            self._use(sampled[start : start + self._limit_nodes], chunks * self.rate)
        if self._sampled > 2 * WINDOW_CHUNKS:
            self._weigh(0.5)

    def _use(self, ids: list[int], nodes: float) -> None:
        """Count what a request of sampled chunks hits; *nodes* is the tier's size in the sample."""
        slots, used = self._slots, self._used
        count = len(slots)
        at = np.array([slots.get(one, -1) for one in ids], np.intp)
        order = np.sort(used[:count])
        later = count - np.searchsorted(order, used[at], side="right")
        later = np.maximum.accumulate(np.where(at < 0, _NEVER, later))
        self._hits += (later[:, None] < nodes * _SCALES).sum(axis=0)
        self._sampled += len(ids)
        self._seen += len(ids)
        fresh = np.flatnonzero(at < 0)
        if count + len(fresh) > len(used):
            self._forget(max(0, min(count, int(nodes * SCALES[-1]))))
            at = np.array([slots.get(one, -1) for one in ids], np.intp)
            fresh = np.flatnonzero(at < 0)
        for place in fresh.tolist():
            at[place] = slots[ids[place]] = len(slots)
        # From the last to the first: what begins a prompt is used after what ends it.
        used[at] = np.arange(self._tick + len(ids), self._tick, -1)
        self._tick += len(ids)

    def _forget(self, kept: int) -> None:
        """Forget all but the *kept* chunks that were used last."""
        kept = min(kept, self._limit_nodes)
        newest = sorted(self._slots, key=lambda one: self._used[self._slots[one]])
        newest = newest[len(newest) - kept :]
        self._keep(newest)

    def _keep(self, ids: list[int]) -> None:
        used = self._used[[self._slots[one] for one in ids]]
        self._slots.clear()
        self._slots.update(zip(ids, range(len(ids)), strict=True))
        self._used[: len(ids)] = used

    def _halve(self) -> None:
        """Leave out half of the sample, the part with the larger identities."""
        self._halvings += 1
        self._keep([one for one in self._slots if one < _ALL >> self._halvings])
        # What was counted at a higher rate counts for as much as it would have at this one.
        self._weigh(0.5)

    def _weigh(self, share: float) -> None:
        self._expected *= share
        self._sampled *= share
        self._hits *= share

    def curve(self) -> list[CurvePoint]:
        """Return the hit ratio at each of ``SCALES``, unknown until enough was asked for."""
        if self._seen < LEAST_SAMPLED or self._expected <= 0:
            return [CurvePoint(scale, None) for scale in SCALES]
        ratios = (self._hits + self._expected - self._sampled) / self._expected
        clipped = np.clip(ratios, 0.0, 1.0).tolist()
        return [CurvePoint(*point) for point in zip(SCALES, clipped, strict=True)]

    def __len__(self) -> int:
        """Sampled chunks that are remembered."""
        return len(self._slots)
