"""A peer of a server under test that answers as it likes: a ROUTER socket in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import zmq

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk import Attach, Attached, Done, Failed, Find, Get, Part
from kvstore.proto.frame import parse_header
from kvstore.proto.peer_words import pack_found, unpack_wanted
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.peer_dial import LetIn
from kvstore.server.cluster.peer_link import PeerTerms

Message = tuple[bulk.Word, bytes | None]
Lie = Callable[[Message], list[Message]]
"""What is sent instead of one right message: another, several, none."""


class FakePeer:
    """Has *frames*, and sends what *lie* makes of its answers. ``dial`` stands in for gRPC's."""

    def __init__(self, frames: Mapping[ChunkKey, Bytes], lie: Lie | None = None) -> None:
        self.lie: Lie = lie or (lambda message: [message])
        self.finds = 0
        self.dials = 0
        self._frames = dict(frames)
        self._infos = {key: parse_header(frame).info() for key, frame in frames.items()}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-peer")
        self._thread.start()

    def dial(self, address: str, node_id: str, within_s: float) -> LetIn:
        """Let anybody in."""
        self.dials += 1
        where = f"tcp://127.0.0.1:{self._port}"
        return LetIn(1, PeerTerms(where, b"", 7, bytes(16), 60_000, 1 << 28, 4096))

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(20):
                continue
            identity, *frames = self._router.recv_multipart()
            payload = frames[1] if len(frames) == 2 else None
            word = bulk.unpack(frames[0], None if payload is None else len(payload))
            for answer in self._answers(word, payload or b""):
                for header, data in self.lie(answer):
                    parts = [identity, bulk.pack(header), *([] if data is None else [data])]
                    self._router.send_multipart(parts)

    def _answers(self, word: bulk.Word, payload: bytes) -> list[Message]:
        if isinstance(word, Attach):
            return [(Attached(word.request), None)]
        if isinstance(word, Find):
            self.finds += 1
            keys = unpack_wanted(payload, 4096)
            return [(Done(word.request, 0), pack_found(map(self._infos.get, keys)))]
        if isinstance(word, Get):
            return self._frame(word, payload)
        return []

    def _frame(self, word: Get, payload: bytes) -> list[Message]:
        wanted, (span,) = bulk.unpack_ranges(payload)
        (key,) = unpack_wanted(wanted, 1)
        frame = self._frames.get(key)
        if frame is None:
            return [(Done(word.request, 0), b"")]
        data, size = frame[span.start : span.stop].tobytes(), len(frame)
        at = range(0, len(data), bulk.MAX_PAYLOAD_BYTES)
        found: list[Message] = []
        for start in at:
            part = Part(word.request, size, span.start + start, 0, bulk.tier_bytes("cpu"))
            found.append((part, data[start : start + bulk.MAX_PAYLOAD_BYTES]))
        return [*found, (Done(word.request, 1), b"")]

    def close(self) -> None:
        """End the thread and the socket."""
        self._stopping.set()
        self._thread.join()
        self._router.close(0)
        self._context.term()


def is_part(message: Message) -> bool:
    """Whether *message* carries bytes of a frame."""
    return isinstance(message[0], Part)


def is_found(message: Message) -> bool:
    """Whether *message* answers a find, of a chunk that is there."""
    return isinstance(message[0], Done) and bool(message[1]) and message[1] != b"\0\0"


def refusal(request: int) -> Message:
    """Return what a peer says that has too much to do."""
    return Failed(request), bulk.pack_failure("QuotaExceededError", "busy")
