"""The RPC Events: what a node gains and loses, to a bounded number of readers that stay."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvstore.proto.messages import as_message
from kvstore.proto.types import ROOT
from kvstore.server.api.interceptors import principal_of
from kvstore.server.telemetry.events import EventLog, EventReader

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.service import Backend
    from kvstore.server.security.sessions import Session

EVENT_READERS = 16
"""Each has a thread of its own while it reads."""
EVENT_READERS_PER_TENANT = 4
POLL_S = 0.02
"""How late an event may be: what comes meanwhile goes out together."""
BEAT_S = 1.0
"""How often a reader is sent something, be there events or not."""
_LAST_S = 0.5
"""A call with so little time left ends, rather than be cut off."""


class EventCalls:
    """Answers Events out of the backend's log, if there is one. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._sessions = backend.sessions
        self._clock = backend.checks.clock
        self._boot_id = backend.identity.boot_id
        self._log = backend.events
        self._authenticator = backend.trust.authenticator if backend.trust else None
        self._readers: Counter[str] = Counter()
        """By tenant, those that read now."""
        self._lock = threading.Lock()  # guards that

    def Events(
        self, request: pb.EventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.EventsResponse]:
        """Yield what comes and goes until the reader, its session or the server ends."""
        log = self._log
        if log is None:
            raise InvalidRequestError("method", "Events", "this server keeps no events")
        session = self._sessions.get(request.session_id) if request.session_id else None
        with self._slot("" if session is None else session.tenant):
            reader = EventReader(log, None if session is None else session.namespace)
            if request.boot_id == self._boot_id:
                reader.go_on(request.cursor)  # which may look through the whole log
            yield from self._pages(log, reader, session, context)

    @contextmanager
    def _slot(self, tenant: str) -> Iterator[None]:
        """Count a reader while it reads. Raises QuotaExceededError."""
        with self._lock:
            if self._readers.total() >= EVENT_READERS:
                raise QuotaExceededError("event_readers", EVENT_READERS, "this server")
            if self._readers[tenant] >= EVENT_READERS_PER_TENANT:
                limit = EVENT_READERS_PER_TENANT
                raise QuotaExceededError("event_readers", limit, f"tenant {tenant!r}")
            self._readers[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= Counter((tenant,))

    def _pages(
        self,
        log: EventLog,
        reader: EventReader,
        session: Session | None,
        context: grpc.ServicerContext,
    ) -> Iterator[pb.EventsResponse]:
        caller = principal_of(context)
        sent_at = self._clock()
        while context.is_active() and not log.ended.is_set():
            left_s = context.time_remaining()
            if left_s is not None and left_s < _LAST_S:
                return
            if session is not None and session.is_closed:
                raise LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")
            # Sessions end with who opened them.
            if session is None and self._authenticator and not self._authenticator.holds(caller):
                raise UnauthenticatedError("credentials: not valid any more; call with others")
            page = reader.poll()
            now = self._clock()
            if page is not None:
                events = [
                    as_message(pb.ChunkEvent, one, parent=b"" if one.parent == ROOT else one.parent)
                    for one in page.events
                ]
                yield as_message(pb.EventsResponse, page, events=events)
                sent_at = now
            elif now - sent_at >= BEAT_S:
                yield pb.EventsResponse(cursor=reader.cursor)
                sent_at = now
            else:
                log.ended.wait(POLL_S)
