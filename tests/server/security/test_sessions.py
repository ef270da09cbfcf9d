"""Sessions: how they begin, how they are told apart, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from contracts.chunks import make_representation
from simulation.clock import FakeClock

from kvstore.proto.errors import (
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
)
from kvstore.proto.keys import namespace, representation_digest
from kvstore.server.security.sessions import ROLES, TOKEN_BYTES, Principal, Session, SessionTable

REPRESENTATION = make_representation()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> SessionTable:
    return SessionTable(3, 2_000, lambda tenant: tenant.encode(), clock, numbers())


def numbers() -> Callable[[int], bytes]:
    drawn = count(1)
    return lambda size: next(drawn).to_bytes(size, "little")


def ended(table: SessionTable) -> list[Session]:
    gone: list[Session] = []
    table.on_close.append(gone.append)
    return gone


def test_an_open_session_knows_its_tenants_namespace(table: SessionTable) -> None:
    session = table.open(REPRESENTATION, "engine", tenant="red")
    assert table.get(session.session_id) is session
    assert session.namespace == namespace(b"red", REPRESENTATION)
    assert session.representation_digest == representation_digest(REPRESENTATION)
    assert len(session.attach_token) == TOKEN_BYTES
    assert len(table) == 1


def test_sessions_beyond_the_limit_are_refused_until_one_closes(table: SessionTable) -> None:
    first, _, _ = (table.open(REPRESENTATION, "engine") for _ in range(3))
    with pytest.raises(QuotaExceededError, match="max_sessions=3"):
        table.open(REPRESENTATION, "engine")
    table.close(first.session_id)
    table.open(REPRESENTATION, "engine")


def test_no_tenant_takes_all_sessions_where_callers_are_known(clock: FakeClock) -> None:
    table = SessionTable(16, 2_000, lambda tenant: tenant.encode(), clock, numbers())
    greedy, other = (Principal(f"key:{name}", name, ROLES) for name in ("acme", "zeta"))
    for _ in range(14):
        table.open(REPRESENTATION, "engine", "acme", greedy)
    with pytest.raises(QuotaExceededError, match="tenant 'acme'"):
        table.open(REPRESENTATION, "engine", "acme", greedy)
    for _ in range(2):
        table.open(REPRESENTATION, "engine", "zeta", other)
    with pytest.raises(QuotaExceededError, match="this server"):
        table.open(REPRESENTATION, "engine", "zeta", other)


def test_no_process_takes_all_sessions_whoever_the_caller_is(clock: FakeClock) -> None:
    table = SessionTable(16, 2_000, lambda tenant: tenant.encode(), clock, numbers())
    first, *_ = (table.open(REPRESENTATION, "engine", process=7) for _ in range(14))
    with pytest.raises(QuotaExceededError, match=r"one process with 14 clients .*max_sessions=16"):
        table.open(REPRESENTATION, "engine", process=7)
    table.open(REPRESENTATION, "engine", process=8)
    table.open(REPRESENTATION, "a client that does not say")
    with pytest.raises(QuotaExceededError, match="this server"):
        table.open(REPRESENTATION, "engine", process=9)
    table.close(first.session_id)
    with pytest.raises(QuotaExceededError, match="one process with 13 clients"):
        table.open(REPRESENTATION, "engine", process=7)
    table.open(REPRESENTATION, "engine", process=9)


def test_a_session_closes_once_and_says_so_once(table: SessionTable) -> None:
    gone = ended(table)
    session = table.open(REPRESENTATION, "engine")
    assert [table.close(session.session_id) for _ in range(2)] == [True, False]
    assert gone == [session]
    with pytest.raises(LeaseExpiredError, match=f"session_id={session.session_id}"):
        table.get(session.session_id)


def test_a_silent_session_expires_and_a_heard_one_does_not(
    table: SessionTable, clock: FakeClock
) -> None:
    gone = ended(table)
    silent, heard = (table.open(REPRESENTATION, "engine") for _ in range(2))
    clock.advance(1.5)
    table.get(heard.session_id)
    clock.advance(0.5)
    assert table.expire() == 0
    clock.advance(0.001)
    assert table.expire() == 1
    assert gone == [silent]
    assert table.get(heard.session_id) is heard


def test_an_attached_session_lives_without_a_word(table: SessionTable, clock: FakeClock) -> None:
    session = table.open(REPRESENTATION, "engine")
    session.is_attached = True
    clock.advance(1e6)
    assert table.expire() == 0
    assert table.close(session.session_id)


def test_a_draining_table_refuses_new_sessions_and_keeps_the_old(table: SessionTable) -> None:
    session = table.open(REPRESENTATION, "engine")
    assert not table.is_draining
    table.drain()
    assert table.is_draining
    with pytest.raises(ShuttingDownError):
        table.open(REPRESENTATION, "engine")
    assert table.get(session.session_id) is session


def test_a_session_id_is_never_zero(clock: FakeClock) -> None:
    table = SessionTable(3, 2_000, lambda _: b"", clock, bytes)
    assert table.open(REPRESENTATION, "engine").session_id == 1
