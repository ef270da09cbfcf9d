"""Shadows: what a cache would hit under another policy or size, from a sample of its chunks.

Spatially hashed sampling as in SHARDS (Waldspurger, Park, Garthwaite and Ahmad, FAST 2015,
section 3): a chunk is in the sample when the hash of its identity is below a threshold, and then
all that happens to it is; a cache of the same policy and of its size times the rate sees nearly
the same share of hits. The threshold falls as chunks come (their section 3.3, fixed size). For
any policy, in miniature: Waldspurger, Saemundsson, Ahmad and Park (ATC 2017).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.base import EvictionPolicy

NODES = 4_096
"""Chunks that each shadow of a set may hold; the rate is halved before there are more."""

Ids = NDArray[np.uint64]
"""Identities of chunks, or their hashes: (chunks,)."""

_ALL = 1 << 64
_SPARE_ROWS = 64


def mix(ids: Ids) -> Ids:
    """Return hashes of identities: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Cast(NamedTuple):
    """A policy to be shadowed and its size, as a multiple of the cache's."""

    policy: EvictionPolicy
    scale: float = 1.0


class Asked(NamedTuple):
    """The sampled chunks of one request, those that begin its prompt first.

    *ids* are their identities, *sizes* their bytes, each of 1 or more; *above* is the identity of
    the sampled chunk that they continue, if there is one before the first of them: where the last
    request ended with that, this one goes on with its prompt.
    """

    ids: Sequence[int]
    sizes: Sequence[int]
    now_s: float
    above: int | None = None


class _Prompt(NamedTuple):
    """The rows of a request, and of all of the prompt so far, which are not to go for it."""

    rows: Sequence[int]
    kept: set[int]


class _Shadow:
    """One cache in small."""

    def __init__(self, cast: Cast) -> None:
        self.policy = cast.policy
        self.scale = cast.scale
        self.sizes = array("Q", [0])
        """Bytes by row; 0 for those that are not here."""
        self.used_bytes = 0

    def request(
        self, asked: Asked, prompt: _Prompt, parents: Sequence[int], limit_bytes: float
    ) -> tuple[int, list[int], list[int]]:
        """Serve a request; return how many chunks of its head were here, who came and who went.

        Nothing is admitted behind a chunk for which no room can be made.
        """
        sizes, now_s, rows = self.sizes, asked.now_s, prompt.rows
        held = [row for row in rows if sizes[row]]
        hits = next((at for at, row in enumerate(rows) if not sizes[row]), len(rows))
        if held:
            self.policy.touch(np.array(held, np.intp), now_s)
        if len(held) == len(rows):
            return hits, [], []
        came: list[int] = []
        missing = [at for at, row in enumerate(rows) if not sizes[row]]
        need = sum(asked.sizes[at] for at in missing) + self.used_bytes - limit_bytes
        gone = self.evict(need, prompt.kept, now_s)
        for at in missing:
            row, size = rows[at], asked.sizes[at]
            if self.used_bytes + size > limit_bytes:
                break
            sizes[row] = size
            self.used_bytes += size
            came.append(row)
        self._insert(came, parents, now_s)
        return hits, came, gone

    def _insert(self, rows: Sequence[int], parents: Sequence[int], now_s: float) -> None:
        """Tell the policy who came: at once those that continue each other and are of a size."""
        start = 0
        for end in range(1, len(rows) + 1):
            row = rows[end - 1]
            if (
                end < len(rows)
                and parents[rows[end]] == row
                and self.sizes[rows[end]] == self.sizes[row]
            ):
                continue
            chain = np.array(rows[start:end], np.intp)
            self.policy.insert_chain(chain, parents[rows[start]], self.sizes[row], now_s)
            start = end

    def evict(self, need_bytes: float, kept: set[int], now_s: float) -> list[int]:
        """Evict until *need_bytes* are free or none may go; return who went."""
        gone: list[int] = []
        if need_bytes <= 0:
            return gone
        for row in self.policy.victims(kept.__contains__, now_s):
            gone.append(row)
            need_bytes -= self.sizes[row]
            if need_bytes <= 0:
                break
        for row in gone:
            self.used_bytes -= self.sizes[row]
            self.sizes[row] = 0
        self.policy.remove_all(gone)
        return gone

    def remove(self, row: int) -> bool:
        """Forget a chunk; False if it was not here."""
        if not self.sizes[row]:
            return False
        self.policy.remove(row)
        self.used_bytes -= self.sizes[row]
        self.sizes[row] = 0
        return True


class ShadowSet:
    """Several shadows over one sample, and how often each was hit.

    A sampled chunk's parent is the sampled chunk before it in the prompt that brought it, so the
    chains of the shadows are those of the cache with the chunks between left out. Shadows share
    rows, which are small however large the cache is: a row is a chunk's while a shadow has it or
    a known chunk continues it, and a while longer, as policies remember what they evicted.
    *remember* is told ``(identity, row)`` of every chunk asked for, before the shadows are: there
    what policies rank by is brought to the row. *hashes* are of identities, evenly spread.

    The same requests give the same hits, bit for bit. Not thread-safe: the owner locks.
    """

    def __init__(
        self,
        casts: Sequence[Cast],
        remember: Callable[[int, int], None] | None = None,
        limit_nodes: int = NODES,
        hashes: Callable[[Ids], Ids] = mix,
    ) -> None:
        if not casts or limit_nodes < 1 or any(cast.scale <= 0 for cast in casts):
            raise InvalidRequestError(
                "shadows", (len(casts), limit_nodes), "at least one, of a positive size and limit"
            )
        self._shadows = [_Shadow(cast) for cast in casts]
        self._remember = remember
        self._limit_nodes = limit_nodes
        self._hashes = hashes
        self._halvings = 0
        self._rows: dict[int, int] = {}
        self._ids: list[int] = [0]
        self._free: list[int] = []
        self._parents = array("I", [NO_ROW])
        self._uses = array("I", [0])
        """Shadows that have the row's chunk, rows that continue it, and one for a ghost's."""
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Rows of chunks that are in no shadow any more, the oldest first."""
        self._kept: set[int] = set()
        """Rows of the prompt that was asked for last, as far as it was."""
        self.left: list[list[int]] = [[] for _ in casts]
        """Identities of the chunks that left each shadow in the last request."""

    # --- the sample

    @property
    def rate(self) -> float:
        """The share of chunks that are in the sample: 1, or a half, a quarter and so on."""
        return 1.0 / (1 << self._halvings)

    def sampled(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether each identity is in the sample, now."""
        if not self._halvings:
            return np.ones(len(ids), np.bool_)
        mask: NDArray[np.bool_] = self._hashes(ids) < np.uint64(_ALL >> self._halvings)
        return mask

    def _halve(self) -> None:
        """Leave out half of the sample, the part with the larger hashes."""
        self._halvings += 1
        ids = np.array(list(self._rows), np.uint64)
        for one in ids[~self.sampled(ids)].tolist():
            self.forget(one)

    # --- requests

    def request(self, asked: Asked, capacity_bytes: float) -> list[int]:
        """Serve a request of a cache of *capacity_bytes*; return the hits of each shadow.

        *capacity_bytes* is that of the whole cache: the shadows' are smaller by the rate.
        """
        if len(set(asked.ids)) < len(asked.ids):
            asked = _without_repeats(asked)
        rows = self._name(asked)
        if self._remember is not None:
            for one, row in zip(asked.ids, rows, strict=True):
                self._remember(one, row)
        if asked.above is None or self._rows.get(asked.above, NO_ROW) not in self._kept:
            self._kept.clear()
        self._kept.update(rows)
        prompt = _Prompt(rows, self._kept)
        hits = []
        gone: list[int] = []
        self.left = []
        for shadow in self._shadows:
            limit_bytes = capacity_bytes * self.rate * shadow.scale
            count, came, left = shadow.request(asked, prompt, self._parents, limit_bytes)
            hits.append(count)
            for row in came:
                self._uses[row] += 1
            gone += left
            self.left.append([self._ids[row] for row in left])
        self._settle(rows, gone)
        while max(len(shadow.policy) for shadow in self._shadows) > self._limit_nodes:
            self._halve()
        return hits

    def _name(self, asked: Asked) -> list[int]:
        """Return the rows of a chain, new ones for chunks that have none."""
        rows: list[int] = []
        above = NO_ROW if asked.above is None else self._rows.get(asked.above, NO_ROW)
        for one in asked.ids:
            row = self._rows.get(one)
            if row is None:
                row = self._new_row(one, above)
            elif row in self._ghosts:
                del self._ghosts[row]
                self._uses[row] -= 1
            above = row
            rows.append(row)
        return rows

    def _new_row(self, one: int, parent: int) -> int:
        if not self._free:
            first = len(self._ids)
            self._free = list(range(first + _SPARE_ROWS - 1, first - 1, -1))
            self._ids += [0] * _SPARE_ROWS
            for column in (self._parents, self._uses, *(x.sizes for x in self._shadows)):
                column.frombytes(bytes(_SPARE_ROWS * column.itemsize))
        row = self._free.pop()
        self._rows[one] = row
        self._ids[row] = one
        self._parents[row] = parent
        self._uses[parent] += 1
        return row

    def _settle(self, rows: Sequence[int], gone: Sequence[int]) -> None:
        """Make ghosts of those that no shadow has any more, and forget the oldest of them."""
        for row in gone:
            self._uses[row] -= 1
        for row in (*gone, *reversed(rows)):
            if row not in self._ghosts and not any(x.sizes[row] for x in self._shadows):
                self._ghosts[row] = None
                self._uses[row] += 1
        while len(self._ghosts) > self._limit_nodes:
            row, _ = self._ghosts.popitem(last=False)
            self._uses[row] -= 1
            self._free_row(row)

    def _free_row(self, row: int) -> None:
        """Free a row that nobody uses, and those before it that were kept for it alone."""
        while row and not self._uses[row]:
            del self._rows[self._ids[row]]
            parent, self._parents[row] = self._parents[row], NO_ROW
            self._free.append(row)
            self._uses[parent] -= 1
            row = parent

    def forget(self, one: int) -> None:
        """Take a chunk out of every shadow, as one that was deleted; unknown ones are ignored."""
        row = self._rows.get(one, NO_ROW)
        if not row:
            return
        self._uses[row] -= sum(shadow.remove(row) for shadow in self._shadows)
        if row in self._ghosts:
            del self._ghosts[row]
            self._uses[row] -= 1
        self._free_row(row)

    def clear(self) -> None:
        """Take everything out of every shadow."""
        for one in list(self._rows):
            self.forget(one)

    def row(self, one: int) -> int:
        """Return the row of a chunk; NO_ROW if it has none."""
        return self._rows.get(one, NO_ROW)

    def holds(self, at: int, one: int) -> bool:
        """Whether a chunk is in the shadow of the cast at place *at*."""
        return self._shadows[at].sizes[self._rows.get(one, NO_ROW)] > 0

    def count_only(self, at: int, other: int) -> int:
        """Return how many chunks are in the shadow at place *at*, and not in that at *other*."""
        ours, theirs = (np.frombuffer(self._shadows[x].sizes, np.uint64) for x in (at, other))
        return int(np.count_nonzero((ours > 0) & (theirs == 0)))

    def victims(self, at: int, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """Yield the identities of whom the shadow at place *at* would evict, in order."""
        ids = self._ids
        for row in self._shadows[at].policy.victims(lambda row: keep(ids[row]), now_s):
            yield ids[row]

    def __len__(self) -> int:
        """Rows in use, ghosts' included."""
        return len(self._rows)

    def used_bytes(self) -> list[int]:
        """Return the bytes that each shadow holds."""
        return [shadow.used_bytes for shadow in self._shadows]


def _without_repeats(asked: Asked) -> Asked:
    sizes = dict(zip(reversed(asked.ids), reversed(asked.sizes), strict=True))
    ids = list(dict.fromkeys(asked.ids))
    return Asked(ids, [sizes[one] for one in ids], asked.now_s, asked.above)
