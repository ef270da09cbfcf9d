"""What the parts of a Catalog share, first the AccessLog: events that are applied later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.eviction.quotas import MissRatioCurve, identities
from kvstore.server.eviction.reuse_estimate import ReuseForecast
from kvstore.server.index.chunk_index import ChunkIndex
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Holds, Leases

MAX_EVENTS = 32
"""Events that wait; one more, and its caller applies the first."""

MAX_LOOKUPS = 4
"""Lookups among them, each of which may take 0.3 ms: who needs a policy waits for all."""

MAX_CHAINS = 4
"""Chains of more than one chunk among them, for the same reason."""

_TOGETHER_S = 0.1
"""Chunks of a chain that come this soon after one another count as stored together."""

_LATELY = 1 / 16


@dataclass(frozen=True, slots=True)
class Lookup:
    """The prompt of *keys* was looked up, of which *known* are here or remembered.

    ``is_again`` for a lookup that was counted already.
    """

    known: Rows
    keys: Sequence[ChunkKey]
    now_s: float
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """Chunks were sealed on the tier of policy *number*, of which each continues the one before,
    the first *parent*. *facts*, of each but for its *flops*, if no tier had them before.
    """

    number: int
    rows: Sequence[int]
    parent: int
    size_bytes: int
    facts: InsertInfo | None
    flops: Sequence[float]
    now_s: float


_Event: TypeAlias = Lookup | Stored


class AccessLog:
    """Keeps what takes long out of the answers to lookups and puts.

    A request only notes what happened. A thread that has time calls ``apply_next``; who reads the
    policies or forgets a row calls ``apply_all`` first. The order of updates is the order of the
    events: the history first, then the policies. Not thread-safe: the catalog's lock guards it.
    """

    def __init__(
        self,
        history: AccessHistory,
        policies: Sequence[EvictionPolicy],
        what_ifs: Sequence[MissRatioCurve | None] = (),
        forecast: ReuseForecast | None = None,
    ) -> None:
        """*what_ifs* get lookups too, one for each policy, or none; *forecast* all events."""
        self._history = history
        self._policies = policies
        self._what_ifs = what_ifs or [None] * len(policies)
        self._forecast = forecast
        self._chunk_bytes = [0.0] * len(policies)
        """About what a chunk takes lately, by policy."""
        self._events: deque[_Event] = deque()
        self._lookups = self._chains = 0

    def note(self, event: _Event) -> None:
        """Keep an event until it is applied."""
        if len(self._events) >= MAX_EVENTS:
            self.apply_next()
        if isinstance(event, Lookup):
            while self._lookups >= MAX_LOOKUPS:
                self.apply_next()
            self._lookups += 1
        elif len(event.rows) > 1:
            while self._chains >= MAX_CHAINS:
                self.apply_next()
            self._chains += 1
        self._events.append(event)

    def apply_next(self) -> bool:
        """Apply the first event, and those that belong to it; False if there was none."""
        if not self._events:
            return False
        event = self._events.popleft()
        if isinstance(event, Lookup):
            self._lookups -= 1
            self._ask(event)
        else:
            self._chains -= len(event.rows) > 1
            run = [event]
            while self._events and _continues(run[-1], self._events[0]):
                run.append(self._events.popleft())  # type: ignore[arg-type]
            self._store(run)
        return True

    def apply_all(self) -> None:
        """Apply all events."""
        while self.apply_next():
            pass

    def _ask(self, event: Lookup) -> None:
        if not event.is_again:
            if self._forecast is not None:
                self._forecast.requested(event.known, len(event.keys), event.now_s)
            self._history.requested(event.known, len(event.keys), event.now_s)
            if event.keys and any(self._chunk_bytes):
                ids = identities(event.keys)
                for what_if, size in zip(self._what_ifs, self._chunk_bytes, strict=True):
                    if what_if is not None and size:
                        what_if.requested(ids, int(size))
        for policy in self._policies:
            policy.touch(event.known, event.now_s)

    def _store(self, run: Sequence[Stored]) -> None:
        first, facts, now_s = run[0], run[-1].facts, run[-1].now_s
        number, size_bytes, parent = first.number, first.size_bytes, first.parent
        usual = self._chunk_bytes[number] or float(size_bytes)
        self._chunk_bytes[number] = usual + (size_bytes - usual) * _LATELY
        names = [row for one in run for row in one.rows]
        # Of rows that come together all but the last count as full.
        is_apart = len(run) == 1 and facts is not None and not facts.tokens_full
        for part in [[row] for row in names] if is_apart else [names]:
            rows = np.array(part, np.intp)
            if facts is not None:
                self._history.seen_chain(rows, parent, facts, now_s)
            self._policies[number].insert_chain(rows, parent, size_bytes, now_s)
            parent = part[-1]
        for one in run:
            if one.facts is None:
                continue
            parent = one.parent
            for row, flops in zip(one.rows, one.flops, strict=True):
                self._history.flops[row] = flops
                if self._forecast is not None:
                    self._forecast.seen(row, parent, one.facts, now_s)
                parent = row

    def __len__(self) -> int:
        return len(self._events)


def _continues(last: Stored, event: _Event) -> bool:
    """Whether the chunk of *event* continues that of *last* and nothing else tells them apart."""
    if not isinstance(event, Stored) or len(event.rows) > 1 or len(last.rows) > 1:
        return False
    if event.parent != last.rows[0] or event.rows[0] == last.rows[0]:
        return False
    if (event.number, event.size_bytes) != (last.number, last.size_bytes):
        return False
    if abs(event.now_s - last.now_s) > _TOGETHER_S:
        return False
    one, before = event.facts, last.facts
    if one is None or before is None:
        return one is before
    return before.tokens_full and (one.group, one.reuse, one.prompt_chunks) == (
        before.group, before.reuse, before.prompt_chunks,
    )  # fmt: skip


class CatalogListener(Protocol):
    """Is called as copies come and go, under the catalog's lock. Never blocks."""

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None) -> None:
        """Copies became visible on *tier*; *put_info* says where one came from, if it was put."""

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """A copy is gone from *tier*; *is_last*: no tier has one."""


class CatalogState:
    """The index, what is known of its chunks, the policies, and who holds what.

    ``lock`` guards all of it; it is held for dictionary operations only. Rows are never kept
    past it: a row may be another chunk's as soon as it is let go.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        leases: Leases,
        pin_limit_bytes: int,
        clock: Callable[[], float],
        metadata: ChunkMetadata,
    ) -> None:
        self.policies = policies
        self.clock = clock
        self.metadata = metadata
        self.access_log = AccessLog(
            metadata.history,
            list(policies.values()),
            [metadata.what_ifs.get(tier) for tier in policies],
            metadata.forecast,
        )
        self.index = ChunkIndex(
            list(policies), metadata.evicted_limit, self._forget_evicted, metadata.hints.columns
        )
        self.holds = Holds(leases, pin_limit_bytes)
        self.lock = threading.Lock()
        self.news = threading.Event()
        """Set when the access_log has something to apply."""

    def _forget_evicted(self, rows: Rows) -> None:
        self.access_log.apply_all()
        self.metadata.history.forget_all(rows)
        for row in rows.tolist():
            self.metadata.hints.forget(row)
