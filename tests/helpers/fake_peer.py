"""A fake peer of a server under test with controlled replies; a thread for each stream."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from helpers.stream_messages import Sent, done, failed, kind, part, ready, receive, send

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import parse_header
from kvstore.proto.framing import FramedSocket
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.peers import Peers
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters

PATIENT = Limits(peer_timeout_ms=20_000)
M = TypeVar("M", pb.OpenPeerResponse, pb.StreamAttach)
Message = Sent
Lie = Callable[[Message], Iterable[Message]]
"""Returns what is sent instead of a correct message: others or none; an error hangs up."""


def peer_session(where: str, certificate: bytes = b"") -> pb.OpenPeerResponse:
    """Return a session at *where*, tcp://host:port."""
    return pb.OpenPeerResponse(
        server=pb.Server(boot_id=1),
        bulk_address=where,
        bulk_certificate=certificate,
        session_id=7,
        attach_token=bytes(16),
        heartbeat_ms=60_000,
        max_frame_bytes=1 << 28,
        max_batch_chunks=4096,
    )


def other(message: M, **fields: Any) -> M:
    """Return *message* with other *fields*."""
    found = type(message)()
    found.CopyFrom(message)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


class FakePeer:
    """A peer with *frames* whose replies pass through *lie*. ``dial`` replaces that of gRPC."""

    def __init__(self, frames: Mapping[ChunkKey, Bytes], lie: Lie | None = None) -> None:
        self.lie: Lie = lie or (lambda message: [message])
        self.finds = 0
        self.dials = 0
        self._frames = dict(frames)
        self._infos = {key: parse_header(frame).info() for key, frame in frames.items()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._wires: list[FramedSocket] = []
        self._threads = [threading.Thread(target=self._run, name="fake-peer")]
        self._threads[0].start()

    def dial(self, address: str, node_id: str, within_s: float) -> pb.OpenPeerResponse:
        self.dials += 1
        where = f"tcp://127.0.0.1:{self._port}"
        return peer_session(where)

    def _run(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            wire = FramedSocket(link, "server", time.monotonic, is_encrypted=False)
            self._wires.append(wire)
            self._threads.append(threading.Thread(target=self._serve, args=(wire,)))
            self._threads[-1].start()

    def _serve(self, wire: FramedSocket) -> None:
        wire.set_timeout(3600.0, math.inf)
        try:
            while True:
                for reply in self._replies(receive(wire)[0]):
                    for message, data in self.lie(reply):
                        send(wire, message, data)
        except KVStoreError:
            wire.close()

    def _replies(self, message: pb.StreamMessage) -> list[Message]:
        number = message.request
        if message.HasField("attach"):
            return [(ready(number), b"")]
        if message.HasField("find"):
            self.finds += 1
            found = bulk.found_rows(map(self._infos.get, bulk.keys_of(message.find, 4096)))
            return [(pb.StreamMessage(request=number, found=found), b"")]
        if message.HasField("get"):
            return self._read(number, message.get)
        return []

    def _read(self, number: int, request: pb.GetRequest) -> list[Message]:
        keys = bulk.keys_of(request, 4096)
        found: list[Message] = []
        for span in request.ranges:
            frame = self._frames.get(keys[span.index])
            if frame is None:
                return [*found, (done(number, span.index), b"")]
            data, size = frame[span.start : span.stop].tobytes(), len(frame)
            for start in range(0, len(data), bulk.MAX_PAYLOAD_BYTES):
                message = part(number, size, span.start + start, span.index, "cpu")
                found.append((message, data[start : start + bulk.MAX_PAYLOAD_BYTES]))
        return [*found, (done(number, len(request.ranges)), b"")]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for wire in self._wires:
            wire.hang_up()
        for thread in self._threads[1:]:
            thread.join()


@contextmanager
def connected(
    *fakes: FakePeer,
    counters: Counters | None = None,
    clock: Callable[[], float] = time.monotonic,
    limits: Limits = PATIENT,
) -> Iterator[Peers]:
    """Yield a server's Peers connected to *fakes*; all are closed at the end."""
    dials = {f"127.0.0.1:{number}": fake.dial for number, fake in enumerate(fakes, 1)}
    with ExitStack() as stack:
        for fake in fakes:
            stack.callback(fake.close)
        peers = Peers(
            tuple(dials), limits, lambda *call: dials[call[0]](*call), counters or Counters(), clock
        )
        stack.callback(peers.close)
        yield peers


def is_part(message: Message) -> bool:
    return kind(message[0]) == "part"


def is_found(message: Message) -> bool:
    """Whether *message* is the reply of a find with a stored chunk."""
    return any(message[0].found.rows)


def refusal(request: int) -> Message:
    """Return the reply of an overloaded peer."""
    return failed(request, "QuotaExceededError", "busy"), b""
