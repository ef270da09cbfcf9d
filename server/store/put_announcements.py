"""Put announcements: one engine puts what another is about to read, and lookups wait for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import MAX_HANDOVER_MS
from kvstore.proto.types import ChunkKey
from kvstore.server.index.catalog import Catalog
from kvstore.server.security.sessions import Session
from kvstore.server.telemetry.metrics import Counters


class PutAnnouncements:
    """What sessions are about to put, and lookups that wait for it: *waiters* at a time, each in
    a thread. Thread-safe.
    """

    def __init__(self, catalog: Catalog, counters: Counters, waiters: int) -> None:
        self._catalog = catalog
        self._counters = counters
        self._waiters = threading.BoundedSemaphore(waiters)

    def wait(self, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Wait until the pending chunks behind those that are here are here too, or will not come.

        No longer than *deadline*, and not at all where as many wait as may.
        """
        if not self._catalog.in_flight.is_any_coming(keys):
            return
        if not self._waiters.acquire(blocking=False):
            self._counters.add("refused_waits")
            return
        try:
            self._counters.add("waited_lookups")
            self._catalog.in_flight.await_arrivals(keys, deadline)
        finally:
            self._waiters.release()

    def announce(self, session: Session, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Let lookups know that *session* will put *keys* within *ttl_ms*; 0: that it will not.

        Return how many chunks are pending by that. Raises InvalidRequestError.
        """
        if ttl_ms > MAX_HANDOVER_MS:
            raise InvalidRequestError("ttl_ms", ttl_ms, f"use 0 to {MAX_HANDOVER_MS}")
        count = self._catalog.in_flight.announce(session.session_id, keys, ttl_ms / 1000)
        if session.is_closed:  # its announcements were already ended; these are too late for that
            self._catalog.in_flight.announce(session.session_id, keys, 0.0)
        if not ttl_ms:
            return 0
        self._counters.add("announced_puts", count)
        return count

    def end(self) -> None:
        """Answer all who wait: the server drains."""
        self._catalog.in_flight.end_waits()
