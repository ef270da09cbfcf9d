"""What callers say of themselves, what they may do and how much of it, and the log of that."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
from conftest import ProcessMaker, ServerMaker
from contracts.chunks import make_representation
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import SMALL, store
from simulation.clock import FakeClock

from kvstore.cli.chunks import fetch_namespaces
from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    ModelError,
    PermissionDeniedError,
    QuotaExceededError,
)
from kvstore.proto.messages import as_message
from kvstore.proto.types import (
    MAX_FACTOR_CHARS,
    MAX_IDENTITY_CHARS,
    MAX_LAYER_GROUPS,
    MAX_LAYERS,
    MAX_ROPE_FACTORS,
)
from kvstore.server.api.service import MAX_CLIENT_CHARS
from kvstore.server.index.known_models import MAX_SPACES
from kvstore.server.security import audit_log, rate_limits
from kvstore.server.security.audit_log import AuditLog, Event, audit_files, read_chain
from kvstore.server.security.authorization import Authorizer, access_to, role_for
from kvstore.server.security.rate_limits import LINES_PER_S, REFUSED, Limits, LogLimit, TenantLimits
from kvstore.server.security.sessions import ROLES, Principal, Session, SessionTable
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


def test_a_token_to_attach_by_has_16_random_bytes(table: SessionTable) -> None:
    tokens = [table.open(REPRESENTATION, "engine").attach_token for _ in range(3)]
    assert [len(token) for token in tokens] == [16] * 3
    assert len(set(tokens)) == 3


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
    folders = [(one, "name a file") for one in (path.parent / "none" / "audit", path.parent)]
    for place, why in ((path, "changed"), *folders):
        with pytest.raises(InvalidRequestError, match=why):
            AuditLog(place, 1 << 20, lambda: 0.0)


def test_a_log_whose_file_is_moved_or_deleted_goes_on_in_a_new_one(path: Path) -> None:
    write(path, 1)
    log = AuditLog(path, 1 << 20, lambda: 1.5)
    for remove in (lambda: path.rename(path.with_name("moved")), path.unlink):
        remove()
        log.note(EVENT)
        assert eventually(lambda: path.exists() and len(lines(path)) == 1)
    log.close()
    (fields,) = map(json.loads, lines(path))
    assert fields["n"] == 2
    assert len(lines(path.with_name("moved"))) == 1


def test_a_log_whose_file_is_replaced_goes_on_in_the_new_one(path: Path) -> None:
    log = AuditLog(path, 1 << 20, lambda: 1.5)
    for number in (1, 2):
        log.note(EVENT)
        assert eventually(lambda: len(lines(path)) == 1)
        for file in audit_files(path):  # as logrotate does, with "create"
            file.rename(path.with_name(f"audit.{int(file.suffix[1:] or 0) + 1}"))
        path.touch()
        assert len(audit_files(path)) == number + 1
    log.note(EVENT)
    log.close()
    assert [len(lines(file)) for file in audit_files(path)] == [1, 1, 1]
    assert len(chain(path)) == 3


def test_no_line_is_lost_while_the_folder_of_the_log_is_moved(tmp_path: Path) -> None:
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    log = AuditLog(folder / "audit", 1 << 20, lambda: 1.5)
    log.note(EVENT)
    assert eventually(lambda: len(lines(folder / "audit")) == 1)
    folder.rename(moved)
    log.note(EVENT)
    assert eventually(lambda: len(lines(moved / "audit")) == 2)
    folder.mkdir()
    log.note(EVENT)
    log.close()
    assert [json.loads(line)["n"] for line in lines(folder / "audit")] == [2]


def test_a_line_that_a_kill_tore_off_is_dropped_at_the_start(path: Path) -> None:
    write(path, 3)
    path.write_bytes(path.read_bytes() + b'{"at": 1')
    write(path, 1)
    assert len(chain(path)) == 4


def test_calls_that_returned_one_frame_or_page_are_logged_as_complete(
    path: Path, make_server: ServerMaker
) -> None:
    server = make_server("--audit-log", str(path), "--audit-reads")
    options = ClientOptions("grpc", 16, DEADLINE_MS)
    with Client(server.address, SMALL, options) as client:
        key, _ = store(client, 1, 2)
        for _ in range(30):
            assert client.frame(key) is not None
            assert len(client.list(limit=1)) == 1
    server.close()
    calls = [(fields["rpc"], fields["outcome"]) for fields in map(json.loads, lines(path))]
    assert [calls.count((rpc, "OK")) for rpc in ("Get", "List")] == [30, 30]


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


def is_lost(log: AuditLog, count: int) -> bool:
    return log._lost == count


def test_a_log_whose_turn_of_files_finds_the_disk_full_goes_on_once_there_is_room(
    path: Path,
) -> None:
    write(path, 1)
    log = AuditLog(path, 1, lambda: 1.5)
    kept, full = log._file, open("/dev/full", "ab")  # noqa: SIM115
    full.write(b" ")
    log._file = full
    for lost in (1, 2):
        log.note(EVENT)
        assert eventually(partial(is_lost, log, lost))
    with suppress(OSError):
        full.close()
    log._file = kept
    log.note(EVENT)
    assert eventually(log._events.empty)
    log.close()
    assert len(chain(path)) == 2
    assert json.loads(lines(path)[-1])["lost"] == 2


def test_a_log_that_ends_on_a_full_disk_ends_without_an_error(path: Path) -> None:
    log = AuditLog(path, 1 << 20, lambda: 1.5)
    kept, log._file = log._file, open("/dev/full", "ab")  # noqa: SIM115
    kept.close()
    log.note(EVENT)
    assert eventually(lambda: log._lost == 1)
    log.close()
    assert log._file.closed


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


SESSIONS = 1_000
MOST_GROWTH_BYTES = 32 << 20
WIDEST = "\N{MUSICAL SYMBOL G CLEF}"
"""Four bytes a character, in memory and on the wire."""
TEXTS = ("model_id", "model_revision", "adapter_digest", "quantization", "tokenizer_digest")


def make_longest() -> pb.Representation:
    kind = as_message(pb.Representation, SMALL)
    for name in TEXTS:
        setattr(kind, name, "x".ljust(MAX_IDENTITY_CHARS, WIDEST))
    kind.rope.scaling = "scaling".ljust(MAX_FACTOR_CHARS, WIDEST)
    del kind.rope.factors[:]
    for at in range(MAX_ROPE_FACTORS):
        kind.rope.factors.add(name=f"{at:04}".ljust(MAX_FACTOR_CHARS, "x"), value=at / 7)
    group = kind.layer_groups[0]
    del kind.layer_groups[:]
    for at in range(MAX_LAYER_GROUPS):
        group.layer_ids[:] = range(at, MAX_LAYERS, MAX_LAYER_GROUPS)
        group.kv_heads, group.head_dim = 1000 + at, 1000
        kind.layer_groups.append(group)
    return kind


_LONGEST = make_longest()


def longest(number: int) -> pb.Representation:
    """Return an identity with as much of everything as there may be, another for each *number*."""
    _LONGEST.model_id = f"{number:08}".ljust(MAX_IDENTITY_CHARS, WIDEST)
    return _LONGEST


GROUP = as_message(pb.Representation, SMALL).layer_groups[0]


def factors(*names: str) -> pb.Representation:
    return pb.Representation(rope=pb.Rope(factors=[pb.RopeFactor(name=name) for name in names]))


def groups(*layers: Iterable[int], **fields: Any) -> pb.Representation:
    """Return groups of these layers, which are like that of the small model but for *fields*."""
    found = pb.Representation(layer_groups=[GROUP] * len(layers))
    for group, ids in zip(found.layer_groups, layers, strict=True):
        group.layer_ids[:] = ids
        group.MergeFrom(pb.LayerGroup(**fields))
    return found


SPOILT: list[tuple[str, pb.Representation]] = [
    ("model_id", pb.Representation(model_id="m" * (MAX_IDENTITY_CHARS + 1))),
    ("model_id", pb.Representation(model_id="m" * 1_800_000)),
    ("model_id", pb.Representation(model_id=" ")),
    ("model_revision", pb.Representation(model_revision="m\n\x1b[2Jcleared")),
    ("tokenizer_digest", pb.Representation(tokenizer_digest="abc\u202edcba")),
    ("rope.scaling", pb.Representation(rope=pb.Rope(scaling="s" * (MAX_FACTOR_CHARS + 1)))),
    ("rope.factors", factors(*map("{:04}".format, range(MAX_ROPE_FACTORS + 1)))),
    ("rope.factors", factors("f" * (MAX_FACTOR_CHARS + 1))),
    ("rope.factors", factors("\u03b2")),
    ("layer_ids", groups(range(200_000))),
    ("layer_ids", groups([0, MAX_LAYERS])),
    ("layer_groups", groups(*([at] for at in range(20_000)))),
    ("layer_groups", groups([1], kind=99)),
]
"""What of an identity is refused by which name."""


def test_an_identity_of_no_shape_or_a_client_s_name_that_does_not_print_opens_no_session(
    server: LocalServer,
) -> None:
    asked: list[tuple[str, pb.OpenSessionRequest]] = [("rope", pb.OpenSessionRequest())]
    for field, change in SPOILT:
        request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
        request.representation.MergeFrom(change)
        asked.append((field, request))
    for name in ("c" * (MAX_CLIENT_CHARS + 1), "a\x1b[31mRED", "a\nFAKE", "\u2066"):
        kind = as_message(pb.Representation, SMALL)
        asked.append(("client", pb.OpenSessionRequest(representation=kind, client=name)))
    connection = server.dial()
    for field, request in asked:
        error = InvalidRequestError if field == "client" else ModelError
        with pytest.raises(error, match=field) as refused:
            connection.call("OpenSession", request, DEADLINE_MS, pb.OpenSessionResponse)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400
    assert len(server.node.sessions) == 0


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(kib)


def miss(connection: Connection, number: int) -> int:
    """Open a session with a longest identity and miss a chunk in it; return its id."""
    client = "c".ljust(MAX_CLIENT_CHARS, WIDEST)
    opening = pb.OpenSessionRequest(representation=longest(number), client=client)
    terms = connection.call("OpenSession", opening, DEADLINE_MS, pb.OpenSessionResponse)
    look = pb.LookupRequest(session_id=terms.session_id, digests=bytes(16))
    connection.call("Lookup", look, DEADLINE_MS, pb.LookupResponse)
    return terms.session_id


def test_a_thousand_sessions_with_the_longest_identities_cost_32_mib_at_most(
    server_process: ProcessMaker,
) -> None:
    server = server_process("--cpu", "16MiB", "--tiers", "cpu")
    server.start()
    with closing(Connection(server.address, retry_after_ms=1)) as connection:
        for number in range(20):
            session_id = miss(connection, number)
            closing_it = pb.CloseSessionRequest(session_id=session_id)
            connection.call("CloseSession", closing_it, DEADLINE_MS, pb.CloseSessionResponse)
        before = resident_bytes(server.pid)
        for number in range(SESSIONS):
            miss(connection, number)
        grown = resident_bytes(server.pid) - before
    assert grown <= MOST_GROWTH_BYTES, f"{grown / (1 << 20):.1f} MiB"


@pytest.fixture
def crowded(make_server: ServerMaker) -> LocalServer:
    """A server that knows as many identities as it remembers, each the longest."""
    server = make_server()
    connection = server.dial()
    for number in range(MAX_SPACES):
        miss(connection, number)
    return server


def test_all_identities_are_listed_though_one_message_does_not_hold_them(
    crowded: LocalServer,
) -> None:
    reply = crowded.dial().call("Spaces", pb.SpacesRequest(), DEADLINE_MS, pb.SpacesResponse)
    assert 0 < len(reply.spaces) < MAX_SPACES
    assert len(reply.spaces) + reply.left == MAX_SPACES
    assert len({one.key_namespace for one in fetch_namespaces(crowded.address)}) == MAX_SPACES


def test_an_explanation_that_no_message_holds_is_cut_and_says_by_how_much(
    crowded: LocalServer,
) -> None:
    request = pb.ExplainRequest(recent=10_000)
    reply = crowded.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    assert 0 < len(reply.recent) < MAX_SPACES
    assert len(reply.recent) + reply.left_out == MAX_SPACES


def test_a_count_with_a_name_of_a_megabyte_leaves_nothing(server: LocalServer) -> None:
    ask = server.dial()
    counts = {"x" * 1_000_000: 1, "hits": 2}
    beat = pb.HeartbeatRequest(session_id=open_session(ask).session_id, counts=counts)
    ask.call("Heartbeat", beat, DEADLINE_MS, pb.HeartbeatResponse)
    reply = ask.call("Explain", pb.ExplainRequest(recent=1), DEADLINE_MS, pb.ExplainResponse)
    assert [dict(one.counts) for one in reply.engines] == [{"hits": 2}]
