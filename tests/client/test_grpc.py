"""The grpc transport: the contract, and calls to one server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from conftest import ServerMaker
from contracts.transport import TransportContract
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, store
from simulation.clock import FakeClock

from kvstore.client import ClientOptions
from kvstore.client.connection import CircuitBreaker, Connection, Pool, Until, translate
from kvstore.client.session import Session
from kvstore.client.transports.base import read_outcomes
from kvstore.client.transports.grpc import StreamTransport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    TierUnavailableError,
)


class TestStreamTransport(TransportContract):
    transport = StreamTransport


CALLS: dict[str, Callable[[Connection], object]] = {
    "call": lambda connection: connection.call("Status", pb.StatusRequest(), 1000, object),
    "stream": lambda connection: list(connection.stream("List", pb.ListRequest(), 1000)),
    "upload": lambda connection: connection.upload("Put", iter([]), 1000, object),
}


def test_a_connection_that_is_closed_or_reaches_no_server_says_so(server: LocalServer) -> None:
    connection = server.dial()
    connection.call("Status", pb.StatusRequest(), DEADLINE_MS, object)
    connection.close()
    connection.close()
    for call in CALLS.values():
        with pytest.raises(KVStoreError, match="the client is closed"):
            call(connection)
        with (
            closing(Connection("127.0.0.1:9", retry_after_ms=1)) as nowhere,
            pytest.raises(TierUnavailableError, match="tier 'server'"),
        ):
            call(nowhere)


def failure(code: grpc.StatusCode, details: str | None, metadata: Any) -> Any:
    """A failed call, as gRPC raises it."""
    return SimpleNamespace(
        code=lambda: code, details=lambda: details, trailing_metadata=lambda: metadata
    )


def test_a_server_that_contradicts_itself_is_an_error_of_the_store() -> None:
    for outcomes, reasons in ((b"\0", []), (b"", ["one"]), (b"\xff", ["one"])):
        with pytest.raises(InvalidRequestError, match=r"outcomes=.: the server's"):
            read_outcomes(outcomes, reasons)
    reply = pb.OpenSessionResponse(max_message_bytes=1, heartbeat_ms=1, key_namespace=bytes(16))
    peer: Any = SimpleNamespace(address="there", call=lambda *_: reply)
    with pytest.raises(InvalidRequestError, match="server='there': it sent invalid session terms"):
        Session(peer, SMALL, ClientOptions())


def test_what_a_server_sends_past_the_request_is_not_kept(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    keys, genuine = store(client, 1, 2), Connection.stream

    def endless(self: Connection, *request: Any) -> Iterator[Any]:
        for number, reply in product(range(100), list(genuine(self, *request))):
            if isinstance(reply, pb.GetResponse):
                reply.index = number
            yield reply
        raise AssertionError("all of it was read")

    frame = client.frame(keys[0])
    assert frame is not None
    monkeypatch.setattr(Connection, "stream", endless)
    again = client.frame(keys[0])
    assert again is not None
    assert again[1] == frame[1]
    assert len(client.list(2)) == 2


def test_failure_of_grpc_s_own_becomes_an_error_of_the_store() -> None:
    for code, kind in (
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QuotaExceededError),
        (grpc.StatusCode.UNAVAILABLE, TierUnavailableError),
        (grpc.StatusCode.CANCELLED, DeadlineError),
        (grpc.StatusCode.UNIMPLEMENTED, KVStoreError),
    ):
        for metadata in ((), None, (("other", "LeaseExpiredError"),)):
            error = translate(failure(code, "for a reason", metadata))
            assert type(error) is kind
            assert "for a reason" in str(error)
            assert type(translate(failure(code, None, metadata))) is kind
    for name, kind in (("LeaseExpiredError", LeaseExpiredError), ("MoonPhaseError", KVStoreError)):
        error = translate(failure(grpc.StatusCode.UNAVAILABLE, "gone", (("kvstore-error", name),)))
        assert (type(error), str(error)) == (kind, "gone"), "what the server named is that error"


@pytest.mark.parametrize(
    "error", [DeadlineError("late"), TierUnavailableError("server", "connection refused")]
)
def test_gate_shuts_after_silence_and_opens_when_its_time_is_up(error: KVStoreError) -> None:
    clock = FakeClock()
    gate = CircuitBreaker(500, clock)
    gate.check()
    assert gate.record(error)
    for _ in range(3):
        with pytest.raises(TierUnavailableError, match=r"did not answer; retried in 0\.5 s"):
            gate.check()
    clock.now += 0.499
    with pytest.raises(TierUnavailableError):
        gate.check()
    clock.now += 0.002
    gate.check()


def test_any_answer_opens_the_gate() -> None:
    for error in (
        None,
        InvalidRequestError("x", 1, "use 2"),
        LeaseExpiredError("gone"),
        ShuttingDownError("bye"),
        TierUnavailableError("disk", "broken"),
    ):
        gate = CircuitBreaker(500, FakeClock())
        gate.record(DeadlineError("late"))
        assert not gate.record(error)
        gate.check()


def test_calls_that_wait_at_the_same_time_count_once() -> None:
    clock = FakeClock()
    gate = CircuitBreaker(500, clock, 1000)
    short = Until(200, clock(), clock)
    for _ in range(9):
        assert not gate.record(DeadlineError("late"), short)
    clock.now += 0.2
    assert not gate.record(DeadlineError("late"), short)
    gate.record(None)
    for is_open in (False, False, True):
        clock.now += 0.2
        assert gate.record(DeadlineError("late"), short) == is_open
    clock.now += 0.6
    assert gate.record(DeadlineError("late"), short), "a server that is dead costs once"


class Link:
    """A connection of a pool; ``ends`` are what was done to it."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self.ends: list[str] = []

    def is_broken(self) -> bool:
        return "broken" in self.ends

    def wake(self, error: KVStoreError) -> None:
        self.ends.append(str(error))

    def close(self) -> None:
        self.ends.append("closed")


def link_of(within_s: float, begin: Callable[[Link], None]) -> Link:
    link = Link(within_s)
    begin(link)
    return link


def test_after_a_failure_a_pool_connects_one_beside_the_calls_and_rests_when_that_fails() -> None:
    clock, given, allowed = FakeClock(), list[float](), Event()

    def dial(within_s: float, begin: Callable[[Link], None]) -> Link:
        given.append(within_s)
        if allowed.is_set():
            return link_of(within_s, begin)
        begin(Link(within_s))
        raise TierUnavailableError("server", "refused")

    def is_over() -> bool:
        return not any(one.name == "kvstore-dial" for one in threading.enumerate())

    pool = Pool(2, dial, 2.0, 30.0, clock)
    for within_s in (0.1, 9.0):
        if given:
            assert pool.take(within_s) is None, "no other call waits"
        else:
            with pytest.raises(TierUnavailableError):
                pool.take(within_s)
    assert eventually(is_over)
    assert given == [0.1, 2.0]
    clock.now += 29.9
    assert pool.take(9.0) is None
    assert not pool.is_ready()
    allowed.set()
    clock.now += 0.2
    assert not pool.is_ready()
    assert eventually(lambda: len(pool.idle) == 1)
    assert eventually(is_over)
    assert given == [0.1, 2.0, 2.0]
    assert pool.take(9.0)
    assert pool.take(1.5)
    assert given == [0.1, 2.0, 2.0, 1.5], "calls connect theirs again"
    assert pool.take(1.5) is None


def test_whoever_waits_to_be_let_in_is_woken_and_without_time_nobody_waits() -> None:
    inside, go_on = Event(), Event()

    def dial(within_s: float, begin: Callable[[Link], None]) -> Link:
        link = link_of(within_s, begin)
        inside.set()
        assert go_on.wait(20)
        return link

    pool = Pool(2, dial, 2.0, 30.0)
    assert pool.take(0.0) is None
    assert pool.take(0.0) is None, "one at a time is connected beside the calls"
    assert inside.wait(20)
    (link,) = pool.busy
    pool.hang_up(DeadlineError("the server hangs"))
    assert link.ends == ["the server hangs"]
    go_on.set()
    assert eventually(lambda: pool.idle == [link])


def test_a_pool_takes_back_what_is_clean_and_makes_no_more_than_it_may() -> None:
    pool = Pool(2, link_of, 2.0, 30.0)
    one, other = pool.take(1.0), pool.take(1.0)
    assert one
    assert other
    assert pool.take(1.0) is None
    assert not pool.is_ready()
    pool.give_back(one, is_clean=True)
    assert pool.take(1.0) is one
    pool.give_back(one, is_clean=False)
    assert one.ends == ["closed"]
    pool.give_back(other, is_clean=True)
    other.ends.append("broken")  # while it lay idle
    third = pool.take(1.0)
    assert third not in (None, other)
    assert other.ends == ["broken", "closed"]
    pool.close()
    assert third.ends == ["the client is closed"], "its call is at work"
    pool.give_back(third, is_clean=True)
    assert third.ends[1:] == ["closed"]
    assert pool.take(1.0) is None


def test_a_pool_that_closes_while_it_connects_keeps_nothing() -> None:
    def connect(within_s: float, begin: Callable[[Link], None]) -> Link:
        pool.close()
        return link_of(within_s, begin)

    pool = Pool(2, connect, 2.0, 30.0)
    link = pool.take(1.0)
    assert link
    assert link.ends == ["the client is closed"], "before it asks the server"
    pool.give_back(link, is_clean=True)
    assert link.ends[1:] == ["closed"]
    assert pool.take(1.0) is None


HUNG_S = 0.5
"""An answer that takes so long came from a server found to hang meanwhile."""


@pytest.fixture
def paced(make_server: ServerMaker) -> Iterator[tuple[Session, list[float]]]:
    """A session, and what its server takes, in seconds, to answer each time it is asked."""
    now_s, answers_s = [0.0], [0.02, 0.03, 0.04]
    server = make_server("--limits", "session_ttl_ms=600000")  # no heartbeat meanwhile
    connection = Connection(server.address, 1_000, lambda: now_s[0])

    def answers(within_s: float) -> bool:
        now_s[0] += answers_s[0]
        if answers_s.pop(0) >= HUNG_S:
            connection.hang_up()
        return True

    connection.answers = answers  # type: ignore[method-assign]
    session = Session(connection, SMALL, ClientOptions())
    assert eventually(lambda: session.pace_s == pytest.approx(0.04))
    yield session, answers_s
    session.close()
    connection.close()


def test_the_pace_of_a_server_is_that_of_its_slowest_answers_fading(
    paced: tuple[Session, list[float]],
) -> None:
    session, answers_s = paced
    answers_s.extend([0.2, 0.001, 0.001, 0.06])
    seen_s = []
    while answers_s:
        session.measure_pace()
        seen_s.append(session.pace_s)
    assert seen_s == pytest.approx([0.2, 0.1, 0.05, 0.06])
    answers_s.append(HUNG_S)
    session.measure_pace()
    assert session.pace_s == pytest.approx(0.06), "it hung, and is not thought slow"
