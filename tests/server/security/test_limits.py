"""What callers may do and how much of it, and the log of what they did."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
from contracts.chunks import make_representation
from helpers.local_server import eventually
from simulation.clock import FakeClock

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    PermissionDeniedError,
    QuotaExceededError,
)
from kvstore.proto.keys import namespace, representation_digest
from kvstore.server.security import audit_log, rate_limits
from kvstore.server.security.audit_log import AuditLog, Event, audit_files, read_chain
from kvstore.server.security.authorization import Authorizer, access_to, role_for
from kvstore.server.security.rate_limits import LINES_PER_S, REFUSED, Limits, LogLimit, TenantLimits
from kvstore.server.security.sessions import ROLES, TOKEN_BYTES, Principal, Session, SessionTable
from kvstore.server.settings.settings import Settings, load_config

TABLE = SessionTable(1000, 1000, lambda _: b"", lambda: 0.0, os.urandom)
AUTHORIZER = Authorizer(Settings(), TABLE, lambda: 0.0)


def caller(*roles: str) -> Principal:
    return Principal("key:1", "acme", frozenset(roles))


def may(role: str, method: str, request: Any = None) -> bool:
    """Whether who has *role* alone may call *method*."""
    try:
        AUTHORIZER.admit(caller(role), method, request)
    except PermissionDeniedError:
        return False
    return True


def test_what_is_about_others_is_for_admins_and_a_method_without_a_row_for_nobody() -> None:
    roles = ("read", "write", "admin")
    for name, kind, own in (
        ("Clear", pb.ClearRequest, "write"),
        ("Spaces", pb.SpacesRequest, "read"),
    ):
        for tenant, role in (("", own), ("acme", own), ("zeta", "admin"), ("*", "admin")):
            assert [one for one in roles if may(one, name, kind(tenant=tenant))] == [role]
    assert may("read", "Spaces", pb.SpacesRequest(tenant="pool:library"))
    pool = pb.ClearRequest(tenant="pool:library")
    assert [one for one in roles if may(one, "Clear", pool)] == ["admin"]
    assert [one for one in roles if may(one, "Explain", pb.ExplainRequest())] == ["admin"]
    assert role_for("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo") == "admin"
    for method in ("/kvstore.v1.KVStore/Dump", "/other.v1.Thing/Do"):
        with pytest.raises(PermissionDeniedError):
            AUTHORIZER.admit(caller(*roles), method)


REPRESENTATION = make_representation()


def make_table(sessions: int, clock: FakeClock) -> SessionTable:
    drawn = count(1)
    return SessionTable(
        sessions, 2_000, str.encode, clock, lambda size: next(drawn).to_bytes(size, "little")
    )


@pytest.fixture
def table(clock: FakeClock) -> SessionTable:
    return make_table(3, clock)


def test_an_open_session_knows_its_tenants_namespace_and_closes_once(table: SessionTable) -> None:
    session = table.open(REPRESENTATION, "engine", tenant="red")
    assert table.get(session.session_id) is session
    assert session.namespace == namespace(b"red", REPRESENTATION)
    assert session.representation_digest == representation_digest(REPRESENTATION)
    assert len(session.attach_token) == TOKEN_BYTES
    for _ in range(2):
        table.open(REPRESENTATION, "engine")
    with pytest.raises(QuotaExceededError, match="max_sessions=3"):
        table.open(REPRESENTATION, "engine")
    gone: list[Session] = []
    table.on_close.append(gone.append)
    assert [table.close(session.session_id) for _ in range(2)] == [True, False]
    assert gone == [session]
    with pytest.raises(LeaseExpiredError, match=f"session_id={session.session_id}"):
        table.get(session.session_id)
    table.open(REPRESENTATION, "engine")


@pytest.mark.parametrize("by", ["tenant", "process"])
def test_neither_a_tenant_nor_a_process_takes_all_sessions(clock: FakeClock, by: str) -> None:
    table = make_table(16, clock)

    def open_for(number: int) -> Session:
        if by == "process":
            return table.open(REPRESENTATION, "engine", process=number)
        tenant = f"t{number}"
        return table.open(REPRESENTATION, "engine", tenant, Principal("key:1", tenant, ROLES))

    def too_many(clients: int) -> str:
        told = rf"one process with {clients} clients .*max_sessions=16"
        return told if by == "process" else "tenant 't7'"

    first, *_ = (open_for(7) for _ in range(14))
    with pytest.raises(QuotaExceededError, match=too_many(14)):
        open_for(7)
    open_for(8)
    table.open(REPRESENTATION, "a client that does not say")
    with pytest.raises(QuotaExceededError, match="this server"):
        open_for(9)
    table.close(first.session_id)
    with pytest.raises(QuotaExceededError, match=too_many(13)):
        open_for(7)
    open_for(9)


def test_a_silent_session_expires_and_a_heard_one_does_not(
    table: SessionTable, clock: FakeClock
) -> None:
    gone: list[Session] = []
    table.on_close.append(gone.append)
    silent, heard, attached = (table.open(REPRESENTATION, "engine") for _ in range(3))
    attached.is_attached = True  # it needs no word
    clock.advance(1.5)
    table.get(heard.session_id)
    clock.advance(0.5)
    assert table.expire() == 0
    clock.advance(0.001)
    assert table.expire() == 1
    assert gone == [silent]
    assert table.get(heard.session_id) is heard
    clock.advance(1e6)
    assert table.expire() == 1
    assert table.close(attached.session_id)


def taken(limits: TenantLimits, tenant: str, asked: int) -> int:
    """Return how many of *asked* requests went through."""
    done = 0
    for _ in range(asked):
        try:
            limits.take_request(tenant)
        except QuotaExceededError:
            continue
        done += 1
    return done


def test_a_tenant_may_ask_a_seconds_worth_at_once_and_the_rate_in_the_long_run() -> None:
    clock = FakeClock()
    limits = TenantLimits({"acme": Limits(requests_per_s=10)}, clock)
    assert taken(limits, "acme", 50) == 10
    clock.advance(0.5)
    assert taken(limits, "acme", 50) == 5
    clock.advance(1000)
    assert taken(limits, "acme", 50) == 10
    assert taken(limits, "zeta", 50) == 50


def test_those_who_are_not_named_have_the_limits_of_all_others_each_for_itself() -> None:
    limits = TenantLimits({"*": Limits(requests_per_s=3), "acme": Limits()}, FakeClock())
    assert [taken(limits, name, 9) for name in ("a", "b", "acme")] == [3, 3, 9]
    limits.set("a", Limits(requests_per_s=5))
    assert taken(limits, "a", 9) == 5
    assert limits.tenants() == ["a", "acme"]


def test_tables_have_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "BUCKETS", 4)
    limits = TenantLimits({"*": Limits(requests_per_s=1)}, FakeClock())
    for number in range(20):
        limits.take_request(f"tenant-{number}")
    assert limits._bucket.cache_info().currsize == 4
    for number in range(3):
        limits.set(f"tenant-{number}", Limits(leases=1))
    with pytest.raises(InvalidRequestError, match="at most 4"):
        limits.set("one-more", Limits(leases=1))
    with pytest.raises(InvalidRequestError):
        Limits(leases=-1)


def test_what_a_pool_allows_is_no_more_than_the_callers_own_roles() -> None:
    pools = load_config(["--shared-pools", "library=*:curator,team=acme+zeta:acme"]).shared_pools
    assert ",".join(map(str, pools)) == "library=*:curator,team=acme+zeta:acme"

    def roles(tenant: str, asked: str, *own: str) -> set[str]:
        principal = Principal("key:1", tenant, frozenset(own or ("read", "write", "admin")))
        return set(access_to(pools, principal, asked)[1])

    assert roles("acme", "pool:library") == {"read"}
    assert roles("curator", "pool:library") == {"read", "write"}
    assert roles("curator", "pool:library", "read") == {"read"}
    assert roles("zeta", "pool:team") == {"read"}
    assert roles("acme", "") == {"read", "write", "admin"}
    for tenant, asked in (("other", "pool:team"), ("acme", "zeta"), ("acme", "library")):
        with pytest.raises(PermissionDeniedError):
            roles(tenant, asked)
    with pytest.raises(PermissionDeniedError):
        roles("zeta", "pool:team", "admin")


def test_refusals_of_strangers_hide_no_others() -> None:
    limit = LogLimit(FakeClock())
    stranger = {"event": REFUSED, "error": "UnauthenticatedError"}
    for _ in range(LINES_PER_S):
        assert limit(None, "info", dict(stranger)) == stranger
    with pytest.raises(structlog.DropEvent):
        limit(None, "info", dict(stranger))
    for other in ({"event": REFUSED, "error": "InvalidRequestError"}, {"event": "a worker died"}):
        assert limit(None, "info", dict(other)) == other


EVENT = Event("key:1", "acme", "Clear", "OK", "00ff", 3, "unix")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def write(path: Path, count: int, file_bytes: int = 1 << 20) -> str:
    """Write *count* events, and return the last hash."""
    log = AuditLog(path, file_bytes, lambda: 1.5)
    for _ in range(count):
        log.note(EVENT)
    log.close()
    return log.last


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def chain(path: Path) -> list[str]:
    return [digest for _, digest in read_chain(audit_files(path))]


def test_a_line_says_who_did_what_and_follows_the_one_before(path: Path) -> None:
    last = write(path, 3)
    fields = [json.loads(line) for line in lines(path)]
    assert fields[0] | {"hash": "", "before": ""} == {
        "at": 1.5, "n": 0, "who": "key:1", "tenant": "acme", "rpc": "Clear", "outcome": "OK",
        "key_prefix": "00ff", "chunks": 3, "peer": "unix", "hash": "", "before": "",
    }  # fmt: skip
    assert [one["before"] for one in fields[1:]] == [one["hash"] for one in fields[:-1]]
    assert chain(path)[-1] == last == fields[-1]["hash"]


def test_the_chain_goes_on_after_a_restart_and_over_files_that_were_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "KEPT_FILES", 3)
    write(path, 5, file_bytes=600)
    write(path, 50, file_bytes=600)
    assert [file.name for file in audit_files(path)] == ["audit.2", "audit.1", "audit"]
    assert len(chain(path)) < 20
    assert int(json.loads(lines(path)[-1])["n"]) == 54
    assert path.stat().st_mode & 0o077 == 0


def test_a_log_that_was_tampered_with_shows_it_and_is_not_gone_on_with(path: Path) -> None:
    write(path, 4)
    kept = lines(path)
    changed = {
        "changed": [kept[0], kept[1].replace(b"acme", b"zeta"), *kept[2:]],
        "left out": [kept[0], *kept[2:]],
        "put in": [*kept[:2], kept[1], *kept[2:]],
        "swapped": [kept[0], kept[2], kept[1], kept[3]],
        "cut short": [*kept[:3], kept[3][:40]],
    }
    for found in changed.values():
        path.write_bytes(b"".join(found))
        with pytest.raises(InvalidRequestError, match="audit_log"):
            chain(path)
    path.write_bytes(b"".join(kept).replace(b"acme", b"zeta"))  # at its end, too
    for place, why in ((path, "changed"), (path.parent / "none" / "audit", "audit_log")):
        with pytest.raises(InvalidRequestError, match=why):
            AuditLog(place, 1 << 20, lambda: 0.0)


def test_a_line_that_a_kill_tore_off_is_dropped_at_the_start(path: Path) -> None:
    write(path, 3)
    path.write_bytes(path.read_bytes() + b'{"at": 1')
    write(path, 1)
    assert len(chain(path)) == 4


@pytest.fixture
def slow(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AuditLog, threading.Event]]:
    """A log whose disk is stuck until the event is set."""
    go, write_now = threading.Event(), AuditLog._write

    def stuck(self: AuditLog, at_s: float, event: Event, lost: int) -> None:
        go.wait(20)
        write_now(self, at_s, event, lost)

    monkeypatch.setattr(AuditLog, "_write", stuck)
    log = AuditLog(path, 1 << 24, lambda: 1.5)
    yield log, go
    go.set()
    log.close()


def test_a_slow_disk_holds_nobody_up_and_what_is_dropped_is_counted(
    path: Path, slow: tuple[AuditLog, threading.Event]
) -> None:
    log, go = slow
    log.note(EVENT)
    assert eventually(log._events.empty)
    for _ in range(audit_log.QUEUE_EVENTS + 7):
        log.note(EVENT)
    go.set()
    log.close()
    assert sum(int(json.loads(line).get("lost", 0)) for line in lines(path)) == 7
    assert len(chain(path)) == audit_log.QUEUE_EVENTS + 1


def test_what_a_full_disk_did_not_take_is_counted_and_the_chain_goes_on(path: Path) -> None:
    log = AuditLog(path, 1 << 20, lambda: 1.5)
    kept, log._file = log._file, Mock(tell=lambda: 0)
    log._file.write.side_effect = OSError(errno.ENOSPC, "no space left")
    log.note(EVENT)
    assert eventually(lambda: log._lost == 1)
    log._file = kept
    log.note(EVENT)
    log.note(EVENT)
    log.close()
    assert [json.loads(line).get("lost") for line in lines(path)] == [1, None]
    assert len(chain(path)) == 2
