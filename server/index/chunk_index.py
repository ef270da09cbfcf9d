"""The ChunkIndex: which chunks exist, what they continue, and which tiers hold copies.

Chain digests already name a whole prefix, so no tree is walked: the longest cached prefix of a
key chain is its longest run of known keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, KeyTable, spare_rows
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Fidelity,
    KVLayout,
    Namespace,
)
from kvstore.server.eviction.policy import Rows
from kvstore.server.index.prefix_ends import ResumeRequirements, StateCheckpoints


class EvictedEntries:
    """Rows in the order in which they came, any of them taken out in O(1). Nine bytes a row.

    Ghost lists are how a cache learns from what it gave up too early (ARC, Megiddo and Modha,
    FAST 2003). Row 0 is nobody's and begins the list.
    """

    def __init__(self) -> None:
        self._newer = array("I", [NO_ROW])
        self._older = array("I", [NO_ROW])
        self._here = array("B", [0])
        self._count = 0

    def extend(self, count: int) -> None:
        """Let there be *count* rows more."""
        for column in (self._newer, self._older, self._here):
            column.frombytes(bytes(count * column.itemsize))

    def __contains__(self, row: int) -> bool:
        return self._here[row] != 0

    @property
    def flags(self) -> NDArray[np.uint8]:
        """1 for each row that is here, by row; to be dropped before the list changes."""
        return np.frombuffer(self._here, np.uint8)

    def append(self, row: int) -> None:
        """Put a row that is not here behind all others."""
        newest = self._older[NO_ROW]
        self._newer[newest] = self._older[NO_ROW] = row
        self._older[row], self._newer[row] = newest, NO_ROW
        self._here[row] = 1
        self._count += 1

    def remove(self, row: int) -> None:
        """Take out a row that is here."""
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older
        self._here[row] = 0
        self._count -= 1

    @property
    def oldest(self) -> int:
        """The row that came first; NO_ROW when there is none."""
        return self._newer[NO_ROW]

    def __iter__(self) -> Iterator[int]:
        row = self._newer[NO_ROW]
        while row:
            yield row
            row = self._newer[row]

    def __len__(self) -> int:
        return self._count


class CopyColumns:
    """The copies on one tier. Not thread-safe, as the index."""

    def __init__(self) -> None:
        self.sizes = array("Q")
        self.codecs = array("H")
        self.fidelities = array("B")
        """One more than the copy's; 0 where this tier has none."""

    def extend(self, count: int) -> None:
        """Make room for that many more rows."""
        for column in (self.sizes, self.codecs, self.fidelities):
            column.frombytes(bytes(count * column.itemsize))


MAX_TIERS = 8
"""A chunk's tiers are the bits of one byte."""

EVICTED_A_CHUNK = 2
"""Of so many times the chunks that have copies the ghosts are kept, though it be over the limit."""

MAX_DEPTH = 1 << 14
"""Chunks before one that are counted."""

_LAYOUTS_KEPT = 1024
_FORGOTTEN_AT_ONCE = 16
"""Ghosts that are forgotten together: told of together, and never for a long time."""

_COMMON, _WHOLE = 1, 2
"""Marks of a row."""


class ChunkIndex:
    """Chunks by key, each in a row of columns. Not thread-safe: the catalog's lock guards it.

    A row belongs to a chunk while any tier has a copy of it, while it is a ghost, or while a
    chunk with a copy continues it; the parent of such a chunk therefore always has a row. When
    its last copy goes a chunk becomes a ghost, the oldest of which are forgotten when there are
    more than *evicted_limit* and EVICTED_A_CHUNK for each chunk with a copy; 0: there are none.
    *on_forget* is called with the rows of ghosts before they can be other chunks'. Columns and
    not objects, because a million chunks are a few million objects that the collector of garbage
    would go through.

    In a namespace of a model with state or window layers (``needs_ends``) a prefix can be
    continued only where the state was kept (Marconi, MLSys 2025, section 3: exact match of
    recurrent states) and the last chunks have the tokens that windows see.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        evicted_limit: int = 0,
        on_forget: Callable[[Rows], None] = lambda rows: None,
    ) -> None:
        if len(tiers) > MAX_TIERS:
            raise InvalidRequestError("tiers", len(tiers), f"at most {MAX_TIERS}")
        self.tiers = tuple(tiers)
        self._keys = KeyTable()
        self._holders = array("B")
        """A bit for each tier that has a copy."""
        self._parents = array("I")
        self._uses = array("I")
        """Known chunks that continue the row's, and one for its copies."""
        self._wholes = array("I")
        """Of those that continue it, how many are no shorter than it."""
        self._marks = array("B")
        """_COMMON: two whole chunks continued it, or one behind it. _WHOLE: one of ``_wholes``."""
        self._flops = array("d")
        self._hits = array("I")
        self._layouts: list[KVLayout | None] = []
        self._known_layouts: dict[KVLayout, KVLayout] = {}
        self._ends = StateCheckpoints()
        self._copies = [CopyColumns() for _ in tiers]
        self._count = 0
        self._evicted = EvictedEntries()
        self._evicted_limit = evicted_limit
        self._on_forget = on_forget
        self._extend(first=True)

    # --- changes

    def add(self, tier: str, info: ChunkInfo) -> int:
        """Take note of a sealed copy on *tier* and return the chunk's row."""
        row = self._row_for(info.key)
        if not self._holders[row]:
            self._describe(row, info, self._parent_row(info), self._shared(info.layout))
        self._hold(self.tiers.index(tier), row, info)
        return row

    def add_chain(self, tier: str, infos: Sequence[ChunkInfo]) -> list[int]:
        """Do the same for *infos*, which no tier has yet, and return their rows.

        Each continues the one before, and all have one layout.
        """
        number, layout = self.tiers.index(tier), self._shared(infos[0].layout)
        above, rows = self._parent_row(infos[0]), []
        for info in infos:
            row = self._row_for(info.key)
            self._describe(row, info, above, layout)
            self._hold(number, row, info)
            rows.append(row)
            above = row
        return rows

    def _hold(self, number: int, row: int, info: ChunkInfo) -> None:
        copies = self._copies[number]
        copies.sizes[row], copies.codecs[row] = info.size_bytes, info.codec_id
        copies.fidelities[row] = info.fidelity + 1
        self._holders[row] |= 1 << number

    def _parent_row(self, info: ChunkInfo) -> int:
        parent = info.parent_key
        return NO_ROW if parent is None else self._row_for(parent)

    def _shared(self, layout: KVLayout) -> KVLayout:
        """Return the layout that all chunks share which have this one."""
        if len(self._known_layouts) >= _LAYOUTS_KEPT:
            self._known_layouts.clear()
        return self._known_layouts.setdefault(layout, layout)

    def _row_for(self, key: ChunkKey) -> int:
        row = self._keys.add(key)
        if row == len(self._holders):
            self._extend()
        return row

    def _extend(self, *, first: bool = False) -> None:
        """Make every column longer; row 0 is nobody's."""
        count = spare_rows(len(self._holders))
        columns = (self._parents, self._uses, self._wholes, self._hits, self._flops)
        for column in (self._holders, self._marks, *columns):
            column.frombytes(bytes(count * column.itemsize))
        self._ends.extend(count)
        self._evicted.extend(count - first)
        self._layouts += [None] * count
        for copies in self._copies:
            copies.extend(count)

    def _describe(self, row: int, info: ChunkInfo, above: int, layout: KVLayout) -> None:
        """Keep what is the same in all copies."""
        self._count += 1
        if row in self._evicted:  # which held the row until now
            self._evicted.remove(row)
        else:
            self._uses[row] += 1
        if above:
            self._uses[above] += 1
            self._parents[row] = above
            before = self._layouts[above]
            # The end of a prompt is stored shorter, and again once more was generated behind it.
            if before is None or layout.tokens >= before.tokens:
                self._marks[row] |= _WHOLE
                self._wholes[above] += 1
            if self._wholes[above] > 1 or self._marks[row] & _COMMON:
                self._note_common(above)
        self._flops[row] = info.prefill_flops
        self._layouts[row] = layout
        self._ends.describe(row, Namespace(info.key[:DIGEST_BYTES]), layout)

    def _note_common(self, row: int) -> None:
        while row and not self._marks[row] & _COMMON:
            self._marks[row] |= _COMMON
            row = self._parents[row]

    def needs_ends(self, space: Namespace, needs: ResumeRequirements) -> None:
        """Take note of what the model of *space* needs where a prefix ends."""
        self._ends.need(space, needs)

    def has_ends(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether prefixes of *keys*, all of one namespace, cannot end everywhere."""
        return bool(keys) and self._ends.needs_of(keys[0][:DIGEST_BYTES]) is not None

    def layout(self, row: int) -> KVLayout | None:
        """Return the layout of a chunk with a copy."""
        return self._layouts[row]

    def is_less_complete(self, row: int, layout: KVLayout) -> bool:
        """Whether a chunk with a copy has less of its end than *layout*."""
        return self._ends.is_less_complete(row, layout)

    def discard(self, tier: str, row: int) -> bool:
        """Forget the copy on *tier*. Return whether there was one; a row may go with its last."""
        number = self.tiers.index(tier)
        bit = 1 << number
        if not self._holders[row] & bit:
            return False
        self._copies[number].fidelities[row] = 0
        self._holders[row] ^= bit
        if not self._holders[row]:
            self._count -= 1
            self._hits[row] = 0
            self._ends.forget(row)
            self._layouts[row] = None
            above, self._parents[row] = self._parents[row], NO_ROW
            if self._marks[row] & _WHOLE:
                self._marks[row] ^= _WHOLE
                self._wholes[above] -= 1
            self._evicted.append(row)
            if above:
                self._let_go(above)
            self._forget_evicted()
        return True

    def _let_go(self, row: int) -> None:
        self._uses[row] -= 1
        if not self._uses[row]:
            self._marks[row] = 0
            self._keys.remove(row)

    def _most_evicted(self) -> int:
        return max(self._evicted_limit, EVICTED_A_CHUNK * self._count) if self._evicted_limit else 0

    def _forget_evicted(self) -> None:
        limit = self._most_evicted()
        batch = min(limit // _FORGOTTEN_AT_ONCE + 1, _FORGOTTEN_AT_ONCE)
        if len(self._evicted) - limit < batch:
            return
        rows = list(islice(self._evicted, batch))
        self._on_forget(np.array(rows, np.intp))
        for row in rows:
            self._evicted.remove(row)
            self._let_go(row)

    def add_evicted(self, key: ChunkKey) -> int:
        """Remember a chunk of which no tier has a copy, as the one that left last; return its row.

        NO_ROW when it is known already, or when ghosts are as many as they may be.
        """
        if len(self._evicted) >= self._most_evicted() or self.is_known(self._keys.find(key)):
            return NO_ROW
        row = self._row_for(key)
        self._uses[row] += 1
        self._evicted.append(row)
        return row

    # --- questions

    def row(self, key: ChunkKey) -> int:
        """Return the row of a chunk with a copy; NO_ROW when no tier holds it."""
        row = self._keys.find(key)
        return row if self._holders[row] else NO_ROW

    def remembers(self, key: ChunkKey) -> bool:
        """Whether the chunk is a ghost."""
        return self.is_evicted(self._keys.find(key))

    def is_known(self, row: int) -> bool:
        """Whether the row is of a chunk with a copy, or of a ghost."""
        return self._holders[row] != 0 or row in self._evicted

    def is_evicted(self, row: int) -> bool:
        """Whether the row is of a chunk that is remembered and has no copy."""
        return row in self._evicted

    def count_evicted(self, rows: Rows) -> int:
        """Return how many of *rows* are ghosts'."""
        return int(self._evicted.flags[rows].sum()) if len(rows) else 0

    @property
    def evicted_count(self) -> int:
        """Chunks that are remembered and have no copy."""
        return len(self._evicted)

    def known_rows(self) -> Iterator[int]:
        """Yield the rows of all ghosts, the oldest first, then of all chunks with a copy."""
        yield from self._evicted
        yield from np.flatnonzero(np.frombuffer(self._holders, np.uint8)).tolist()

    def key(self, row: int) -> ChunkKey:
        """Return the key of a row."""
        return self._keys.key(row)

    def keys(self, rows: Rows) -> NDArray[np.void]:
        """Return the keys of *rows*, each a void of 32 bytes."""
        return self._keys.keys(rows)

    def parent(self, row: int) -> int:
        """Return the row of the chunk before this one; NO_ROW at the start of a chain."""
        return self._parents[row]

    def tokens(self, row: int) -> int:
        """Return the tokens of a chunk with a copy; 0 without one."""
        layout = self._layouts[row]
        return 0 if layout is None else layout.tokens

    def context_tokens(self, row: int) -> int:
        """Return the tokens of the chunks before this one, as far back as they have copies."""
        tokens, above = 0, self._parents[row]
        for _ in range(MAX_DEPTH):  # of parents that lie in a circle, too
            if not above or not self._holders[above]:
                break
            tokens += self.tokens(above)
            above = self._parents[above]
        return tokens

    def continued(self, row: int) -> int:
        """Return how many chunks with copies continue a chunk that has one."""
        return self._uses[row] - 1

    def is_common(self, row: int) -> bool:
        """Whether two whole chunks continued this one, or one behind it, since it is known."""
        return bool(self._marks[row] & _COMMON)

    def is_alone_on(self, tier: str, row: int) -> bool:
        """Whether *tier* and no other has a copy."""
        return self._holders[row] == 1 << self.tiers.index(tier)

    def hits(self, row: int) -> int:
        """Return how often the chunk was found."""
        return self._hits[row]

    def size_bytes(self, tier: str, row: int) -> int:
        """Return the size of the frame on *tier*, which there must be."""
        return self._copies[self.tiers.index(tier)].sizes[row]

    def holders(self, row: int, least: Fidelity = Fidelity.none) -> list[str]:
        """Return the tiers that hold the chunk, at *least* so true, in the index's order."""
        copies = enumerate(self._copies)
        return [self.tiers[number] for number, one in copies if one.fidelities[row] > least]

    def info(self, tier: str, row: int) -> ChunkInfo:
        """Return the description of the copy on *tier*, which there must be."""
        copies = self._copies[self.tiers.index(tier)]
        above = self._parents[row]
        parent = ChainDigest(self._keys.key(above)[DIGEST_BYTES:]) if above else ROOT
        layout = self._layouts[row]
        assert layout is not None, "a chunk with a copy has a layout"
        return ChunkInfo(
            self._keys.key(row), parent, layout, copies.codecs[row], copies.sizes[row],
            Fidelity(copies.fidelities[row] - 1), self._flops[row],
        )  # fmt: skip

    def copies(self, row: int) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name."""
        return {tier: self.info(tier, row) for tier in self.holders(row)}

    def longest_prefix(
        self, keys: Sequence[ChunkKey], min_fidelity: Fidelity = Fidelity.exact
    ) -> Rows:
        """Return the rows of the longest run of *keys* with a copy of at least *min_fidelity*."""
        return self.readable(self._keys.prefix(keys), min_fidelity)

    def known_prefix(self, keys: Sequence[ChunkKey]) -> Rows:
        """Return the rows of the longest run of *keys* that have a copy or are ghosts."""
        rows = self._keys.prefix(keys)
        known = np.frombuffer(self._holders, np.uint8)[rows] | self._evicted.flags[rows]
        return rows if known.all() else rows[: int(known.argmin())]

    def readable(self, rows: Rows, min_fidelity: Fidelity = Fidelity.exact) -> Rows:
        """Return the longest prefix of *rows* that has copies of at least *min_fidelity*."""
        fit = np.zeros(len(rows), np.bool_)
        for copies in self._copies:
            fit |= np.frombuffer(copies.fidelities, np.uint8)[rows] > min_fidelity
        return self.usable(rows if fit.all() else rows[: int(fit.argmin())])

    def usable(self, rows: Rows) -> Rows:
        """Return the prefix of *rows*, of one chain, after which a model could go on."""
        if not self._ends.space_count or not len(rows):
            return rows
        needs = self._ends.needs_of(self._keys.key(int(rows[0]))[:DIGEST_BYTES])
        return rows if needs is None else rows[: self._ends.usable(needs, rows, self.tokens)]

    def sizes(
        self, tier: str, rows: Rows, min_fidelity: Fidelity
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which chunks *tier* has a copy of *min_fidelity* of, and how large each is."""
        copies = self._copies[self.tiers.index(tier)]
        held = np.frombuffer(copies.fidelities, np.uint8)[rows] > min_fidelity
        return held, np.frombuffer(copies.sizes, np.int64)[rows]

    def count_hits(self, rows: Rows) -> None:
        """Take note that the chunks were found; one that is named twice was found once."""
        np.frombuffer(self._hits, np.uint32)[rows] += 1

    def keys_of(self, space: Namespace) -> list[ChunkKey]:
        """Return the chunks of a namespace that have a copy."""
        rows = self._keys.rows_of(space)
        return [self.key(row) for row in rows.tolist() if self._holders[row]]

    def keys_starting(self, start: bytes) -> NDArray[np.void]:
        """Return the keys of chunks with a copy that begin with *start*, each of 32 bytes."""
        rows = self._keys.rows_of(start)
        return self._keys.keys(rows[np.frombuffer(self._holders, np.uint8)[rows] > 0])

    def all_hits(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return how often each row's chunk was found, and the row before it; copies of both."""
        return (
            np.frombuffer(self._hits, np.uint32).copy(),
            np.frombuffer(self._parents, np.uint32).copy(),
        )

    def held_rows(self, first: int, count: int) -> tuple[list[int], int]:
        """Return those of *count* rows from *first* whose chunks have copies, and the next row.

        The next row is 0 when these were the last.
        """
        stop = first + count
        held = np.frombuffer(self._holders, np.uint8)[first:stop]
        rows: list[int] = (first + np.flatnonzero(held)).tolist()
        return rows, stop if stop < len(self._holders) else 0

    def only_on(self, tiers: Iterable[str]) -> list[ChunkKey]:
        """Return the chunks that are on no tier but these."""
        bits = sum(1 << self.tiers.index(tier) for tier in tiers)
        holders = np.frombuffer(self._holders, np.uint8)
        rows = np.flatnonzero((holders > 0) & (holders & ~np.uint8(bits) == 0))
        return [self.key(row) for row in rows.tolist()]

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: ChunkKey) -> bool:
        return self.row(key) != NO_ROW
