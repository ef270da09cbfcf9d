"""ZeroMQ's protocol by hand: understood by libzmq, and nothing that comes over it is believed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvstore.proto.errors import DeadlineError, InvalidRequestError, TierUnavailableError
from kvstore.server.cluster.zmtp_wire import MAX_SMALL_BYTES, ZmtpWire

MIB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
READY = b"\x04" + bytes([len(READY) - 2]) + READY[2:]
PING = b"\x04\x09\x04PING\x00\x64me"
PONG = b"\x04\x07\x04PONGme"


def soon() -> float:
    return time.monotonic() + 20.0


class Far:
    """The other end: it says what a test has it say."""

    def __init__(self, path: Path) -> None:
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen()
        self.wire = ZmtpWire(f"ipc://{path}", time.monotonic)
        self.end, _ = self._door.accept()
        self.end.settimeout(20)

    def greet(self) -> None:
        self.end.sendall(GREETING + READY)

    def hears(self, count: int) -> bytes:
        heard = b""
        while len(heard) < count:
            heard += self.end.recv(count - len(heard)) or pytest.fail(f"hung up after {heard!r}")
        return heard

    def close(self) -> None:
        self.wire.close()
        self.end.close()
        self._door.close()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    with closing(Far(tmp_path / "wire")) as one:
        yield one


def test_libzmq_and_it_tell_each_other_messages_of_one_frame_and_two() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    payload = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    try:
        with closing(ZmtpWire(f"tcp://127.0.0.1:{port}", time.monotonic)) as wire:
            wire.send([b"hello"])
            wire.send([b"head", payload.tobytes()[:70_000]])
            with pytest.raises(DeadlineError):
                wire.receive(time.monotonic() + 0.3)  # by then both are sent
            who, *frames = router.recv_multipart()
            assert frames == [b"hello"]
            assert router.recv_multipart() == [who, b"head", payload.tobytes()[:70_000]]
            for sent in ([b"a"], [b"b", b""], [b"c", payload], [b"d"]):
                router.send_multipart([who, *sent])
            out = np.zeros(MIB, np.uint8)
            assert wire.receive(soon()) == (b"a", None)
            assert wire.receive(soon()) == (b"b", 0)
            assert wire.receive(soon()) == (b"c", MIB)
            for start in range(0, MIB, 300_000):  # in pieces, where they belong
                wire.fill(out[start : start + 300_000], soon())
            assert np.array_equal(out, payload)
            assert wire.receive(soon()) == (b"d", None)
            assert wire.tend()
    finally:
        router.close(0)
        context.term()


def test_messages_that_come_byte_by_byte_are_the_same(far: Far) -> None:
    far.wire.send([b"asked"])
    said = GREETING + READY + PING + b"\x01\x02hi\x02" + (300).to_bytes(8, "big") + bytes(300)

    def say() -> None:
        for byte in said:
            far.end.sendall(bytes([byte]))

    slow = threading.Thread(target=say)
    slow.start()
    assert far.wire.receive(soon()) == (b"hi", 300)
    out = np.ones(300, np.uint8)
    far.wire.fill(out, soon())
    slow.join()
    assert not out.any()
    assert far.hears(64)[:10] == GREETING[:10]
    ready = READY.replace(b"ROUTER", b"DEALER")
    assert far.hears(len(ready) + 7 + len(PONG)) == ready + b"\x00\x05asked" + PONG


def test_an_idle_one_answers_heartbeats_and_sees_who_has_hung_up(far: Far) -> None:
    far.greet()
    far.end.sendall(b"\x00\x02hi")
    assert far.wire.receive(soon()) == (b"hi", None)
    far.hears(64 + 2 + 28)  # the greeting, and that it is ready
    far.end.sendall(PING)
    assert far.wire.tend()
    assert far.hears(len(PONG)) == PONG
    far.end.close()
    assert not far.wire.tend()


def test_one_that_is_told_something_unasked_is_not_used_again(far: Far) -> None:
    far.greet()
    far.end.sendall(b"\x00\x02hi")
    assert far.wire.receive(soon()) == (b"hi", None)
    far.end.sendall(b"\x00\x02ho")
    assert not far.wire.tend()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n".ljust(64),
        GREETING.replace(b"NULL", b"CURV"),
        GREETING.replace(b"\x7f\x03", b"\x7f\x01"),
        GREETING + b"\x00\x02hi",
        GREETING + READY + b"\x02" + (1 << 62).to_bytes(8, "big"),
        GREETING + READY + b"\x02" + (MAX_SMALL_BYTES + 1).to_bytes(8, "big"),
        GREETING + READY + b"\x01\x02hi\x01\x00\x00\x00",
        GREETING + READY + b"\x01\x02hi\x02" + (1 << 62).to_bytes(8, "big"),
        GREETING + READY + b"\x01\x02hi" + PING,
    ],
)
def test_what_is_no_message_of_the_bulk_channel_is_refused(far: Far, said: bytes) -> None:
    far.wire.send([b"asked"])
    far.end.sendall(said)
    with pytest.raises(InvalidRequestError):
        far.wire.receive(soon())


def test_more_of_a_payload_than_was_said_is_not_taken(far: Far) -> None:
    far.greet()
    far.end.sendall(b"\x01\x02hi\x00\x03abc")
    assert far.wire.receive(soon()) == (b"hi", 3)
    with pytest.raises(InvalidRequestError):
        far.wire.fill(np.zeros(4, np.uint8), soon())
    with pytest.raises(InvalidRequestError):
        far.wire.receive(soon())


def test_who_hangs_up_or_is_not_there_is_unavailable(far: Far, tmp_path: Path) -> None:
    far.greet()
    far.end.sendall(b"\x01\x02hi\x00\x09abc")
    assert far.wire.receive(soon()) == (b"hi", 9)
    far.end.close()
    with pytest.raises(TierUnavailableError):
        far.wire.fill(np.zeros(9, np.uint8), soon())
    with pytest.raises(TierUnavailableError):
        ZmtpWire(f"ipc://{tmp_path}/none", time.monotonic)
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with (
            closing(ZmtpWire(address, time.monotonic)) as wire,
            pytest.raises(TierUnavailableError),
        ):
            wire.receive(soon())


def test_who_does_not_read_is_not_sent_without_end(far: Far) -> None:
    far.greet()
    with pytest.raises(DeadlineError):
        far.wire.receive(time.monotonic())

    def send_on() -> None:
        for _ in range(64):
            far.wire.send([b"head", bytes(MIB)])

    with pytest.raises(TierUnavailableError, match="does not read"):
        send_on()
