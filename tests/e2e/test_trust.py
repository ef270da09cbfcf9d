"""Who may do what to whose chunks, through real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from credentials import Authority, KeyRing
from local_server import DEADLINE_MS, LocalServer, eventually, open_session
from prompts import SMALL, chunks_of, keys_of

from kvstore.client import Access, Chunk, Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
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
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, PutOutcome
from kvstore.proto.wire import representation_to_message
from kvstore.server.config import load_config
from kvstore.server.roles import METHODS

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]


def chunks_for(client: Client, seed: int, count: int = 4) -> tuple[list[ChunkKey], list[Chunk]]:
    """Return the keys and the chunks of a prompt."""
    keys = keys_of(client, seed, count)
    return keys, chunks_of(client, keys)


class World:
    """A server over TLS that asks who calls, and callers of it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.cert, self.key = self.ca.issue("server")
        self.ring = KeyRing(folder / "api-keys")
        self.acme, self.zeta = self.ring.make("acme"), self.ring.make("zeta")
        self.reader, self.admin = self.ring.make("acme", "read"), self.ring.make("ops", "admin")
        self.server = LocalServer(
            folder, "--tls-cert", str(self.cert), "--tls-key", str(self.key),
            "--auth-keys", str(self.ring.path), "--zmq", "127.0.0.1:0", *flags,
        )  # fmt: skip
        self._open: list[Client | Connection] = []

    @property
    def address(self) -> str:
        return f"localhost:{self.server.node.port}"

    def client(self, key: str, transport: TransportName = "grpc", tenant: str = "") -> Client:
        options = ClientOptions(
            transport,
            chunk_tokens=16,
            deadline_ms=DEADLINE_MS,
            access=Access(ca=self.ca.path, token=key),
            tenant=tenant,
        )
        client = Client(self.address, SMALL, options)
        self._open.append(client)
        return client

    def new_key(self, tenant: str, *roles: str) -> str:
        """Return a key that the server knows already."""
        key = self.ring.make(tenant, *roles)
        self.server.node.trust.authenticator.refresh()
        return key

    def dial(self, access: Access) -> Connection:
        connection = Connection(self.address, 1, access=access)
        self._open.append(connection)
        return connection

    def call(self, key: str, method: str, request: Any) -> Any:
        """Call *method*, whatever it is, as the holder of *key*; return all of its answer."""
        connection = self.dial(Access(ca=self.ca.path, token=key))
        descriptor = SERVICE.methods_by_name[method]
        reply = getattr(pb, descriptor.output_type.name)
        if descriptor.client_streaming:
            return connection.upload(method, iter([request]), DEADLINE_MS, reply)
        if descriptor.server_streaming:
            return list(connection.stream(method, request, DEADLINE_MS))
        return connection.call(method, request, DEADLINE_MS, reply)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
        self.server.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    flags = (
        *("--shared-pools", "library=acme+zeta:ops,curated=*:acme"),
        *("--tenant-limits", "lent=0:0:2,hasty=0:5:0,small=3:0:0"),
    )
    world = World(tmp_path_factory.mktemp("trust"), *flags)
    yield world
    world.close()


def request_of(method: str, session_id: int, digests: bytes = b"") -> Any:
    """Return a request of *method* on a session, for chunks of the world's first prompt."""
    request = getattr(pb, SERVICE.methods_by_name[method].input_type.name)()
    fields = request.DESCRIPTOR.fields_by_name
    if "session_id" in fields:
        request.session_id = session_id
    if "digests" in fields:
        request.digests = digests
    if "ttl_ms" in fields:
        request.ttl_ms = 1000
    return request


OF_A_SESSION = sorted(
    method.name
    for method in SERVICE.methods
    if "session_id" in method.input_type.fields_by_name and method.name != "CloseSession"
)


# --- one tenant and another


@pytest.mark.parametrize("method", OF_A_SESSION)
def test_a_session_of_another_tenant_is_as_if_it_were_not_there(method: str, world: World) -> None:
    theirs = open_session(world.dial(Access(ca=world.ca.path, token=world.acme)))
    answers = []
    for session_id in (theirs.session_id, 12345):
        with pytest.raises(LeaseExpiredError) as caught:
            world.call(world.zeta, method, request_of(method, session_id))
        answers.append(str(caught.value).replace(str(session_id), "N"))
    assert answers[0] == answers[1]


def test_closing_another_tenants_session_does_nothing_and_says_nothing(world: World) -> None:
    connection = world.dial(Access(ca=world.ca.path, token=world.acme))
    theirs = open_session(connection)
    world.call(world.zeta, "CloseSession", pb.CloseSessionRequest(session_id=theirs.session_id))
    beat = pb.HeartbeatRequest(session_id=theirs.session_id)
    assert not connection.call("Heartbeat", beat, DEADLINE_MS, pb.HeartbeatResponse).draining


def test_another_tenants_chunks_are_as_if_they_were_not_there(world: World) -> None:
    mine = world.client(world.acme)
    keys, chunks = chunks_for(mine, 1)
    assert [put.outcome for put in mine.put(chunks)] == [PutOutcome.stored] * len(keys)
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
    other = world.client(world.zeta)
    assert other.lookup(keys_of(other, 1, 4)).ready == 0
    assert mine.lookup(keys).ready == len(keys)


def test_whoever_names_another_tenant_is_refused(world: World) -> None:
    for tenant in ("zeta", "pool:none", "pool:", "default"):
        request = pb.OpenSessionRequest(
            representation=representation_to_message(SMALL), tenant=tenant
        )
        with pytest.raises(PermissionDeniedError, match="tenant"):
            world.call(world.acme, "OpenSession", request)
    assert world.client(world.acme, tenant="acme").namespace == world.client(world.acme).namespace


def test_a_pool_is_read_by_its_readers_and_filled_by_its_writers(world: World) -> None:
    writer = world.client(world.acme, tenant="pool:curated")
    keys, chunks = chunks_for(writer, 2)
    writer.put(chunks)
    reader = world.client(world.zeta, tenant="pool:curated")
    assert reader.namespace == writer.namespace != world.client(world.acme).namespace
    assert len(reader.get(keys)) == len(keys)
    with pytest.raises(PermissionDeniedError, match="write"):
        reader.put(chunks)
    with pytest.raises(PermissionDeniedError, match="write"):
        reader.delete(keys)
    stranger = world.client(world.new_key("stranger"), tenant="pool:library")
    with pytest.raises(PermissionDeniedError):
        stranger.lookup(keys)


# --- roles, on every way in


@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
def test_a_reader_reads_and_does_not_write(transport: TransportName, world: World) -> None:
    writer = world.client(world.acme, transport)
    keys, chunks = chunks_for(writer, 2)
    writer.put(chunks)
    reader = world.client(world.reader, transport)
    assert len(reader.get(keys)) == len(keys)
    _, others = chunks_for(reader, 8)
    with pytest.raises(PermissionDeniedError):
        reader.put(others)
    with pytest.raises(PermissionDeniedError):
        reader.drain()


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
    assert gone.lookup(keys_of(gone, 5, 2)).ready >= 0
    stays.lookup(keys_of(stays, 5, 2))
    before = world.server.counter("revoked_sessions")
    world.ring.revoke(key)
    assert eventually(lambda: world.server.counter("revoked_sessions") == before + 1)
    with pytest.raises(UnauthenticatedError):
        gone.lookup(keys_of(gone, 5, 2))
    stays.lookup(keys_of(stays, 5, 2))


# --- quotas


def test_a_tenants_leases_and_requests_have_limits_with_names(world: World) -> None:
    lender = world.client(world.new_key("lent"))
    keys, chunks = chunks_for(lender, 3, 2)
    lender.put(chunks)
    leases = [lender.lease(keys) for _ in range(2)]
    with pytest.raises(QuotaExceededError, match=r"tenant 'lent' reached leases=2"):
        lender.lease(keys)
    leases[0].release()
    lender.lease(keys).release()
    leases[1].release()
    hasty = world.client(world.new_key("hasty"))
    keys = keys_of(hasty, 5, 2)
    with pytest.raises(QuotaExceededError, match=r"tenant 'hasty' reached requests_per_s=5"):
        list(map(hasty.lookup, [keys] * 20))


def test_a_tenant_has_so_many_chunks_and_an_admin_changes_that(world: World) -> None:
    key = world.new_key("small")
    small = world.client(key)
    for seed in range(4):
        _, chunks = chunks_for(small, 100 + seed, 2)
        assert {put.outcome for put in small.put(chunks)} == {PutOutcome.stored}
    (seen,) = world.call(key, "Quota", pb.QuotaRequest()).tenants
    used = {tier.tier: tier.used_chunks for tier in seen.tiers}
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
    for seed in range(4):
        small.put(chunks_for(small, 100 + seed, 2)[1])
    (seen,) = world.call(world.admin, "Quota", pb.QuotaRequest(tenant="small")).tenants
    assert {tier.tier: tier.used_chunks for tier in seen.tiers}["cpu"] == 8
    everybody = world.call(world.admin, "Quota", pb.QuotaRequest(tenant="*")).tenants
    assert [one.tenant for one in everybody] == ["hasty", "lent", "small"]
    with pytest.raises(InvalidRequestError, match="--tenant-quotas"):
        world.call(world.admin, "SetQuota", pb.SetQuotaRequest(tenant="acme", quota_bytes=1))


# --- TLS


def test_without_a_token_only_health_answers(world: World) -> None:
    for method in sorted(METHODS):
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


def test_certificates_identify_and_may_be_replaced_under_load(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    cert, key = ca.issue("server")
    mine = Access(True, ca.path, *ca.issue("engine", tenant="acme"))
    server = LocalServer(
        tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca.path),
    )  # fmt: skip
    address = f"localhost:{server.node.port}"

    def status(access: Access) -> pb.StatusResponse:
        connection = Connection(address, 1, access=access)
        try:
            return connection.call("Status", pb.StatusRequest(), 3000, pb.StatusResponse)
        finally:
            connection.close()

    try:
        client = server.connect(
            options=ClientOptions("grpc", chunk_tokens=16, access=mine, deadline_ms=DEADLINE_MS)
        )
        client._connection.close()
        client._connection = Connection(address, 1, access=mine)
        keys, chunks = chunks_for(client, 4)
        client.put(chunks)
        stranger = Authority(tmp_path, "stranger")
        wrong = [
            Access(ca=ca.path),
            Access(True, ca.path, *stranger.issue("thief", tenant="acme")),
            Access(True, ca.path, *ca.issue("late", tenant="acme", days=-1)),
        ]
        for access in wrong:
            with pytest.raises(TierUnavailableError):
                status(access)
        with pytest.raises(UnauthenticatedError, match="subject"):
            status(Access(True, ca.path, *ca.issue("nobody")))
        stop, failures = threading.Event(), []

        def load() -> None:
            while not stop.is_set():
                try:
                    assert len(client.get(keys)) == len(keys)
                except (KVStoreError, AssertionError) as error:
                    failures.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        renewed = Authority(tmp_path, "renewed")
        renewed.issue("server")  # over the same files
        seen_by_new = replace(mine, ca=renewed.path)
        assert eventually(lambda: _answers(lambda: status(seen_by_new)))
        with pytest.raises(TierUnavailableError):
            status(mine)
        stop.set()
        thread.join()
        assert failures == []
    finally:
        server.close()


def _answers(work: Callable[[], object]) -> bool:
    try:
        work()
    except TierUnavailableError:
        return False
    return True


# --- which starts are refused


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]", "192.0.2.1"])
@pytest.mark.parametrize("is_insecure", [False, True])
@pytest.mark.parametrize("has_auth", [False, True])
@pytest.mark.parametrize("has_tls", [False, True])
def test_other_hosts_reach_a_server_with_tls_and_authentication_or_by_an_explicit_word(
    host: str, is_insecure: bool, has_auth: bool, has_tls: bool, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    flags = ["--listen", f"{host}:0"]
    flags += ["--insecure"] if is_insecure else []
    flags += ["--auth-keys", str(file)] if has_auth else []
    flags += ["--tls-cert", str(file), "--tls-key", str(file)] if has_tls else []
    if host == "127.0.0.1" or is_insecure or (has_auth and has_tls):
        load_config(flags)
    else:
        with pytest.raises(InvalidRequestError, match="--insecure"):
            load_config(flags)


def test_health_has_a_port_of_its_own_that_answers_in_plain_text(tmp_path: Path) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    world = World(tmp_path, "--health", "127.0.0.1:0")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{world.server.node.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("liveness", "readiness", "startup"):
                request = health_pb2.HealthCheckRequest(service=service)
                assert stub.Check(request, timeout=20).status == 1
    finally:
        world.close()
