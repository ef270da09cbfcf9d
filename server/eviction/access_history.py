"""The access history of chunks, present or evicted, which survives a restart, and their classes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import spare_rows
from kvstore.proto.types import KEY_BYTES
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.reuse_statistics import AGE_BINS, DensityTable

MAX_CLASSES = 1024
"""Limit of classes; beyond it a chunk is counted in its coarser class."""

MAX_GROUPS = 8
"""Groups with separate statistics; all others share one."""

HINTS = 3
"""Reuse hints of a chunk: 0 none, 1 discard, 2 keep."""

_FREQUENCIES = 3
_TURNS = 5
_LENGTHS = 3
OWNS = (MAX_GROUPS + 2) * HINTS * 2
"""Upper bound of the values of *own*."""

COARSER = 1 << 31
"""Flag of the code of a coarser class; the rest is its number."""

_COARSER_CLASSES = _FREQUENCIES * HINTS * 2
_CONTEXTS = _TURNS * _LENGTHS * _FREQUENCIES
_UNKNOWN = 65_535
_CODE_OF_OWN = np.arange(256, dtype=np.intp) * _CONTEXTS
_TURN_OF = np.searchsorted([1, 2, 3, 6], np.arange(256), side="right")
_CODE_OF_TURN: list[int] = (_TURN_OF * (_LENGTHS * _FREQUENCIES)).tolist()
_FREQUENCY_OF = np.clip(np.arange(256), 1, _FREQUENCIES) - 1
_SHORT_TOKENS, _LONG_TOKENS = 1_000, 16_000


class ChunkClasses:
    """Numbers classes on first use.

    A class is: the number of requests for the chunk (1, 2, more), the turn of its conversation (0,
    1, 2, 3 to 5, more), the length of the prompt (below 1 k, below 16 k tokens, more), and the
    chunk's *own* properties: its group, its reuse hint, and whether it is the end of a prompt that
    fills no chunk: ``(group x HINTS + hint) x 2 + end``. The coarser class has frequency, hint and
    end only.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.count = _COARSER_CLASSES
        """Classes in use; the coarser classes come first, also without chunks."""
        self.coarse = np.zeros(MAX_CLASSES, np.intp)
        """The coarser class of each class."""
        self.coarse[:_COARSER_CLASSES] = np.arange(_COARSER_CLASSES)
        self._numbers = np.full(OWNS * _CONTEXTS, _UNKNOWN, np.uint16)
        self._ends = [_SHORT_TOKENS / chunk_tokens, _LONG_TOKENS / chunk_tokens]
        self.groups: dict[int, int] = {}
        """Numbers of the groups with separate statistics, in order."""

    def group(self, group: int) -> int:
        """Return the number of a group: 0 for 0, then one per group, then one for all others."""
        if not group:
            return 0
        if group not in self.groups and len(self.groups) < MAX_GROUPS:
            self.groups[group] = 1 + len(self.groups)
        return self.groups.get(group, MAX_GROUPS + 1)

    def context(self, turn: int, chunks: int) -> int:
        """Return the part of the class code that all chunks of one prompt share."""
        return _CODE_OF_TURN[turn] + bisect_right(self._ends, chunks) * _FREQUENCIES

    def contexts(self, turns: NDArray[np.uint8], chunks: NDArray[np.uint16]) -> NDArray[np.intp]:
        """Return the ``context`` of each chunk."""
        lengths = np.searchsorted(self._ends, chunks, side="right")
        return (_TURN_OF[turns] * _LENGTHS + lengths) * _FREQUENCIES

    def of(
        self, own: NDArray[np.uint8], hits: NDArray[np.uint8], context: NDArray[np.intp] | int
    ) -> NDArray[np.uint16]:
        """Return the classes of chunks."""
        codes = _CODE_OF_OWN[own]
        codes += _FREQUENCY_OF[hits]
        codes += context
        numbers = self._numbers[codes]
        if numbers.max(initial=0) == _UNKNOWN:
            for code in codes[numbers == _UNKNOWN].tolist():
                self.number(code)
            numbers = self._numbers[codes]
        return numbers

    def codes(self) -> NDArray[np.intp]:
        """Return the code of each class, as ``number`` takes it; coarser ones contain COARSER."""
        found = np.zeros(self.count, np.intp)
        codes = np.flatnonzero(self._numbers != _UNKNOWN)
        found[self._numbers[codes]] = codes
        found[:_COARSER_CLASSES] = COARSER | np.arange(_COARSER_CLASSES)
        return found

    def number(self, code: int) -> int:
        """Return the number of a class by its code. Raises InvalidRequestError."""
        if code & COARSER:
            return code & ~COARSER
        if not 0 <= code < len(self._numbers):
            raise InvalidRequestError("code", code, f"below {len(self._numbers)}")
        number = self._numbers.item(code)
        if number == _UNKNOWN:
            own, frequency = code // _CONTEXTS, code % _FREQUENCIES
            number = coarser = own % (HINTS * 2) * _FREQUENCIES + frequency
            if self.count < MAX_CLASSES:
                number = self.count
                self.count += 1
                self.coarse[number] = coarser
            self._numbers[code] = number
        return number


class SteadyClock:
    """A monotonic clock over one that may jump back: it stands still until time goes on."""

    def __init__(self) -> None:
        self.latest_s = -np.inf
        """The last result of ``time_s``."""
        self._ahead_s = 0.0

    def time_s(self, now_s: float) -> float:
        """Return the time at the caller's *now_s*, never before an earlier result."""
        time_s = now_s + self._ahead_s
        if time_s < self.latest_s:
            self._ahead_s += self.latest_s - time_s
            return self.latest_s
        self.latest_s = time_s
        return time_s


class RefreshReport(NamedTuple):
    """Chunks requested between two refreshes.

    ``rows`` are the known ones and ``ages_s`` the time since the previous request of each;
    ``chunks`` counts all, known or not, of ``requests`` prompts.
    """

    rows: Rows
    ages_s: NDArray[np.float64]
    chunks: int
    requests: int
    time_s: float


FIRST_REFRESH_REQUESTS, REFRESH_REQUESTS = 50, 100
"""Most requests between two refreshes of the table: among the first 2000, and later."""

REFRESH_S = 30.0
"""Time after which a refresh is due with fewer requests."""

LEAST_REFRESH_REQUESTS = 10
"""Least requests between two refreshes: more than the steps of a refresh."""

_FIRST_REQUESTS = 2_000
_MOST = 255
_MOST_CHUNKS = 65_535
_COLUMNS = ("last_s", "hits", "classes", "flops", "turns", "chunks", "own")


class InsertInfo(NamedTuple):
    """Properties of a chunk when it is stored, with validated hints.

    ``tokens_full`` is False for the end of a prompt that fills no chunk; ``flops`` is the cost of
    its prefill, 0: unknown; ``group`` a number for a tenant or category, 0: none; ``reuse`` 0:
    none, 1: "discard", 2: "keep"; ``prompt_chunks`` the length of the prompt, 0: unknown.
    """

    tokens_full: bool = True
    flops: float = 0.0
    group: int = 0
    reuse: int = 0
    prompt_chunks: int = 0


NO_INFO = InsertInfo()
"""All unknown."""


class AccessHistory:
    """Access statistics of chunks in columns by row, and the table learnt from them.

    A row belongs to a chunk from its first ``seen_chain`` to ``forget_all``, evicted or not:
    evicted chunks show what was worth keeping. The owner bounds the rows, and reports each event
    here before it does to the policies. Not thread-safe: the owner locks. Memory: 23 bytes a row,
    and the table.
    """

    def __init__(self, chunk_tokens: int = 256) -> None:
        """A full chunk has *chunk_tokens* tokens. Raises InvalidRequestError."""
        if chunk_tokens < 1:
            raise InvalidRequestError("chunk_tokens", chunk_tokens, "at least 1")
        self.last_s = np.zeros(1)
        """Time of the last request of each, on the clock of ``time_s``."""
        self.hits = np.zeros(1, np.uint8)
        """Requests of each, with the first put as 1, at most 255; 0 for unknown rows."""
        self.classes = np.zeros(1, np.uint16)
        """Class numbers."""
        self.flops = np.zeros(1)
        """FLOPs of the prefill of each; 0: unknown."""
        self.turns = np.zeros(1, np.uint8)
        """Turn of the conversation at the last request of each, from 0."""
        self.chunks = np.zeros(1, np.uint16)
        """Length of the prompt at the last request of each, in chunks."""
        self.own = np.zeros(1, np.uint8)
        """See ChunkClasses."""
        self.kinds = ChunkClasses(chunk_tokens)
        self.table = DensityTable(self.kinds.coarse)
        self.on_hint: list[Callable[[Rows], None]] = []
        """Called with rows after a hint changed their class."""
        self.on_refresh: list[Callable[[RefreshReport], None]] = []
        """Called after each refresh."""
        self._asked: list[tuple[Rows, NDArray[np.float64]]] = []
        """Rows requested since the last report, and the age of each."""
        self._chunks = 0
        self._clock = SteadyClock()
        self.time_s = self._clock.time_s
        self._requests = 0
        self._refreshed_at = 0
        self._refreshed_s = -np.inf
        self._steps: Iterator[None] = iter(())
        """Remaining steps of the last refresh, one per request."""

    # --- events

    def requested(self, rows: Rows, chunks: int, now_s: float) -> None:
        """Record a lookup of a prompt of *chunks* chunks, whose first chunks are *rows*.

        Unknown rows are skipped. The prompt is the next turn of the one in which the last of *rows*
        was requested if it begins with all of that but its end. Refreshes the table when due.
        """
        time_s, rows = self.time_s(now_s), self._known(rows)
        if len(rows):
            self._record(rows, min(chunks, _MOST_CHUNKS), time_s)
        self._requests += 1
        self._chunks += chunks
        since = self._requests - self._refreshed_at
        most = FIRST_REFRESH_REQUESTS if self._requests < _FIRST_REQUESTS else REFRESH_REQUESTS
        is_due = since >= most or time_s - self._refreshed_s >= REFRESH_S
        is_due = is_due and since >= LEAST_REFRESH_REQUESTS
        if is_due:
            self._refreshed_at, self._refreshed_s = self._requests, time_s
            self._steps = self.table.refreshing(time_s, self.kinds.count)
        next(self._steps, None)
        if is_due and self._asked:
            all_rows, ages_s = map(np.concatenate, zip(*self._asked, strict=True))
            report = RefreshReport(all_rows, ages_s, self._chunks, since, time_s)
            self._asked.clear()
            self._chunks = 0
            for watcher in self.on_refresh:
                watcher(report)

    def _known(self, rows: Rows) -> Rows:
        """Return the known ones of *rows*, each once."""
        if not len(rows):
            return rows
        hits = self.hits.take(rows, mode="clip")
        if not hits.all():
            rows = rows[hits > 0]
        return _distinct(rows)

    def _record(self, rows: Rows, chunks: int, time_s: float) -> None:
        last = rows.item(-1)
        is_next = 1 < len(rows) >= self.chunks.item(last) - 1
        turn = min(self.turns.item(last) + 1, _MOST) if is_next else 0
        since_s = self.last_s[rows]
        self.table.requested(self.classes[rows], since_s, time_s)
        if self.on_refresh:
            self._asked.append((rows, time_s - since_s))
        hits = self.hits[rows]
        hits += hits < _MOST
        self.hits[rows] = hits
        self.last_s[rows], self.turns[rows], self.chunks[rows] = time_s, turn, chunks
        context = self.kinds.context(turn, chunks)
        classes = self.classes[rows] = self.kinds.of(self.own[rows], hits, context)
        self.table.wait(classes, time_s)

    def seen_chain(self, rows: Rows, parent: int, facts: InsertInfo, now_s: float) -> None:
        """Record the put of a chain of chunks that continues *parent*.

        *parent* may be NO_ROW or unknown. The first put of a chunk counts as a request, in the
        context of *parent*; for a known one, which was requested before, only the facts are taken.
        ``tokens_full`` applies to the last.
        """
        if not len(rows):
            return
        time_s = self.time_s(now_s)
        self.reach(max(int(rows.max()), parent))
        if facts.flops:
            self.flops[rows] = facts.flops
        known = self.hits[rows] > 0
        fresh = rows
        if known.any():
            if facts.reuse:
                self.hint(rows[known], facts.reuse)
            fresh = rows[~known]
        if len(fresh):
            self._track(_distinct(fresh), parent, facts, time_s)

    def _track(self, rows: Rows, parent: int, facts: InsertInfo, time_s: float) -> None:
        """Begin to track chunks in the context of *parent*."""
        kinds, turn = self.kinds, self.turns.item(parent)
        own = 0
        if facts.group or facts.reuse:
            own = (kinds.group(facts.group) * HINTS + facts.reuse) * 2
        chunks = min(facts.prompt_chunks or self.chunks.item(parent) or len(rows), _MOST_CHUNKS)
        context = kinds.context(turn, chunks)
        kind = kinds.number(own * _CONTEXTS + context)
        # All columns of unknown rows are 0.
        if own:
            self.own[rows] = own
        if turn:
            self.turns[rows] = turn
        self.hits[rows], self.classes[rows] = 1, kind
        self.last_s[rows], self.chunks[rows] = time_s, chunks
        if not facts.tokens_full:
            last = int(rows[-1])
            self.own[last] = own + 1
            self.classes[last] = kinds.number((own + 1) * _CONTEXTS + context)
        self.table.wait(self.classes[rows], time_s)

    def hint(self, rows: Rows, reuse: int) -> None:
        """Set the reuse hint of chunks."""
        rows, kinds = self._known(rows), self.kinds
        rows = rows[self.own[rows] // 2 % HINTS != reuse]
        if not len(rows):
            return
        own = self.own[rows]
        own += np.uint8(2 * reuse) - own // 2 % HINTS * 2
        self.own[rows] = own
        contexts = kinds.contexts(self.turns[rows], self.chunks[rows])
        others = kinds.of(own, self.hits[rows], contexts)
        self.table.moved(self.classes[rows], others, self.last_s[rows], self._clock.latest_s)
        self.classes[rows] = others
        for follower in self.on_hint:
            follower(rows)

    def forget_all(self, rows: Rows) -> None:
        """Forget the chunks of *rows*, which may be reused."""
        rows = self._known(rows)
        if not len(rows):
            return
        self.table.forgotten(self.classes[rows], self.last_s[rows], self._clock.latest_s)
        for name in _COLUMNS:
            getattr(self, name)[rows] = 0

    # --- queries

    def hits_of(self, row: int) -> int:
        """Return the requests of a row; 0 for unknown ones."""
        return self.hits.item(row) if row < len(self.hits) else 0

    def flops_of(self, row: int) -> float:
        """Return the FLOPs of the prefill of a row; 0: unknown."""
        return self.flops.item(row) if row < len(self.flops) else 0.0

    def reuse_of(self, row: int) -> int:
        """Return the hint of a row; 0 for unknown ones."""
        return self.own.item(row) // 2 % HINTS if row < len(self.own) else 0

    def is_partial(self, row: int) -> bool:
        """Whether the row is the end of a prompt that fills no chunk."""
        return row < len(self.own) and self.own.item(row) % 2 == 1

    def reach(self, row: int) -> None:
        """Grow the columns to include *row*. The last place is always empty."""
        if row + 1 < len(self.hits):
            return
        count = row + 1 - len(self.hits) + spare_rows(row)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(count, column.dtype))))


def _distinct(rows: Rows) -> Rows:
    """Return each of *rows* once, in order."""
    names = rows.tolist()
    if len(set(names)) == len(names):
        return rows
    return np.array(list(dict.fromkeys(names)), np.intp)


CHUNK = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("age_s", "<f8"),
        ("flops", "<f8"),
        ("left_s", "<f8"),
        ("chunks", "<u2"),
        ("hits", "u1"),
        ("turns", "u1"),
        ("own", "u1"),
        ("priority", "u1"),
        ("zeros", "V2"),
    ]
)
"""A saved chunk. ``age_s``: time since its last request; ``left_s``: time to live, 0: unlimited."""

CLASS = np.dtype([("code", "<u4"), ("asked", "<f4", AGE_BINS), ("forgotten", "<f4", AGE_BINS)])
"""A saved class: how many of its chunks were requested, or forgotten, by bin of age."""

MAX_CHUNKS = 1 << 19
"""Limit of saved chunks, 32 MiB; the earliest evicted are dropped."""

_SAVED = ("flops", "chunks", "hits", "turns", "own")
_MERGED_AT = 512
"""Restored chunks are grouped into this many distinct ages."""


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """``names``: tenant and category by group number, from 1; ``groups``: the numbers of those
    with separate statistics, in order. ``classes`` are of dtype CLASS, ``chunks`` of CHUNK.
    """

    names: Sequence[tuple[str, str]]
    groups: Sequence[int]
    classes: NDArray[np.void]
    chunks: NDArray[np.void]

    @classmethod
    def of(
        cls, names: Sequence[tuple[str, str]], history: AccessHistory, rows: Rows, now_s: float
    ) -> SavedHistory:
        """Return the state of *history*; the chunks are those of *rows*, without their keys."""
        time_s = history.time_s(now_s)
        history.table.settle(time_s)
        chunks = np.zeros(len(rows), CHUNK)
        chunks["age_s"] = np.maximum(time_s - history.last_s[rows], 0.0)
        for name in _SAVED:
            chunks[name] = getattr(history, name)[rows]
        count = history.kinds.count
        classes = np.zeros(count, CLASS)
        classes["code"] = history.kinds.codes()
        classes["asked"], classes["forgotten"] = history.table.ended(count)
        return cls(names, tuple(history.kinds.groups), classes, chunks)

    def fill(self, history: AccessHistory, rows: Rows, now_s: float) -> None:
        """Restore into an empty *history*, chunks under *rows*. Raises InvalidRequestError."""
        time_s = history.time_s(now_s)
        for group in self.groups:
            history.kinds.group(group)
        numbers = list(map(history.kinds.number, self.classes["code"].tolist()))
        count = len(history.kinds.coarse)
        asked, forgotten = np.zeros((2, count, AGE_BINS))
        fits = np.array([number < count for number in numbers], bool)
        at = np.array(numbers, np.intp)[fits]
        np.add.at(asked, at, self.classes["asked"][fits])
        np.add.at(forgotten, at, self.classes["forgotten"][fits])
        history.table.learned(asked, forgotten)
        if not len(rows):
            return
        history.reach(int(rows.max()))
        order = np.argsort(-self.chunks["age_s"], kind="stable")
        for part in np.array_split(order, min(_MERGED_AT, len(order))):
            mine, last_s = rows[part], time_s - float(self.chunks["age_s"][part[0]])
            history.last_s[mine] = last_s
            for name in _SAVED:
                getattr(history, name)[mine] = self.chunks[name][part]
            contexts = history.kinds.contexts(history.turns[mine], history.chunks[mine])
            classes = history.kinds.of(history.own[mine], history.hits[mine], contexts)
            history.classes[mine] = classes
            history.table.wait(classes, last_s)
        history.table.refresh(time_s, history.kinds.count)
