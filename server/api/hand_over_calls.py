"""The RPC of hand-over: Promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store


class HandOverCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server

    def Promise(
        self, request: pb.PromiseRequest, context: grpc.ServicerContext
    ) -> pb.PromiseResponse:
        """Have lookups know of chunks that the session is about to put."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        pending = self._store.announcements.announce(session, keys, request.ttl_ms)
        return pb.PromiseResponse(server=self._stamp, pending=pending)
