"""Timeouts: a call's own bounds all that is done for it, and blames nobody else."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, SMALL, assert_reads, chunks_of, keys_of, store, tokens
from helpers.slow_link import SlowLink
from helpers.tcp_proxy import TcpProxy
from typing_extensions import override

from kvstore.client import Client, ClientOptions, server_link
from kvstore.client.chunk import PlannedChunk
from kvstore.client.chunk_reads import ChunkRequest, read_layers
from kvstore.client.connection import SLACK_S, Connection, Until
from kvstore.client.decode import fresh
from kvstore.client.lookups import look_up
from kvstore.client.options import TransportName
from kvstore.client.planning import PlanTerms
from kvstore.client.server_link import ServerLink
from kvstore.client.session import Session
from kvstore.client.transports.base import PutTerms, ReadPlan, Transport
from kvstore.client.transports.shared_memory import PutPipeline, ShmTransport
from kvstore.client.transports.tcp import BulkTransport
from kvstore.codecs.raw import RawCodec
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkKey, PutOutcome
from kvstore.server.bulk import tcp_server
from kvstore.server.store.writes import Writes

SHORT_S = 0.2
LONG_S = 5.0
"""Long before a client's own deadline."""
LATE = DeadlineError("late")


CALLS: list[Callable[[Client], object]] = [
    lambda client: client.get(tokens(1, 64), timeout=SHORT_S),
    lambda client: client.lookup(tokens(1, 64), timeout=SHORT_S),
    lambda client: client.get_layers(tokens(1, 64), timeout=SHORT_S),
    lambda client: client.get_levelled([ChunkKey(bytes(32))], PlanTerms(SHORT_S)),
]


def test_opening_a_session_takes_no_longer_than_the_call_that_needs_it(silent: str) -> None:
    for call in CALLS:
        with Client(silent, SMALL, ClientOptions("grpc", 16, deadline_ms=60_000)) as client:
            began_s = time.monotonic()
            with pytest.raises(DeadlineError):
                call(client)
            assert time.monotonic() - began_s < LONG_S
    with Client(silent, SMALL, ClientOptions("grpc", 16, deadline_ms=300)) as client:
        began_s = time.monotonic()
        with pytest.raises(DeadlineError):  # however long the put may take
            client.put_chunk_layers([PlannedChunk(ChunkKey(bytes(32)), 16)])
        assert time.monotonic() - began_s < LONG_S


@contextmanager
def asked(
    fails: Callable[[str, int], None] = lambda name, within_ms: None,
) -> Iterator[list[tuple[str, int]]]:
    """Collect which methods are called, and within how many ms; *fails* may raise instead."""
    found: list[tuple[str, int]] = []

    def noted(send: Any) -> Any:
        def sends(self: Connection, name: str, request: Any, deadline_ms: int, *reply: Any) -> Any:
            found.append((name, deadline_ms))
            fails(name, deadline_ms)
            return send(self, name, request, deadline_ms, *reply)

        return sends

    with pytest.MonkeyPatch.context() as patched:
        for verb in ("call", "begin_stream"):
            patched.setattr(Connection, verb, noted(getattr(Connection, verb)))
        yield found


def test_a_lost_session_and_a_wrong_chunk_are_told_within_the_call_that_found_them(
    server: LocalServer,
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 1)
    link = client._link
    transport = link.connected()

    def lost(*_: Any) -> None:
        raise LeaseExpiredError("gone")

    def no_time_left() -> int:
        raise DeadlineError("passed")

    with asked() as calls:
        link.quarantine(transport, keys[0], Until(300).left_ms)
        link.quarantine(transport, keys[0], no_time_left)
        with pytest.raises(LeaseExpiredError):
            link.run(lost, 300)
    assert [name for name, _ in calls] == ["Delete", "Heartbeat"]
    assert max(within_ms for _, within_ms in calls) <= 300


@pytest.mark.parametrize("method", ["Lookup", "Get"], ids=["levelled", "layers"])
def test_a_get_that_lost_its_session_has_one_deadline_for_both_attempts(
    server: LocalServer, method: str
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 1)

    def lost_once(_: str, __: int) -> None:
        if [name for name, _ in calls] == [method]:
            time.sleep(0.5)
            raise LeaseExpiredError("gone")

    with asked(lost_once) as calls:
        if method == "Lookup":
            assert client.get_levelled(keys, PlanTerms(DEADLINE_MS / 1000)).levels == (0,)
        else:
            assert len(list(client.get_chunk_layers(keys))) == 2
    attempts = [within_ms for name, within_ms in calls if name == method]
    assert attempts[1] <= DEADLINE_MS - 500


def _in_a_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


class Nat(TcpProxy):
    """Forgets connections: what arrives on one goes nowhere, and nobody is told."""

    forgotten: Sequence[socket.socket] = ()

    def forget(self) -> None:
        self.forgotten = tuple(self._links)

    @override
    def hand_on(self, data: bytes, sink: socket.socket, *, is_up: bool) -> None:
        if sink not in self.forgotten:
            sink.sendall(data)


def test_a_connection_that_died_without_a_sign_is_replaced(server: LocalServer) -> None:
    options = ClientOptions("grpc", 16, deadline_ms=500, retry_after_ms=1)
    late: list[DeadlineError] = []
    with closing(Nat(server.node.port)) as nat, Client(nat.address, SMALL, options) as client:

        def is_found() -> bool:
            try:
                return len(client.get_chunks(keys)) == 2
            except DeadlineError as error:
                late.append(error)
            except TierUnavailableError:
                pass
            return False

        keys = store(client, 1, 2)
        assert is_found()
        nat.forget()
        assert eventually(is_found)
        assert 1 <= len(late) <= 60, "of half a second each"


def test_short_calls_that_are_late_one_after_another_shut_the_others_out(silent: str) -> None:
    options = ClientOptions("grpc", 16, deadline_ms=1000, retry_after_ms=60_000)
    with Client(silent, SMALL, options) as client:
        for is_shut in (False, False, True):
            with pytest.raises(DeadlineError):
                client.lookup(tokens(1, 64), timeout=SHORT_S)
            assert client.is_shut == is_shut
    with Client(silent, SMALL, replace(options, deadline_ms=500)) as client:
        with pytest.raises(DeadlineError):
            client.lookup(tokens(1, 64))
        assert client.is_shut, "a server that is late with a whole deadline costs once"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_levelled_get_that_is_late_shuts_nobody_out_nor_lets_anybody_in(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    options = ClientOptions("grpc", 16, deadline_ms=DEADLINE_MS, retry_after_ms=60_000)
    client = server.connect(options=options)
    keys = store(client, 1, 1)
    transport = client._link.connected()

    def late(_: Any) -> None:
        transport.session.connection.breaker.record(LATE if is_own else DeadlineError("another's"))
        raise LATE

    monkeypatch.setattr(transport, "read", late)
    client.get_levelled(keys, PlanTerms(DEADLINE_MS / 1000))
    assert client.is_shut != is_own


def test_a_session_is_given_up_without_waiting_for_who_opens_another(server: LocalServer) -> None:
    client = server.connect("grpc")
    link, is_over, is_held = client._link, threading.Event(), threading.Event()
    transport = link.connected()

    def hold() -> bool:
        with link._lock:
            is_held.set()
            return is_over.wait(LONG_S)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        is_held.wait()
        transport.is_spent = True
        link.renew(transport)
        assert not client.is_connected
        is_over.set()
        assert holding.result(), "it waited for the lock"


@pytest.mark.parametrize("error", [LATE, TierUnavailableError("disk", "gone")])
def test_a_lookup_that_fails_ends_its_leases_within_its_own_time(
    server: LocalServer, error: KVStoreError
) -> None:
    client = server.connect("grpc")
    keys, within_ms = store(client, 1, 2), 3000
    session = client._link.connected().session
    session.terms.max_batch_chunks = 1

    def fails(name: str, left_ms: int) -> None:
        assert left_ms <= within_ms
        if [one for one, _ in calls].count("Lookup") == 2 and name == "Lookup":
            time.sleep(left_ms / 1000 if error is LATE else 0)
            raise error

    with asked(fails) as calls, pytest.raises(type(error)):
        look_up(client._link, keys, pb.LookupRequest(lease=True), within_ms)
    assert [name for name, _ in calls].count("Release") == (error is not LATE)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_where_a_bulk_server_is_full_a_call_goes_through_grpc_or_leaves_no_session(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, transport: TransportName
) -> None:
    server = make_server("--bulk", "127.0.0.1:0")
    monkeypatch.setattr(tcp_server, "MAX_CLIENT_STREAMS", 0)
    monkeypatch.setattr(server_link, "can_share_memory", lambda _: False)
    client = server.connect(transport)
    if transport == "auto":
        assert client.lookup(tokens(1, 64)).missing == 4
        assert client.transport_name == "grpc"
        return
    for _ in range(3):
        with pytest.raises(QuotaExceededError):
            client.lookup(tokens(1, 64))
    assert eventually(lambda: len(server.node.sessions) == 0)


@pytest.fixture
def silent_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers are said to listen on a Unix socket that takes connections and says nothing."""
    path = str(tmp_path / "silent.sock")
    begin = Session.__init__

    def elsewhere(self: Session, *arguments: Any) -> None:
        begin(self, *arguments)
        self.terms.socket_path = path

    monkeypatch.setattr(Session, "__init__", elsewhere)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(8)
        yield


@pytest.mark.usefixtures("silent_socket")
def test_a_server_that_shares_no_memory_in_time_costs_a_call_no_more_than_it_has(
    server: LocalServer,
) -> None:
    client = server.connect(options=ClientOptions("auto", 16, deadline_ms=4000))
    began_s = time.monotonic()
    with pytest.raises(DeadlineError):
        client.lookup(tokens(1, 64), timeout=SHORT_S)
    assert time.monotonic() - began_s < 10 * SHORT_S - SLACK_S
    assert client.lookup(tokens(1, 64)).missing == 4
    assert client.transport_name == "grpc", "one that has time goes on without"


def test_puts_that_wait_for_another_have_one_deadline(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("shm")
    keys = keys_of(client, 1, 1)
    transport = client._link.connected()
    assert isinstance(transport, ShmTransport)
    granted_ms: list[int] = []
    run = PutPipeline.__init__

    def noted(self: PutPipeline, *arguments: Any) -> None:
        granted_ms.append(arguments[-1].within_ms)
        run(self, *arguments)

    monkeypatch.setattr(PutPipeline, "__init__", noted)
    with transport._put_lock, pytest.raises(DeadlineError):
        _in_a_thread(lambda: transport.put([], PutTerms(durable=False, within_ms=100)))
    with ThreadPoolExecutor(1) as pool:
        with transport._put_lock:
            waiting = pool.submit(client.put_chunks, chunks_of(client, keys))
            time.sleep(0.5)
        assert waiting.result()[0].outcome is PutOutcome.stored
    assert len(granted_ms) == 1
    assert granted_ms[0] <= DEADLINE_MS - 400


def test_all_requests_of_a_put_have_one_deadline(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ClientOptions("shm", 64, deadline_ms=2000, staging_bytes=1)
    client = server.connect("shm", MEDIUM, options)
    keys = keys_of(client, 1, 24)
    chunks = chunks_of(client, keys)  # a group each
    commit = Writes.commit

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.25)
        return commit(*arguments, **more)

    monkeypatch.setattr(Writes, "commit", slow)
    began_s = time.monotonic()
    with pytest.raises(DeadlineError):
        client.put_chunks(chunks)
    assert time.monotonic() - began_s < LONG_S
    monkeypatch.setattr(Writes, "commit", commit)
    outcomes = [one.outcome for one in client.put_chunks(chunks)]
    assert set(outcomes) == {PutOutcome.exists, PutOutcome.stored}
    assert_reads(client, keys)
    server.settled()


def test_layers_that_are_wanted_no_more_are_not_waited_for_over_tcp(
    make_server: ServerMaker,
) -> None:
    server = make_server("--bulk", "127.0.0.1:0")
    client = server.connect("tcp", MEDIUM, ClientOptions("tcp", 64, deadline_ms=DEADLINE_MS))
    keys = store(client, 1, 8)
    session = client._link.connected().session
    with closing(SlowLink(int(server.streams.address.rpartition(":")[2]))) as link:
        session.terms.bulk_address = f"tcp://{link.address}"
        with closing(BulkTransport(session)) as transport:
            wanted = ChunkRequest(keys, fresh, Accuracy.exact, DEADLINE_MS)
            for share in (0.4, math.inf):
                began_s, link.stop_at_bytes = time.monotonic(), link.passed_bytes + share * 2e6
                with closing(read_layers(client._link, transport, wanted)) as layers:
                    assert len(next(layers).tensors) == 8
                assert time.monotonic() - began_s < LONG_S
    server.settled()


def test_a_call_does_not_wait_for_another_that_opens_the_session(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(silent, SMALL, ClientOptions("grpc", 16, deadline_ms=3000)) as client:
        link = client._link

        def slow(*_: Any) -> Session:
            with pytest.raises(DeadlineError, match="another call"):
                _in_a_thread(lambda: link.connected(Until(100).left_ms))
            raise DeadlineError("late")

        monkeypatch.setattr(server_link, "Session", slow)
        with pytest.raises(DeadlineError, match="late"):
            client.lookup(tokens(1, 64))


def test_a_call_that_hangs_at_its_end_counts_with_its_whole_time(
    server: LocalServer,
) -> None:
    options = ClientOptions("grpc", 16, deadline_ms=DEADLINE_MS, retry_after_ms=60_000)
    client = server.connect(options=options)
    breaker = client._link.connected().session.connection.breaker

    def slow(*_: Any) -> None:  # each of its answers came in time
        raise LATE

    def hangs(*_: Any) -> None:
        breaker.record(None)
        breaker.record(LATE, Until(DEADLINE_MS // 4))
        raise LATE

    for work, is_shut in ((slow, False), (hangs, True)):
        with pytest.raises(DeadlineError):
            client._link.run(work)
        assert client.is_shut == is_shut


def test_a_get_ends_its_lease_within_what_is_left_of_its_time(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("shm")
    keys = store(client, 1, 1)
    transport, within_ms = client._link.connected(), 5000
    release = transport.release
    granted_ms: list[int] = []

    def noted(leases: Any, deadline_ms: int) -> None:
        granted_ms.append(deadline_ms)
        release(leases, deadline_ms)

    monkeypatch.setattr(transport, "release", noted)
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    with transport.read(ReadPlan(digests, 0, within_ms)) as arriving:
        next(arriving.frames)
        time.sleep(0.5)
    assert len(granted_ms) == 1
    assert granted_ms[0] <= within_ms - 400
    server.settled()


def test_a_chunk_that_proved_wrong_layer_by_layer_is_reported_however_long_the_caller_took(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect(options=ClientOptions("grpc", 16, deadline_ms=2000))
    keys = store(client, 1, 2)
    decode = RawCodec.decode_checked

    def damaged(self: RawCodec, header: FrameHeader, segment: int, *rest: Any) -> None:
        if segment and header.key == keys[1]:  # the first goes on, whichever is decoded first
            raise ChunkCorruptError(header.key, "damaged")
        decode(self, header, segment, *rest)

    monkeypatch.setattr(RawCodec, "decode_checked", damaged)
    with asked() as calls:
        layers = client.get_chunk_layers(keys)
        next(layers)
        time.sleep(2.1)
        list(layers)
    assert [name for name, _ in calls] == ["Get", "Delete"]


def test_a_prompt_is_named_by_the_session_that_was_opened_for_the_call(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    client.lookup(tokens(1, 64))
    connected = ServerLink.connected

    def then_lost(self: ServerLink, *left_ms: Any) -> Transport:
        transport = connected(self, *left_ms)
        monkeypatch.undo()
        self.end_session()
        return transport

    monkeypatch.setattr(ServerLink, "connected", then_lost)
    opens: list[int] = []
    opened = Session.__init__

    def noted(self: Session, *arguments: Any) -> None:
        opens.append(arguments[-1])
        opened(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "__init__", noted)
        client.lookup(tokens(1, 64), timeout=LONG_S)
    assert len(opens) == 1
    assert opens[0] <= 1000 * LONG_S
