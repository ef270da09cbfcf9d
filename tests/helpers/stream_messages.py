"""Messages of TCP streams for tests, and a caller that sends any of them."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.framing import FramedSocket

Sent = tuple[pb.StreamMessage, bytes]
"""A message and its payload; only parts have one."""


def send(wire: FramedSocket, message: pb.StreamMessage, payload: bytes = b"") -> None:
    wire.send(message, [as_bytes(payload)])


def receive(wire: FramedSocket) -> Sent:
    message, size_bytes = wire.receive()
    payload = np.empty(size_bytes, np.uint8)
    wire.fill(payload)
    return message, payload.tobytes()


def kind(message: pb.StreamMessage) -> str:
    return str(message.WhichOneof("body"))


def attach(session_id: int, token: bytes) -> pb.StreamMessage:
    return pb.StreamMessage(attach=pb.StreamAttach(session_id=session_id, token=token))


def ready(request: int = 0) -> pb.StreamMessage:
    return pb.StreamMessage(request=request, ready=True)


def get(request: int, session_id: int, digests: bytes = b"") -> pb.StreamMessage:
    body = pb.GetRequest(session_id=session_id, digests=digests, deadline_ms=1000)
    return pb.StreamMessage(request=request, get=body)


def put(request: int, session_id: int) -> pb.StreamMessage:
    body = pb.PutRequest(session_id=session_id, deadline_ms=1000)
    return pb.StreamMessage(request=request, put=body)


def part(
    request: int, frame_bytes: int, offset: int, index: int = 0, tier: str = ""
) -> pb.StreamMessage:
    of = pb.StreamPart(index=index, frame_bytes=frame_bytes, offset=offset, tier=tier)
    return pb.StreamMessage(request=request, part=of)


def cancel(request: int) -> pb.StreamMessage:
    return pb.StreamMessage(request=request, cancel=True)


def finish(request: int, frames: int) -> pb.StreamMessage:
    return pb.StreamMessage(request=request, finish=frames)


def done(request: int, frames: int) -> pb.StreamMessage:
    return pb.StreamMessage(request=request, done=frames)


def stored(request: int, outcomes: bytes) -> pb.StreamMessage:
    """Return the reply to a put of frames with these *outcomes*."""
    answer = pb.PutResponse(outcomes=outcomes, reasons=[""] * len(outcomes))
    return pb.StreamMessage(request=request, stored=answer)


def failed(request: int, name: str, text: str) -> pb.StreamMessage:
    return pb.StreamMessage(request=request, failed=pb.StreamError(name=name, text=text))


SOON_S = 20.0


class StreamCaller:
    """A stream attached to the session of *terms*."""

    def __init__(self, terms: pb.OpenSessionResponse) -> None:
        host, _, port = terms.bulk_address.rpartition(":")
        link = socket.create_connection((host.removeprefix("tcp://"), int(port)))
        self.wire = FramedSocket(link, "server", time.monotonic, is_encrypted=False)
        self.wire.set_timeout(SOON_S)
        self.send(attach(terms.session_id, terms.attach_token))
        answer, _ = self.receive()
        if answer.HasField("failed"):
            self.close()
            raise bulk.error_of(answer.failed)
        assert answer == pb.StreamMessage(ready=True)

    def send(self, message: pb.StreamMessage, payload: bytes = b"") -> None:
        send(self.wire, message, payload)

    def receive(self) -> Sent:
        return receive(self.wire)

    def is_refused(self, text: str) -> bool:
        """Whether the next message is an error with *text* in its name or text."""
        answer, _ = self.receive()
        error = f"{answer.failed.name}: {answer.failed.text}"
        assert text in error, error
        return answer.request == 1 and answer.HasField("failed")

    def is_hung_up_on(self) -> bool:
        """Whether the server hangs up."""
        with pytest.raises(TierUnavailableError):
            self.wire.receive()
        return True

    def close(self) -> None:
        self.wire.close()
