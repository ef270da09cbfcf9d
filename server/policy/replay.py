"""A cache without bytes: what a policy would have hit on a trace of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.history import NO_FACTS, Facts, History

LEAST_ROWS = 1 << 18
"""Blocks that are remembered, here or evicted, whatever the size of the cache."""

_FORGOTTEN_SHARE = 8


class BlockReplay:
    """One tier as a policy sees it, and requests that are chains of blocks.

    A hit is the longest prefix of a request that is here before it. Then its blocks that are
    here are touched, and the others inserted, the first of them first, evicting as needed but
    none of its own; if nothing may go, or a block is larger than the tier, the rest is not
    admitted. What is evicted is remembered by the History: at most 2^18 blocks, or twice as many
    as were here at once, those asked for longest ago forgotten first. The same requests give
    the same hits.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        history: History,
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
        self._largest_bytes = 1
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
        facts: Facts = NO_FACTS,
        flops: NDArray[np.float64] | None = None,
    ) -> int:
        """Look up and store a prompt; return how many of its first blocks were here.

        *blocks* are identities, the first of the prompt first, all of *block_bytes*; *flops* what
        the prefill of each costs. Raises InvalidRequestError.
        """
        if block_bytes < 1:
            raise InvalidRequestError("block_bytes", block_bytes, "at least 1")
        found = [self._rows.get(block, NO_ROW) for block in blocks]
        hit, known = self._measure(found)
        self.requests += 1
        self.blocks += len(found)
        self.hit_blocks += hit
        if not found:
            return 0
        rows = np.array(found[:known], np.intp)
        self._note_asked(rows, len(found), now_s, facts)
        if known < len(found):
            fresh = self._name(blocks[known:], found)
            self._note_seen(fresh, found[known - 1] if known else NO_ROW, facts, now_s)
            rows = np.concatenate((rows, fresh))
        if flops is not None and self._policy.ranks_by_history:
            self._history.reach(int(rows.max()))
            np.frombuffer(self._history.flops)[rows] = flops
        self._store(rows, hit, block_bytes, now_s)
        return hit

    def _note_asked(self, rows: NDArray[np.intp], blocks: int, now_s: float, facts: Facts) -> None:
        if self._policy.ranks_by_history:
            self._history.asked(rows, blocks, now_s)
            if facts.reuse:
                self._history.hint(rows, facts.reuse)

    def _note_seen(self, rows: NDArray[np.intp], parent: int, facts: Facts, now_s: float) -> None:
        if self._policy.ranks_by_history:
            self._history.seen_chain(rows, parent, facts, now_s)

    def _measure(self, found: list[int]) -> tuple[int, int]:
        """Return how many of a prompt's first blocks are here, and how many are known."""
        sizes = self._sizes
        hit = known = len(found)
        if not all(found):
            known = found.index(NO_ROW)
        for count in range(known):
            if not sizes[found[count]]:
                hit = count
                break
        return min(hit, known), known

    def _name(self, blocks: Sequence[int], found: list[int]) -> NDArray[np.intp]:
        """Return the rows of *blocks*, new ones for those without."""
        rows, ids, free = self._rows, self._ids, self._free
        if len(rows) + len(blocks) > self._row_limit:
            self._forget(set(found))
        new = [block for block in dict.fromkeys(blocks) if block not in rows]
        reused = free[max(len(free) - len(new), 0) :]
        del free[len(free) - len(reused) :]
        for row, block in zip(reused, new, strict=False):
            ids[row] = block
        numbers = [*reused, *range(len(ids), len(ids) + len(new) - len(reused))]
        ids.extend(new[len(reused) :])
        rows.update(zip(new, numbers, strict=True))
        if len(ids) > len(self._sizes):
            self._sizes.frombytes(bytes(8 * (len(ids) - len(self._sizes) + spare_rows(len(ids)))))
        if len(new) == len(blocks):
            return np.array(numbers, np.intp)
        return np.array([rows[block] for block in blocks], np.intp)

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
        asked_s = np.frombuffer(self._history.last_s)[gone]
        oldest = gone[np.argsort(asked_s, kind="stable")[: len(gone) // _FORGOTTEN_SHARE + 1]]
        self._history.forget_all(oldest)
        for row in oldest.tolist():
            del self._rows[self._ids[row]]
            self._free.append(row)

    def _store(self, rows: NDArray[np.intp], hit: int, block_bytes: int, now_s: float) -> None:
        policy = self._policy
        sizes = np.frombuffer(self._sizes, np.uint64)
        here = sizes[rows[hit:]] > 0
        has_gaps = bool(here.any())
        policy.touch(rows[sizes[rows] > 0] if has_gaps else rows[:hit], now_s)
        missing = rows[hit:]
        names = missing.tolist()
        if has_gaps or len(set(names)) < len(names):
            missing = _distinct(missing[~here])
        if not len(missing) or block_bytes > self._capacity_bytes:
            return
        need_bytes = self.used_bytes + len(missing) * block_bytes - self._capacity_bytes
        if need_bytes > 0:
            self._evict(need_bytes, set(rows.tolist()), now_s)
            missing = missing[: (self._capacity_bytes - self.used_bytes) // block_bytes]
        sizes[missing] = block_bytes
        self._largest_bytes = max(self._largest_bytes, block_bytes)
        self.used_bytes += len(missing) * block_bytes
        if has_gaps:
            self._fill_gaps(rows, set(missing.tolist()), block_bytes, now_s)
        else:
            parent = int(rows[hit - 1]) if hit else NO_ROW
            policy.insert_chain(missing, parent, block_bytes, now_s)

    def _fill_gaps(
        self, rows: NDArray[np.intp], missing: set[int], block_bytes: int, now_s: float
    ) -> None:
        parent = NO_ROW
        for row in rows.tolist():
            if row in missing:
                self._policy.insert(row, parent, block_bytes, now_s)
                missing.discard(row)
            parent = row

    def _evict(self, need_bytes: int, kept: set[int], now_s: float) -> None:
        sizes = np.frombuffer(self._sizes, np.uint64)
        victims: list[int] = []
        freed_bytes = 0
        candidates = self._policy.victims(kept.__contains__, now_s)
        while freed_bytes < need_bytes:
            # No more than are needed, however large they are.
            least = -((freed_bytes - need_bytes) // self._largest_bytes)
            more = list(islice(candidates, least))
            if not more:
                break
            freed_bytes += int(sizes[more].sum())
            victims += more
        sizes[victims] = 0
        self._policy.remove_all(victims)
        self.used_bytes -= freed_bytes
        self.evictions += len(victims)

    @property
    def held_bytes(self) -> int:
        """Sum of the sizes of what is here: ``used_bytes``, counted anew."""
        return int(np.frombuffer(self._sizes, np.uint64).sum())

    def __len__(self) -> int:
        """Blocks remembered, here or not."""
        return len(self._rows)


def _distinct(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    return np.array(list(dict.fromkeys(rows.tolist())), np.intp)
