"""The RPC of puts out of device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import FrameHeader, parse_header, raw_frame_bytes
from kvstore.proto.types import PutOutcome
from kvstore.proto.wire import hints_from_message
from kvstore.server.api.validation import outcomes
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.writes import check_put

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import Session, SessionTable
    from kvstore.server.store.device_puts import DevicePuts

NO_DEVICE = "this server takes no puts out of device memory: start it with gpu"


class DeviceCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server
    device_puts: DevicePuts | None = None

    def PutDevice(
        self, request: pb.PutDeviceRequest, context: grpc.ServicerContext
    ) -> pb.PutResponse:
        """Put frames out of the session's ring."""
        session = self._sessions.get(request.session_id)
        count = len(request.headers)
        self._checks.batch("headers", count)
        if count != len(request.offsets):
            raise InvalidRequestError("offsets", len(request.offsets), "give one for each header")
        hints = hints_from_message(request.hints)
        deadline = self._checks.deadline(request.deadline_ms)
        headers = [self._raw_header(session, data) for data in request.headers]
        if self.device_puts is None:
            results = [PutResult(PutOutcome.refused, NO_DEVICE)] * count
        else:
            frames = list(zip(headers, request.offsets, strict=True))
            results = self.device_puts.put(session, frames, request.event, deadline, hints)
        return pb.PutResponse(server=self._stamp, **outcomes(results))

    def _raw_header(self, session: Session, data: bytes) -> FrameHeader:
        """Return the header of a raw frame that *session* may put. Raises what it is not."""
        header = parse_header(as_bytes(data))
        if len(data) != header.header_bytes:
            raise InvalidRequestError("headers", len(data), f"this one has {header.header_bytes}")
        info, _ = self._checks.header(session, header, header.frame_bytes)
        check_put(header, info, session)
        wanted = (0, raw_frame_bytes(header.layout))
        if (header.codec_id, header.frame_bytes) != wanted:
            found = (header.codec_id, header.frame_bytes)
            raise InvalidRequestError("codec_id, frame_bytes", found, f"raw: {wanted}")
        return header
