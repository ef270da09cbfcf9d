"""Who may do what to whose chunks, TLS, and which servers do not start, through real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.credentials import Authority, KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import SMALL, keys_of
from helpers.trust_world import SERVICE, World, chunks_for, request_of

from kvstore.client import Access, Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    PermissionDeniedError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.messages import as_message
from kvstore.proto.types import DIGEST_BYTES, PutOutcome


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    flags = (
        *("--shared-pools", "library=acme+zeta:ops,curated=*:acme"),
        *("--tenant-limits", "lent=0:0:2,hasty=0:5:0,small=3:0:0,putter=0:10:0"),
        *("--tenant-quotas", "pool:library=16KiB"),
    )
    world = World(tmp_path_factory.mktemp("trust"), *flags)
    yield world
    world.close()


OF_A_SESSION = sorted(
    method.name
    for method in SERVICE.methods
    if "session_id" in method.input_type.fields_by_name and method.name != "CloseSession"
)


# --- one tenant and another


def test_a_session_of_another_tenant_is_as_if_it_were_not_there_and_closing_it_does_nothing(
    world: World,
) -> None:
    connection = world.dial(Access(ca=world.ca.path, token=world.acme))
    theirs = open_session(connection)
    for method in OF_A_SESSION:
        answers = []
        for session_id in (theirs.session_id, 12345):
            with pytest.raises(LeaseExpiredError) as caught:
                world.call(world.zeta, method, request_of(method, session_id))
            answers.append(str(caught.value).replace(str(session_id), "N"))
        assert answers[0] == answers[1], method
    world.call(world.zeta, "CloseSession", pb.CloseSessionRequest(session_id=theirs.session_id))
    beat = pb.HeartbeatRequest(session_id=theirs.session_id)
    assert not connection.call("Heartbeat", beat, DEADLINE_MS, pb.HeartbeatResponse).draining


def test_another_tenants_chunks_are_as_if_they_were_not_there(world: World) -> None:
    mine = world.client(world.acme)
    keys, chunks = chunks_for(mine, 1)
    assert [put.outcome for put in mine.put_chunks(chunks)] == [PutOutcome.stored] * len(keys)
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    session_id = open_session(world.dial(Access(ca=world.ca.path, token=world.zeta))).session_id

    def ask(method: str) -> Any:
        return world.call(world.zeta, method, request_of(method, session_id, digests))

    assert (ask("Lookup").ready, ask("Lookup").pending) == (0, 0)
    assert [one for one in ask("Get") if one.WhichOneof("body")] == []
    assert list(ask("Stat").chunks) == []
    assert [list(one.chunks) for one in ask("List")] == []
    assert (ask("Pin").pinned, ask("Unpin").unpinned) == (0, 0)
    assert (ask("Delete").deleted, ask("Delete").leased) == (0, 0)
    assert (ask("Clear").deleted, ask("Clear").leased) == (0, 0)
    explained = ask("Explain")
    assert {one.state for one in explained.chunks} == {"unknown"}
    assert list(explained.near) == []
    for tenant in ("acme", "pool:curated"):
        with pytest.raises(PermissionDeniedError):
            world.call(world.zeta, "Clear", pb.ClearRequest(tenant=tenant))
    other = world.client(world.zeta)
    assert other.lookup(keys=keys_of(other, 1, 4)).ready == 0
    assert mine.lookup(keys=keys).ready == len(keys)


def test_whoever_names_another_tenant_is_refused(world: World) -> None:
    for tenant in ("zeta", "pool:none", "pool:", "default"):
        request = pb.OpenSessionRequest(
            representation=as_message(pb.Representation, SMALL), tenant=tenant
        )
        with pytest.raises(PermissionDeniedError, match="tenant"):
            world.call(world.acme, "OpenSession", request)
    assert world.client(world.acme, tenant="acme").namespace == world.client(world.acme).namespace


def test_a_pool_is_read_by_its_readers_and_filled_by_its_writers(world: World) -> None:
    writer = world.client(world.acme, tenant="pool:curated")
    keys, chunks = chunks_for(writer, 2)
    writer.put_chunks(chunks)
    reader = world.client(world.zeta, tenant="pool:curated")
    assert reader.namespace == writer.namespace != world.client(world.acme).namespace
    assert len(reader.get_chunks(keys)) == len(keys)
    with pytest.raises(PermissionDeniedError, match="write"):
        reader.put_chunks(chunks)
    with pytest.raises(PermissionDeniedError, match="write"):
        reader.delete(keys=keys)
    stranger = world.client(world.new_key("stranger"), tenant="pool:library")
    with pytest.raises(PermissionDeniedError):
        stranger.lookup(keys=keys)


def test_a_pool_has_a_quota_and_its_chunks_count_against_no_tenants(world: World) -> None:
    key = world.new_key("ops")
    writer = world.client(key, tenant="pool:library")
    for seed in range(200, 210):
        puts = writer.put_chunks(chunks_for(writer, seed)[1])
        assert [put.outcome for put in puts] == [PutOutcome.stored] * 4
    (pool,) = world.call(world.admin, "Quota", pb.QuotaRequest(tenant="pool:library")).tenants
    (cpu,) = (tier for tier in pool.tiers if tier.tier == "cpu")
    assert (cpu.quota_bytes, 0 < cpu.used_bytes <= cpu.quota_bytes) == (16 << 10, True)
    change = pb.SetQuotaRequest(tenant="pool:library", quota_bytes=32 << 10)
    (pool,) = world.call(world.admin, "SetQuota", change).tenants
    assert {tier.quota_bytes for tier in pool.tiers} == {32 << 10}


def test_a_tenant_has_no_more_readers_of_events_by_sessions_of_pools(world: World) -> None:
    key = world.new_key("zeta")
    with ExitStack() as stack:
        for tenant in ("", "", "pool:library", "pool:curated"):
            next(stack.enter_context(world.client(key, tenant=tenant).events()))
        more = stack.enter_context(world.client(key, tenant="pool:library").events())
        with pytest.raises(QuotaExceededError, match="tenant 'zeta'"):
            next(more)


# --- roles, on every way in


def test_status_tells_tenants_what_is_nobodys_alone(world: World) -> None:
    seen = world.client(world.reader).status()
    assert {tier.name for tier in seen.tiers} == {"cpu", "disk"}
    assert not seen.counters
    assert not seen.sessions
    assert not any(tier.used_bytes or tier.chunks for tier in seen.tiers)
    assert world.call(world.admin, "Status", pb.StatusRequest()).counters


def test_a_revoked_key_ends_its_sessions_and_nobody_elses(world: World) -> None:
    key = world.new_key("acme")
    gone, stays = world.client(key, "shm"), world.client(world.acme, "shm")
    assert gone.lookup(keys=keys_of(gone, 5, 2)).ready >= 0
    stays.lookup(keys=keys_of(stays, 5, 2))
    before = world.server.counter("revoked_sessions")
    world.ring.revoke(key)
    assert eventually(lambda: world.server.counter("revoked_sessions") == before + 1)
    with pytest.raises(UnauthenticatedError):
        gone.lookup(keys=keys_of(gone, 5, 2))
    stays.lookup(keys=keys_of(stays, 5, 2))


# --- quotas


def test_a_tenants_leases_and_requests_have_limits_with_names(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = world.client(world.new_key("lent"))
    keys, chunks = chunks_for(lender, 3, 2)
    lender.put_chunks(chunks)
    leases = [lender.lease(keys=keys) for _ in range(2)]
    with pytest.raises(QuotaExceededError, match=r"tenant 'lent' reached leases=2"):
        lender.lease(keys=keys)
    leases[0].release()
    lender.lease(keys=keys).release()
    leases[1].release()
    hasty = world.client(world.new_key("hasty"))
    keys = keys_of(hasty, 5, 2)
    limits = world.server.node.authorizer.limits
    now_s = limits._clock()
    monkeypatch.setattr(limits, "_clock", lambda: now_s)  # or else a slow machine is not hasty
    with pytest.raises(QuotaExceededError, match=r"tenant 'hasty' reached requests_per_s=5"):
        [hasty.lookup(keys=keys) for _ in range(6)]


def test_a_put_is_one_request_of_the_tenant_whose_session_it_is_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = world.server.node.authorizer.limits
    now_s = limits._clock()
    monkeypatch.setattr(limits, "_clock", lambda: now_s)
    putter = world.client(world.new_key("putter"))
    puts = [chunks_for(putter, seed, 2)[1] for seed in range(200, 210)]  # opens the session
    for chunks in puts[:9]:
        assert [put.outcome for put in putter.put_chunks(chunks)] == [PutOutcome.stored] * 2
    with pytest.raises(QuotaExceededError, match=r"tenant 'putter' reached requests_per_s=10"):
        putter.put_chunks(puts[9])


def test_a_tenant_has_so_many_chunks_and_an_admin_changes_that(world: World) -> None:
    key = world.new_key("small")
    small = world.client(key)
    for seed in range(4):
        _, chunks = chunks_for(small, 100 + seed, 2)
        assert {put.outcome for put in small.put_chunks(chunks)} == {PutOutcome.stored}
    (seen,) = world.call(key, "Quota", pb.QuotaRequest()).tenants
    used: dict[str, int] = {tier.tier: tier.used_chunks for tier in seen.tiers}
    assert (seen.tenant, seen.chunks) == ("small", 3)
    assert 1 <= used["cpu"] <= 3
    change = pb.SetQuotaRequest(tenant="small", chunks=50, requests_per_s=9)
    with pytest.raises(PermissionDeniedError):
        world.call(key, "SetQuota", change)
    with pytest.raises(PermissionDeniedError):
        world.call(world.acme, "Quota", pb.QuotaRequest(tenant="small"))
    (changed,) = world.call(world.admin, "SetQuota", change).tenants
    assert (changed.chunks, changed.requests_per_s, changed.leases) == (50, 9, 0)
    world.call(world.admin, "SetQuota", pb.SetQuotaRequest(tenant="small", requests_per_s=0))
    used.clear()

    def has_room() -> bool:
        for seed in range(4):
            puts = small.put_chunks(chunks_for(small, 100 + seed, 2)[1])
            assert PutOutcome.refused not in [put.outcome for put in puts], puts
        (seen,) = world.call(world.admin, "Quota", pb.QuotaRequest(tenant="small")).tenants
        used.update({tier.tier: tier.used_chunks for tier in seen.tiers})
        # One that was evicted to disk meanwhile is there, and not put again.
        return used["cpu"] > 3 and used["cpu"] + used["disk"] >= 8

    # What was there when it was put, and on its way out by the old limit, is put again.
    assert eventually(has_room), used
    everybody = world.call(world.admin, "Quota", pb.QuotaRequest(tenant="*")).tenants
    assert [one.tenant for one in everybody] == ["hasty", "lent", "pool:library", "putter", "small"]
    with pytest.raises(InvalidRequestError, match="--tenant-quotas"):
        world.call(world.admin, "SetQuota", pb.SetQuotaRequest(tenant="acme", quota_bytes=1))


# --- TLS


def test_without_a_token_only_health_answers(world: World) -> None:
    for method in sorted(SERVICE.methods_by_name):
        with pytest.raises(UnauthenticatedError):
            world.call("", method, request_of(method, 0))


def test_a_server_of_another_authority_is_not_believed(world: World, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    connection = world.dial(Access(ca=stranger.path, token=world.acme))
    with pytest.raises(TierUnavailableError):
        connection.call("Status", pb.StatusRequest(), 2000, pb.StatusResponse)
    plain = world.dial(Access())
    with pytest.raises(KVStoreError):
        plain.call("Status", pb.StatusRequest(), 2000, pb.StatusResponse)


def test_a_token_does_not_travel_in_plain_text_to_other_hosts() -> None:
    with pytest.raises(InvalidRequestError, match="plain text"):
        Connection("kv.example:7420", 1, access=Access(token="kvs_1"))
    Connection("kv.example:7420", 1, access=Access(token="kvs_1", insecure=True)).close()
    Connection("127.0.0.1:7420", 1, access=Access(token="kvs_1")).close()
    assert "kvs_1" not in repr(Access(token="kvs_1"))


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def serve(ca: Authority, tmp_path: Path) -> Iterator[Callable[..., LocalServer]]:
    """Start servers that clients show certificates to."""
    cert, key = ca.issue("server")
    with ExitStack() as stack:

        def start(*flags: str) -> LocalServer:
            own = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca.path))
            return stack.enter_context(closing(LocalServer(tmp_path, *own, *flags)))

        yield start


def status(server: LocalServer, access: Access) -> pb.StatusResponse:
    with closing(Connection(f"localhost:{server.node.port}", 1, access=access)) as connection:
        return connection.call("Status", pb.StatusRequest(), 3000, pb.StatusResponse)


def test_certificates_identify_and_may_be_replaced_under_load(
    ca: Authority, serve: Callable[..., LocalServer], tmp_path: Path
) -> None:
    mine, server = Access(True, ca.path, *ca.issue("engine", tenant="acme")), serve()
    stranger = Authority(tmp_path, "stranger")
    for wrong in (
        Access(ca=ca.path),
        Access(True, ca.path, *stranger.issue("thief", tenant="acme")),
        Access(True, ca.path, *ca.issue("late", tenant="acme", days=-1)),
    ):
        with pytest.raises(TierUnavailableError):
            status(server, wrong)
    with pytest.raises(UnauthenticatedError, match="subject"):
        status(server, Access(True, ca.path, *ca.issue("nobody")))
    options = ClientOptions("grpc", 16, DEADLINE_MS, access=mine, retry_after_ms=1)
    stop, failures = threading.Event(), list[Exception]()
    with Client(f"localhost:{server.node.port}", SMALL, options) as client:
        keys, chunks = chunks_for(client, 4)
        client.put_chunks(chunks)

        def load() -> None:
            while not stop.is_set():
                try:
                    assert len(client.get_chunks(keys)) == len(keys)
                except (KVStoreError, AssertionError) as error:
                    failures.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        renewed = Authority(tmp_path, "renewed")
        renewed.issue("server")  # over the same files

        def is_renewed() -> bool:
            with suppress(TierUnavailableError):
                status(server, replace(mine, ca=renewed.path))
                return True
            return False

        assert eventually(is_renewed)
        with pytest.raises(TierUnavailableError):
            status(server, mine)
        stop.set()
        thread.join()
    assert failures == []


def test_a_client_goes_on_with_the_certificate_that_replaced_its_expired_one(
    ca: Authority, serve: Callable[..., LocalServer], tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys")
    token = ring.make("acme")
    server, ends_at = serve("--auth-keys", str(ring.path)), time.monotonic() + 5
    access = Access(True, ca.path, *ca.issue("engine", days=5 / 86_400), token=token)
    options = ClientOptions("grpc", 16, DEADLINE_MS, access=access, retry_after_ms=1)
    refused = []
    with Client(f"localhost:{server.node.port}", SMALL, options) as client:
        keys, chunks = chunks_for(client, 4)
        client.put_chunks(chunks)
        ca.issue("engine")  # over the same files

        while time.monotonic() < ends_at + 1.5:
            try:
                client.get_chunks(keys)
            except KVStoreError as error:
                refused.append(error)
        assert len(refused) < 10, refused[-1]
        assert len(client.get_chunks(keys)) == len(keys)


def test_a_certificate_that_is_revoked_is_refused_and_ends_its_sessions(
    ca: Authority, serve: Callable[..., LocalServer], tmp_path: Path
) -> None:
    crl = str(ca.revoke(hours=-1))
    with pytest.raises(InvalidRequestError, match="out of date"):
        serve("--tls-crl", crl)
    ca.revoke()
    bad, good = (Access(True, ca.path, *ca.issue(n, tenant="acme")) for n in ("bad", "good"))
    ring = KeyRing(tmp_path / "keys")
    both = replace(bad, token=ring.make("acme"))
    server = serve("--tls-crl", crl, "--auth-keys", str(ring.path))
    request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
    for access in (bad, both, good):
        with closing(Connection(f"localhost:{server.node.port}", 1, access=access)) as connection:
            connection.call("OpenSession", request, DEADLINE_MS, pb.OpenSessionResponse)
    assert len(server.node.sessions) == 3
    ca.revoke(tmp_path / "bad.crt")
    assert eventually(lambda: len(server.node.sessions) == 1)
    assert eventually(lambda: server.counter("revoked_sessions") == 2)  # counted after
    for access in (bad, both):
        with pytest.raises(UnauthenticatedError, match="revoked"):
            status(server, access)
    status(server, good)


def test_health_has_a_port_of_its_own_that_answers_in_plain_text(tmp_path: Path) -> None:
    with (
        closing(World(tmp_path, "--health", "127.0.0.1:0")) as world,
        grpc.insecure_channel(f"127.0.0.1:{world.server.node.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness", "startup"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=20).status == 1
