"""LRU over the leaves of the prefix tree, and a variant that evicts "discard" chunks first."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.policy import Columns, EvictionPolicy, Rows

FEW = 24
"""Below this number of rows Python is faster than numpy."""


def closes_circle(row: int, parent: int, parents: array[int], children: array[int]) -> bool:
    """Whether *row* is an ancestor of *parent*, by a client's error: it could never be evicted."""
    if parent != row and not children[row]:
        return False  # nothing continues it, so nothing leads back to it
    above = parent
    while above and above != row:
        above = parents[above]
    return above == row and row != NO_ROW


class LeafCursor:
    """Leaves, given in order of *rank*, merged with the parents that they expose."""

    __slots__ = ("_heap", "_leaf", "_leaves", "_rank")

    def __init__(self, leaves: Iterator[int], rank: Callable[[int], float]) -> None:
        self._leaves, self._rank = leaves, rank
        self._heap: list[tuple[float, int]] = []
        """Exposed parents, and the next of *leaves*."""
        self._leaf = NO_ROW
        self.take()

    def add(self, row: int) -> None:
        """Add a row that is not among the leaves."""
        heapq.heappush(self._heap, (self._rank(row), row))

    @property
    def first(self) -> int:
        """The row that ``take`` returns next; NO_ROW when there is none."""
        return self._heap[0][1] if self._heap else NO_ROW

    def take(self) -> int:
        """Remove and return the first row; NO_ROW when there is none."""
        row = heapq.heappop(self._heap)[1] if self._heap else NO_ROW
        if row == self._leaf:
            self._leaf = next(self._leaves, NO_ROW)
            if self._leaf:
                self.add(self._leaf)
        return row


_STEPS = 8
"""Rows searched from each end of a queue for the place of a row."""


class ClassQueues:
    """Rows in one queue per class, sorted by ``order[row]``.

    A used row moves to the end of its queue in O(1), as each queue is a doubly linked list. A
    parent exposed by an eviction keeps its own last use and belongs inside the queue: when that is
    not near one of the ends, a sorted list of such *late* rows holds it. ``order[row]`` must not
    change while the row is queued, and no two queued rows have the same. 10 bytes a row, in
    columns, 8 a class and about 120 a late row.
    """

    def __init__(self, order: array[int], columns: Columns, limit: int = 1) -> None:
        """Create queues for the classes below *limit*."""
        self._order = order
        self._newer: array[int] = columns.add("I")
        """The next row; NO_ROW after the last; a late row points to itself."""
        self._older: array[int] = columns.add("I")
        """The previous row; NO_ROW before the first."""
        self._classes: array[int] = columns.add("H")
        self._oldest = array("I", bytes(4 * limit))
        self._newest = array("I", bytes(4 * limit))
        """The last row of each queue without late rows; NO_ROW if empty."""
        self._late: dict[int, list[tuple[int, int]]] = {}
        """(order, row) of late rows, by class."""

    def append(self, row: int, kind: int) -> None:
        """Append an unqueued row to a queue in which no row has a greater order."""
        self._link(row, kind, self._newest[kind], NO_ROW)

    def place(self, row: int, kind: int) -> None:
        """Insert an unqueued row into a queue in order."""
        order = self._order
        rank = order[row]
        behind, before = self._oldest[kind], self._newest[kind]
        if not before or rank > order[before]:
            self.append(row, kind)
            return
        for _ in range(_STEPS):
            if rank < order[behind]:
                self._link(row, kind, self._older[behind], behind)
                return
            behind = self._newer[behind]
            before = self._older[before]
            if rank > order[before]:
                self._link(row, kind, before, self._newer[before])
                return
        self._classes[row] = kind
        self._newer[row] = row
        insort(self._late.setdefault(kind, []), (rank, row))

    def _link(self, row: int, kind: int, older: int, newer: int) -> None:
        self._classes[row] = kind
        self._older[row], self._newer[row] = older, newer
        if older:
            self._newer[older] = row
        else:
            self._oldest[kind] = row
        if newer:
            self._older[newer] = row
        else:
            self._newest[kind] = row

    def remove(self, row: int) -> None:
        """Remove a queued row."""
        kind, older, newer = self._classes[row], self._older[row], self._newer[row]
        if newer == row:
            late = self._late[kind]
            del late[bisect_left(late, (self._order[row], row))]
            if not late:
                del self._late[kind]
            return
        if older:
            self._newer[older] = newer
        else:
            self._oldest[kind] = newer
        if newer:
            self._older[newer] = older
        else:
            self._newest[kind] = older

    def ends(self, kinds: int) -> Rows:
        """Return in turn the first row of each queue below *kinds*, and the last one not late."""
        rows = np.empty((kinds, 2), np.intp)
        rows[:, 0] = np.frombuffer(self._oldest, np.uint32)[:kinds]
        rows[:, 1] = np.frombuffer(self._newest, np.uint32)[:kinds]
        for kind, late in self._late.items():
            rank, row = late[0]
            if not rows[kind, 0] or rank < self._order[rows[kind, 0]]:
                rows[kind, 0] = row
        return rows.ravel()

    def kinds(self) -> list[int]:
        """Return the classes with rows."""
        return [kind for kind, row in enumerate(self._oldest) if row or kind in self._late]

    def walk(self, kind: int = 0) -> Iterator[int]:
        """Return an iterator over a queue in order. Nothing may change while it is in use."""
        linked, late = _follow(self._oldest[kind], self._newer), self._late.get(kind)
        if not late:
            return linked
        return heapq.merge(linked, (row for _, row in late), key=self._order.__getitem__)

    def walk_back(self, kind: int) -> Iterator[int]:
        """Return an iterator in reverse order, without late rows."""
        return _follow(self._newest[kind], self._older)


def _follow(row: int, links: array[int]) -> Iterator[int]:
    while row:
        yield row
        row = links[row]


class LruEviction(EvictionPolicy):
    """Evict the least recently used leaf.

    A chunk is useless without those before it, so only leaves (chunks without a continuation on the
    tier) are candidates, as in SGLang's RadixAttention (Zheng et al., arXiv 2312.07104, section
    3.1), over chunks instead of tokens.

    All other policies keep this tree too. Leaves are queued by their last use, in one queue, or for
    a subclass in the queue that ``_kind`` returns, below *kinds*. Every event calls its hooks, each
    once: ``_inserted``, then ``_add_leaf`` if nothing continues the chunk; ``_use``; ``_drop_leaf``
    if it is a leaf, then ``_removed``. An event costs O(1), or O(log n) of the late leaves of its
    queue. 27 bytes a row, in columns.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._columns = Columns()
        self._here: array[int] = self._columns.add("B")
        """1 for rows whose chunk is on the tier."""
        self._parents: array[int] = self._columns.add("I")
        self._children: array[int] = self._columns.add("I")
        """Chunks on the tier that continue this one, which may be absent."""
        self._used: array[int] = self._columns.add("Q")
        """Sequence number of the last use of each chunk."""
        self._queues = ClassQueues(self._used, self._columns, kinds)
        self._tick = 0
        self._count = 0

    # --- hooks

    def _kind(self, row: int) -> int:
        """Return the queue of a leaf."""
        return 0

    def _extend(self, rows: int) -> None:
        """The columns have grown to *rows* places."""

    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        """A chain of chunks was added; their ``_parents`` are set."""
        self._stamp(rows)

    def _add_leaf(self, row: int) -> None:
        """A chunk became a leaf: it is new, or lost its last child."""
        self._queues.place(row, self._kind(row))

    def _drop_leaf(self, row: int) -> None:
        """A leaf ceases to be one: it has a child now, or is being removed."""
        self._queues.remove(row)

    def _use(self, rows: Rows, now_s: float) -> None:
        """Chunks on the tier were used, in chain order; some may occur twice."""
        # From last to first: the start of a chain must be evicted after its end.
        rows = rows[::-1]
        if len(rows) < FEW:
            leaves = [row for row in rows.tolist() if not self._children[row]]
        else:
            leaves = rows[np.frombuffer(self._children, np.uint32)[rows] == 0].tolist()
        for row in leaves:
            self._queues.remove(row)
            self._queues.append(row, self._kind(row))
        self._stamp(rows)

    def _removed(self, row: int) -> None:
        """A chunk was removed."""

    def _stamp(self, rows: Rows) -> None:
        """Number the uses of *rows*, in order."""
        if len(rows) < FEW:
            used = self._used
            for tick, row in enumerate(rows.tolist(), self._tick + 1):
                used[row] = tick
        else:
            ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows))
            np.frombuffer(self._used, np.uint64)[rows] = ticks
        self._tick += len(rows)

    def _requeue(self, rows: Rows) -> None:
        """Queue *rows* again, whose kinds changed; unknown rows are ignored."""
        for row in rows[rows < len(self._here)].tolist():
            if self._is_leaf(row):
                self._queues.remove(row)
                self._queues.place(row, self._kind(row))

    # --- events

    def _reach(self, row: int) -> None:
        if self._columns.reach(row):
            self._extend(self._columns.rows)

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self._reach(max(row, parent))
        if self._here[row]:
            self._use(np.array([row]), now_s)
            return
        if closes_circle(row, parent, self._parents, self._children):
            parent = NO_ROW
        self._count += 1
        self._here[row] = 1
        self._parents[row] = parent
        self._inserted(np.array([row]), size_bytes, now_s)
        if not self._children[row]:
            self._add_leaf(row)
        if parent:
            self._adopt(parent)

    def _adopt(self, parent: int) -> None:
        children = self._children
        if not children[parent] and self._here[parent]:
            self._drop_leaf(parent)
        children[parent] += 1

    @override
    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        if not len(rows):
            return
        listed = rows.tolist()
        names = set(listed)
        self._reach(max(parent, max(listed)))
        here, parents, children = self._here, self._parents, self._children
        is_known = any(map(here.__getitem__, listed)) or any(map(children.__getitem__, listed))
        if is_known or len(names) < len(rows) or parent in names:
            super().insert_chain(rows, parent, size_bytes, now_s)
            return
        # Rows without children cannot close a cycle.
        before = parent
        for row in listed:
            here[row] = 1
            parents[row] = before
            children[row] = 1
            before = row
        children[before] = 0
        self._count += len(rows)
        self._inserted(rows, size_bytes, now_s)
        self._add_leaf(before)
        if parent:
            self._adopt(parent)

    def _is_leaf(self, row: int) -> bool:
        return self._here[row] != 0 and not self._children[row]

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        if not len(rows):
            return
        here = np.frombuffer(self._here, np.uint8).take(rows, mode="clip")
        if 0 in here.tobytes():
            rows = rows[here > 0]
        if len(rows):
            self._use(rows, now_s)

    @override
    def remove(self, row: int) -> None:
        here, children = self._here, self._children
        if row >= len(here) or not here[row]:
            return
        if not children[row]:
            self._drop_leaf(row)
        here[row] = 0
        self._count -= 1
        self._removed(row)
        parent = self._parents[row]
        if not parent:
            return
        self._parents[row] = NO_ROW
        children[parent] -= 1
        if here[parent] and not children[parent]:
            self._add_leaf(parent)

    # --- queries

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._queues.walk(), self._used.__getitem__, keep)

    def _exposed_by(self, row: int, orphaned: dict[int, int]) -> int:
        """Return the parent if *row* was its last child not yielded yet; else NO_ROW."""
        parent = self._parents[row]
        if not parent or not self._here[parent]:
            return NO_ROW
        left = orphaned.pop(parent, self._children[parent]) - 1
        if left:
            orphaned[parent] = left
            return NO_ROW
        return parent

    def _name(
        self, leaves: Iterator[int], rank: Callable[[int], float], keep: Callable[[int], bool]
    ) -> Iterator[int]:
        """Yield *leaves* by rank, and each parent by its own rank once all its children were."""
        left = LeafCursor(leaves, rank)
        orphaned: dict[int, int] = {}
        while row := left.take():
            if keep(row):
                continue
            yield row
            parent = self._exposed_by(row, orphaned)
            if parent:
                left.add(parent)

    @override
    def __len__(self) -> int:
        return self._count


DISCARD = 1
"""The reuse hint of a chunk that will not be used again."""

_DISCARDED, _OTHERS = 0, 1
_TICK_BITS = 56


class DiscardHintEviction(LruEviction):
    """Evict the least recently used leaf with the hint "discard", else of the others.

    "Paging with succinct predictions" (Antoniadis et al., arXiv 2210.02775): one bit of prediction
    per request, and a page with a 1 is evicted if there is one. The bit here is the reuse hint of
    the AccessHistory; no hint, or "keep", is a 0. Ours departs from the paper in that LRU decides
    among equals, and that only leaves are candidates: a parent with "discard" waits for its
    descendants.

    **Not robust**: with half of the bits wrong it is far below LRU; ``hit_density`` learns how
    reliable hints are. 27 bytes a row.
    """

    def __init__(self, history: AccessHistory) -> None:
        super().__init__(kinds=2)
        self._history = history
        history.on_hint.append(self._requeue)

    @override
    def _kind(self, row: int) -> int:
        return _DISCARDED if self._history.reuse_of(row) == DISCARD else _OTHERS

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        def rank(row: int) -> int:
            return self._kind(row) << _TICK_BITS | self._used[row]

        leaves = chain(self._queues.walk(_DISCARDED), self._queues.walk(_OTHERS))
        return self._name(leaves, rank, keep)
