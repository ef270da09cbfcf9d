"""Copies: which chunks are on which tiers, told to the policies and to what is remembered."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.proto.hints import NO_PRIORITY
from kvstore.proto.types import (
    DIGEST_BYTES,
    ChunkInfo,
    ChunkKey,
    Fidelity,
    KVLayout,
    Namespace,
)
from kvstore.server.events.event_ring import Event
from kvstore.server.events.events import EventLog
from kvstore.server.history_file import MAX_CHUNKS, SavedHistory
from kvstore.server.index.knowledge import Knowledge, Origin
from kvstore.server.index.pins import PinTable
from kvstore.server.index.promises import Promises
from kvstore.server.index.uses import AnnouncedUses
from kvstore.server.leases import LeaseTable
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.content_index import Named
from kvstore.server.policy.history_state import HistoryState
from kvstore.server.policy.journal import Journal, Stored
from kvstore.server.policy.prefix_ends import EndNeeds
from kvstore.server.policy.radix import RadixIndex, Rows
from kvstore.server.policy_report import PolicyReport

if TYPE_CHECKING:  # its file loads redis
    from kvstore.server.cluster.directory import Directory

QUIET_S = 0.004
"""Requests have paused when none came for so long."""
_LOOKS_FOR_QUIET = 64
SPARED = 4
"""Events told behind one answer: what a lookup comes to that learned a chain, and one more."""

MAX_UNREAD = 4096
"""Chunks whose frames are to be looked at; of more, the oldest are found by key only."""
HELD_ROWS = 256
"""Looked at under the lock at a time, for who asks for all there is."""
_MEMORY = "cpu"

GAVE_WAY_PRIORITY = NO_PRIORITY // 2
"""Of a variant that gave way to better ones; engines' words come before it."""

_UNKNOWN = Origin()


class Copies:
    """The part of the Catalog that is told of copies as they come and go."""

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        leases: LeaseTable,
        pin_limit_bytes: int,
        clock: Callable[[], float],
        knowledge: Knowledge | None = None,
    ) -> None:
        self._policies = policies
        self._leases = leases
        self._clock = clock
        self.knowledge = known = knowledge or Knowledge()
        self._journal = Journal(
            known.history,
            list(policies.values()),
            [known.what_ifs.get(tier) for tier in policies],
        )
        self._journal.forecast = known.forecast
        self._index = RadixIndex(list(policies), known.ghost_limit, self._forget_ghosts)
        self._pending: dict[ChunkKey, int] = {}
        self._leaving: dict[ChunkKey, str] = {}
        """Chunks being evicted, and the tier they leave."""
        self._strays: dict[str, set[ChunkKey]] = {tier: set() for tier in policies}
        """Copies that were forgotten and that their tier has not freed yet."""
        self.unread: deque[ChunkKey] = deque(maxlen=MAX_UNREAD)
        """Chunks that others put and that came into memory: their frames say what they hold."""
        self._pinned = PinTable(pin_limit_bytes)
        self._handed_over = PinTable(pin_limit_bytes // 2)
        """Chunks that another engine is about to read."""
        self._promises = Promises()
        self._no_waits = False
        self.uses = AnnouncedUses(pin_limit_bytes)
        self.directory: Directory | None = None
        """Told of what is in memory and what leaves it, where there is one."""
        self.events: EventLog | None = None
        """Told of what comes and goes, once there is one."""
        self.unkept = 0
        """Announced chunks that came and were not kept, for want of room."""
        # Guards all of the above; held for dictionary operations only.
        self._lock = threading.Lock()
        self._unclaimed = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)
        self._news = threading.Event()

    # --- copies

    def needs_ends(self, space: Namespace, needs: EndNeeds) -> None:
        """Prefixes of *space* are of a model that goes on only where it has what it *needs*."""
        with self._lock:
            self._index.needs_ends(space, needs)

    def is_outgrown(self, key: ChunkKey, layout: KVLayout) -> bool:
        """Whether the chunk is here with less of its end than *layout* has."""
        with self._lock:
            row = self._index.row(key)
            return bool(row) and self._index.lacks(row, layout)

    def is_absent_or_outgrown(self, key: ChunkKey, layout: KVLayout) -> bool:
        """Whether a chunk of *layout* would be news."""
        with self._lock:
            row = self._index.row(key)
            return not row or self._index.lacks(row, layout)

    def note_sealed(self, tier: str, info: ChunkInfo, origin: Origin | None = None) -> None:
        """A copy became visible on *tier*; *origin* says where it came from, if it was put."""
        with self._lock:
            if self._contradicts(info):
                self._strays[tier].add(info.key)
                return
            self._sealed(tier, info, origin)
        self._news.set()

    def _sealed(self, tier: str, info: ChunkInfo, origin: Origin | None) -> None:
        self._strays[tier].discard(info.key)
        is_new = not self._index.row(info.key)
        row = self._index.add(tier, info)
        parent, now = self._index.parent(row), self._clock()
        facts = self.knowledge.facts(row, info, origin or _UNKNOWN) if is_new else None
        self.knowledge.hints.arrived(row)
        if origin is not None:
            self._name(info, origin)
        elif tier == _MEMORY and info.key not in self.knowledge.contents:
            self.unread.append(info.key)
        if is_new and self.uses:
            self._came(info.key, info.size_bytes, origin)
        number = self._index.tiers.index(tier)
        self._journal.note(Stored(number, row, parent, info.size_bytes, facts, now))
        if tier == _MEMORY and self.directory is not None:
            self.directory.sealed((info.key,))
        if self.events is not None:
            self.events.stored(tier, info)

    def _name(self, info: ChunkInfo, origin: Origin) -> None:
        tokens = info.layout.tokens
        named = Named(info.key, info.parent, origin.content, tokens, origin.position)
        self._take_in(named)

    def _take_in(self, chunk: Named) -> None:
        """Know a chunk by its content. A variant that gives way to it goes early: before others
        that are next to go, unless an engine ranked it.
        """
        key = self.knowledge.contents.note(chunk)
        row = self._index.row(key) if key is not None else 0
        if row and self.knowledge.hints.priority(row) == NO_PRIORITY:
            self.knowledge.hints.rank(row, GAVE_WAY_PRIORITY)

    def _contradicts(self, info: ChunkInfo) -> bool:
        """Whether there are copies with another layout: all copies of a chunk are alike."""
        row = self._index.row(info.key)
        return bool(row) and self._index.layout(row) != info.layout

    def _came(self, key: ChunkKey, size_bytes: int, origin: Origin | None) -> None:
        """Keep an announced chunk that is needed again; whoever put it has used it."""
        if origin is not None:
            self.uses.used([key])
        self._keep(key, size_bytes)

    def _keep(self, key: ChunkKey, size_bytes: int) -> None:
        if not self.uses.keep(key, size_bytes):
            self.unkept += 1

    def forget(self, tier: str, key: ChunkKey) -> bool:
        """A copy is gone from *tier*. False if it was not known."""
        with self._lock:
            return self._forget(tier, key)

    def _forget(self, tier: str, key: ChunkKey) -> bool:
        row = self._index.row(key)
        if not row:
            return False
        self._journal.settle()
        self._policies[tier].remove(row)
        known = self._index.discard(tier, row)
        if not self._index.holders(row):
            self.knowledge.hints.forget(row)
            self.knowledge.contents.forget(key)
            self.uses.gone(key)
        if known and tier == _MEMORY and self.directory is not None:
            self.directory.gone((key,))
        if known and self.events is not None:
            self.events.removed(tier, key)
        return known

    def _forget_ghosts(self, rows: Rows) -> None:
        self._journal.settle()
        self.knowledge.history.forget_all(rows)
        for row in rows.tolist():
            self.knowledge.hints.forget(row)

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until requests pause, and tell the policies what happened; a thread that does so
        spares the next requests the time. Return whether there was anything.
        """
        is_any = self._news.wait(timeout_s)
        for _ in range(_LOOKS_FOR_QUIET):
            if not self._news.is_set():
                break
            self._news.clear()
            time.sleep(QUIET_S)
        while not self._news.is_set() and self._step():
            time.sleep(0)  # lets go of the interpreter, which a request may be waiting for
        return is_any

    def spare_next(self) -> None:
        """Tell the policies of what came first, if more waits behind it.

        For who has just answered a lookup, whose asker now looks at the answer: of many lookups in
        a row, each would otherwise have to tell of an earlier one before it can be answered.
        """
        for _ in range(SPARED):
            if len(self._journal) <= 1:
                break
            self._step()

    def _step(self) -> bool:
        with self._lock:
            return self._journal.step()

    def cast_out(self, tier: str, key: ChunkKey, *, even_if_held: bool = True) -> bool:
        """A copy is about to leave *tier*, and a stray until ``swept``.

        False if it was not there, or is held.
        """
        with self._lock:
            if not even_if_held and self._is_held(key):
                return False
            known = self._forget(tier, key)
            if known:
                self._strays[tier].add(key)
            return known

    def strays(self, tier: str) -> set[ChunkKey]:
        """Return what was cast out of *tier* and may still lie there."""
        with self._lock:
            return set(self._strays[tier])

    def is_stray(self, tier: str, key: ChunkKey) -> bool:
        """Whether the chunk was cast out of *tier* and may still lie there."""
        with self._lock:
            return key in self._strays[tier]

    def swept(self, tier: str, key: ChunkKey) -> None:
        """The tier has freed a stray."""
        with self._lock:
            self._strays[tier].discard(key)

    def copies(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name; empty when there is none."""
        with self._lock:
            return self._index.copies(self._index.row(key))

    def holders(self, key: ChunkKey, least: Fidelity = Fidelity.none) -> list[str]:
        """Return the tiers with such a copy of the chunk: less to ask for than ``copies``."""
        with self._lock:
            return self._index.holders(self._index.row(key), least)

    def is_common(self, key: ChunkKey) -> bool:
        """Whether several prompts have the chunk: two went on from it or from one behind it."""
        with self._lock:
            return self._index.is_common(self._index.row(key))

    def size_bytes(self, tier: str, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on *tier*; 0 when it is not there."""
        with self._lock:
            row = self._index.row(key)
            return self._index.size_bytes(tier, row) if tier in self._index.holders(row) else 0

    def any_size_bytes(self, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on the fastest tier that has it; 0 without one."""
        with self._lock:
            row = self._index.row(key)
            return self._index.size_bytes(self._index.holders(row)[0], row) if row else 0

    def held_from(self, row: int, space: Namespace | None = None) -> tuple[list[Event], int]:
        """Return the copies of *space*, or all, in HELD_ROWS rows from *row* on, as events.

        With them comes the next row to ask for; 0 when there are no more.
        """
        with self._lock:
            index, found = self._index, []
            rows, after = index.held_rows(row, HELD_ROWS)
            for at in rows:
                if space is None or index.key(at)[:DIGEST_BYTES] == space:
                    for tier, info in index.copies(at).items():
                        tokens = info.layout.tokens
                        found.append(Event(info.key, tier, tokens, info.parent, info.fidelity))
            return found, after

    def only_on(self, *tiers: str) -> list[ChunkKey]:
        """Return the chunks that are on no tier but these."""
        with self._lock:
            return self._index.only_on(tiers)

    def count_on(self, tier: str) -> int:
        """Copies known on *tier*."""
        with self._lock:
            self._journal.settle()
            return len(self._policies[tier])

    def policy_report(self, tier: str) -> PolicyReport:
        """Return whom *tier* evicts by, and what its partitions take."""
        known, policy = self.knowledge, self._policies[tier]
        name = known.policy_names.get(tier, type(policy).__name__)
        with self._lock:
            self._journal.settle()
            return PolicyReport.of(name, policy, known.what_ifs.get(tier), known.partitions.names)

    # --- over a restart

    def save(self) -> SavedHistory:
        """Return what is remembered of chunks, here or evicted, those that left first first."""
        known = self.knowledge
        with self._lock:
            self._journal.settle()
            now = self._clock()
            rows = np.fromiter(filter(known.history.knows, self._index.known_rows()), np.intp)
            state = HistoryState.of(known.history, rows[-MAX_CHUNKS:], now)
            rows = rows[-MAX_CHUNKS:]
            state.chunks["key"] = self._index.keys(rows)
            known.hints.write(rows, state.chunks, now)
            return SavedHistory(known.groups.names(), state)

    def restore(self, saved: SavedHistory) -> int:
        """Remember what an earlier run did; return how many chunks. Before any other event.

        What engines said of chunks counts from ``note_sealed`` on. Raises InvalidRequestError.
        """
        known = self.knowledge
        with self._lock:
            for names in saved.groups:
                known.groups.number(*names)
            chunks = saved.state.chunks[-max(1, known.ghost_limit) :]
            keys = [ChunkKey(key) for key in chunks["key"].tolist()]
            rows = np.array([self._index.add_ghost(key) for key in keys], np.intp)
            state = replace(saved.state, chunks=chunks[rows > 0])
            state.fill(known.history, rows[rows > 0], self._clock())
            known.hints.await_rows(rows[rows > 0], state.chunks, self._clock())
            return len(state.chunks)

    def ghost_count(self) -> int:
        """Chunks without a copy that are remembered."""
        return self._index.ghost_count

    def __len__(self) -> int:
        return len(self._index)

    def _is_held(self, key: ChunkKey) -> bool:
        return (
            key in self._leases.pins
            or key in self._pinned
            or key in self._handed_over
            or key in self.uses
        )
