"""A cache without bytes: what a policy would have hit on a trace of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows

LEAST_ROWS = 1 << 18
"""Blocks that are remembered, here or evicted, whatever the size of the cache."""

_FORGOTTEN_SHARE = 8


class BlockReplay:
    """One tier as a policy sees it, and requests that are chains of blocks.

    A hit is the longest prefix of a request that is here before it. Then its blocks that are
    here are touched, and the others inserted, the first of them first, evicting as needed but
    none of its own; if nothing may go, or a block is larger than the tier, the rest is not
    admitted. What is evicted is remembered by the AccessHistory: at most 2^18 blocks, or twice as
    many as were here at once, those asked for longest ago forgotten first. The same requests give
    the same hits.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        history: AccessHistory,
        capacity_bytes: int,
        *,
        least_rows: int = LEAST_ROWS,
    ) -> None:
        """A tier that is empty. Raises InvalidRequestError."""
        if capacity_bytes < 0:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "0 or more")
        self._policy = policy
        self._history = history
        self._capacity_bytes = capacity_bytes
        self._rows: dict[int, int] = {}
        self._ids: list[int] = [NO_ROW]
        """The block of each row."""
        self._sizes = array("Q", [0])
        """The bytes of the blocks that are here, by row."""
        self._free: list[int] = []
        self._row_limit = least_rows
        self.used_bytes = 0
        self.requests = 0
        self.blocks = 0
        self.hit_blocks = 0
        self.evictions = 0

    def request(
        self,
        blocks: Sequence[int],
        block_bytes: int,
        now_s: float,
        facts: InsertInfo = NO_INFO,
        flops: NDArray[np.float64] | None = None,
    ) -> int:
        """Look up and store a prompt; return how many of its first blocks were here.

        *blocks* are identities, the first of the prompt first, all of *block_bytes*; *flops* what
        the prefill of each costs. Raises InvalidRequestError.
        """
        if block_bytes < 1:
            raise InvalidRequestError("block_bytes", block_bytes, "at least 1")
        self.requests += 1
        self.blocks += len(blocks)
        if not len(blocks):
            return 0
        history = self._history
        names = list(map(self._rows.get, blocks, repeat(NO_ROW)))
        known = names.index(NO_ROW) if NO_ROW in names else len(names)
        if known < len(names):
            self._name(blocks, names)
        rows = np.array(names, np.intp)
        history.requested(rows[:known], len(names), now_s)
        if facts.reuse:
            history.hint(rows[:known], facts.reuse)
        history.seen_chain(rows[known:], names[known - 1] if known else NO_ROW, facts, now_s)
        if flops is not None:
            history.reach(len(self._ids))
            history.flops[rows] = flops
        hit = self._store(names, rows, block_bytes, now_s)
        self.hit_blocks += hit
        return hit

    def _name(self, blocks: Sequence[int], names: list[int]) -> None:
        """Give rows to those *blocks* of a prompt that have none, and fill in their *names*."""
        rows, ids, free = self._rows, self._ids, self._free
        if len(rows) + len(blocks) > self._row_limit:
            self._forget(set(names))
        for at, block in enumerate(blocks):
            row = rows.get(block, NO_ROW)
            if not row and free:
                row = rows[block] = free.pop()
                ids[row] = block
            elif not row:
                row = rows[block] = len(ids)
                ids.append(block)
            names[at] = row
        if len(ids) > len(self._sizes):
            self._reach()

    def _reach(self) -> None:
        """Let there be a size for each row, and for some to come."""
        count = len(self._ids)
        self._sizes.frombytes(bytes(8 * (count - len(self._sizes) + spare_rows(count))))

    def _forget(self, kept: set[int]) -> None:
        """Forget an eighth of what is not here, but for those of *kept*."""
        count = len(self._ids)
        here = np.frombuffer(self._sizes, np.uint64)[:count] > 0
        self._row_limit = max(self._row_limit, 2 * int(here.sum()))
        if len(self._rows) < self._row_limit:
            return
        here[list(kept)] = True
        here[0] = True
        here[self._free] = True
        gone = np.flatnonzero(~here)
        self._history.reach(len(self._ids))
        asked_s = self._history.last_s[gone]
        oldest = gone[np.argsort(asked_s, kind="stable")[: len(gone) // _FORGOTTEN_SHARE + 1]]
        self._history.forget_all(oldest)
        for row in oldest.tolist():
            del self._rows[self._ids[row]]
            self._free.append(row)

    def _store(self, names: list[int], rows: Rows, block_bytes: int, now_s: float) -> int:
        """Touch and insert the blocks of a prompt; return how many of the first were here."""
        policy, sizes = self._policy, self._sizes
        held = list(map(sizes.__getitem__, names))
        hit = held.index(0) if 0 in held else len(held)
        has_gaps = any(held[hit:])
        policy.touch(rows[np.array(held) > 0] if has_gaps else rows[:hit], now_s)
        if hit == len(names) or block_bytes > self._capacity_bytes:
            return hit
        missing = list(dict.fromkeys(row for row in names[hit:] if not sizes[row]))
        need_bytes = self.used_bytes + len(missing) * block_bytes - self._capacity_bytes
        if need_bytes > 0:
            self._evict(need_bytes, set(names), now_s)
            del missing[(self._capacity_bytes - self.used_bytes) // block_bytes :]
        for row in missing:
            sizes[row] = block_bytes
        self.used_bytes += len(missing) * block_bytes
        if has_gaps:
            self._fill_gaps(names, set(missing), block_bytes, now_s)
        else:
            parent = names[hit - 1] if hit else NO_ROW
            fresh = rows[hit:] if len(missing) == len(names) - hit else np.array(missing, np.intp)
            policy.insert_chain(fresh, parent, block_bytes, now_s)
        return hit

    def _fill_gaps(
        self, names: list[int], missing: set[int], block_bytes: int, now_s: float
    ) -> None:
        parent = NO_ROW
        for row in names:
            if row in missing:
                self._policy.insert(row, parent, block_bytes, now_s)
                missing.discard(row)
            parent = row

    def _evict(self, need_bytes: int, kept: set[int], now_s: float) -> None:
        """Evict until *need_bytes* are free or none but those of *kept* are left."""
        sizes, freed_bytes = self._sizes, 0
        victims = []
        for row in self._policy.victims(kept.__contains__, now_s):
            victims.append(row)
            freed_bytes += sizes[row]
            if freed_bytes >= need_bytes:
                break
        for row in reversed(victims):  # a block before what it continues: no such leaf is queued
            sizes[row] = 0
            self._policy.remove(row)
        self.used_bytes -= freed_bytes
        self.evictions += len(victims)

    @property
    def held_bytes(self) -> int:
        """Sum of the sizes of what is here: ``used_bytes``, counted anew."""
        return int(np.frombuffer(self._sizes, np.uint64).sum())

    def __len__(self) -> int:
        """Blocks remembered, here or not."""
        return len(self._rows)
