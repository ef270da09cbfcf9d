"""A fill on one line: its deadline and its silence, whatever the other end takes and sends."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_process import TlsFiles

from kvstore.tiers.redis_fill import MAX_FILL_WINDOW, Fill, FillTalk, Step
from kvstore.tiers.redis_lines import NEAR_S, Lines
from kvstore.tiers.redis_open import LineOptions
from kvstore.tiers.redis_url import Login
from kvstore.tiers.redis_wire import converse

SILENCE_S = 0.4
LATE_S = 0.5
"""What a busy machine may take."""
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Our end, which does not block, and the server's, with small buffers between them."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
    ours.settimeout(0)
    with closing(ours), closing(theirs):
        yield ours, theirs


def carried_on(talk: FillTalk, deadline_s: float) -> float:
    """Carry on as a link does; return how long that took."""
    started = time.monotonic()
    talk.run(started + deadline_s, SILENCE_S, time.monotonic)
    if not talk.is_done and talk.error is None:
        converse([talk], started + deadline_s, SILENCE_S)
    return time.monotonic() - started


def fill_of(size_bytes: int) -> Fill:
    step = Step(b"ask", b"$%d\r\n" % size_bytes, size_bytes)
    return Fill([step], [memoryview(bytearray(size_bytes))])


def test_silence_in_the_midst_of_a_slice_is_noticed_soon_after(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(b"$1000\r\nhalf")
    talk = FillTalk(ours, fill_of(1000))
    assert SILENCE_S <= carried_on(talk, 60) < 1.25 * SILENCE_S + LATE_S
    assert "no answer in time" in str(talk.error)
    assert ours.gettimeout() == 0


def test_a_server_that_trickles_is_given_up_at_the_deadline(ends: Ends) -> None:
    ours, theirs = ends
    is_over = threading.Event()

    def trickle() -> None:
        theirs.sendall(b"$1000\r\n")
        while not is_over.wait(0.05):
            theirs.sendall(b".")

    thread = threading.Thread(target=trickle)
    thread.start()
    talk = FillTalk(ours, fill_of(1000))
    assert 1 <= carried_on(talk, 1) < 1 + LATE_S
    is_over.set()
    thread.join()
    assert "no answer in time" in str(talk.error)


@pytest.mark.parametrize("takes_bytes", [0, 2000])
def test_commands_that_are_taken_slowly_or_never_end_at_the_deadline(
    ends: Ends, takes_bytes: int
) -> None:
    ours, theirs = ends
    is_over = threading.Event()

    def take() -> None:
        while not is_over.wait(0.05):
            if takes_bytes:
                theirs.recv(takes_bytes)

    thread = threading.Thread(target=take)
    thread.start()
    talk = FillTalk(ours, Fill([Step(b"E" * 1_000_000, b":1\r\n")], []))
    assert carried_on(talk, 1) < 1 + LATE_S
    is_over.set()
    thread.join()
    assert "no answer in time" in str(talk.error)


def test_who_takes_no_more_until_its_replies_are_taken_is_served(ends: Ends) -> None:
    ours, theirs = ends
    steps = [Step(b"E" * 100_000, b":1\r\n" * 100_000) for _ in range(4)]

    def answer() -> None:
        for step in steps:
            left = len(step.ask)
            while left:
                left -= len(theirs.recv(min(left, 1 << 16)))
            theirs.sendall(step.expected)

    thread = threading.Thread(target=answer)
    thread.start()
    talk = FillTalk(ours, Fill(steps, []))
    carried_on(talk, 60)
    thread.join()
    assert talk.error is None
    assert talk.is_done


def test_what_the_tls_layer_read_ahead_is_taken_before_anybody_waits(tmp_path: Path) -> None:
    files = TlsFiles.make(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    client = ssl.create_default_context(cafile=str(files.ca))
    client.check_hostname = False
    size = 100
    now = [Step(b"now", b":1\r\n")]
    slices = [Step(b"s%d" % at, b"$100\r\n", size) for at in range(3)]
    reply = b"$100\r\n" + bytes(size) + b"\r\n"

    def answer(link: socket.socket) -> None:
        with server.wrap_socket(link, server_side=True) as theirs:
            theirs.recv(100)
            theirs.sendall(b":1\r\n" + reply + reply)  # one record
            theirs.recv(100)
            theirs.sendall(reply)
            theirs.recv(1)

    ours, link = socket.socketpair()
    thread = threading.Thread(target=answer, args=(link,))
    thread.start()
    with client.wrap_socket(ours) as sock:
        sock.settimeout(0)
        first = FillTalk(sock, Fill(now, [], ahead=slices[:2]))
        converse([first], time.monotonic() + 20, 20)
        assert first.is_done
        assert first.asked_ahead == 2
        rooms = [memoryview(bytearray(size)) for _ in slices]
        second = FillTalk(sock, Fill(slices, rooms), asked=2)
        converse([second], time.monotonic() + 20, 20)
        assert second.error is None
        assert second.is_done
    thread.join()


def test_a_server_that_is_far_has_more_on_its_way_and_one_that_proves_near_has_not() -> None:
    lines = Lines(("127.0.0.1", 1), LineOptions(1.0, 4, Login("", ""), 0, None))
    assert lines.slices_ahead(2, MAX_FILL_WINDOW) == 2
    lines.note_first(NEAR_S / 3)
    for _ in range(31):
        lines.note_first(30 * NEAR_S)
    assert lines.slices_ahead(2, MAX_FILL_WINDOW) == 2, "the others waited for a processor"
    lines.note_first(3 * NEAR_S)
    assert lines.slices_ahead(2, MAX_FILL_WINDOW) == 6
    for _ in range(32):
        lines.note_first(30 * NEAR_S)
    assert lines.slices_ahead(2, MAX_FILL_WINDOW) == MAX_FILL_WINDOW
    lines.note_first(NEAR_S / 3)
    assert lines.slices_ahead(2, MAX_FILL_WINDOW) == 2
