"""The RPC of looking at a server: Status, of which tenants see what is theirs or nobody's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend_wire import gate_to_message
from kvstore.server.api.access_check import principal_of
from kvstore.server.api.validation import tier_status

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from kvstore.server.api.service import Identity
    from kvstore.server.api.unix_server import DataPlane
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store


class StatusCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _identity: Identity
    _clock: Callable[[], float]
    _data_plane: DataPlane | None
    _stamp: pb.Server
    directory: Directory | None = None

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        """Say how the server is; how much of it is used, and by whom, to admins alone."""
        reply = pb.StatusResponse(
            server=self._stamp,
            version=self._identity.version,
            state="draining" if self._sessions.is_draining else "serving",
            uptime_s=self._clock() - self._identity.started_at,
        )
        tiers = [tier_status(status) for status in self._store.slot_statuses()]
        if not principal_of(context).is_admin():
            reply.tiers.extend(
                pb.TierStatus(name=one.name, codec=one.codec, state=one.state) for one in tiers
            )
            return reply
        catalog = self._store.catalog
        for tier in tiers:
            catalog.eviction.policy_report(tier.name).fill(tier)
        reply.tiers.extend(tiers)
        reply.ghosts = catalog.evicted_count()
        reply.gates.extend(map(gate_to_message, self._store.blends.gates.views()))
        reply.sessions = len(self._sessions)
        reply.leases = catalog.lease_count()
        reply.counters.update(self._store.counters.snapshot())
        reply.socket_path = str(self._data_plane.path) if self._data_plane else ""
        if self.directory is not None:
            reply.directory.CopyFrom(self.directory.report().to_message())
        return reply
