"""The blocking client: its verbs, its errors, and servers that die, restart or stay silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from helpers.bare_wire import wire_to
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import (
    MEDIUM,
    SMALL,
    chunks_of,
    is_right,
    keys_of,
    other_revision,
    store,
    tokens,
)

from kvstore.client import Client, ClientOptions, chunk_reads
from kvstore.client.options import TransportName
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkKey

ServerMaker = Callable[..., LocalServer]


# --- keys


def test_keys_share_exactly_the_prefix_that_prompts_share(client: Client) -> None:
    one, other = tokens(1, 64), tokens(1, 64)
    other[40] += 1
    shared = [a == b for a, b in zip(client.keys(one), client.keys(other), strict=True)]
    assert shared == [True, True, False, False]
    assert client.keys(one, [b"image"])[0] != client.keys(one)[0]
    assert client.keys(tokens(1, 63)) == client.keys(one)[:3]
    assert client.keys([]) == []


def test_key_of_another_namespace_is_refused_and_changes_nothing(
    server: LocalServer, client: Client
) -> None:
    stranger = server.connect("grpc", other_revision(SMALL))
    keys = store(stranger, 1, 2)
    calls: list[Callable[[list[ChunkKey]], object]] = [
        lambda keys: client.get(keys=keys),
        lambda keys: client.lookup(keys=keys),
        lambda keys: client.lease(keys=keys),
        lambda keys: client.pin(keys=keys, ttl=1.0),
        lambda keys: client.unpin(keys=keys),
        lambda keys: client.delete(keys=keys),
        lambda keys: client.stat(keys=keys),
        lambda keys: client.put_chunks(chunks_of(client, keys)),
    ]
    with server.unchanged():
        for call in calls:
            with pytest.raises(InvalidRequestError, match=r"key='.*: not in this client's names"):
                call(keys)
            with pytest.raises(InvalidRequestError, match="name chunks with keys"):
                call([ChunkKey(keys[0][:31])])


def test_keys_that_are_no_bytes_are_refused(client: Client) -> None:
    no_keys: list[Any] = [["abc"], "abc", [7], [None], b"abc"]
    for call in (client.get, client.lookup, client.lease, client.delete, client.stat):
        for keys in no_keys:
            with pytest.raises(InvalidRequestError, match=r"key=.*: give a list of bytes"):
                call(keys=keys)
    with pytest.raises(InvalidRequestError, match="tier="):
        client.clear("\ud800")


# --- verbs


def test_verbs_agree_on_what_is_there(client: Client) -> None:
    keys = store(client, 1, 4)
    match = client.lookup(keys=[*keys, *keys_of(client, 2, 2)])
    assert (match.ready, match.pending, match.missing) == (4, 0, 2)
    assert (match.tiers, len(match.load_us), match.lease_id) == (("cpu",) * 4, 4, 0)
    assert [chunk.digest for chunk in client.stat(keys=[*keys, *keys_of(client, 2, 1)])] == [
        key[16:] for key in keys
    ]
    assert {chunk.digest for chunk in client.list()} == {key[16:] for key in keys}
    assert len(client.list(3)) == 3
    assert client.pin(keys=keys[:2], ttl=60.0) == 2
    assert [chunk.pinned for chunk in client.stat(keys=keys)] == [True, True, False, False]
    assert client.delete(keys=keys) == 2
    assert client.unpin(keys=keys) == 2
    assert client.lookup(keys=keys).ready == 2
    assert client.clear() == 2
    assert client.list() == []


def test_chunk_can_be_deleted_as_soon_as_its_get_is_over(client: Client) -> None:
    for seed in range(20):
        keys = store(client, seed, 2)
        assert len(client.get_chunks(keys)) == 2
        assert (client.delete(keys=keys) if seed % 2 else client.clear()) == 2


def test_listing_of_many_chunks_comes_whole(client: Client) -> None:
    keys = store(client, 1, 600)
    assert {chunk.digest for chunk in client.list()} == {key[16:] for key in keys}


def test_chunk_that_is_being_put_is_pending(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, 1)
    wire = wire_to(server)
    request = wire.reserve(2304)
    wire.call("Reserve", request)
    pending = ChunkKey(client.namespace + request.digests)
    match = client.lookup(keys=[*keys, pending, *keys_of(client, 2, 1)])
    assert (match.ready, match.pending, match.missing) == (1, 1, 1)


def test_pins_have_a_limit_that_is_named(server: LocalServer) -> None:
    client = server.connect(
        representation=MEDIUM, options=ClientOptions(chunk_tokens=256, deadline_ms=DEADLINE_MS)
    )
    keys = store(client, 1, 10)
    with pytest.raises(QuotaExceededError, match="pin_limit_bytes"):
        client.pin(keys=keys, ttl=60.0)


def test_number_that_no_message_could_carry_is_refused(client: Client) -> None:
    for value in (-1, 1 << 32):
        with pytest.raises(InvalidRequestError, match=f"ttl={value / 1000}"):
            client.pin(keys=[], ttl=value / 1000)
        with pytest.raises(InvalidRequestError, match=f"limit={value}"):
            client.list(value)


def test_chunks_of_an_iterator_are_put_as_those_of_a_list(client: Client) -> None:
    keys = keys_of(client, 1, 3)
    chunks: Any = iter(chunks_of(client, keys))
    assert all(put.outcome.name == "stored" for put in client.put_chunks(chunks))
    assert len(client.get_chunks(keys)) == 3


def test_chunk_over_the_server_s_limit_is_refused_before_it_is_sent(
    make_server: ServerMaker,
) -> None:
    server = make_server("--max-frame-bytes", "64KiB")
    long = server.connect("auto", MEDIUM, ClientOptions(chunk_tokens=64, deadline_ms=DEADLINE_MS))
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match=r"takes 65536 at most; use shorter chunks"),
    ):
        long.put_chunks(chunks_of(long, keys_of(long, 1, 1)))


def test_status_tells_what_the_server_is_and_holds(server: LocalServer, client: Client) -> None:
    store(client, 1, 3)
    status = client.status()
    assert (status.state, status.sessions) == ("serving", 1)
    assert [(tier.name, tier.state, tier.codec) for tier in status.tiers] == [
        ("cpu", "serving", "raw"), ("disk", "serving", "raw")
    ]  # fmt: skip
    assert status.tiers[0].chunks == status.counters["put_stored_chunks"] == 3
    assert status.socket_path == str(server.config.socket_path_for(server.node.port))


def test_drain_saves_what_only_memory_holds(make_server: ServerMaker) -> None:
    server = make_server("--write", "evict")
    client = server.connect()
    keys = store(client, 1, 4)
    assert [[copy.tier for copy in chunk.copies] for chunk in client.stat(keys=keys)] == [
        ["cpu"]
    ] * 4
    assert client.drain()
    assert {copy.tier for chunk in client.stat(keys=keys) for copy in chunk.copies} == {
        "cpu",
        "disk",
    }
    assert len(client.get_chunks(keys)) == 4


# --- sessions that end, servers that restart


def test_client_opens_another_session_when_the_server_lost_it(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, 3)
    calls: list[Callable[[], int]] = [
        lambda: len(client.get_chunks(keys)),
        lambda: client.lookup(keys=keys).ready,
        lambda: len(client.put_chunks(chunks_of(client, keys))),
        lambda: len(client.list()),
    ]
    for call in calls:
        (session_id,) = server.node.sessions.by_id
        server.node.sessions.close(session_id)
        assert call() == 3
        assert session_id not in server.node.sessions.by_id
    assert server.settled().leases == 0
    assert len(server.node.sessions) == 1


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_client_finds_a_restarted_server_what_its_disk_kept_and_no_lease_of_before(
    make_server: ServerMaker, transport: TransportName
) -> None:
    first = make_server()
    options = ClientOptions(transport, 16, DEADLINE_MS, retry_after_ms=1)
    client = first.connect(options=options)
    keys = store(client, 1, 4)
    boot_id = client.boot_id
    lease = client.lease(keys=keys)
    assert lease.match.ready == 4
    first.stop()
    second = make_server("--listen", first.address)
    with pytest.raises(KVStoreError):
        lease.get()

    def reads() -> bool:
        try:
            return len(client.get_chunks(keys)) == 4
        except KVStoreError:
            return False

    assert eventually(reads)
    with pytest.raises(KVStoreError):
        lease.get()
    lease.release()
    assert client.boot_id != boot_id
    assert client.transport_name == transport
    assert all(is_right(client, *pair) for pair in zip(keys, client.get_chunks(keys), strict=True))
    assert eventually(lambda: second.counter("promoted_chunks") == 4)
    assert second.settled().leases == 0
    assert client.delete(keys=keys) == 4
    client.close()


def test_heartbeats_keep_an_idle_session_alive(make_server: ServerMaker) -> None:
    server = make_server("--limits", "session_ttl_ms=3000")
    client = server.connect()
    client.keys([])
    (session,) = server.node.sessions.by_id.values()
    heard_at = session.heard_at
    for _ in range(3):
        before = session.heard_at
        assert eventually(lambda before=before: session.heard_at > before)  # type: ignore[misc]
    assert session.heard_at > heard_at
    assert list(server.node.sessions.by_id.values()) == [session]


# --- servers that do not answer


def test_silent_server_costs_one_deadline_and_then_calls_fail_at_once(
    silent: str, no_leaks: None
) -> None:
    options = ClientOptions(deadline_ms=200, retry_after_ms=60_000)
    with Client(silent, SMALL, options) as client:
        with pytest.raises((DeadlineError, TierUnavailableError)) as first:
            client.keys([])
        assert "tried again in" not in str(first.value)
        for _ in range(100):
            with pytest.raises(TierUnavailableError, match=r"did not answer; tried again in"):
                client.keys([])


# --- the end


def test_closed_client_says_so_whatever_is_asked(client: Client) -> None:
    keys = store(client, 1, 2)
    chunks = chunks_of(client, keys)
    lease = client.lease(keys=keys)
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.keys([]),
        lambda: client.get_chunks(keys),
        lambda: client.put_chunks(chunks),
        lambda: client.lookup(keys=keys),
        lambda: client.lease(keys=keys),
        lambda: lease.get(),
        lambda: client.pin(keys=keys, ttl=0.001),
        lambda: client.delete(keys=keys),
        client.clear,
        client.list,
        client.status,
        client.drain,
    ]
    for call in calls:
        with pytest.raises(KVStoreError, match="the client is closed"):
            call()
    lease.release()
    client.close()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_closing_a_client_under_its_calls_raises_errors_of_the_store_only(
    server: LocalServer, transport: TransportName
) -> None:
    for _ in range(3):
        client = server.connect(transport)
        keys = keys_of(client, 1, 40)
        client.put_chunks(chunks_of(client, keys))

        def read(client: Client = client, keys: list[ChunkKey] = keys) -> None:
            with suppress(KVStoreError):
                while True:
                    client.get_chunks(keys)

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(4)]
            assert eventually(lambda: server.usage().leases > 0)
            client.close()
        assert [reader.exception() for reader in readers] == [None] * 4
    assert server.settled().leases == 0


def test_a_second_attempt_at_layers_has_what_is_left_of_the_timeout(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 4)
    read, deadlines_ms = chunk_reads.read_layers, list[int]()

    def lost_once(link: Any, transport: Any, request: chunk_reads.ChunkRequest) -> Any:
        deadlines_ms.append(request.deadline_ms)
        if len(deadlines_ms) == 1:
            time.sleep(0.3)
            raise LeaseExpiredError("dropped meanwhile")
        return read(link, transport, request)

    monkeypatch.setattr(chunk_reads, "read_layers", lost_once)
    assert len(list(client.get_chunk_layers(keys))) == 2
    assert deadlines_ms[1] <= deadlines_ms[0] - 300
