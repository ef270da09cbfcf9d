"""The AccessLog: events that are applied to the history and the policies later, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from kvstore.proto.types import ChunkKey
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.eviction.quotas import MissRatioCurve, identities
from kvstore.server.eviction.reuse_estimate import ReuseForecast

MAX_EVENTS = 32
"""Events that wait; one more, and its caller works off the first."""

MAX_LOOKUPS = 4
"""Lookups among them, each of which may take 0.3 ms: whoever must ask a policy waits for all."""


MAX_CHAINS = 4
"""Chains among them, for the same reason."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt of *keys* was looked up, of which *known* are here or remembered.

    ``is_again`` for a lookup that was counted already.
    """

    known: Rows
    keys: Sequence[ChunkKey]
    now_s: float
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk was sealed on the tier of policy *number*; *facts* if no tier had it before."""

    number: int
    row: int
    parent: int
    size_bytes: int
    facts: InsertInfo | None
    now_s: float


@dataclass(frozen=True, slots=True)
class StoredChain:
    """Chunks that no tier had were sealed, each of which continues the one before, the first
    *parent*. *facts* are of each but for its *flops*.
    """

    number: int
    rows: Sequence[int]
    parent: int
    size_bytes: int
    facts: InsertInfo
    flops: Sequence[float]
    now_s: float


_TOGETHER_S = 0.1
"""Chunks of a chain that come this soon after one another count as stored together."""

_LATELY = 1 / 16

_Event: TypeAlias = Asked | Stored | StoredChain


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
    ) -> None:
        """*what_ifs* are told of lookups too, one for each policy, or none."""
        self._history = history
        self._policies = policies
        self._what_ifs = what_ifs or [None] * len(policies)
        self._chunk_bytes = [0.0] * len(policies)
        """About what a chunk takes lately, by policy."""
        self._events: deque[_Event] = deque()
        self._lookups = self._chains = 0
        self.forecast: ReuseForecast | None = None
        """Told as the history is, for those who place copies by it."""

    def note(self, event: _Event) -> None:
        """Keep an event until it is told."""
        if len(self._events) >= MAX_EVENTS:
            self.apply_next()
        if isinstance(event, Asked):
            while self._lookups >= MAX_LOOKUPS:
                self.apply_next()
            self._lookups += 1
        elif isinstance(event, StoredChain):
            while self._chains >= MAX_CHAINS:
                self.apply_next()
            self._chains += 1
        self._events.append(event)

    def apply_next(self) -> bool:
        """Tell of the first event, and of those that belong to it; False if there was none."""
        if not self._events:
            return False
        event = self._events.popleft()
        if isinstance(event, Asked):
            self._lookups -= 1
            self._ask(event)
        elif isinstance(event, StoredChain):
            self._chains -= 1
            self._store_chain(event)
        else:
            self._store(event)
        return True

    def apply_all(self) -> None:
        """Tell of everything."""
        while self.apply_next():
            pass

    def _ask(self, event: Asked) -> None:
        if not event.is_again:
            if self.forecast is not None:
                self.forecast.asked(event.known, len(event.keys), event.now_s)
            self._history.asked(event.known, len(event.keys), event.now_s)
            self._wonder(event)
        for policy in self._policies:
            policy.touch(event.known, event.now_s)

    def _wonder(self, event: Asked) -> None:
        if not event.keys or not any(self._chunk_bytes):
            return
        ids = identities(event.keys)
        for what_if, size in zip(self._what_ifs, self._chunk_bytes, strict=True):
            if what_if is not None and size:
                what_if.asked(ids, int(size), event.now_s)

    def _store(self, first: Stored) -> None:
        run = [first]
        while self._events and _continues(run[-1], self._events[0]):
            run.append(self._events.popleft())  # type: ignore[arg-type]
        self._weigh(first)
        rows = np.array([event.row for event in run], np.intp)
        last = run[-1]
        if last.facts is not None:
            self._history.seen_chain(rows, first.parent, replace(last.facts, flops=0.0), last.now_s)
            for event in run:
                assert event.facts is not None
                self._history.flops[event.row] = event.facts.flops
                if self.forecast is not None:
                    self.forecast.seen(event.row, event.parent, event.facts, last.now_s)
        self._policies[first.number].insert_chain(rows, first.parent, first.size_bytes, last.now_s)

    def _store_chain(self, chain: StoredChain) -> None:
        self._weigh(chain)
        facts, now_s = chain.facts, chain.now_s
        parent = chain.parent
        # Of a run, all but the last count as full.
        for run in [chain.rows] if facts.tokens_full else [[row] for row in chain.rows]:
            rows = np.array(run, np.intp)
            self._history.seen_chain(rows, parent, facts, now_s)
            self._policies[chain.number].insert_chain(rows, parent, chain.size_bytes, now_s)
            parent = run[-1]
        parent = chain.parent
        for row, flops in zip(chain.rows, chain.flops, strict=True):
            self._history.flops[row] = flops
            if self.forecast is not None:
                self.forecast.seen(row, parent, replace(facts, flops=flops), now_s)
            parent = row

    def _weigh(self, event: Stored | StoredChain) -> None:
        usual = self._chunk_bytes[event.number] or float(event.size_bytes)
        self._chunk_bytes[event.number] = usual + (event.size_bytes - usual) * _LATELY

    def __len__(self) -> int:
        return len(self._events)


def _continues(last: Stored, event: _Event) -> bool:
    """Whether the chunk of *event* continues that of *last* and nothing else tells them apart."""
    if not isinstance(event, Stored) or event.parent != last.row or event.row == last.row:
        return False
    if (event.number, event.size_bytes) != (last.number, last.size_bytes):
        return False
    if abs(event.now_s - last.now_s) > _TOGETHER_S:
        return False
    if last.facts is None or event.facts is None:
        return last.facts is event.facts
    said, before = event.facts, last.facts
    return before.tokens_full and (said.group, said.reuse, said.prompt_chunks) == (
        before.group, before.reuse, before.prompt_chunks,
    )  # fmt: skip
