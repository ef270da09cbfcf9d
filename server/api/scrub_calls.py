"""The RPC of scrubbing, and deletes by readers that found damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.scrub import Scrub
    from kvstore.server.store.store import Store

MAX_SCRUB_BYTES_PER_S = 1 << 40
CLOSED = "this server does not scrub"


class ScrubCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server
    scrub: Scrub | None = None

    def Scrub(self, request: pb.ScrubRequest, context: grpc.ServicerContext) -> pb.ScrubResponse:
        """Begin a pass if asked to, and say how far the one that runs is."""
        if self.scrub is None:
            raise InvalidRequestError("method", "Scrub", CLOSED)
        if request.bytes_per_s > MAX_SCRUB_BYTES_PER_S:
            fix = f"at most {MAX_SCRUB_BYTES_PER_S}; 0 is no limit"
            raise InvalidRequestError("bytes_per_s", request.bytes_per_s, fix)
        self._checks.batch("tiers", len(request.tiers))
        begun = request.begin and self.scrub.begin(list(request.tiers), request.bytes_per_s)
        report = self.scrub.report()
        return pb.ScrubResponse(
            server=self._stamp,
            begun=begun,
            running=report.is_running,
            passes=report.passes,
            total_chunks=report.total_chunks,
            checked_chunks=report.checked_chunks,
            checked_bytes=report.checked_bytes,
            damaged_chunks=report.damaged_chunks,
            unread_chunks=report.unread_chunks,
        )

    def _drop_damaged(self, request: pb.DeleteRequest) -> pb.DeleteResponse:
        """Answer a reader that says that chunks are damaged: those that are not stay."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        damaged = 0
        if self.scrub is not None:
            damaged = self.scrub.drop_damaged(keys, session.representation_digest)
        return pb.DeleteResponse(server=self._stamp, deleted=damaged)
