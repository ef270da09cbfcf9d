"""TLS, certificates and which servers do not start, through real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.credentials import Authority
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL
from helpers.trust_world import SERVICE, World, chunks_for, request_of

from kvstore.client import Access, Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.messages import as_message
from kvstore.server.settings.settings import load_config


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("tls"))
    yield world
    world.close()


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

    clients = ExitStack()
    try:
        options = ClientOptions(
            "grpc", chunk_tokens=16, access=mine, deadline_ms=DEADLINE_MS, retry_after_ms=1
        )
        client = clients.enter_context(Client(address, SMALL, options))
        keys, chunks = chunks_for(client, 4)
        client.put_chunks(chunks)
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
                    assert len(client.get_chunks(keys)) == len(keys)
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
        clients.close()
        server.close()


def test_a_certificate_that_is_revoked_is_refused_and_ends_its_sessions(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    cert, key = ca.issue("server")
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca.path)]
    flags += ["--tls-crl", str(ca.revoke(hours=-1))]
    with pytest.raises(InvalidRequestError, match="out of date"):
        LocalServer(tmp_path, *flags)
    ca.revoke()
    bad, good = (Access(True, ca.path, *ca.issue(n, tenant="acme")) for n in ("bad", "good"))
    server = LocalServer(tmp_path, *flags)
    address = f"localhost:{server.node.port}"
    connections = [Connection(address, 1, access=access) for access in (bad, good)]
    try:
        request = pb.OpenSessionRequest(representation=as_message(pb.Representation, SMALL))
        for connection in connections:
            connection.call("OpenSession", request, DEADLINE_MS, pb.OpenSessionResponse)
        assert len(server.node.sessions) == 2
        ca.revoke(tmp_path / "bad.crt")
        assert eventually(lambda: len(server.node.sessions) == 1)
        assert eventually(lambda: server.counter("revoked_sessions") == 1)  # counted after
        with pytest.raises(UnauthenticatedError, match="revoked"):
            connections[0].call("Status", pb.StatusRequest(), DEADLINE_MS, pb.StatusResponse)
        connections[1].call("Status", pb.StatusRequest(), DEADLINE_MS, pb.StatusResponse)
    finally:
        for connection in connections:
            connection.close()
        server.close()


def _answers(work: Callable[[], object]) -> bool:
    try:
        work()
    except TierUnavailableError:
        return False
    return True


# --- which starts are refused


def test_other_hosts_reach_a_server_with_tls_and_authentication_or_by_an_explicit_word(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    sides = product(("127.0.0.1", "0.0.0.0", "[::]", "192.0.2.1"), *[(False, True)] * 3)
    for host, is_insecure, has_auth, has_tls in sides:
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
    with (
        closing(World(tmp_path, "--health", "127.0.0.1:0")) as world,
        grpc.insecure_channel(f"127.0.0.1:{world.server.node.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness", "startup"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=20).status == 1
