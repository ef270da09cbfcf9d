"""Policies that are not served: what bench.policy holds those that are against."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Protocol

import numpy as np
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.marconi import FlopDensity, MarconiEviction
from kvstore.server.eviction.policy import EvictionPolicy, Rows, make_policy

_TICK_BITS = 48
_MOST_USES = (1 << (64 - _TICK_BITS)) - 1
_ONE = 1 << 16
"""Priorities are whole numbers of 65536ths, so that sums are in any order the same."""

_SMALL, _MAIN = 0, 1
_MOST_QUEUED_USES = 3
_CHANCES = 64
_PASSED = 32
_REMEMBERED_MOVES = 1 << 14


class RowOrder(Protocol):
    """What a heap orders rows by: a column, or what is made of several."""

    def __getitem__(self, row: int, /) -> float:
        """Return the rank of *row*."""
        ...


class RowHeap:
    """Rows with the smallest of ``order[row]`` first; any row is taken out in O(log n).

    ``order[row]`` may not change while the row is in the heap. Four bytes a row that is in it,
    and four for every row there is: heaps that never share a row may share *places*.
    """

    def __init__(self, order: RowOrder, places: array[int] | None = None) -> None:
        self._order = order
        self._rows = array("I")
        self.places = array("I", [0]) if places is None else places
        """One more than where each row lies; 0 for rows that are not in the heap."""

    def extend(self, count: int) -> None:
        """Let there be *count* rows more."""
        self.places.frombytes(bytes(count * self.places.itemsize))

    def __contains__(self, row: int) -> bool:
        return self.places[row] != 0

    def push(self, row: int) -> None:
        """Put in a row that is not there."""
        self._rows.append(row)
        self._rise(len(self._rows) - 1, row)

    def remove(self, row: int) -> None:
        """Take out a row that is there."""
        at = self.places[row] - 1
        self.places[row] = 0
        last = self._rows.pop()
        if last != row:
            self._sink(at, last)

    def _rise(self, at: int, row: int) -> None:
        rows, places, order = self._rows, self.places, self._order
        rank = order[row]
        while at:
            above = (at - 1) >> 1
            other = rows[above]
            if order[other] <= rank:
                break
            rows[at] = other
            places[other] = at + 1
            at = above
        rows[at] = row
        places[row] = at + 1

    def _sink(self, at: int, row: int) -> None:
        rows, places, order = self._rows, self.places, self._order
        rank, end = order[row], len(rows)
        while (below := 2 * at + 1) < end:
            other = rows[below]
            if below + 1 < end and order[rows[below + 1]] < order[other]:
                below += 1
                other = rows[below]
            if order[other] >= rank:
                break
            rows[at] = other
            places[other] = at + 1
            at = below
        self._rise(at, row)

    def first(self) -> int:
        """Return the first row; there must be one."""
        return self._rows[0]

    def sorted(self) -> Iterator[int]:
        """Yield the rows in order, changing nothing: O(log n) for each that is taken."""
        order, rows = self._order, self._rows
        ahead = [(order[rows[0]], 0)] if rows else []
        while ahead:
            _, at = heapq.heappop(ahead)
            yield rows[at]
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(rows):
                    heapq.heappush(ahead, (order[rows[below]], below))

    def __len__(self) -> int:
        return len(self._rows)


class HeapedEviction(LruEviction):
    """Evict the leaf of the least rank; every event costs O(log n) of the leaves."""

    def __init__(self, ranks: RowOrder) -> None:
        """*ranks* has the rank of each row; a subclass changes it in ``_came`` and ``_rank``."""
        super().__init__()
        self._ranks = ranks
        self._leaves = RowHeap(ranks)
        self._tick = 0

    @abstractmethod
    def _rank(self, rows: Rows) -> None:
        """Rank anew chunks that were used, the last of the chain first; none is in the heap."""

    @override
    def _extend(self, rows: int) -> None:
        self._leaves.extend(rows - len(self._leaves.places))

    @override
    def _add_leaf(self, row: int) -> None:
        self._leaves.push(row)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._leaves.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        leaves = [row for row in dict.fromkeys(rows.tolist()) if row in self._leaves]
        for row in leaves:
            self._leaves.remove(row)
        self._rank(rows)
        for row in leaves:
            self._leaves.push(row)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._leaves.sorted(), self._ranks.__getitem__, keep)


class LfuEviction(HeapedEviction):
    """Evict the leaf that was used least often, of several the one used longest ago.

    In-cache LFU (as in Lee et al., "LRFU", IEEE Trans. Computers 50(12), 2001, section 2, at the
    end of its spectrum): the count of a chunk begins at 1 when it comes. Ours departs in
    that only leaves are candidates. There is no ageing: what was used often once stays.
    """

    def __init__(self) -> None:
        self._counts = array("Q", [0])
        """How often a chunk was used, then when, in one number."""
        super().__init__(self._counts)
        self._columns.arrays.append(self._counts)

    @override
    def _came(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        for row in rows.tolist():
            self._tick += 1
            self._counts[row] = 1 << _TICK_BITS | self._tick

    @override
    def _rank(self, rows: Rows) -> None:
        counts = np.frombuffer(self._counts, np.uint64)
        uses = np.minimum((counts[rows] >> _TICK_BITS) + 1, _MOST_USES)
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        counts[rows] = uses << _TICK_BITS | ticks
        self._tick += len(rows)


class GdsfEviction(HeapedEviction):
    """Evict the leaf of the least priority: clock + uses x cost / size.

    Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching
    policy", HP Labs HPL-98-69, 1998. The clock is the priority of what was evicted last, so what
    is not used any more is overtaken by what comes.

    Ours departs in four ways. Only leaves are candidates. Cost / size is the prefill FLOPs that
    a byte saves, divided by the mean of all chunks seen, which keeps it near 1 in any unit; a
    chunk whose FLOPs are not known counts as 1. Of equal priorities the one used longest ago
    goes. And the policy is not told why a chunk goes, so the clock
    moves to the least priority there is when one does: a deletion cannot push it ahead.
    """

    def __init__(self, history: AccessHistory) -> None:
        self._keys: list[int] = [0]
        """The priority of each row, then when it was used, in one number: what orders the heap."""
        super().__init__(self._keys)
        self._density = FlopDensity(history)
        self._uses: array[int] = self._columns.add("H")
        self._densities: array[float] = self._columns.add("f")
        self._clock = 0

    @override
    def _extend(self, rows: int) -> None:
        self._keys.extend(repeat(0, rows - len(self._keys)))
        super()._extend(rows)

    @override
    def _came(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        for row in rows.tolist():
            self._densities[row] = self._density.of(row, size_bytes)
            self._uses[row] = 1
            self._set_key(row)

    @override
    def _rank(self, rows: Rows) -> None:
        uses = np.frombuffer(self._uses, np.uint16)
        uses[rows] = np.minimum(uses[rows], _MOST_USES - 1) + 1
        for row in rows.tolist():
            self._set_key(row)

    def _set_key(self, row: int) -> None:
        self._tick += 1
        gain = int(self._uses[row] * self._densities[row] * _ONE)
        self._keys[row] = (self._clock + gain) << _TICK_BITS | self._tick

    @override
    def _gone(self, row: int) -> None:
        least = self._keys[row] >> _TICK_BITS
        self._keys[row] = 0  # the number is given back
        if least <= self._clock:
            return
        if len(self._leaves):
            least = min(least, self._keys[self._leaves.first()] >> _TICK_BITS)
        self._clock = max(self._clock, least)


class _Hand:
    """Goes through the leaves of one queue in order; others are put in ahead of it."""

    def __init__(self, leaves: Iterator[int], order: array[int]) -> None:
        self._leaves = leaves
        self._order = order
        self._next = next(leaves, NO_ROW)
        self._more: list[tuple[int, int]] = []

    def push(self, order: int, row: int) -> None:
        heapq.heappush(self._more, (order, row))

    def pop(self) -> int:
        if self._more and (not self._next or self._more[0][0] < self._order[self._next]):
            return heapq.heappop(self._more)[1]
        row, self._next = self._next, next(self._leaves, NO_ROW)
        return row

    def __bool__(self) -> bool:
        return bool(self._next or self._more)


class S3FifoEviction(LruEviction):
    """Evict new chunks that were not used in time, then old ones, each in the order they came.

    S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, section 4
    and algorithm 1): a small queue for what is new, a main queue for what was used there or is
    remembered as evicted from it (a ghost), where what was used since gets another round.

    Ours departs in five ways. Only leaves are candidates, and a chunk that is continued stays in
    its queue unseen: so it goes to the main queue when it is used enough, not when the hand is
    there, and the round that a leaf gets is one for what it alone continues as well, or a chain
    would have as many rounds as chunks. Shares are of the bytes that are here, as a policy is
    not told the size of its tier. ``victims`` only answers, so the moves between queues that
    lead to a victim are made when it is removed. And one choice passes over at most 64 leaves
    that have uses left, which bounds it; the paper's hand may go round the whole queue.

    There are as many ghosts as the paper's main queue has room for: those evicted last, by a
    count of evictions, so that they take no list.
    """

    def __init__(
        self, history: AccessHistory, *, small_share: float = 0.1, promote_uses: int = 2
    ) -> None:
        """New chunks have *small_share* of the bytes, and *promote_uses* take one out of it."""
        super().__init__()
        self._history = history
        self._small_share, self._promote_uses = small_share, promote_uses
        self._order: array[int] = self._columns.add("Q")
        """When each chunk came into its queue."""
        self._queue_of: array[int] = self._columns.add("B")
        self._uses: array[int] = self._columns.add("B")
        self._sizes: array[int] = self._columns.add("Q")
        self._evicted: array[int] = self._columns.add("Q")
        """The number of the eviction that made each row a ghost; 0 for none."""
        places: array[int] = self._columns.add("I")
        self._leaves = (RowHeap(self._order, places), RowHeap(self._order, places))
        self._bytes = [0, 0]
        self._tick = 0
        self._evictions = 0
        self._moves: dict[int, list[tuple[int, int]]] = {}
        """By victims named last: the moves that led to each, as (row, order it had)."""

    @override
    def _came(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        for row in rows.tolist():
            queue = _MAIN if self._is_ghost(row) else _SMALL
            self._evicted[row] = 0
            self._uses[row] = 0
            self._sizes[row] = size_bytes
            self._enter(row, queue)
            self._bytes[queue] += size_bytes

    def _is_ghost(self, row: int) -> bool:
        # A row that was another chunk's when it was evicted is seen for the first time now.
        if not self._evicted[row] or self._history.hits_of(row) == 1:
            return False
        ghosts = math.ceil((1.0 - self._small_share) * self._count)
        return self._evictions - self._evicted[row] < ghosts

    def _enter(self, row: int, queue: int) -> None:
        self._tick += 1
        self._order[row] = self._tick
        self._queue_of[row] = queue

    @override
    def _add_leaf(self, row: int) -> None:
        self._leaves[self._queue_of[row]].push(row)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._leaves[self._queue_of[row]].remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        uses = np.frombuffer(self._uses, np.uint8)
        uses[rows] = np.minimum(uses[rows] + 1, _MOST_QUEUED_USES)
        is_inner = np.frombuffer(self._children, np.uint32)[rows] > 0
        is_small = np.frombuffer(self._queue_of, np.uint8)[rows] == _SMALL
        is_used = uses[rows] >= self._promote_uses
        del uses
        for row in dict.fromkeys(rows[is_inner & is_small & is_used].tolist()):
            self._move(row)

    @override
    def _gone(self, row: int) -> None:
        self._bytes[self._queue_of[row]] -= self._sizes[row]
        if self._queue_of[row] == _SMALL:
            self._evictions += 1
            self._evicted[row] = self._evictions
        for moved, order in self._moves.pop(row, ()):
            if self._here[moved] and self._order[moved] == order:
                self._move(moved)

    def _move(self, row: int) -> None:
        """Put a chunk that has uses left at the end of the main queue."""
        is_leaf = row in self._leaves[_MAIN]  # of either queue
        if is_leaf:
            self._drop_leaf(row)
        if self._queue_of[row] == _SMALL:
            self._bytes[_SMALL] -= self._sizes[row]
            self._bytes[_MAIN] += self._sizes[row]
            self._uses[row] = 0
        else:
            for passed in (row, *self._behind(row)):
                self._uses[passed] = max(0, self._uses[passed] - 1)
        self._enter(row, _MAIN)
        if is_leaf:
            self._leaves[_MAIN].push(row)

    def _behind(self, row: int) -> Iterator[int]:
        """Yield what a chunk alone continues, in the main queue; a limited number.

        Where the hand passes over a chunk, it does so over these, which cannot be met before.
        """
        for _ in range(_PASSED):
            row = self._parents[row]
            if not self._here[row] or self._queue_of[row] != _MAIN or self._children[row] != 1:
                return
            yield row

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._moves.clear()
        hands = [_Hand(leaves.sorted(), self._order) for leaves in self._leaves]
        left_bytes = list(self._bytes)
        tick, recorded = self._tick, 0
        uses: dict[int, int] = {}
        """Of those that were moved to the main queue on the way."""
        orphaned: dict[int, int] = {}
        moves: list[tuple[int, int]] = []
        while hands[_SMALL] or hands[_MAIN]:
            queue = self._turn(left_bytes)
            if not hands[queue]:
                queue = 1 - queue
            row = hands[queue].pop()
            if keep(row):
                continue
            used = uses.get(row, self._uses[row])
            needed = self._promote_uses if queue == _SMALL else 1
            if used >= needed and len(moves) < _CHANCES:
                if queue == _SMALL:
                    left_bytes[_SMALL] -= self._sizes[row]
                    left_bytes[_MAIN] += self._sizes[row]
                    uses[row] = 0
                else:
                    for passed in (row, *self._behind(row)):
                        uses[passed] = max(0, uses.get(passed, self._uses[passed]) - 1)
                moves.append((row, self._order[row]))
                tick += 1
                hands[_MAIN].push(tick, row)
                continue
            left_bytes[queue] -= self._sizes[row]
            if moves and recorded < _REMEMBERED_MOVES:
                recorded += len(moves)
                self._moves[row] = moves
            moves = []
            yield row
            parent = self._exposed_by(row, orphaned)
            if parent:
                hands[self._queue_of[parent]].push(self._order[parent], parent)

    def _turn(self, queue_bytes: list[int]) -> int:
        """Return the queue that is to give up a chunk."""
        is_full = queue_bytes[_SMALL] >= self._small_share * sum(queue_bytes)
        return _SMALL if is_full else _MAIN


class MarconiLinearEviction(MarconiEviction):
    """Marconi's score with a linear recency: norm(last use) + 1/4 x norm(FLOPs / byte).

    Ours. 1 / (now - last use) is nearly 0 for all but the newest, so that any alpha above 0
    ranks by efficiency alone where there are many candidates.
    """

    def __init__(self, history: AccessHistory, alpha: float = 0.25) -> None:
        super().__init__(history, alpha)

    @override
    def _recency(self, used: int) -> float:
        return float(used)


BASELINES: dict[str, Callable[[AccessHistory], EvictionPolicy]] = {
    "lfu": lambda _: LfuEviction(),
    "gdsf": GdsfEviction,
    "s3fifo": S3FifoEviction,
    "marconi_linear": MarconiLinearEviction,
}


def make_any(name: str, history: AccessHistory) -> EvictionPolicy:
    """Return a new policy that is served, or a baseline. Raises InvalidRequestError."""
    return BASELINES[name](history) if name in BASELINES else make_policy(name, history)
