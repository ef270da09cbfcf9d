"""A peer that answers a stream as it likes: what is not of the frame is refused, in time."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from contracts.bad_puts import changed
from contracts.chunks import make_frame
from helpers import stream_messages as messages
from helpers.fake_peer import other, peer_session
from helpers.local_server import LocalServer
from helpers.stream_messages import Sent, ready, send

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, InvalidFrameError, TierUnavailableError
from kvstore.proto.framing import FramedSocket
from kvstore.proto.types import ChunkInfo
from kvstore.server.bulk import tcp_server
from kvstore.server.bulk.tcp_server import BulkServer, listen
from kvstore.server.cluster.peer_connections import StreamLink, dial_peer
from kvstore.server.settings.settings import Settings

ServerMaker = Callable[..., LocalServer]
SILENCE_S = 20.0


def reached(terms: pb.OpenPeerResponse) -> StreamLink:
    link = StreamLink(terms, time.monotonic)
    link.connect(SILENCE_S)
    return link


class Liar:
    """Lets one in, and answers its get with *words*, then with silence or by hanging up."""

    def __init__(self, words: list[Sent], *, hangs_up: bool = False) -> None:
        self._words = words
        self._hangs_up = hangs_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.terms = peer_session(address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        link, _ = self._listener.accept()
        with closing(FramedSocket(link, "reader", time.monotonic, is_encrypted=False)) as wire:
            wire.set_timeout(SILENCE_S)
            wire.receive()
            wire.send(ready())
            wire.receive()
            for message, payload in self._words:
                send(wire, message, payload)
            if not self._hangs_up:
                self._ended.wait(SILENCE_S)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
        self._listener.close()


INFO_BYTES = 1000


def part(offset: int, size_bytes: int, **other: int) -> Sent:
    return changed((messages.part(1, INFO_BYTES, offset, 0, "cpu"), bytes(size_bytes)), **other)


def test_parts_that_are_not_of_the_frame_are_refused(info: ChunkInfo) -> None:
    for words in [
        [part(10, 500)],
        [part(0, 500), part(400, 500)],
        [part(0, 1001)],
        [part(0, 0)],
        [part(0, 500, frame_bytes=999)],
        [part(0, 500, index=1)],
        [(messages.part(2, INFO_BYTES, 0), bytes(500))],
        [part(0, 500), (messages.done(1, 1), b"")],
        [(messages.done(2, 1), b"")],
        [(messages.finish(1, 1), b"")],
    ]:
        with closing(Liar(words)) as liar, closing(reached(liar.terms)) as link:
            out = np.zeros(INFO_BYTES, np.uint8)
            with pytest.raises(InvalidFrameError):
                list(link.read(info, out, 0, SILENCE_S))


def test_who_hangs_up_or_falls_silent_costs_no_more_than_the_silence(
    info: ChunkInfo,
) -> None:
    for hangs_up, error in ((True, TierUnavailableError), (False, DeadlineError)):
        with (
            closing(Liar([part(0, 500)], hangs_up=hangs_up)) as liar,
            closing(reached(liar.terms)) as link,
        ):
            out = np.zeros(INFO_BYTES, np.uint8)
            with pytest.raises(error):
                list(link.read(info, out, 0, SILENCE_S if hangs_up else 0.05))
            assert not link.is_open


def test_a_read_ends_when_another_thread_hangs_up(info: ChunkInfo) -> None:
    with closing(Liar([part(0, 500)])) as liar, closing(reached(liar.terms)) as link:
        steps = link.read(info, np.zeros(INFO_BYTES, np.uint8), 0, SILENCE_S)
        assert next(steps) == 500
        link.hang_up()
        with pytest.raises(TierUnavailableError):
            next(steps)


@pytest.fixture
def info() -> ChunkInfo:
    return replace(make_frame(1)[0], size_bytes=INFO_BYTES)


class _Full:
    """A listener of a process that has no descriptor left, the first time it accepts."""

    def __init__(self) -> None:
        self.accepts = 0
        self._listener, self.address = listen("127.0.0.1", 0)
        self.fileno = self._listener.fileno
        self.setblocking = self._listener.setblocking
        self.close = self._listener.close

    def accept(self) -> tuple[socket.socket, object]:
        self.accepts += 1
        if self.accepts == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()


def test_without_a_descriptor_it_listens_again_a_little_later(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")
    assert server.node.bulk is not None
    listener = _Full()
    monkeypatch.setattr(tcp_server, "listen", lambda host, port: (listener, listener.address))
    told = dial_peer(Settings(), server.address, "other", SILENCE_S)
    with closing(BulkServer(Settings(bulk="127.0.0.1:0"), server.node.bulk.service, 64)) as streams:
        reached(other(told, bulk_address=listener.address)).close()
        assert listener.accepts == 2
        assert streams.is_alive()
