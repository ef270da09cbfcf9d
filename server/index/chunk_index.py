"""The ChunkIndex: which chunks exist, their parents, and which tiers hold copies.

A chain digest identifies a whole prefix, so there is no tree to walk: the longest cached prefix of
a key chain is its longest run of known keys, up to where a model can resume.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, KeyTable, spare_rows
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    KVLayout,
    LayerGroup,
    LayerKind,
    Namespace,
)
from kvstore.server.eviction.policy import Rows

MAX_CHECKPOINT_SPACES = 4096
"""Limit of namespaces of models with resume requirements; beyond it the oldest is forgotten."""

_HAS_WINDOW, _HAS_STATE = 1, 2


class ResumeRequirements(NamedTuple):
    """What a model needs to resume after a prefix: a state, and windows of the last tokens."""

    state: bool = False
    window_tokens: int = 0

    @classmethod
    def of_groups(cls, groups: Iterable[LayerGroup]) -> ResumeRequirements:
        """Return what layers of *groups* need. A window of w attends to the w - 1 tokens before."""
        kinds = [(group.kind, group.window_tokens) for group in groups]
        widths = [max(1, width - 1) for kind, width in kinds if kind is LayerKind.window]
        return cls(any(kind is LayerKind.state for kind, _ in kinds), max(widths, default=0))

    @classmethod
    def of_layout(cls, layout: KVLayout) -> ResumeRequirements:
        """Return the needs of a model that a chunk of *layout* implies."""
        windows = [c.tokens for c in layout.components if c.kind is LayerKind.window]
        return cls(layout.has(LayerKind.state), max(windows, default=0))

    def flags(self) -> int:
        """Return the needs as a bit mask."""
        return _HAS_STATE * self.state | _HAS_WINDOW * (self.window_tokens > 0)


def _reach(
    has: NDArray[np.bool_], rows: Rows, tokens: Callable[[int], int], wanted: int
) -> NDArray[np.bool_]:
    """Return after which rows windows cover the last *wanted* tokens, or all tokens."""
    behind = np.cumsum(np.fromiter(map(tokens, rows.tolist()), np.int64, len(rows)))
    before = np.concatenate([[0], behind])
    gap = np.maximum.accumulate(np.where(has, -1, np.arange(len(rows))))
    reached: NDArray[np.bool_] = has & ((gap < 0) | (behind - before[gap + 1] >= wanted))
    return reached


class EvictedEntries:
    """A ghost list: evicted rows in order of eviction, with O(1) removal. Nine bytes a row.

    A cache learns from ghosts what it evicted too early (ARC, Megiddo and Modha, FAST 2003). Row 0
    is the list head and belongs to no chunk. The owner extends its ``columns``.
    """

    def __init__(self) -> None:
        self._newer = array("I")
        self._older = array("I")
        self.here = array("B")
        """1 for each row in the list, by row."""
        self.columns = (self._newer, self._older, self.here)
        self._count = 0

    def append(self, row: int) -> None:
        """Append a row that is not in the list."""
        newest = self._older[NO_ROW]
        self._newer[newest] = self._older[NO_ROW] = row
        self._older[row], self._newer[row] = newest, NO_ROW
        self.here[row] = 1
        self._count += 1

    def remove(self, row: int) -> None:
        """Remove a row that is in the list."""
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older
        self.here[row] = 0
        self._count -= 1

    def __iter__(self) -> Iterator[int]:
        row = self._newer[NO_ROW]
        while row:
            yield row
            row = self._newer[row]

    def __len__(self) -> int:
        return self._count


class CopyColumns(NamedTuple):
    """The copies on one tier; ``accuracies`` are the copy's plus one, 0 without a copy."""

    sizes: array[int]
    codecs: array[int]
    accuracies: array[int]


MAX_TIERS = 8
"""The tiers of a chunk are the bits of one byte."""

EVICTED_A_CHUNK = 2
"""Ghosts kept per chunk with a copy, even beyond the limit."""

MAX_DEPTH = 1 << 14
"""Limit of parents visited."""

_LAYOUTS_KEPT = 1024
_FORGOTTEN_AT_ONCE = 16
"""Ghosts forgotten in one batch, small enough to be quick."""

_COMMON, _WHOLE = 1, 2
"""Marks of a row."""


@lru_cache(_LAYOUTS_KEPT)
def _kept_layout(layout: KVLayout) -> tuple[KVLayout, ResumeRequirements, int]:
    """Return the first of equal layouts, its requirements and their flags."""
    needs = ResumeRequirements.of_layout(layout)
    return layout, needs, needs.flags()


class ChunkIndex:
    """Chunks by key, each in a row of columns. Not thread-safe: the catalog's lock guards it.

    A row belongs to a chunk while any tier has a copy of it, while it is a ghost, or while a
    chunk with a copy continues it. A chunk that loses its last copy becomes a ghost; the oldest
    are forgotten beyond both *evicted_limit* and EVICTED_A_CHUNK per chunk with a copy; 0: no
    ghosts. *on_forget* is called with the rows of ghosts before they are reused. Columns, as
    garbage collection would traverse millions of objects; *columns* of others are extended too.

    In a namespace of a model with state or window layers (``needs``) a prefix can be resumed only
    exactly where a state was stored (Marconi, MLSys 2025, section 3), and where windows cover the
    tokens before.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        evicted_limit: int = 0,
        on_forget: Callable[[Rows], None] = lambda rows: None,
        columns: Iterable[array[Any]] = (),
    ) -> None:
        if len(tiers) > MAX_TIERS:
            raise InvalidRequestError("tiers", len(tiers), f"at most {MAX_TIERS}")
        self.tiers = tuple(tiers)
        self._table = KeyTable()
        self.key = self._table.key
        """Maps a row to its key."""
        self.keys = self._table.keys
        """Maps rows to their keys, each a void of 32 bytes."""
        self.find, self.rows = self._table.find, self._table.find_all
        """Map a key, or keys, to rows, with or without a copy; NO_ROW for unknown keys."""
        self.prefix = self._table.prefix
        """Maps keys to rows, up to the first unknown key."""
        self._holders = array("B")
        """One bit per tier that has a copy."""
        self.parents = array("I")
        """The row of the parent; NO_ROW at the start of a chain."""
        self._uses = array("I")
        """Known chunks that continue this one, plus one if it has copies or is a ghost."""
        self._wholes = array("I")
        """How many of the chunks that continue it are no shorter than it."""
        self._marks = array("B")
        """_COMMON: two whole chunks continued it or a later one. _WHOLE: counts in ``_wholes``."""
        self._flops = array("d")
        self.hits = array("I")
        """Lookups that found the chunk; one that names it twice counts once."""
        self.layouts: list[KVLayout | None] = []
        """Layouts of chunks with a copy."""
        self._ends = array("B")
        """``ResumeRequirements.flags`` of chunks with a copy."""
        self.needs: OrderedDict[bytes, ResumeRequirements] = OrderedDict()
        """Resume requirements by namespace, for models that have any."""
        self.evicted = EvictedEntries()
        self._copies = {tier: CopyColumns(array("Q"), array("H"), array("B")) for tier in tiers}
        self._columns: list[array[Any]] = [
            *(self._holders, self.parents, self._uses, self._wholes, self._marks, self._flops),
            *(self.hits, self._ends, *self.evicted.columns),
            *chain(*self._copies.values(), columns),
        ]
        self._count = 0
        self._evicted_limit = evicted_limit
        self._on_forget = on_forget
        self._extend()  # row 0 belongs to no chunk

    # --- changes

    def add(self, tier: str, infos: Sequence[ChunkInfo]) -> list[int]:
        """Add copies on *tier* of one chunk, or of a new chain of one layout; return the rows."""
        rows: list[int] = []
        for info in infos:  # inlined for speed: a put waits
            rows.append(self._table.add(info.key))
            if rows[-1] == len(self._holders):
                self._extend()
        if not self._holders[rows[0]]:
            self._describe(rows, infos)
        bit = 1 << self.tiers.index(tier)
        sizes, codecs, accuracies = self._copies[tier]
        for row, info in zip(rows, infos, strict=True):
            sizes[row], codecs[row] = info.size_bytes, info.codec_id
            accuracies[row] = info.accuracy + 1
            self._holders[row] |= bit
        return rows

    def _describe(self, rows: Sequence[int], infos: Sequence[ChunkInfo]) -> None:
        """Record what all copies have in common."""
        layout, needs, flags = _kept_layout(infos[0].layout)
        if flags:
            self.need(Namespace(infos[0].key[:DIGEST_BYTES]), needs)
        parent = infos[0].parent_key
        above = NO_ROW if parent is None else self._row_for(parent)
        self._count += len(rows)
        for row, info in zip(rows, infos, strict=True):
            if self.evicted.here[row]:  # the ghost counts in _uses already
                self.evicted.remove(row)
            else:
                self._uses[row] += 1
            if above:
                self._uses[above] += 1
                self.parents[row] = above
                before = self.layouts[above]
                # The last chunk of a prompt is shorter, and stored again once it has grown.
                if before is None or layout.tokens >= before.tokens:
                    self._marks[row] |= _WHOLE
                    self._wholes[above] += 1
                is_common = self._wholes[above] > 1 or self._marks[row] & _COMMON
                while is_common and above and not self._marks[above] & _COMMON:
                    self._marks[above] |= _COMMON
                    above = self.parents[above]
            self._flops[row] = info.prefill_flops
            self.layouts[row] = layout
            self._ends[row] = flags
            above = row

    def need(self, space: Namespace, needs: ResumeRequirements) -> None:
        """Record what the model of *space* needs to resume after a prefix."""
        known = self.needs.get(space, needs)
        tokens = max(known.window_tokens, needs.window_tokens)
        self.needs[space] = ResumeRequirements(known.state or needs.state, tokens)
        if len(self.needs) > MAX_CHECKPOINT_SPACES:
            self.needs.popitem(last=False)

    def _row_for(self, key: ChunkKey) -> int:
        row = self._table.add(key)
        if row == len(self._holders):
            self._extend()
        return row

    def _extend(self) -> None:
        count = spare_rows(len(self._holders))
        for column in self._columns:
            column.frombytes(bytes(count * column.itemsize))
        self.layouts += [None] * count

    def discard(self, tier: str, row: int) -> bool:
        """Remove the copy on *tier*; return whether there was one. The last may free the row."""
        if not self._copies[tier].accuracies[row]:
            return False
        self._copies[tier].accuracies[row] = 0
        self._holders[row] ^= 1 << self.tiers.index(tier)
        if not self._holders[row]:
            self._count -= 1
            self.hits[row] = self._ends[row] = 0
            self.layouts[row] = None
            above, self.parents[row] = self.parents[row], NO_ROW
            if self._marks[row] & _WHOLE:
                self._marks[row] ^= _WHOLE
                self._wholes[above] -= 1
            self.evicted.append(row)
            if above:
                self._release(above)
            self._forget_evicted()
        return True

    def _release(self, row: int) -> None:
        self._uses[row] -= 1
        if not self._uses[row]:
            self._marks[row] = 0
            self._table.remove(row)

    def _most_evicted(self) -> int:
        return max(self._evicted_limit, EVICTED_A_CHUNK * self._count) if self._evicted_limit else 0

    def _forget_evicted(self) -> None:
        limit = self._most_evicted()
        batch = min(limit // _FORGOTTEN_AT_ONCE + 1, _FORGOTTEN_AT_ONCE)
        if len(self.evicted) - limit < batch:
            return
        rows = list(islice(self.evicted, batch))
        self._on_forget(np.array(rows, np.intp))
        for row in rows:
            self.evicted.remove(row)
            self._release(row)

    def add_evicted(self, key: ChunkKey) -> int:
        """Add a chunk as the latest ghost; return its row, NO_ROW if known or at the limit."""
        if len(self.evicted) >= self._most_evicted() or self.row(key) or self.is_evicted(key):
            return NO_ROW
        row = self._row_for(key)
        self._uses[row] += 1
        self.evicted.append(row)
        return row

    # --- queries

    def row(self, key: ChunkKey) -> int:
        """Return the row of a chunk with a copy; NO_ROW when no tier holds it."""
        row = self._table.find(key)
        return row if self._holders[row] else NO_ROW

    def is_evicted(self, key: ChunkKey) -> bool:
        """Whether the chunk is a ghost."""
        return self.evicted.here[self._table.find(key)] != 0

    def known_rows(self) -> Iterator[int]:
        """Yield the rows of all ghosts, the oldest first, then of all chunks with a copy."""
        yield from self.evicted
        yield from np.flatnonzero(np.frombuffer(self._holders, np.uint8)).tolist()

    def tokens(self, row: int) -> int:
        """Return the tokens of a chunk with a copy; 0 without one."""
        layout = self.layouts[row]
        return 0 if layout is None else layout.tokens

    def context_tokens(self, row: int) -> int:
        """Return the tokens of the ancestors of this chunk, up to the first without a copy."""
        tokens, above = 0, self.parents[row]
        for _ in range(MAX_DEPTH):  # bounded even if parents form a cycle
            if not above or not self._holders[above]:
                break
            tokens += self.tokens(above)
            above = self.parents[above]
        return tokens

    def continued(self, row: int) -> int:
        """Return how many chunks with copies continue a chunk that has one."""
        return self._uses[row] - 1

    def is_common(self, row: int) -> bool:
        """Whether two whole chunks have continued this one or a later one."""
        return bool(self._marks[row] & _COMMON)

    def size_bytes(self, tier: str, row: int) -> int:
        """Return the size of the frame on *tier*, which must have a copy."""
        return self._copies[tier].sizes[row]

    def any_size_bytes(self, row: int) -> int:
        """Return the size of the frame on its first tier; there must be a copy."""
        return self.size_bytes(self.holders(row)[0], row)

    def holders(self, row: int, least: Accuracy = Accuracy.approximate) -> list[str]:
        """Return the tiers that hold the chunk with at *least* this accuracy, in index order."""
        return [tier for tier, one in self._copies.items() if one.accuracies[row] > least]

    def info(self, tier: str, row: int) -> ChunkInfo:
        """Return the description of the copy on *tier*, which must have one."""
        copies = self._copies[tier]
        above = self.parents[row]
        parent = ChainDigest(self.key(above)[DIGEST_BYTES:]) if above else ROOT
        layout = self.layouts[row]
        assert layout is not None, "a chunk with a copy has a layout"
        return ChunkInfo(
            self.key(row), parent, layout, copies.codecs[row], copies.sizes[row],
            Accuracy(copies.accuracies[row] - 1), self._flops[row],
        )  # fmt: skip

    def copies(self, row: int) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name."""
        return {tier: self.info(tier, row) for tier in self.holders(row)}

    def known_prefix(self, keys: Sequence[ChunkKey]) -> Rows:
        """Return the rows of the longest prefix of *keys* that have a copy or are ghosts."""
        rows = self.prefix(keys)
        here = np.frombuffer(self._holders, np.uint8)[rows]
        known = here | np.frombuffer(self.evicted.here, np.uint8)[rows]
        return rows if known.all() else rows[: int(known.argmin())]

    def readable(self, rows: Rows, least: Accuracy = Accuracy.exact) -> Rows:
        """Return the longest prefix of *rows* with copies of *least* that a model can resume."""
        fit = np.zeros(len(rows), np.bool_)
        for copies in self._copies.values():
            fit |= np.frombuffer(copies.accuracies, np.uint8)[rows] > least
        rows = rows if fit.all() else rows[: int(fit.argmin())]
        return self.usable(rows) if self.needs else rows

    def usable(self, rows: Rows) -> Rows:
        """Return the longest prefix of *rows*, of one chain, that a model can resume."""
        is_any = self.needs and len(rows)
        needs = self.needs.get(self.key(int(rows[0]))[:DIGEST_BYTES]) if is_any else None
        if needs is None:
            return rows
        flags = np.frombuffer(self._ends, np.uint8)[rows]
        fit = np.ones(len(rows), np.bool_)
        if needs.state:
            fit &= (flags & _HAS_STATE) != 0
        if needs.window_tokens:
            has = (flags & _HAS_WINDOW) != 0
            fit &= has if has.all() else _reach(has, rows, self.tokens, needs.window_tokens)
        ends = np.flatnonzero(fit)
        return rows[: int(ends[-1]) + 1 if len(ends) else 0]

    def is_less_complete(self, row: int, layout: KVLayout) -> bool:
        """Whether the chunk has less end state than *layout*."""
        return bool(ResumeRequirements.of_layout(layout).flags() & ~self._ends[row])

    def sizes(
        self, tier: str, rows: Rows, least: Accuracy
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which chunks *tier* has at *least*, and the size of each."""
        copies = self._copies[tier]
        held = np.frombuffer(copies.accuracies, np.uint8)[rows] > least
        return held, np.frombuffer(copies.sizes, np.int64)[rows]

    def keys_starting(self, start: bytes) -> NDArray[np.void]:
        """Return the keys of chunks with a copy that begin with *start*, each of 32 bytes."""
        rows = self._table.rows_of(start)
        return self.keys(rows[np.frombuffer(self._holders, np.uint8)[rows] > 0])

    def held_rows(self, first: int, count: int) -> tuple[list[int], int]:
        """Return the rows with copies among *count* from *first*, and the next; 0 at the end."""
        stop = first + count
        held = np.frombuffer(self._holders, np.uint8)[first:stop]
        rows: list[int] = (first + np.flatnonzero(held)).tolist()
        return rows, stop if stop < len(self._holders) else 0

    def only_on(self, tiers: Iterable[str]) -> list[ChunkKey]:
        """Return the chunks that are only on these tiers."""
        bits = sum(1 << self.tiers.index(tier) for tier in tiers)
        holders = np.frombuffer(self._holders, np.uint8)
        rows = np.flatnonzero((holders > 0) & (holders & ~np.uint8(bits) == 0))
        return [self.key(row) for row in rows.tolist()]

    def __len__(self) -> int:
        return self._count
