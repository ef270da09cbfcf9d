"""A cache without bytes: what a policy would have hit on a trace of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.history import NO_FACTS, Facts, History
from kvstore.server.policy.radix import Rows

LEAST_ROWS = 1 << 18
"""Blocks that are remembered, here or evicted, whatever the size of the cache."""

_FORGOTTEN_SHARE = 8


class _Prompt(NamedTuple):
    """A prompt as rows: all of them, and those that are known; or those of all.

    With *first*, those that are not known lie side by side from there on, and came just now.
    """

    names: list[int]
    rows: Rows
    first: int


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
        self._ranks_by_history = policy.ranks_by_history
        self._rows: dict[int, int] = {}
        self._ids: list[int] = [NO_ROW]
        """The block of each row."""
        self._sizes = array("Q", [0])
        """The bytes of the blocks that are here, by row."""
        self._free: list[int] = []
        self._row_limit = least_rows
        self._largest_bytes = 1
        self._smallest_bytes = 0
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
        names = list(map(self._rows.get, blocks, repeat(NO_ROW)))
        self.requests += 1
        self.blocks += len(names)
        if not names:
            return 0
        known = names.index(NO_ROW) if NO_ROW in names else len(names)
        rows = np.array(names[:known], np.intp)
        if self._ranks_by_history:
            self._note_asked(rows, names[:known], len(names), now_s, facts)
        first = NO_ROW
        if known < len(names):
            parent = names[known - 1] if known else NO_ROW
            first = self._name(blocks[known:], names, known)
            if self._ranks_by_history and first:
                self._history.meet(first, len(names) - known, parent, facts, now_s)
            elif self._ranks_by_history:
                fresh = np.array(names[known:], np.intp)
                self._history.seen_chain(fresh, parent, facts, now_s)
        if not first and known < len(names):
            rows = np.array(names, np.intp)
        if flops is not None and self._policy.ranks_by_flops:
            self._history.reach(len(self._ids))
            np.frombuffer(self._history.flops)[names] = flops
        hit = self._store(_Prompt(names, rows, first), block_bytes, now_s)
        self.hit_blocks += hit
        return hit

    def _note_asked(
        self, rows: Rows, names: list[int], blocks: int, now_s: float, facts: Facts
    ) -> None:
        if len(set(names)) == len(names):
            self._history.asked_known(rows, blocks, now_s)
        else:
            self._history.asked(rows, blocks, now_s)
        if facts.reuse:
            self._history.hint(rows, facts.reuse)

    def _name(self, blocks: Sequence[int], names: list[int], known: int) -> int:
        """Name the *blocks* behind the *known* ones of a prompt, whose *names* are filled in.

        Return the row of the first where all are new and have rows side by side, else NO_ROW.
        """
        rows, ids, free = self._rows, self._ids, self._free
        if len(rows) + len(blocks) > self._row_limit:
            self._forget(set(names))
        if not free and not any(names[known:]):
            first = len(ids)
            fresh = range(first, first + len(blocks))
            before = len(rows)
            rows.update(zip(blocks, fresh, strict=True))
            if len(rows) - before == len(blocks):
                ids += blocks
                names[known:] = fresh
                if len(ids) > len(self._sizes):
                    self._reach()
                return first
            for block in blocks:  # one is named twice
                rows.pop(block, None)
        new = [block for block in dict.fromkeys(blocks) if block not in rows]
        numbers: list[int] = []
        if free:
            numbers = free[max(len(free) - len(new), 0) :]
            del free[len(free) - len(numbers) :]
            for row, block in zip(numbers, new, strict=False):
                ids[row] = block
        behind = new[len(numbers) :]
        numbers += range(len(ids), len(ids) + len(behind))
        ids += behind
        rows.update(zip(new, numbers, strict=True))
        if len(ids) > len(self._sizes):
            self._reach()
        names[known:] = [rows[block] for block in blocks]
        return NO_ROW

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
        asked_s = np.frombuffer(self._history.last_s)[gone]
        oldest = gone[np.argsort(asked_s, kind="stable")[: len(gone) // _FORGOTTEN_SHARE + 1]]
        self._history.forget_all(oldest)
        for row in oldest.tolist():
            del self._rows[self._ids[row]]
            self._free.append(row)

    def _store(self, prompt: _Prompt, block_bytes: int, now_s: float) -> int:
        """Touch and insert the blocks of a prompt; return how many of the first were here."""
        policy, sizes, names = self._policy, self._sizes, prompt.names
        rows, first = prompt.rows, prompt.first
        held = list(map(sizes.__getitem__, names[: len(rows)]))
        hit = held.index(0) if 0 in held else len(held)
        has_gaps = any(held[hit:])
        policy.touch(rows[np.array(held) > 0] if has_gaps else rows[:hit], now_s)
        if hit == len(names) or block_bytes > self._capacity_bytes:
            return hit
        kept = set(names)
        is_plain = not has_gaps and len(kept) == len(names)
        missing = names[hit:]
        if not is_plain:
            missing = list(dict.fromkeys(row for row in missing if not sizes[row]))
        count = self._make_room(len(missing), block_bytes, kept, now_s)
        del missing[count:]
        parent = names[hit - 1] if hit else NO_ROW
        if has_gaps:
            self._take_in(missing, block_bytes)
            self._fill_gaps(names, set(missing), block_bytes, now_s)
        elif is_plain and first and hit == len(rows):
            sizes[first : first + count] = array("Q", [block_bytes]) * count
            if count:
                policy.insert_run(first, count, parent, block_bytes, now_s)
        else:
            self._take_in(missing, block_bytes)
            policy.insert_chain(np.array(missing, np.intp), parent, block_bytes, now_s)
        return hit

    def _make_room(self, count: int, block_bytes: int, kept: set[int], now_s: float) -> int:
        """Evict what must go for *count* blocks; return for how many there is room then."""
        need_bytes = self.used_bytes + count * block_bytes - self._capacity_bytes
        if need_bytes > 0:
            self._evict(need_bytes, kept, now_s)
            count = min(count, (self._capacity_bytes - self.used_bytes) // block_bytes)
        self._largest_bytes = max(self._largest_bytes, block_bytes)
        self._smallest_bytes = min(self._smallest_bytes or block_bytes, block_bytes)
        self.used_bytes += count * block_bytes
        return count

    def _take_in(self, rows: list[int], block_bytes: int) -> None:
        sizes = self._sizes
        for row in rows:
            sizes[row] = block_bytes

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
        sizes = self._sizes
        keep = kept.__contains__
        # No more than are needed, however large they are.
        least = -(-need_bytes // self._largest_bytes)
        if self._smallest_bytes == self._largest_bytes:
            victims = self._policy.evict(least, keep, now_s)
            for row in victims:
                sizes[row] = 0
            self.used_bytes -= self._largest_bytes * len(victims)
            self.evictions += len(victims)
            return
        victims = self._policy.first_victims(least, keep, now_s)
        freed_bytes = sum(map(sizes.__getitem__, victims))
        if freed_bytes < need_bytes and len(victims) == least:
            for row in islice(self._policy.victims(keep, now_s), least, None):
                victims.append(row)
                freed_bytes += sizes[row]
                if freed_bytes >= need_bytes:
                    break
        for row in victims:
            sizes[row] = 0
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
