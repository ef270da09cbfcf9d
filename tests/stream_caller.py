"""A caller at the other end of a stream, with every message of its own making."""

from __future__ import annotations

import socket
import time

import pytest

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
        self.say(bulk.Attach(0, terms.session_id, terms.attach_token))
        said, payload = self.hear()
        if isinstance(said, bulk.Failed):
            self.close()
            raise bulk.unpack_failure(payload)
        assert said == bulk.Attached(0)

    def say(self, word: bulk.Word, payload: bytes | None = None) -> None:
        """Send a message."""
        self.wire.send(word, payload)

    def hear(self) -> tuple[bulk.Word, bytes]:
        """Return the next message."""
        word, size_bytes = self.wire.receive()
        return word, self.wire.take(size_bytes)

    def is_refused(self, message: str) -> bool:
        """Whether the next message is an error that has *message* in it."""
        word, payload = self.hear()
        assert message in payload.decode(), payload
        return word == bulk.Failed(1)

    def is_hung_up_on(self) -> bool:
        """Whether nothing more comes."""
        with pytest.raises(TierUnavailableError):
            self.wire.receive()
        return True

    def close(self) -> None:
        """Hang up."""
        self.wire.close()
