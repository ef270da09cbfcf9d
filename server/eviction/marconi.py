"""Evict leaves of the prefix tree by a score of recency and FLOPs per byte."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import filterfalse, islice

import numpy as np
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LeafCursor, LruEviction
from kvstore.server.eviction.policy import Rows

LEAST_DENSITY, MOST_DENSITY = 1 / 64, 64.0
"""Bounds of a density: values from engines are not trusted beyond them."""

_MOST_FLOPS = 1e30
_HALVED_AFTER = 4096
"""Chunks after which earlier ones count half, so that false values fade."""


class FlopDensity:
    """FLOPs per byte, as multiples of the mean of recent chunks.

    A chunk of unknown FLOPs counts as the mean: those of one model have the same bytes per token,
    so their savings per byte differ by depth only.
    """

    def __init__(self, history: AccessHistory) -> None:
        self._history = history
        self._sum = 0.0
        self._chunks = 0

    def of(self, row: int, size_bytes: int) -> float:
        """Return the density of a chunk of *size_bytes*; 1 if unknown."""
        flops = self._history.flops_of(row)
        if flops < 1.0 or not size_bytes:
            return 1.0
        found = (flops if flops < _MOST_FLOPS else _MOST_FLOPS) / size_bytes
        # A value far above the mean raises it no more than one at the bound.
        bound = MOST_DENSITY * self._sum / self._chunks if self._chunks else found
        self._sum += found if found < bound else bound
        self._chunks += 1
        if self._chunks == _HALVED_AFTER:
            self._sum, self._chunks = self._sum / 2, self._chunks // 2
        density = found * self._chunks / self._sum
        return min(max(density, LEAST_DENSITY), MOST_DENSITY)


WINDOW_FACTOR = 5
"""Requests to record per request before the first eviction."""

RECORDED_CHUNKS = 1 << 15
"""Limit of recorded chunks; the last requests are kept."""

SCORED_REQUESTS = 500
"""Only the last recorded requests count."""

ALPHAS = tuple(step / 10 for step in range(21))
"""Candidate values."""

HYSTERESIS = 0.01
"""Share that another alpha must save beyond the first."""

SLICE_CHUNKS = 16
"""Chunks replayed per request."""

_GROUP = 16
"""Chunks per eviction round of a replay."""


_CHUNK = np.dtype([("row", "u4"), ("size", "u8"), ("kind", "u1"), ("begins", "?")])
"""A recorded chunk, its efficiency class, and whether it may begin a request."""


class AlphaTuner:
    """Sets alpha once, as Marconi does (Pan et al., MLSys 2025).

    The first eviction sets a window: WINDOW_FACTOR times the requests so far. At its end the
    recorded requests are replayed against an empty tier of the same size, once for each of ALPHAS,
    and the alpha that saves the most FLOPs in the last SCORED_REQUESTS is taken; the first one
    unless another saves more by HYSTERESIS.

    Ours departs in two ways, which bound its cost: only the last requests of the window are kept,
    and each request replays SLICE_CHUNKS, an eviction none. Memory: 14 bytes a recorded chunk, and
    one shadow of the policy.
    """

    def __init__(self) -> None:
        self._recorded = np.zeros(RECORDED_CHUNKS, _CHUNK)
        """A ring buffer."""
        self._next = 0
        self._last = -1
        """The last chunk of the request being recorded; -1 if the next one begins a request."""
        self._requests = self._window = self._capacity_bytes = 0
        self._search: Iterator[None] | None = None
        self.alpha: float | None = None
        """The result; None until then."""

    def requested(self, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Record a request that hit *chunks*, as (row, size in bytes, class), or replay some."""
        self._requests += 1
        if self._search is None and 0 < self._window < self._requests:
            self._search = self._find()
        if self._search is not None:
            for _ in islice(self._search, SLICE_CHUNKS):
                pass
            return
        self._last = -1
        for chunk in chunks:
            self.stored(self._last, *chunk)

    def stored(self, parent: int, row: int, size_bytes: int, kind: int) -> None:
        """Record a stored chunk; it belongs to the last request if it continues that."""
        if self._search is not None:
            return
        begins = parent != self._last or self._last < 0
        self._recorded[self._next % RECORDED_CHUNKS] = row, size_bytes, kind, begins
        self._next += 1
        self._last = row

    def evicting(self, here_bytes: int) -> None:
        """Record an eviction from a tier with *here_bytes* in use; only the first counts."""
        if self._requests and not self._window:
            self._window = WINDOW_FACTOR * self._requests
            self._capacity_bytes = here_bytes

    def _find(self) -> Iterator[None]:
        """Set the best alpha; yield once for every chunk of every replay."""
        numbers: dict[int, int] = {}
        kinds = [0]
        """By number."""
        requests: list[list[tuple[int, int]]] = []
        chunks = self._recorded[: self._next]
        self._recorded = chunks[:0].copy()
        for row, size_bytes, kind, begins in np.roll(chunks, -self._next).tolist():
            if begins or not requests:
                requests.append([])
            number = numbers.setdefault(row, len(kinds))
            kinds[number : number + 1] = [kind]
            requests[-1].append((number, size_bytes))
        first, *others = ALPHAS
        best = first
        saved = least = yield from self._replay(requests, kinds, first)
        for alpha in others:
            saves = yield from self._replay(requests, kinds, alpha)
            if saves > saved and saves > least * (1.0 + HYSTERESIS):
                best, saved = alpha, saves
        self.alpha = best

    def _replay(
        self, requests: Sequence[Sequence[tuple[int, int]]], kinds: Sequence[int], alpha: float
    ) -> Generator[None, None, float]:
        """Return the FLOPs saved in the scored requests, in units of the mean per byte."""
        policy = _make_shadow(kinds, alpha)
        here = [0] * len(kinds)
        """Sizes of chunks on the simulated tier; 0 if absent."""
        free_bytes, saved = self._capacity_bytes, 0.0
        for number, chunks in enumerate(requests):
            rows = [row for row, _ in chunks]
            found = next((at for at, row in enumerate(rows) if not here[row]), len(rows))
            if number >= len(requests) - SCORED_REQUESTS:
                saved += sum(here[row] * EFFICIENCIES[kinds[row]] for row in rows[:found])
            policy.touch(np.array(rows[:found], np.intp), 0.0)
            for _ in range(found):
                yield
            above, own = rows[found - 1] if found else NO_ROW, set(rows)
            for at in range(found, len(rows), _GROUP):
                group = chunks[at : at + _GROUP]
                need_bytes = sum(size for row, size in group if not here[row]) - free_bytes
                while need_bytes > 0:
                    victim = next(policy.victims(own.__contains__, 0.0), NO_ROW)
                    if not victim:
                        break
                    policy.remove(victim)
                    free_bytes += here[victim]
                    need_bytes -= here[victim]
                    here[victim] = 0
                for row, size_bytes in group:
                    if not here[row] and free_bytes >= size_bytes:
                        policy.insert(row, above, size_bytes, 0.0)
                        here[row] = size_bytes
                        free_bytes -= size_bytes
                    above = row
                    yield
                if not here[above]:
                    break
        return saved


_STEPS = 8
"""Efficiency classes per doubling."""

_MIDDLE = int(math.log2(MOST_DENSITY)) * _STEPS
EFFICIENCIES: list[float] = [2.0 ** ((kind - _MIDDLE) / _STEPS) for kind in range(2 * _MIDDLE + 1)]
"""FLOPs per byte of each class, as multiples of the mean: LEAST_DENSITY to MOST_DENSITY."""


def efficiency_class(density: float) -> int:
    """Return the class nearest to a density within the bounds."""
    return round(math.log2(density) * _STEPS) + _MIDDLE


class ScoredEviction(LruEviction):
    """Evict the leaf of least score, for a given alpha: see MarconiEviction."""

    def __init__(self, kind_of: Callable[[int, int], int], alpha: float) -> None:
        """*kind_of* returns the efficiency class of a row and its size in bytes."""
        super().__init__(kinds=len(EFFICIENCIES))
        if not 0.0 <= alpha < math.inf:
            raise InvalidRequestError("alpha", alpha, "a number, not negative")
        self.alpha = alpha
        self._kind_of = kind_of
        self._sizes: array[int] = self._columns.add("Q")
        self._kinds: array[int] = self._columns.add("B")

    @override
    def _kind(self, row: int) -> int:
        return self._kinds[row]

    @override
    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._inserted(rows, size_bytes, now_s)
        for row in rows.tolist():
            self._sizes[row] = size_bytes
            self._kinds[row] = self._kind_of(row, size_bytes)

    def _recency(self, used: int) -> float:
        """Return the recency of a use before normalisation: Marconi's 1 / (now - last)."""
        return 1.0 / (self._tick + 1 - used)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        used, queues = self._used, self._queues

        def age(row: int) -> int:
            return -used[row]

        def oldest_of(rows: Iterator[int]) -> LeafCursor:
            return LeafCursor(filterfalse(keep, rows), used.__getitem__)

        kinds = queues.kinds()
        oldest = {kind: oldest_of(queues.walk(kind)) for kind in kinds}
        newest = filterfalse(keep, heapq.merge(*map(queues.walk_back, kinds), key=age))
        latest, named = LeafCursor(newest, age), set[int]()
        orphaned: dict[int, int] = {}
        while heads := {kind: queue.first for kind, queue in oldest.items() if queue.first}:
            while latest.first in named:
                latest.take()
            row = oldest[self._least(heads, used[latest.first])].take()
            named.add(row)
            yield row
            parent = self._exposed_by(row, orphaned)
            if parent and not keep(parent):
                kind = self._kinds[parent]
                if kind not in oldest:
                    oldest[kind] = oldest_of(iter(()))
                oldest[kind].add(parent)
                latest.add(parent)

    def _least(self, heads: dict[int, int], newest_used: int) -> int:
        """Return the class whose head, the oldest of its efficiency, has the least score."""
        used = self._used
        oldest_used = min([used[row] for row in heads.values()])
        low, high = self._recency(oldest_used), self._recency(newest_used)
        worst, best = EFFICIENCIES[min(heads)], EFFICIENCIES[max(heads)]
        ranks = []
        for kind, row in heads.items():
            recency = (self._recency(used[row]) - low) / (high - low) if high > low else 1.0
            efficiency = (EFFICIENCIES[kind] - worst) / (best - worst) if best > worst else 1.0
            ranks.append((recency + self.alpha * efficiency, used[row], kind))
        return min(ranks)[2]


class MarconiEviction(ScoredEviction):
    """Evict the leaf with the least norm(1 / (now - last use)) + alpha x norm(FLOPs / byte).

    Marconi (Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025,
    equations 1 and 2); both terms are normalised to 0..1 over the candidates for every victim.
    Alpha begins at 0 and is set once by ``AlphaTuner``, or is given.

    Ours departs in four ways. Only leaves are candidates: a chunk has no state beside its KV that
    could be dropped separately. Times are numbers of uses, one for every chunk of a chain, and a
    use refreshes the whole path. Efficiencies are rounded to 8 classes per doubling, within 1/64
    and 64 times their mean, so that only the oldest leaf of each class needs a score. A chunk of
    unknown FLOPs counts as the mean.

    A victim costs O(log n) of the classes in use. 36 bytes a row, plus the tuner's record.
    """

    def __init__(self, history: AccessHistory, alpha: float | None = None) -> None:
        """Tune alpha if it is None. Raises InvalidRequestError."""
        density = FlopDensity(history)

        def kind_of(row: int, size_bytes: int) -> int:
            return efficiency_class(density.of(row, size_bytes))

        super().__init__(kind_of, 0.0 if alpha is None else alpha)
        self._bytes = 0
        self._tuner = AlphaTuner() if alpha is None else None

    @override
    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._inserted(rows, size_bytes, now_s)
        self._bytes += size_bytes * len(rows)
        if self._tuner is not None:
            for row in rows.tolist():
                self._tuner.stored(self._parents[row], row, size_bytes, self._kinds[row])

    @override
    def _removed(self, row: int) -> None:
        if self._tuner is not None:
            self._tuner.evicting(self._bytes)
        self._bytes -= self._sizes[row]

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        super().touch(rows, now_s)
        if self._tuner is None:
            return
        here = [row for row in rows.tolist() if row < len(self._here) and self._here[row]]
        self._tuner.requested([(row, self._sizes[row], self._kinds[row]) for row in here])
        if self._tuner.alpha is not None:
            self.alpha = self._tuner.alpha
            self._tuner = None


def _make_shadow(kinds: Sequence[int], alpha: float) -> ScoredEviction:
    return ScoredEviction(lambda row, _: kinds[row], alpha)
