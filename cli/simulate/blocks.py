"""A cache without bytes: what a policy would have hit on a trace of blocks."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.trace_format import DEFAULT_BLOCK_TOKENS, BlockTrace
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows, make_policy
from kvstore.server.settings.values import parse_size

ATTENTION, HYBRID = "attention", "hybrid-7b"

DEFAULT_KV_BYTES_PER_TOKEN = 131_072
"""Llama-3.1-8B in bfloat16: 32 layers of 8 heads of 128, keys and values."""

MIN_ROWS = 1 << 18
"""Blocks that are remembered, here or evicted, whatever the size of the cache."""

_FORGOTTEN_SHARE = 8

_LINEAR_FLOPS, _SQUARE_FLOPS = 1.6e10, 262_144.0
"""Prefill of such a model: 1.6e10 L + 262,144 L^2 for a prompt of L tokens."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a trace is replayed on. *capacity* is ``10GiB`` or a share of the footprint, ``5%``.

    With *from_half* hits count from the middle of the trace on. Raises InvalidRequestError.
    """

    policy: str
    capacity: str
    model: str = ATTENTION
    kv_bytes_per_token: int = DEFAULT_KV_BYTES_PER_TOKEN
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    from_half: bool = False

    def __post_init__(self) -> None:
        parse_capacity(self.capacity, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy hit. Rates are shares of the tokens and blocks requested; *block_hit_rate* is
    None where the model's cache has no blocks.

    *requests_per_s* counts requests for blocks where there are blocks, else whole prompts.
    *flops_saved* is what prefill of the tokens hit would have cost.
    """

    policy: str
    capacity_bytes: int
    token_hit_rate: float
    flops_saved: float
    requests_per_s: float
    block_hit_rate: float | None = None
    evictions: int | None = None


def parse_capacity(text: str, footprint_bytes: int) -> int:
    """Return bytes: of a size such as 10GiB, or of a share of *footprint_bytes* such as 2.5%.

    Raises InvalidRequestError.
    """
    share = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%\s*", text)
    if share is not None:
        return int(Fraction(share[1]) / 100 * footprint_bytes)
    try:
        return parse_size(text.strip())
    except ValueError as error:
        raise InvalidRequestError("capacity", text, f"{error}, or 5% of the trace") from None


def replay_blocks(
    trace: BlockTrace, terms: Terms, policy: tuple[EvictionPolicy, AccessHistory] | None = None
) -> Outcome:
    """Replay a trace of blocks on one tier; *policy* stands in for the one that is named, with
    the AccessHistory that it ranks by.
    """
    block_bytes = trace.block_tokens * terms.kv_bytes_per_token
    capacity_bytes = parse_capacity(terms.capacity, trace.blocks * block_bytes)
    if 0 < capacity_bytes < block_bytes and "%" not in terms.capacity:
        fix = f"a block has {block_bytes} bytes; a share of the trace is written as 5%"
        raise InvalidRequestError("capacity", terms.capacity, fix)
    if policy is None:
        history = AccessHistory(trace.block_tokens)
        policy = make_policy(terms.policy, history), history
    replay = BlockReplay(*policy, capacity_bytes)
    times, starts = trace.times_s.tolist(), trace.starts.tolist()
    rows = trace.rows.tolist()
    is_full = (trace.tokens == trace.block_tokens).tolist()
    hits = [0] * trace.requests
    longest = int(np.diff(trace.starts).max(initial=0))
    flops = np.diff(_prefill_flops(np.arange(longest + 1.0) * trace.block_tokens))
    started = time.perf_counter()
    for at, (now_s, start, end) in enumerate(zip(times, starts, starts[1:], strict=False)):
        chain = rows[start:end]
        if chain:
            facts = _facts(is_full[chain[-1]], len(chain))
            hits[at] = replay.request(chain, block_bytes, now_s, facts, flops[: len(chain)])
    spent_s = time.perf_counter() - started
    first = trace.requests // 2 if terms.from_half else 0
    hit_blocks = np.minimum(np.array(hits, np.int64), trace.known)[first:]
    inputs = trace.input_tokens[first:]
    hit_tokens = np.minimum(hit_blocks * trace.block_tokens, inputs)
    return Outcome(
        policy=terms.policy,
        capacity_bytes=capacity_bytes,
        token_hit_rate=int(hit_tokens.sum()) / max(1, int(inputs.sum())),
        flops_saved=float(_prefill_flops(hit_tokens).sum()),
        requests_per_s=len(rows) / max(spent_s, 1e-9),
        block_hit_rate=int(hit_blocks.sum()) / max(1, int(trace.known[first:].sum())),
        evictions=replay.evictions,
    )


def _prefill_flops(tokens: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    return _LINEAR_FLOPS * tokens + _SQUARE_FLOPS * tokens**2


@lru_cache(maxsize=1024)
def _facts(tokens_full: bool, prompt_chunks: int) -> InsertInfo:
    return InsertInfo(tokens_full=tokens_full, prompt_chunks=prompt_chunks)


class BlockReplay:
    """One tier as a policy sees it, and requests that are chains of blocks.

    A hit is the longest prefix of a request that is here before it. Then its blocks that are
    here are touched, and the others inserted, the first of them first, evicting as needed but
    none of its own; if nothing may go, or a block is larger than the tier, the rest is not
    admitted. What is evicted is remembered by the AccessHistory: at most *min_rows* blocks, or
    twice as many as were here at once; those requested longest ago are forgotten first. The same
    requests give the same hits.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        history: AccessHistory,
        capacity_bytes: int,
        *,
        min_rows: int = MIN_ROWS,
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
        self._row_limit = min_rows
        self.used_bytes = 0
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
        missing = len(ids) - len(self._sizes)
        if missing > 0:
            self._sizes.frombytes(bytes(8 * (missing + spare_rows(len(ids)))))

    def _forget(self, kept: set[int]) -> None:
        """Forget an eighth of what is not here, but for those of *kept*."""
        count = len(self._ids)
        here = np.frombuffer(self._sizes, np.uint64)[:count] > 0
        self._row_limit = max(self._row_limit, 2 * int(here.sum()))
        if len(self._rows) < self._row_limit:
            return
        here[[NO_ROW, *kept, *self._free]] = True
        gone = np.flatnonzero(~here)
        self._history.reach(count)
        last_s = self._history.last_s[gone]
        oldest = gone[np.argsort(last_s, kind="stable")[: len(gone) // _FORGOTTEN_SHARE + 1]]
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
        if not has_gaps:
            parent = names[hit - 1] if hit else NO_ROW
            fresh = rows[hit:] if len(missing) == len(names) - hit else np.array(missing, np.intp)
            policy.insert_chain(fresh, parent, block_bytes, now_s)
            return hit
        left = set(missing)
        for row, parent in zip(names, [NO_ROW, *names], strict=False):
            if row in left:
                policy.insert(row, parent, block_bytes, now_s)
                left.discard(row)
        return hit

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

    def __len__(self) -> int:
        """Blocks remembered, here or not."""
        return len(self._rows)
