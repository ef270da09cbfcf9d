"""Puts in flight: chunks that are being put or were announced, and who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.proto.types import ChunkKey, Fidelity, KVLayout
from kvstore.server.index.state import CatalogState

MAX_ANNOUNCED_CHUNKS = 1 << 16
"""Chunks announced at once; of more nothing is known before they come."""
MAX_ANNOUNCEMENTS = 1024
"""Announcements at once."""


@dataclass(slots=True, eq=False)
class _Announcement:
    """What one call announced and has not come yet, and until when it stands."""

    session_id: int
    until: float
    left: set[ChunkKey]


class Announcements:
    """Announced chunks. The catalog's lock guards it. ``until`` is in the clock's seconds."""

    def __init__(self) -> None:
        self._announcements: list[_Announcement] = []
        self._by_key: dict[ChunkKey, _Announcement] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._by_key

    def make(self, session_id: int, keys: Sequence[ChunkKey], until: float) -> int:
        """Announce those of *keys* that are not announced yet; return how many found room."""
        room = MAX_ANNOUNCED_CHUNKS - len(self._by_key)
        new = {key for key in keys[: max(0, room)] if key not in self._by_key}
        if not new or len(self._announcements) >= MAX_ANNOUNCEMENTS:
            return 0
        announcement = _Announcement(session_id, until, new)
        self._announcements.append(announcement)
        self._by_key.update(dict.fromkeys(new, announcement))
        return len(new)

    def over(self, key: ChunkKey) -> bool:
        """A chunk came, or will not come; return whether it was announced."""
        announcement = self._by_key.pop(key, None)
        if announcement is None:
            return False
        announcement.left.discard(key)
        if not announcement.left:
            self._announcements.remove(announcement)
        return True

    def take_back(self, session_id: int, keys: Sequence[ChunkKey]) -> int:
        """End the session's own announcements of *keys*; return how many there were."""
        own = [key for key in keys if key in self._by_key]
        own = [key for key in own if self._by_key[key].session_id == session_id]
        return sum(self.over(key) for key in own)

    def expire(self, now: float) -> bool:
        """End the announcements whose time is up; return whether there was any."""
        return self._drop(lambda announcement: announcement.until <= now)

    def end(self, session_id: int) -> bool:
        """End the announcements of a session; return whether there was any."""
        return self._drop(lambda announcement: announcement.session_id == session_id)

    def _drop(self, is_over: Callable[[_Announcement], bool]) -> bool:
        over = [announcement for announcement in self._announcements if is_over(announcement)]
        self._announcements = [
            announcement for announcement in self._announcements if announcement not in over
        ]
        for announcement in over:
            for key in announcement.left:
                del self._by_key[key]
        return bool(over)

    def __len__(self) -> int:
        return len(self._by_key)


class InFlightPuts:
    """What is about to come. Shares the lock of *state*. Thread-safe."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state
        self._writers: dict[ChunkKey, int] = {}
        self._announcements = Announcements()
        self._no_waits = False
        self._arrived = threading.Condition(state.lock)

    def begin(self, key: ChunkKey, layout: KVLayout | None = None) -> bool:
        """Count a writer of *key*; False, counting nothing, when an exact copy exists.

        Or copies that have less of the chunk's end than *layout*.
        """
        with self._state.lock:
            row = self._state.index.row(key)
            if row and layout is not None and self._state.index.is_less_complete(row, layout):
                return False
            if self._state.index.holders(row, Fidelity.exact):
                self._state.metadata.live_on(row, self._state.clock())
                self._announcements.over(key)
                return False
            self._writers[key] = self._writers.get(key, 0) + 1
            return True

    def end(self, key: ChunkKey) -> None:
        """Undo one ``begin``: the chunk is here, or will not come."""
        with self._state.lock:
            left = self._writers[key] - 1
            if left:
                self._writers[key] = left
            else:
                del self._writers[key]
            self._announcements.over(key)
            self._arrived.notify_all()

    def count(self) -> int:
        """Writers at work."""
        with self._state.lock:
            return sum(self._writers.values())

    def announce(self, session_id: int, keys: Sequence[ChunkKey], ttl_s: float) -> int:
        """A session will put *keys* within *ttl_s*; return how many nobody has put or announced.

        Without *ttl_s* it will not.
        """
        with self._state.lock:
            if not ttl_s:
                count = self._announcements.take_back(session_id, keys)
                self._arrived.notify_all()
                return count
            absent = [
                key for key in keys if not self._state.index.holders(self._state.index.row(key))
            ]
            return self._announcements.make(session_id, absent, self._state.clock() + ttl_s)

    def is_any_coming(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether the chunk behind those of *keys* that are here is being put, or announced."""
        with self._state.lock:
            at = self._first_absent(keys, 0)
            return at < len(keys) and self.is_coming(keys[at])

    def _first_absent(self, keys: Sequence[ChunkKey], at: int) -> int:
        while at < len(keys) and self._state.index.holders(self._state.index.row(keys[at])):
            at += 1
        return at

    def await_arrivals(self, keys: Sequence[ChunkKey], deadline: float) -> bool:
        """Wait until all of *keys* are here, or the first that is not will not come.

        False when time is up before that, or the server drains.
        """
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
        """Have nobody wait any more: the server drains."""
        with self._state.lock:
            self._no_waits = True
            self._arrived.notify_all()

    # --- under the lock

    def is_coming(self, key: ChunkKey) -> bool:
        """Whether the chunk is being put, or announced."""
        return key in self._writers or key in self._announcements

    def is_written(self, key: ChunkKey) -> bool:
        """Whether somebody is putting the chunk."""
        return key in self._writers

    def is_announced(self, key: ChunkKey) -> bool:
        """Whether a session said that it will put the chunk."""
        return key in self._announcements

    def end_session(self, session_id: int) -> None:
        """A session will put nothing any more."""
        if self._announcements.end(session_id):
            self._arrived.notify_all()

    def expire(self, now: float) -> None:
        """End the announcements whose time is up."""
        if self._announcements.expire(now):
            self._arrived.notify_all()
