"""The RPCs of blending: Resolve and ReportReuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import blend_wire
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.api.blend_validation import BlendChecks

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store


class BlendCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server

    def Resolve(
        self, request: pb.ResolveRequest, context: grpc.ServicerContext
    ) -> pb.ResolveResponse:
        """Say what can stand in for the segments of a prompt, under a lease."""
        clock = self._checks.clock
        started = clock()
        session = self._sessions.get(request.session_id)
        question = BlendChecks(self._checks).question(session, request)
        blends = self._store.blends
        found = blends.resolve(session, question)
        reply = blend_wire.resolution_to_message(found, blends.tier_names, self._stamp)
        reply.server_us = int(1e6 * (clock() - started))
        return reply

    def ReportReuse(
        self, request: pb.ReportReuseRequest, context: grpc.ServicerContext
    ) -> pb.ReportReuseResponse:
        """Take in what an engine measured; all of it, or an error that names what is wrong."""
        session = self._sessions.get(request.session_id)
        blends, checks = self._store.blends, BlendChecks(self._checks)
        try:
            keys = checks.report_keys(session, request)
            report = checks.report(request, keys, blends.variant_tokens(keys))
        except InvalidRequestError:
            self._store.counters.add("blend_refused_reports")
            raise
        gate = blends.report(session, report)
        return pb.ReportReuseResponse(server=self._stamp, gate=blend_wire.gate_to_message(gate))
