"""What is known of chunks beyond their bytes: what engines said of them, and whose they are."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import spare_rows
from kvstore.proto.plans import MAX_PRIORITY, NO_HINTS, NO_PRIORITY, Hints
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.quotas import MissRatioCurve, PartitionTable
from kvstore.server.eviction.reuse_estimate import ReuseForecast
from kvstore.tiers.base import DEFAULT_TENANT

LOOK_AHEAD = 32
LOOK_AHEAD_SHARE = 16
"""Of so many of the chunks that are next to go, a sixteenth of all at most, the one of lowest
priority goes first. So priorities, true or not, decide about a sixteenth of a tier and no more."""

_STALE_TIMES = 1024
NEVER = 0.0
_LEAST_S = 1e-9
"""What a chunk is said to have left to live whose time is up."""


class RowHints:
    """Columns by row, 13 bytes each. Not thread-safe: the catalog's lock guards it.

    Times are seconds on the caller's clock. A row that was never spoken of has no priority, lives
    for ever and is in partition 0.
    """

    def __init__(self) -> None:
        self._priorities = array("B", [0])
        self._expiries = array("d", [NEVER])
        self._partitions = array("H", [0])
        self._times: list[tuple[float, int]] = []
        """When which row may expire, a heap; entries that are no longer true are skipped."""
        self._awaited: dict[int, tuple[float, int]] = {}
        """What an earlier run said of chunks that are not here yet, by row."""
        self._expiring = 0
        self._prioritized = 0

    def _reach(self, row: int) -> None:
        if row < len(self._priorities):
            return
        count = row + 1 - len(self._priorities) + spare_rows(row)
        for column in (self._priorities, self._expiries, self._partitions):
            column.frombytes(bytes(count * column.itemsize))

    # --- priorities

    def set_priority(self, row: int, priority: int) -> None:
        """Give a chunk a priority of 1 to 100; 0 takes it back."""
        self._reach(row)
        self._prioritized += bool(priority) - bool(self._priorities[row])
        self._priorities[row] = priority

    def priority(self, row: int) -> int:
        """Return the priority of a chunk."""
        said = self._priorities[row] if row < len(self._priorities) else 0
        return said or NO_PRIORITY

    def in_order(
        self, victims: Iterator[int], parent: Callable[[int], int], count: int
    ) -> Iterator[int]:
        """Yield *victims* of a tier of *count* chunks, the lowest priority of the next few first.

        A chunk stays behind all that continue it. Changes nothing, as ``victims`` does not.
        """
        window = min(LOOK_AHEAD, count // LOOK_AHEAD_SHARE)
        if not self._prioritized or window < 2:
            yield from victims
            return
        ahead: list[int] = []
        for victim in victims:
            ahead.append(victim)
            if len(ahead) == window:
                yield ahead.pop(self._lowest(ahead, parent))
        while ahead:
            yield ahead.pop(self._lowest(ahead, parent))

    def _lowest(self, ahead: list[int], parent: Callable[[int], int]) -> int:
        waiting: set[int] = set()
        best, least = 0, NO_PRIORITY + NO_PRIORITY + 1
        for at, row in enumerate(ahead):
            if row not in waiting and self.priority(row) < least:
                best, least = at, self.priority(row)
            waiting.add(parent(row))
        return best

    # --- lifetimes

    def set_expiry(self, row: int, expires_s: float) -> None:
        """Let a chunk expire at *expires_s*; NEVER takes it back."""
        self._reach(row)
        self._expiring += (expires_s != NEVER) - (self._expiries[row] != NEVER)
        self._expiries[row] = expires_s
        if expires_s != NEVER:
            heapq.heappush(self._times, (expires_s, row))
            if len(self._times) > 2 * self._expiring + _STALE_TIMES:
                self._times = [time for time in self._times if self._is_true(time)]
                self._times = sorted(set(self._times))  # sorted is a heap

    def _is_true(self, time: tuple[float, int]) -> bool:
        return self._expiries[time[1]] == time[0]

    def expiry(self, row: int) -> float:
        """Return when a chunk expires; NEVER if it does not."""
        return self._expiries[row] if row < len(self._expiries) else NEVER

    def is_expired(self, row: int, now_s: float) -> bool:
        """Whether the chunk's time is up."""
        return NEVER != self.expiry(row) <= now_s

    def unexpired(self, rows: Rows, now_s: float) -> Rows:
        """Return *rows* up to the first whose time is up."""
        if not self._expiring or not len(rows):
            return rows
        if int(rows.max()) >= len(self._expiries):
            self._reach(int(rows.max()))
        expiries = np.frombuffer(self._expiries)[rows]
        late = (expiries != NEVER) & (expiries <= now_s)
        return rows[: int(late.argmax())] if late.any() else rows

    def expired(self, now_s: float, limit: int) -> list[int]:
        """Return at most *limit* chunks whose time is up, the first to expire first.

        They are named again and again until they are forgotten or live on.
        """
        found: dict[int, None] = {}
        popped = []
        while self._times and self._times[0][0] <= now_s and len(found) < limit:
            time = heapq.heappop(self._times)
            if self._is_true(time) and time[1] not in found:
                found[time[1]] = None
                popped.append(time)
        for time in popped:
            heapq.heappush(self._times, time)
        return list(found)

    # --- over a restart

    def write(self, rows: Rows, chunks: NDArray[np.void], now_s: float) -> None:
        """Write what is known of *rows* into *chunks*, of ``saved_history.CHUNK``."""
        if not self._expiring and not self._prioritized:
            return
        known = np.flatnonzero(rows < len(self._priorities))
        mine = rows[known]
        chunks["priority"][known] = np.frombuffer(self._priorities, np.uint8)[mine]
        expiries = np.frombuffer(self._expiries)[mine]
        left_s = np.where(expiries == NEVER, 0.0, np.maximum(expiries - now_s, _LEAST_S))
        chunks["left_s"][known] = left_s

    def restore(self, rows: Rows, chunks: NDArray[np.void], now_s: float) -> None:
        """Take what an earlier run wrote: it counts once the chunks have arrived here again."""
        spoken = np.flatnonzero((chunks["left_s"] > 0) | (chunks["priority"] > 0))
        for at in spoken.tolist():
            left_s = float(chunks["left_s"][at])
            expires_s = now_s + left_s if left_s else NEVER
            self._awaited[int(rows[at])] = (expires_s, int(chunks["priority"][at]))

    def arrived(self, row: int) -> None:
        """A chunk has a copy: what an earlier run said of it counts now."""
        if self._awaited and row in self._awaited:
            expires_s, priority = self._awaited.pop(row)
            self.set_expiry(row, expires_s)
            self.set_priority(row, min(priority, MAX_PRIORITY))

    # --- partitions

    def assign_partition(self, row: int, partition: int) -> None:
        """Put a chunk into a partition."""
        self._reach(row)
        self._partitions[row] = partition

    def partition(self, row: int) -> int:
        """Return the partition of a chunk."""
        return self._partitions[row] if row < len(self._partitions) else 0

    # --- all of them

    def forget(self, row: int) -> None:
        """The chunk is nowhere any more."""
        self._awaited.pop(row, None)
        if row < len(self._priorities):
            self.set_priority(row, 0)
            self.set_expiry(row, NEVER)
            self._partitions[row] = 0

    @property
    def expiring_count(self) -> int:
        """Chunks that expire some time."""
        return self._expiring


MAX_GROUPS = 15
"""Those that came first; statistics of all others are kept together, as group 0."""


class GroupTable:
    """Numbers of (tenant, category), in the order in which they came. Not thread-safe."""

    def __init__(self, limit: int = MAX_GROUPS) -> None:
        self._limit = limit
        self._numbers: dict[tuple[str, str], int] = {}

    def names(self) -> list[tuple[str, str]]:
        """Return the groups, in the order of their numbers, the first of which is 1."""
        return list(self._numbers)

    def number(self, tenant: str, category: str) -> int:
        """Return the group's number, 1 to the limit; 0 for those that came after."""
        name = (tenant, category)
        known = self._numbers.get(name)
        if known is None:
            if len(self._numbers) >= self._limit:
                return 0
            known = self._numbers[name] = len(self._numbers) + 1
        return known


EVICTED_LIMIT = 1 << 18
"""Chunks without a copy that are remembered at least, if there were so many."""

_SPACES_KEPT = 4096

UNKNOWN_CONTENT = bytes(DIGEST_BYTES)
"""Content digest of a chunk whose frame names none."""


@dataclass(frozen=True, slots=True)
class PutInfo:
    """Whose chunk it is, what was said when it was put, and what its frame says of its tokens."""

    tenant: str = DEFAULT_TENANT
    hints: Hints = NO_HINTS
    content: bytes = UNKNOWN_CONTENT
    position: int = 0


@dataclass(slots=True, eq=False)
class ChunkMetadata:
    """By row of the ChunkIndex. Not thread-safe: the catalog's lock guards it.

    ``category_ttls_s`` is how long chunks of a category live when no hint says so, ``what_ifs``
    the tiers whose size is wondered about, ``policy_names`` what each tier's policy is called.
    Times are seconds on the caller's clock.
    """

    history: AccessHistory = field(default_factory=AccessHistory)
    hints: RowHints = field(default_factory=RowHints)
    partitions: PartitionTable = field(default_factory=PartitionTable)
    category_ttls_s: Mapping[str, float] = field(default_factory=dict)
    evicted_limit: int = EVICTED_LIMIT
    what_ifs: Mapping[str, MissRatioCurve] = field(default_factory=dict)
    policy_names: Mapping[str, str] = field(default_factory=dict)
    groups: GroupTable = field(default_factory=GroupTable)
    forecast: ReuseForecast | None = None
    """Of the same history; None where no tier's admission asks for chances."""
    _full_tokens: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """By namespace, the most tokens that a chunk of it had: shorter ones end a prompt."""

    def facts(self, row: int, info: ChunkInfo, put_info: PutInfo) -> InsertInfo:
        """A chunk came that no tier had; return what the history is to be told of it."""
        tokens = info.layout.tokens
        full = self._full(info, tokens)
        hints = put_info.hints
        group = self.groups.number(put_info.tenant, hints.category)
        prompt_chunks = -(-hints.prompt_tokens // full)
        flops = info.prefill_flops if 0.0 <= info.prefill_flops < math.inf else 0.0
        self.hints.assign_partition(row, self.partitions.number(put_info.tenant, hints.category))
        return InsertInfo(tokens >= full, flops, group, hints.reuse, prompt_chunks)

    def facts_of_chain(
        self, rows: Sequence[int], chain: Sequence[ChunkInfo], put_info: PutInfo
    ) -> tuple[InsertInfo, list[float]]:
        """Do the same for a *chain* of one layout; return the facts of each and their FLOPs."""
        facts = self.facts(rows[0], chain[0], put_info)
        partition = self.hints.partition(rows[0])
        if partition:  # a new row is in partition 0
            for row in rows:
                self.hints.assign_partition(row, partition)
        flops = [info.prefill_flops for info in chain]
        return replace(facts, flops=0.0), [f if 0.0 <= f < math.inf else 0.0 for f in flops]

    def _full(self, info: ChunkInfo, tokens: int) -> int:
        space = info.key[:DIGEST_BYTES]
        full = max(tokens, self._full_tokens.get(space, 0))
        self._full_tokens[space] = full
        if len(self._full_tokens) > _SPACES_KEPT:
            self._full_tokens.popitem(last=False)
        return full

    def hinted(self, rows: Rows, hints: Hints, now_s: float) -> None:
        """An engine spoke of chunks that are here; pins are not looked at."""
        if hints.reuse:
            self.history.hint(rows, hints.reuse)
        ttl_s = hints.ttl_ms / 1000 or self.category_ttls_s.get(hints.category, 0.0)
        for row in rows.tolist():
            if hints.priority:
                self.hints.set_priority(row, hints.priority)
            if ttl_s:
                self.hints.set_expiry(row, now_s + ttl_s)

    def live_on(self, row: int, now_s: float) -> None:
        """A chunk whose time was up was put again."""
        if self.hints.is_expired(row, now_s):
            self.hints.set_expiry(row, NEVER)
