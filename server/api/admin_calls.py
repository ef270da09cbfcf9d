"""The RPCs of keeping and forgetting: Pin, Unpin and Clear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.api.access_check import principal_of
from kvstore.server.store.clear import clear, keys_of_tenant

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store

CLEAR_DEADLINE_MS = 60_000
"""Of a request that names none."""
MAX_PIN_TTL_MS = 24 * 3600 * 1000


class KeepCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinResponse:
        """Keep chunks from eviction for a time."""
        session = self._sessions.get(request.session_id)
        if not 1 <= request.ttl_ms <= MAX_PIN_TTL_MS:
            raise InvalidRequestError("ttl_ms", request.ttl_ms, f"use 1 to {MAX_PIN_TTL_MS}")
        keys = self._checks.keys(session, request.digests)
        return pb.PinResponse(server=self._stamp, pinned=self._store.pin(keys, request.ttl_ms))

    def Unpin(self, request: pb.UnpinRequest, context: grpc.ServicerContext) -> pb.UnpinResponse:
        """End pins."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        return pb.UnpinResponse(server=self._stamp, unpinned=self._store.unpin(keys))

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearResponse:
        """Forget what nobody reads: of a session's namespace, of a tenant, or everything."""
        slots = self._store.moves.tiers.slots
        if request.tier and request.tier not in slots:
            raise InvalidRequestError("tier", request.tier, f"use one of {sorted(slots)}")
        deadline = self._checks.deadline(request.deadline_ms or CLEAR_DEADLINE_MS)
        if request.session_id and request.tenant:
            fix = "name a tenant without a session, whose chunks are its own"
            raise InvalidRequestError("tenant", request.tenant, fix)
        if request.session_id:
            space = self._sessions.get(request.session_id).namespace
            keys = self._store.catalog.queries.keys_from(space)
        else:
            tenant = request.tenant or principal_of(context).tenant
            keys = keys_of_tenant(self._store, tenant)
        done = clear(self._store, keys, deadline, request.tier, dry_run=request.dry_run)
        return pb.ClearResponse(server=self._stamp, **done._asdict())
