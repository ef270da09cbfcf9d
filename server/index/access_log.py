"""State shared by the parts of a Catalog, and the AccessLog of events that are applied later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.access_history import InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.eviction.quotas import identities
from kvstore.server.index.chunk_index import ChunkIndex
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Holds

MAX_EVENTS = 32
"""Limit of waiting events, and of chunks joined to one; beyond it the first is applied."""

MAX_ROWS = 2048
"""Limit of their rows, which take a millisecond to apply before a policy can be read."""

LOOKUP_ROWS = 512
"""Least weight of a lookup, in rows."""

_TOGETHER_S = 0.1
"""Chunks of a chain that arrive within this time count as stored together."""

_LATELY = 1 / 16


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup of *keys*; *rows* are those that exist or are remembered.

    ``is_again``: the lookup was counted already.
    """

    rows: Rows
    keys: Sequence[ChunkKey]
    now_s: float
    is_again: bool = False


@dataclass(slots=True)
class Stored:
    """A chain of chunks that continues *parent*, sealed on the tier of policy *number*. If no tier
    had them before, *facts* apply to each, and *flops* are per chunk.
    """

    number: int
    rows: list[int]
    parent: int
    size_bytes: int
    facts: InsertInfo | None
    flops: list[float]
    now_s: float
    is_joined: bool = False
    """Whether *facts* apply to the last chunk only, and the others are full."""

    def join(self, other: Stored) -> bool:
        """Add a chunk that continues these if all else is equal; return whether it was added."""
        fits = (
            other.parent == self.rows[-1] != other.rows[0]
            and len(other.rows) == 1
            and len(self.rows) < MAX_EVENTS
            and (other.number, other.size_bytes) == (self.number, self.size_bytes)
            and abs(other.now_s - self.now_s) <= _TOGETHER_S
            and (other.facts and other.facts._replace(tokens_full=True)) == self.facts
        )
        if fits:
            self.rows += other.rows
            self.flops += other.flops
            self.facts, self.now_s, self.is_joined = other.facts, other.now_s, True
        return fits


def _weight(event: Lookup | Stored) -> int:
    """Return the cost of an event in rows; a lookup visits all its keys, found or not."""
    return max(LOOKUP_ROWS, len(event.keys)) if isinstance(event, Lookup) else len(event.rows)


class AccessLog:
    """Defers slow updates from lookups and puts.

    A request only records an event. A background thread calls ``apply_next``; readers of the
    policies, and whatever frees a row, call ``apply_all`` first. Events are applied in order, to
    the history first, then to the policies. Not thread-safe: the catalog's lock guards it.
    """

    def __init__(self, metadata: ChunkMetadata, policies: Mapping[str, EvictionPolicy]) -> None:
        self._history, self._forecast = metadata.history, metadata.forecast
        self._policies = list(policies.values())
        self._what_ifs = [metadata.what_ifs.get(tier) for tier in policies]
        self._chunk_bytes = [0.0] * len(policies)
        """Moving average of the chunk size, by policy."""
        self._events: deque[Lookup | Stored] = deque()
        self._rows = 0

    def note(self, event: Lookup | Stored) -> None:
        """Queue an event until it is applied."""
        last = self._events[-1] if self._events else None
        self._rows += _weight(event)
        if isinstance(event, Stored) and isinstance(last, Stored) and last.join(event):
            return
        self._events.append(event)
        while len(self._events) > MAX_EVENTS or (self._rows > MAX_ROWS and len(self._events) > 1):
            self.apply_next()

    def apply_next(self) -> bool:
        """Apply the first event; False if there was none."""
        if not self._events:
            return False
        event = self._events.popleft()
        self._rows -= _weight(event)
        if isinstance(event, Lookup):
            self._apply_lookup(event)
        else:
            self._apply_stored(event)
        return True

    def apply_all(self) -> None:
        """Apply all events."""
        while self.apply_next():
            pass

    def _apply_lookup(self, event: Lookup) -> None:
        if not event.is_again:
            if self._forecast is not None:
                self._forecast.requested(event.rows, len(event.keys), event.now_s)
            self._history.requested(event.rows, len(event.keys), event.now_s)
            if event.keys and any(self._chunk_bytes):
                ids = identities(event.keys)
                for what_if, size in zip(self._what_ifs, self._chunk_bytes, strict=True):
                    if what_if is not None and size:
                        what_if.requested(ids, int(size))
        for policy in self._policies:
            policy.touch(event.rows, event.now_s)

    def _apply_stored(self, event: Stored) -> None:
        number, size_bytes, facts, now_s = event.number, event.size_bytes, event.facts, event.now_s
        usual = self._chunk_bytes[number] or float(size_bytes)
        self._chunk_bytes[number] = usual + (size_bytes - usual) * _LATELY
        # All but the last of joined rows count as full.
        is_apart = facts is not None and not facts.tokens_full and not event.is_joined
        parent = event.parent
        for part in [[row] for row in event.rows] if is_apart else [event.rows]:
            rows = np.array(part, np.intp)
            if facts is not None:
                self._history.seen_chain(rows, parent, facts, now_s)
            self._policies[number].insert_chain(rows, parent, size_bytes, now_s)
            parent = part[-1]
        if facts is None:
            return
        full, parent = facts._replace(tokens_full=True), event.parent
        for row, flops in zip(event.rows, event.flops, strict=True):
            self._history.flops[row] = flops
            if self._forecast is not None:
                is_short = is_apart or row == event.rows[-1]
                self._forecast.seen(row, parent, facts if is_short else full, now_s)
            parent = row

    def __len__(self) -> int:
        return len(self._events)


class CatalogListener(Protocol):
    """Called when copies are added or removed, under the catalog's lock. Must not block."""

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None) -> None:
        """Copies became visible on *tier*; *put_info* describes the put of one that was put."""

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """A copy was removed from *tier*; *is_last*: no tier has another."""


@dataclass(eq=False)
class CatalogState:
    """The index, the metadata of its chunks, the policies and the holds.

    ``lock`` guards all of it; it is held for dictionary operations only. Rows must not be kept
    beyond it: a row may belong to another chunk once the lock is released.
    """

    policies: Mapping[str, EvictionPolicy]
    holds: Holds
    clock: Callable[[], float]
    metadata: ChunkMetadata

    def __post_init__(self) -> None:
        known, tiers = self.metadata, list(self.policies)
        self.access_log = AccessLog(known, self.policies)
        self.index = ChunkIndex(
            tiers, known.evicted_limit, self._forget_evicted, known.hints.columns
        )
        self.lock = threading.Lock()
        self.news = threading.Event()
        """Set when the access_log has something to apply."""

    def _forget_evicted(self, rows: Rows) -> None:
        self.access_log.apply_all()
        self.metadata.history.forget_all(rows)
        for row in rows.tolist():
            self.metadata.hints.forget(row)
