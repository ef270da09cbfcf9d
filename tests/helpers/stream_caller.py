"""A caller at the other end of a stream, with every message of its own making."""

from __future__ import annotations

import socket
import time

import pytest
from helpers.stream_messages import Sent, attach, receive, send

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.framing import FramedSocket

SOON_S = 20.0


class StreamCaller:
    """Connected under the session of *terms*, and let in."""

    def __init__(self, terms: pb.OpenSessionResponse) -> None:
        host, _, port = terms.bulk_address.rpartition(":")
        link = socket.create_connection((host.removeprefix("tcp://"), int(port)))
        self.wire = FramedSocket(link, "server", time.monotonic, is_encrypted=False)
        self.wire.set_timeout(SOON_S)
        self.say(attach(terms.session_id, terms.attach_token))
        answer, _ = self.hear()
        if answer.HasField("failed"):
            self.close()
            raise bulk.error_of(answer.failed)
        assert answer == pb.StreamMessage(ready=True)

    def say(self, message: pb.StreamMessage, payload: bytes = b"") -> None:
        """Send a message."""
        send(self.wire, message, payload)

    def hear(self) -> Sent:
        """Return the next message."""
        return receive(self.wire)

    def is_refused(self, text: str) -> bool:
        """Whether the next message is an error that has *text* behind its class's name."""
        answer, _ = self.hear()
        error = f"{answer.failed.name}: {answer.failed.text}"
        assert text in error, error
        return answer.request == 1 and answer.HasField("failed")

    def is_hung_up_on(self) -> bool:
        """Whether nothing more comes."""
        with pytest.raises(TierUnavailableError):
            self.wire.receive()
        return True

    def close(self) -> None:
        """Hang up."""
        self.wire.close()
