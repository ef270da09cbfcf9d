"""The RPC of hand-over: Promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from kvstore.server.manager import TierManager
    from kvstore.server.rpc.checks import Checks
    from kvstore.server.sessions import SessionTable


class HandOverCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _manager: TierManager
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server

    def Promise(
        self, request: pb.PromiseRequest, context: grpc.ServicerContext
    ) -> pb.PromiseResponse:
        """Have lookups know of chunks that the session is about to put."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        pending = self._manager.hand_over.promise(session, keys, request.ttl_ms)
        return pb.PromiseResponse(server=self._stamp, pending=pending)
