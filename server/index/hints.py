"""Metadata of chunks: hints of engines, partitions of quotas, and history."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.plans import MAX_PRIORITY, NO_HINTS, NO_PRIORITY, Hints
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.quotas import MissRatioCurve, PartitionTable
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.tiers.base import DEFAULT_TENANT

LOOK_AHEAD = 32
LOOK_AHEAD_SHARE = 16
"""Of the next LOOK_AHEAD victims, at most a sixteenth of all chunks, the one of lowest priority is
evicted first. So priorities, honest or not, decide about at most a sixteenth of a tier."""

_STALE_TIMES = 1024
NEVER = 0.0
_LEAST_S = 1e-9
"""Saved remaining lifetime of an expired chunk."""


class RowHints:
    """Columns by row, 11 bytes each. Not thread-safe: the catalog's lock guards it.

    The ChunkIndex extends the ``columns``. Times are seconds on the caller's clock. A row without
    hints has no priority, never expires and is in partition 0.
    """

    def __init__(self) -> None:
        self.priorities = array("B")
        self.expiries = array("d")
        self.partitions = array("H")
        self.columns = (self.priorities, self.expiries, self.partitions)
        self._times: list[tuple[float, int]] = []
        """A heap of expiry times and rows; stale entries are skipped."""
        self.expiring = 0
        """Chunks with an expiry."""
        self._prioritized = 0

    # --- priorities

    def set_priority(self, row: int, priority: int) -> None:
        """Set a chunk's priority, 1 to 100; 0 removes it."""
        self._prioritized += bool(priority) - bool(self.priorities[row])
        self.priorities[row] = priority

    def priority(self, row: int) -> int:
        """Return the priority of a chunk."""
        return self.priorities[row] or NO_PRIORITY

    def in_order(
        self, victims: Iterator[int], parent: Callable[[int], int], count: int
    ) -> Iterator[int]:
        """Yield *victims*, the lowest priority of the next few first, children before parents."""
        window = min(LOOK_AHEAD, count // LOOK_AHEAD_SHARE)
        if not self._prioritized or window < 2:
            yield from victims
            return
        ahead = list(islice(victims, window))
        while ahead:
            yield ahead.pop(self._lowest(ahead, parent))
            ahead += islice(victims, 1)

    def _lowest(self, ahead: list[int], parent: Callable[[int], int]) -> int:
        waiting, free = set[int](), list[int]()
        for at, row in enumerate(ahead):
            if row not in waiting:
                free.append(at)
            waiting.add(parent(row))
        return min(free, key=lambda at: self.priority(ahead[at]))

    # --- lifetimes

    def set_expiry(self, row: int, expires_s: float) -> None:
        """Let a chunk expire at *expires_s*, or NEVER."""
        self.expiring += (expires_s != NEVER) - (self.expiries[row] != NEVER)
        self.expiries[row] = expires_s
        if expires_s != NEVER:
            heapq.heappush(self._times, (expires_s, row))
            if len(self._times) > 2 * self.expiring + _STALE_TIMES:
                self._times = sorted(set(filter(self._is_true, self._times)))  # sorted: a heap

    def _is_true(self, time: tuple[float, int]) -> bool:
        return self.expiries[time[1]] == time[0]

    def is_expired(self, row: int, now_s: float) -> bool:
        """Whether the chunk has expired."""
        return NEVER != self.expiries[row] <= now_s

    def unexpired(self, rows: Rows, now_s: float) -> Rows:
        """Return *rows* up to the first expired one."""
        if not self.expiring:
            return rows
        expiries = np.frombuffer(self.expiries)[rows]
        late = (expiries != NEVER) & (expiries <= now_s)
        return rows[: int(late.argmax())] if late.any() else rows

    def expired(self, now_s: float, limit: int) -> list[int]:
        """Return at most *limit* expired chunks, the earliest first.

        Each is returned again until it is forgotten or its expiry changes.
        """
        found: dict[tuple[float, int], int] = {}
        while self._times and self._times[0][0] <= now_s and len(found) < limit:
            time = heapq.heappop(self._times)
            if self._is_true(time):
                found[time] = time[1]
        for time in found:
            heapq.heappush(self._times, time)
        return list(found.values())

    # --- restarts

    def write(self, rows: Rows, chunks: NDArray[np.void], now_s: float) -> None:
        """Write the hints of *rows* into *chunks*, of dtype ``access_history.CHUNK``."""
        chunks["priority"] = np.frombuffer(self.priorities, np.uint8)[rows]
        expiries = np.frombuffer(self.expiries)[rows]
        chunks["left_s"] = np.where(expiries == NEVER, 0.0, np.maximum(expiries - now_s, _LEAST_S))

    def restore(self, rows: Rows, chunks: NDArray[np.void], now_s: float) -> None:
        """Restore the hints that an earlier run wrote."""
        spoken = np.flatnonzero((chunks["left_s"] > 0) | (chunks["priority"] > 0))
        for row, chunk in zip(rows[spoken].tolist(), chunks[spoken], strict=True):
            self.set_priority(row, min(int(chunk["priority"]), MAX_PRIORITY))
            self.set_expiry(row, now_s + float(chunk["left_s"]) if chunk["left_s"] else NEVER)

    def forget(self, row: int) -> None:
        """Reset the row of a chunk without copies."""
        self.set_priority(row, 0)
        self.set_expiry(row, NEVER)
        self.partitions[row] = 0


MAX_GROUPS = 15
"""Limit of groups; statistics of all later ones are kept together, as group 0."""

EVICTED_LIMIT = 1 << 18
"""Default number of chunks without a copy that are remembered."""

_SPACES_KEPT = 4096

UNKNOWN_CONTENT = bytes(DIGEST_BYTES)
"""Content digest of a chunk whose frame has none."""


@dataclass(frozen=True, slots=True)
class PutInfo:
    """The tenant and hints of a put, and the content digest and position in its frame."""

    tenant: str = DEFAULT_TENANT
    hints: Hints = NO_HINTS
    content: bytes = UNKNOWN_CONTENT
    position: int = 0


@dataclass(slots=True, eq=False)
class ChunkMetadata:
    """Metadata by row of the ChunkIndex. Not thread-safe: the catalog's lock guards it.

    ``category_ttls_s``: lifetimes of categories without a hint; ``what_ifs``: miss-ratio curves by
    tier; ``policy_names``: names of the policies by tier. Times are seconds on the caller's clock.
    """

    history: AccessHistory = field(default_factory=AccessHistory)
    hints: RowHints = field(default_factory=RowHints)
    partitions: PartitionTable = field(default_factory=PartitionTable)
    category_ttls_s: Mapping[str, float] = field(default_factory=dict)
    evicted_limit: int = EVICTED_LIMIT
    what_ifs: Mapping[str, MissRatioCurve] = field(default_factory=dict)
    policy_names: Mapping[str, str] = field(default_factory=dict)
    groups: dict[tuple[str, str], int] = field(default_factory=dict)
    """Numbers of (tenant, category), in order of arrival, from 1."""
    forecast: ReuseForecast | None = None
    """Forecast over the same history; None if no tier's admission needs chances."""
    _full_tokens: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """By namespace, the tokens of its longest chunk: shorter chunks end a prompt."""

    def group(self, tenant: str, category: str) -> int:
        """Return the group's number; 0 for those beyond MAX_GROUPS."""
        number = self.groups.get((tenant, category), 0)
        if not number and len(self.groups) < MAX_GROUPS:
            number = self.groups[tenant, category] = len(self.groups) + 1
        return number

    def facts(
        self, rows: Sequence[int], chain: Sequence[ChunkInfo], put_info: PutInfo
    ) -> tuple[InsertInfo, list[float]]:
        """Return the facts of a new *chain* of one layout for the history, and its FLOPs."""
        tokens, space = chain[0].layout.tokens, chain[0].key[:DIGEST_BYTES]
        full = self._full_tokens[space] = max(tokens, self._full_tokens.get(space, 0))
        if len(self._full_tokens) > _SPACES_KEPT:
            self._full_tokens.popitem(last=False)
        tenant, hints = put_info.tenant, put_info.hints
        partition = self.partitions.number(tenant, hints.category)
        flops = []
        for row, info in zip(rows, chain, strict=True):
            self.hints.partitions[row] = partition
            flops.append(info.prefill_flops if 0.0 <= info.prefill_flops < math.inf else 0.0)
        facts = InsertInfo(
            tokens_full=tokens >= full,
            group=self.groups.get((tenant, hints.category)) or self.group(tenant, hints.category),
            reuse=hints.reuse,
            prompt_chunks=-(-hints.prompt_tokens // full),
        )
        return facts, flops

    def hinted(self, rows: Rows, hints: Hints, now_s: float) -> None:
        """Apply an engine's hints to existing chunks, except pins."""
        if hints.reuse:
            self.history.hint(rows, hints.reuse)
        ttl_s = hints.ttl_ms / 1000 or self.category_ttls_s.get(hints.category, 0.0)
        for row in rows.tolist():
            if hints.priority:
                self.hints.set_priority(row, hints.priority)
            if ttl_s:
                self.hints.set_expiry(row, now_s + ttl_s)
