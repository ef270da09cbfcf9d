"""Puts in flight: chunks that are being put or announced, and waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvstore.proto.types import Accuracy, ChunkKey, KVLayout
from kvstore.server.index.access_log import CatalogState
from kvstore.server.index.hints import NEVER
from kvstore.server.security.sessions import SPARED_SHARE

MAX_ANNOUNCEMENTS = 1024
MAX_ANNOUNCED_CHUNKS = 1 << 16
"""Limit of announced chunks; further announcements are ignored. The last 1/SPARED_SHARE of both
limits is for tenants that have less."""


class Announcement(NamedTuple):
    """The session that announced chunks, its tenant, and the expiry in seconds on the clock."""

    session_id: int
    until: float
    tenant: str


class InFlightPuts:
    """Pending chunks. Shares the lock of *state*. Thread-safe."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state
        self._index = state.index
        self.writers: Counter[ChunkKey] = Counter()
        """Puts in progress by chunk. Under the lock."""
        self.announced: dict[ChunkKey, Announcement] = {}
        """Chunks that a session is about to put. Under the lock."""
        self._chunks: dict[Announcement, set[ChunkKey]] = {}
        """Chunks by announcement, to find expired ones without a scan of all chunks."""
        self._no_waits = False
        self._arrived = threading.Condition(state.lock)

    def begin(
        self, key: ChunkKey, layout: KVLayout | None = None, away: Collection[str] = ()
    ) -> bool:
        """Count a writer of *key*; False if a tier not in *away* has an exact copy, or there is one
        with less end state.
        """
        index, hints = self._index, self._state.metadata.hints
        with self._state.lock:
            row = index.row(key)
            if row and layout is not None and index.is_less_complete(row, layout):
                return False
            if row and not set(index.holders(row, Accuracy.exact)).issubset(away):
                if hints.is_expired(row, self._state.clock()):
                    hints.set_expiry(row, NEVER)
                self._forget(key)
                return False
            self.writers[key] = self.writers.get(key, 0) + 1
            return True

    def end(self, key: ChunkKey) -> None:
        """Undo one ``begin``: the chunk is stored, or cancelled."""
        with self._state.lock:
            left = self.writers.pop(key) - 1
            if left:
                self.writers[key] = left
            self._forget(key)
            self._arrived.notify_all()

    def _forget(self, key: ChunkKey) -> None:
        if (announcement := self.announced.pop(key, None)) is not None:
            self._chunks[announcement].discard(key)
            if not self._chunks[announcement]:
                del self._chunks[announcement]

    # --- announcements

    def announce(
        self, session_id: int, keys: Sequence[ChunkKey], ttl_s: float, tenant: str = ""
    ) -> int:
        """Announce *keys* for *ttl_s*, or withdraw them with 0; return how many changed."""
        with self._state.lock:
            known = self.announced
            if not ttl_s:
                ours = {key for key in keys if key in known and known[key].session_id == session_id}
                for key in ours:
                    self._forget(key)
                self._arrived.notify_all()
                return len(ours)
            absent = [key for key in keys if not self._index.row(key)]
            held = [len(chunks) for one, chunks in self._chunks.items() if one.tenant == tenant]
            room = _room(MAX_ANNOUNCED_CHUNKS, len(known), sum(held))
            new = set(absent[:room]) - known.keys()
            if not new or not _room(MAX_ANNOUNCEMENTS, len(self._chunks), len(held)):
                return 0
            announcement = Announcement(session_id, self._state.clock() + ttl_s, tenant)
            known.update(dict.fromkeys(new, announcement))
            self._chunks.setdefault(announcement, set()).update(new)
            return len(new)

    def drop(self, is_over: Callable[[Announcement], bool]) -> None:
        """End the announcements for which *is_over*. Under the lock."""
        over = [announcement for announcement in self._chunks if is_over(announcement)]
        for announcement in over:
            for key in self._chunks.pop(announcement):
                del self.announced[key]
        if over:
            self._arrived.notify_all()

    # --- waits

    def is_any_coming(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether the first absent chunk of *keys* is being put, or announced."""
        with self._state.lock:
            at = self._first_absent(keys, 0)
            return at < len(keys) and self.is_coming(keys[at])

    def _first_absent(self, keys: Sequence[ChunkKey], at: int) -> int:
        while at < len(keys) and self._index.row(keys[at]):
            at += 1
        return at

    def await_arrivals(self, keys: Sequence[ChunkKey], deadline: float) -> bool:
        """Wait until *keys* are stored or cancelled; False at the deadline or on a drain."""
        with self._arrived:
            at = self._first_absent(keys, 0)
            while at < len(keys) and self.is_coming(keys[at]):
                left_s = deadline - self._state.clock()
                if left_s <= 0 or self._no_waits:
                    return False
                self._arrived.wait(left_s)
                at = self._first_absent(keys, at)
            return True

    def end_waits(self) -> None:
        """End all waits, now and later: the server drains."""
        with self._state.lock:
            self._no_waits = True
            self._arrived.notify_all()

    def is_coming(self, key: ChunkKey) -> bool:
        """Whether the chunk is being put, or announced. Under the lock."""
        return key in self.writers or key in self.announced


def _room(limit: int, used: int, held: int) -> int:
    """Return how much more of *limit* may be taken by the tenant that has *held* of the *used*."""
    spared = limit // SPARED_SHARE
    return max(0, limit - spared - used, min(limit - used, spared - held))
