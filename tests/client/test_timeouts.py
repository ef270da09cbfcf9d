"""Timeouts: a call's own bounds all that is done for it, and blames nobody else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from local_server import DEADLINE_MS, LocalServer
from prompts import SMALL, chunks_of, keys_of, tokens

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection, countdown
from kvstore.client.levels import PlanTerms
from kvstore.client.transports.base import Transport
from kvstore.proto.errors import DeadlineError, LeaseExpiredError
from kvstore.proto.types import ChunkKey

SHORT_S = 0.2
LONG_S = 5.0
"""Long before a client's own deadline."""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


CALLS: dict[str, Callable[[Client], object]] = {
    "get": lambda client: client.get(tokens(1, 64), timeout=SHORT_S),
    "lookup": lambda client: client.lookup(tokens(1, 64), timeout=SHORT_S),
    "get_layers": lambda client: client.get_layers(tokens(1, 64), timeout=SHORT_S),
    "get_levelled": lambda client: client.get_levelled([ChunkKey(bytes(32))], PlanTerms(SHORT_S)),
}


@pytest.mark.parametrize("call", CALLS)
def test_opening_a_session_takes_no_longer_than_the_call_that_needs_it(
    silent: str, call: str
) -> None:
    with Client(silent, SMALL, ClientOptions("grpc", 16, deadline_ms=60_000)) as client:
        began_s = time.monotonic()
        with pytest.raises(DeadlineError):
            CALLS[call](client)
        assert time.monotonic() - began_s < LONG_S


def test_a_late_call_of_a_short_timeout_shuts_no_other_call_out(silent: str) -> None:
    options = ClientOptions("grpc", 16, deadline_ms=1000, retry_after_ms=60_000)
    with Client(silent, SMALL, options) as client:
        with pytest.raises(DeadlineError):
            client.lookup(tokens(1, 64), timeout=SHORT_S)
        assert not client.is_shut
        with pytest.raises(DeadlineError):
            client.lookup(tokens(1, 64))
        assert client.is_shut, "a server that is late with a whole deadline costs once"


@contextmanager
def granted(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[list[int]]:
    """Collect the deadlines that calls of *method* get."""
    found: list[int] = []
    call = Connection.call

    def noted(self: Connection, name: str, request: Any, deadline_ms: int, reply: Any) -> Any:
        if name == method:
            found.append(deadline_ms)
        return call(self, name, request, deadline_ms, reply)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "call", noted)
        yield found


def test_a_lost_session_is_looked_at_within_the_call_that_found_it_lost(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    client.lookup(tokens(1, 64))

    def lost(*_: Any) -> None:
        raise LeaseExpiredError("gone")

    with (
        granted(monkeypatch, "Heartbeat") as heartbeats,
        pytest.raises(LeaseExpiredError),
    ):
        client._link.run(lost, 300)
    assert len(heartbeats) == 1
    assert heartbeats[0] <= 300


def test_a_chunk_that_proved_wrong_is_reported_within_the_call_that_read_it(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    keys = keys_of(client, 1, 1)
    client.put_chunks(chunks_of(client, keys))
    transport = client._link.connected()
    with granted(monkeypatch, "Delete") as deletes:
        client._link.quarantine(transport, keys[0], countdown(300))
        client._link.quarantine(transport, keys[0], _no_time_left)
    assert len(deletes) == 1
    assert deletes[0] <= 300


def _no_time_left() -> int:
    raise DeadlineError("passed")


def test_a_levelled_get_that_lost_its_session_has_one_deadline_for_both_attempts(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    keys = keys_of(client, 1, 1)
    client.put_chunks(chunks_of(client, keys))
    deadline_s, attempts = DEADLINE_MS / 1000, list[int]()
    call = Connection.call

    def lost_once(self: Connection, name: str, request: Any, deadline_ms: int, reply: Any) -> Any:
        if name == "Lookup":
            attempts.append(deadline_ms)
            if len(attempts) == 1:
                time.sleep(0.5)
                raise LeaseExpiredError("gone")
        return call(self, name, request, deadline_ms, reply)

    monkeypatch.setattr(Connection, "call", lost_once)
    assert client.get_levelled(keys, PlanTerms(deadline_s)).levels == (0,)
    assert attempts[1] <= DEADLINE_MS - 500


def test_a_call_does_not_wait_for_another_that_opens_the_session(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(silent, SMALL, ClientOptions("grpc", 16, deadline_ms=3000)) as client:
        link = client._link

        def slow(left_ms: Callable[[], int]) -> Transport:
            with pytest.raises(DeadlineError, match="another call"):
                _in_a_thread(lambda: link.connected(countdown(100)))
            raise DeadlineError("late")

        monkeypatch.setattr(link, "_connect", slow)
        with pytest.raises(DeadlineError, match="late"):
            client.lookup(tokens(1, 64))


def _in_a_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
