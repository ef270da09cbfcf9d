"""Calls over the Unix socket as their caller sees them: silence, lies, late answers, and gRPC."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, assert_reads, store
from helpers.socket_peer import Listener

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.session import Session
from kvstore.client.transports.unix_rpc import Sent, UnixRpc
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.unix_socket import (
    HEADER_BYTES,
    MAX_PACKET_BYTES,
    Op,
    Packet,
    Reply,
    Request,
    pack_answer,
    pack_failure,
)

Answers = Sequence[Packet]
"""Packets to send, and after them nothing."""
HANG_UP = b""
"""Among answers: to send no more of them, and hang up."""

SOON_MS = 100
"""Of calls that nobody answers."""
BY_SOCKET = 99
"""Chunks that a Lookup finds by the false server's word. gRPC's server finds two."""


def lookup_answer(ready: int = BY_SOCKET) -> list[Packet]:
    return pack_answer(pb.LookupResponse(ready=ready))


class FalseServer:
    """Listens on the socket. *answer* says what each call gets, *join* what who joins is told.

    It proves itself with *token*. ``heard`` are the packets that came, ``calls`` those of calls,
    ``joins`` of those who joined or tried to, ``ended`` counts connections that the other side
    closed, ``answered`` calls whose answer is on its way.
    """

    def __init__(
        self,
        path: Path,
        token: bytes,
        answer: Callable[[bytes], Answers],
        join: Callable[[], Answers] = lambda: [unix_socket.pack_reply(Reply.ok)],
    ) -> None:
        self.token = token
        self.answer = answer
        self.join = join
        self.heard: list[bytes] = []
        self.calls: list[bytes] = []
        self.joins: list[bytes] = []
        self.ended = self.answered = 0
        self._listener = Listener(path, self._serve)

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while message := peer.recv(MAX_PACKET_BYTES):
                self.heard.append(message)
                request = Request.unpack(message[:HEADER_BYTES])
                if request.op is Op.hello:
                    nonces = (request.token, b"s" * unix_socket.NONCE_BYTES)
                    proven = unix_socket.proof(self.token, Op.hello, request.arg, nonces)
                    peer.send(unix_socket.pack_greeting(nonces[1], proven))
                    continue
                is_call = request.op is Op.call
                (self.calls if is_call else self.joins).append(message)
                for packet in self.answer(message) if is_call else self.join():
                    if packet is HANG_UP:
                        return
                    peer.send(packet)
                self.answered += is_call
            self.ended += 1

    def close(self) -> None:
        """Hang up on everybody."""
        self._listener.close()


class Setting:
    """A link to a false server, over a connection to a true one that holds two chunks."""

    def __init__(self, server: LocalServer, folder: Path) -> None:
        self.ahead_s = 0.0
        """Time that a test lets pass."""
        self.connection = Connection(
            server.address, 60_000, lambda: time.monotonic() + self.ahead_s
        )
        self.session = Session(
            self.connection, SMALL, ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS)
        )
        self.path = folder / "false.sock"
        self.session.terms.socket_path = str(self.path)
        self.link = UnixRpc(self.session.terms, self.connection)
        self.keys = store(server.connect("grpc"), 1, 2)
        self.false: FalseServer | None = None

    def serve(
        self, answer: Callable[[bytes], Answers], join: Callable[[], Answers] | None = None
    ) -> FalseServer:
        """Start the false server."""
        token = self.session.terms.attach_token
        self.false = FalseServer(self.path, token, answer, *([join] if join else []))
        return self.false

    def serve_one(self) -> FalseServer:
        """Start it, and have a call answered: the next has a connection, however short its time.

        Set ``answer`` for those that follow.
        """
        false = self.serve(lambda _: lookup_answer())
        assert self.look_up() == BY_SOCKET
        return false

    def request(self) -> pb.LookupRequest:
        """Return a question for the two chunks."""
        digests = b"".join(key[16:] for key in self.keys)
        return pb.LookupRequest(session_id=self.session.terms.session_id, digests=digests)

    def look_up(self, deadline_ms: int = DEADLINE_MS) -> int:
        """Return how many chunks are ready."""
        return self.link.call("Lookup", self.request(), deadline_ms, pb.LookupResponse).ready

    def sent(
        self, request: pb.LookupRequest, deadline_ms: int, queue: deque[Sent] | None = None
    ) -> Callable[[], pb.LookupResponse]:
        """Send a Lookup; the returned function waits for its answer."""
        return partial(self.link.wait, self.link.send("Lookup", request, deadline_ms, queue))

    def get(self, deadline_ms: int = DEADLINE_MS) -> Iterator[pb.GetResponse]:
        """Start a get of the two chunks."""
        lookup = self.request()
        request = pb.GetRequest(session_id=lookup.session_id, digests=lookup.digests)
        return self.link.stream("Get", request, deadline_ms)

    def close(self) -> None:
        """End everything, the false server last."""
        self.link.links.close()
        self.session.close()
        self.connection.close()
        if self.false is not None:
            self.false.close()


@pytest.fixture
def setting(server: LocalServer, tmp_path: Path) -> Iterator[Setting]:
    with closing(Setting(server, tmp_path)) as setting:
        yield setting


# --- answers


def test_calls_one_after_another_share_a_connection_and_answers_wait_to_be_looked_at(
    setting: Setting,
) -> None:
    false = setting.serve(lambda _: lookup_answer())
    assert [setting.look_up() for _ in range(5)] == [BY_SOCKET] * 5
    wait = setting.sent(setting.request(), DEADLINE_MS)
    assert eventually(lambda: false.answered == 6)
    setting.ahead_s = DEADLINE_MS
    assert wait().ready == BY_SOCKET, "it came in time"
    assert (len(false.calls), len(false.joins)) == (6, 1)
    assert setting.session.terms.attach_token not in b"".join(false.heard)


def numbered(number: int) -> pb.LookupRequest:
    return pb.LookupRequest(session_id=1, digests=b"number" + number.to_bytes(2, "big"))


def number_of(message: bytes) -> list[Packet]:
    return lookup_answer(int.from_bytes(message[-2:], "big"))


def test_calls_in_a_queue_share_a_connection_and_each_has_its_own_answer(setting: Setting) -> None:
    failure = [pack_failure("LeaseExpiredError", "gone")]
    false = setting.serve(lambda message: failure if message[-1] == 5 else number_of(message))
    queue = deque[Sent]()
    waits = [setting.sent(numbered(n), DEADLINE_MS, queue) for n in range(6)]
    assert eventually(lambda: len(false.calls) == 6)
    assert waits[0]().ready == 0
    other = numbered(9)  # on a connection of its own, as answers are still to come
    assert setting.link.call("Lookup", other, DEADLINE_MS, pb.LookupResponse).ready == 9
    with pytest.raises(AssertionError, match="in call order"):
        waits[2]()
    assert [wait().ready for wait in waits[1:5]] == [1, 2, 3, 4]
    with pytest.raises(LeaseExpiredError, match="gone"):
        waits[5]()
    assert len(false.joins) == 2
    assert setting.sent(numbered(7), DEADLINE_MS, queue)().ready == 7
    assert setting.sent(numbered(8), DEADLINE_MS)().ready == 8
    assert len(false.joins) == 2  # all answered, it is anybody's


def test_queue_that_lost_its_connection_goes_on_by_grpc_and_a_new_one(
    setting: Setting,
) -> None:
    false = setting.serve(lambda message: [HANG_UP])
    queue = deque[Sent]()
    waits = [setting.sent(setting.request(), DEADLINE_MS, queue) for _ in range(3)]
    assert [wait().ready for wait in waits] == [2, 2, 2]  # the true server's word
    false.answer = number_of
    waits = [setting.sent(numbered(n), DEADLINE_MS, queue) for n in (5, 6)]
    assert [wait().ready for wait in waits] == [5, 6]


def test_silence_ends_all_calls_of_a_queue_after_one_deadline(setting: Setting) -> None:
    false = setting.serve_one()
    false.answer = lambda _: []
    queue = deque[Sent]()
    waits = [setting.sent(setting.request(), SOON_MS, queue) for _ in range(3)]
    with pytest.raises(DeadlineError):
        waits[0]()
    for wait in waits[1:]:
        with pytest.raises(TierUnavailableError, match="did not answer; retried in"):
            wait()
    assert eventually(lambda: false.ended == 1)


def test_error_of_a_call_is_the_server_s_and_the_connection_is_kept(setting: Setting) -> None:
    answers = [
        [pack_failure("LeaseExpiredError", "gone")],
        [pack_failure("DeadlineError", "too late")],
        [unix_socket.pack_reply(Reply.denied)],
    ]
    false = setting.serve(lambda _: answers.pop(0) if answers else lookup_answer())
    with pytest.raises(LeaseExpiredError, match=r"^gone$"):
        setting.look_up()
    with pytest.raises(DeadlineError, match="too late"):  # which shuts no gate
        setting.look_up()
    with pytest.raises(KVStoreError, match="the server refused the call: denied"):
        list(setting.get())
    assert setting.look_up() == BY_SOCKET
    assert len(false.joins) == 1


def test_stream_yields_its_messages_and_keeps_its_connection_unless_it_is_given_up(
    setting: Setting,
) -> None:
    replies = [pb.GetResponse(index=n, tier="x" * n * 70_000) for n in range(4)]
    packets = [packet for reply in replies for packet in pack_answer(reply, more=True)]
    false = setting.serve(lambda _: [*packets, *pack_answer(None)])
    assert list(setting.get()) == replies
    assert list(setting.get()) == replies
    assert (len(false.joins), false.ended) == (1, 0)
    first = pack_answer(replies[0], more=True)
    false.answer = lambda message: first if message[8] == 2 else lookup_answer()
    with closing(setting.get()) as begun:  # type: ignore[type-var]
        assert next(begun) == replies[0]
    assert eventually(lambda: false.ended == 1)
    assert setting.look_up() == BY_SOCKET
    assert len(false.joins) == 2


# --- silence


def test_silent_server_costs_one_deadline_and_shuts_the_gate(setting: Setting) -> None:
    false = setting.serve_one()
    false.answer = lambda _: []
    with pytest.raises(DeadlineError, match="did not answer in time"):
        setting.look_up(SOON_MS)
    for ask in (setting.look_up, lambda: list(setting.get())):
        with pytest.raises(TierUnavailableError, match="did not answer; retried in"):
            ask()
    with pytest.raises(TierUnavailableError, match="did not answer; retried in"):
        setting.sent(setting.request(), DEADLINE_MS)
    assert eventually(lambda: len(false.calls) == 2)  # the first had an answer
    setting.ahead_s = 61.0
    false.answer = lambda _: lookup_answer()
    assert setting.look_up() == BY_SOCKET


@pytest.mark.parametrize("kind", ["call", "stream"])
def test_late_answer_is_never_taken_for_the_next_call_s(setting: Setting, kind: str) -> None:
    is_late = threading.Event()

    def answer(_: bytes) -> Answers:
        if len(false.calls) == 2:
            assert is_late.wait(20)
            return (
                pack_answer(pb.GetResponse(), more=True) if kind == "stream" else lookup_answer(1)
            )
        return lookup_answer(2)

    false = setting.serve_one()
    false.answer = answer
    with pytest.raises(DeadlineError):
        list(setting.get(SOON_MS)) if kind == "stream" else setting.look_up(SOON_MS)
    assert eventually(lambda: len(false.calls) == 2)
    setting.ahead_s = 61.0
    is_late.set()
    assert [setting.look_up() for _ in range(3)] == [2, 2, 2]
    assert len(false.joins) == 2


# --- through gRPC instead


def test_call_that_gets_no_answer_goes_through_grpc_on_no_connection_of_the_old(
    setting: Setting,
) -> None:
    part = unix_socket.pack_reply(Reply.part)
    no_answers: list[Answers] = [
        [HANG_UP],
        [b"x"],
        [bytes(32)],
        [bytes(MAX_PACKET_BYTES + 1)],
        pack_answer(pb.LookupResponse(), more=True),
        [part] * 40,
        [part, HANG_UP],
    ]
    false = setting.serve(lambda _: no_answers[len(false.calls) - 1])
    for number in range(1, len(no_answers) + 1):
        assert setting.look_up() == 2
        assert (len(false.calls), len(false.joins)) == (number, number)
    false.answer = lambda _: [unix_socket.pack_reply(Reply.ok) + b"\xff\xff"]
    with pytest.raises(KVStoreError, match="the server's reply is not a LookupResponse"):
        setting.look_up()


def test_stream_that_breaks_goes_by_grpc_or_in_the_middle_is_unavailable(
    setting: Setting,
) -> None:
    false = setting.serve(lambda _: [HANG_UP])
    assert [reply.index for reply in setting.get()] == [0, 1], "through gRPC, before the first"
    false.answer = lambda _: [*pack_answer(pb.GetResponse(index=5), more=True), HANG_UP]
    replies = setting.get()
    assert next(replies).index == 5
    with pytest.raises(TierUnavailableError, match="tier 'server': hung up"):
        next(replies)


def test_what_the_socket_does_not_carry_goes_through_grpc(setting: Setting) -> None:
    false = setting.serve(lambda _: lookup_answer())
    assert setting.link.call("Status", pb.StatusRequest(), DEADLINE_MS, pb.StatusResponse).version
    pages = setting.link.stream(
        "List", pb.ListRequest(session_id=setting.session.terms.session_id), DEADLINE_MS
    )
    assert sum(len(page.chunks) for page in pages) == 2
    assert false.joins == []
    request = setting.request()
    request.digests *= MAX_PACKET_BYTES // len(request.digests)
    with pytest.raises(InvalidRequestError, match="digests"):
        setting.link.call("Lookup", request, DEADLINE_MS, pb.LookupResponse)
    assert false.calls == []


def test_who_may_not_join_calls_through_grpc_and_tries_again_later(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setting.look_up() == 2, "nobody listens"
    monkeypatch.setattr(setting.link.links, "_dial_s", SOON_MS / 1000)
    ok = unix_socket.pack_reply(Reply.ok)
    said: list[Answers] = [
        [unix_socket.pack_reply(Reply.invalid)],
        [unix_socket.pack_reply(Reply.denied)],
        [b"rubbish"],
        [],
        [HANG_UP],
        [ok],
    ]
    false = setting.serve(lambda _: lookup_answer(), lambda: said[len(false.joins) - 1])
    for number in range(1, len(said)):
        setting.ahead_s += 6.0
        assert [setting.look_up(), setting.look_up()] == [2, 2]
        assert eventually(lambda: len(false.joins) == number)  # noqa: B023
        assert eventually(lambda: not setting.link.links._is_in_thread)
    setting.ahead_s += 6.0
    assert setting.look_up() == 2, "one is connected beside it"
    assert eventually(lambda: setting.look_up() == BY_SOCKET)
    assert len(false.joins) == len(said)


def test_who_listens_without_the_token_of_the_session_hears_nothing_but_hello(
    setting: Setting,
) -> None:
    false = setting.serve(lambda _: lookup_answer())
    false.token = bytes(16)
    assert setting.look_up() == 2  # through gRPC
    assert eventually(lambda: false.ended == 1)
    assert [Request.unpack(message).op for message in false.heard] == [Op.hello]


def test_who_listens_in_another_process_than_the_session_s_server_hears_nothing(
    setting: Setting,
) -> None:
    false = setting.serve(lambda _: lookup_answer())
    setting.session.terms.server_pid = 1
    assert setting.look_up() == 2
    assert eventually(lambda: false.ended == 1)
    assert false.heard == []
    setting.session.terms.pid_namespace += 1  # where the number says nothing
    setting.link = UnixRpc(setting.session.terms, setting.connection)
    assert setting.look_up() == BY_SOCKET


# --- closing


def test_closing_wakes_calls_in_flight_which_go_on_through_grpc_as_later_ones_do(
    setting: Setting,
) -> None:
    false = setting.serve(lambda _: [])
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(setting.look_up) for _ in range(3)]
        stream = pool.submit(lambda: [reply.index for reply in setting.get()])
        assert eventually(lambda: len(false.calls) == 4)
        setting.link.links.close()
        assert [call.result() for call in calls] == [2] * 3
        assert stream.result() == [0, 1]
    assert eventually(lambda: false.ended == 4)
    setting.link.links.close()
    assert not setting.link.links.busy | set(setting.link.links.idle)
    assert setting.look_up() == 2
    assert [reply.index for reply in setting.get()] == [0, 1]
    assert (len(false.calls), len(false.joins)) == (4, 4)


# --- with a true server


def test_calls_of_a_client_do_not_go_through_grpc(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Client = server.connect("shm")
    keys = store(client, 1, 3)

    def refuse(*_: object) -> None:
        raise AssertionError

    for verb in ("call", "stream"):
        monkeypatch.setattr(client._link.connection, verb, refuse)
    with client.lease(keys=keys) as lease:
        assert len(lease.get()) == 3
    store(client, 2, 3)
    assert client.lookup(keys=keys).ready == 3
    monkeypatch.undo()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_call_that_is_interrupted_ends_its_connection(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = setting.serve(lambda _: lookup_answer())
    with monkeypatch.context() as patch:
        patch.setattr(UnixRpc, "_receive", _interrupted)
        for ask in (setting.look_up, lambda: list(setting.get())):
            with pytest.raises(KeyboardInterrupt):
                ask()
    assert not setting.link.links.busy | set(setting.link.links.idle)
    assert setting.look_up() == BY_SOCKET
    assert len(false.joins) == 3


def attached_sessions(server: LocalServer) -> list[int]:
    sessions = list(server.node.sessions.by_id.values())
    return [session.session_id for session in sessions if session.is_attached]


def test_threads_whose_session_is_replaced_under_their_calls_notice_nothing(
    server: LocalServer,
) -> None:
    client = server.connect("shm")
    keys = store(client, 1, 9)
    done = threading.Event()
    calls = [0] * 8

    def work(seed: int) -> None:
        while not done.is_set():
            assert client.lookup(keys=keys[: seed + 1]).ready == seed + 1
            calls[seed] += 1

    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, seed) for seed in range(8)]
        try:
            for turn in range(5):
                # A call that loses its session twice may fail.
                assert eventually(lambda: min(calls) >= 20 * (turn + 1))  # noqa: B023
                (session_id,) = attached_sessions(server)
                assert server.node.sessions.close(session_id)
                calls[:] = [20 * (turn + 1)] * 8
        finally:
            done.set()
        for worker in workers:
            worker.result()
    assert_reads(client, keys)
