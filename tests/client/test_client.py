"""The client, blocking and awaited: its verbs, its errors, its sessions and its end."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from contracts.layers import damage, layers_of, planned
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.pages import engine_pages
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

from kvstore.client import (
    AsyncClient,
    Chunk,
    Client,
    ClientOptions,
    PlannedChunk,
    Shard,
)
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.options import TransportName
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
)
from kvstore.proto.types import ChunkKey, KVLayout, PutOutcome

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


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_damaged_chunk_of_keys_in_any_memory_is_a_miss(
    server: LocalServer, client: Client, kind: Callable[[bytes], Any]
) -> None:
    keys = store(client, 1, 3)
    damage(server, keys[1])
    assert len(client.get_chunks(list(map(kind, keys)))) == 1
    assert client.lookup(keys=keys).ready == 1


def test_a_lease_outlives_the_variable_of_its_client(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, 2)
    other = Client(server.address, SMALL, client.options)
    is_there = weakref.ref(other)
    with other.lease(keys=keys) as lease:
        del other
        assert is_there() is not None, "its end closes the session"
        assert len(lease.get()) == 2


def test_chunk_can_be_deleted_as_soon_as_its_get_is_over(client: Client) -> None:
    for seed in range(20):
        keys = store(client, seed, 2)
        assert len(client.get_chunks(keys)) == 2
        assert (client.delete(keys=keys) if seed % 2 else client.clear()) == 2


def test_a_chunk_over_the_servers_limit_is_refused_unsent(
    make_server: ServerMaker,
) -> None:
    server = make_server("--max-frame-bytes", "64KiB")
    long = server.connect("auto", MEDIUM, ClientOptions(chunk_tokens=64, deadline_ms=DEADLINE_MS))
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match=r"limit is 65536; use shorter chunks"),
    ):
        long.put_chunks(chunks_of(long, keys_of(long, 1, 1)))


# --- sessions that end, servers that restart


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_client_opens_another_session_when_the_server_lost_it(
    make_server: ServerMaker, transport: TransportName
) -> None:
    server = make_server("--bulk", "127.0.0.1:0")
    client = server.connect(transport)
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
    assert client.transport_name == transport
    assert server.settled().leases == 0
    assert len(server.node.sessions) == 1


# --- servers that do not answer


# --- the end


def wrong_calls(client: Any, keys: Sequence[ChunkKey]) -> dict[str, list[Callable[[], Any]]]:
    """Calls with a value of the wrong kind, by the argument that the error is to name."""
    shard: Any
    change: Any
    span: Any
    plan: Any
    (chunk, *_), key = chunks_of(client, keys), keys[0]
    lease, other = client.lease(keys=keys), Chunk(key, chunk.tensors)
    planned = PlannedChunk(key, 16)
    shard, change, span, plan = Shard, replace, SegmentRange, PlannedChunk
    return {
        "chunks": [
            *(partial(client.put_chunks, one) for one in (None, chunk, ["x"], [planned])),
            *(partial(client.put_chunk_layers, one) for one in (None, ["x"], [chunk])),
        ],
        "hints": [partial(client.put_chunks, [chunk], hints="x")],
        "parent": [lambda: change(chunk, parent=3)],
        "position": [lambda: change(chunk, position="a"), lambda: change(chunk, position=1.5)],
        "prefill_flops": [lambda: change(chunk, prefill_flops="a")],
        "tokens": [lambda: plan(key, "a")],
        "layout": [partial(client.put_chunks, [change(other, layout="x")])],
        "importance": [partial(client.put_chunks, [change(other, importance=[1.0])])],
        "tensors": [
            *(
                partial(client.put_chunks, [change(chunk, tensors=one)])
                for one in (None, [1], [[1]])
            ),
            *(partial(client.get_chunks, keys, [one] * 3) for one in (1, [1], [[1]])),
            partial(client.get_chunks, keys, lambda index, layout: None),
        ],
        "shard": [
            partial(client.put_chunks, [chunk], shard="x"),
            partial(client.get_chunks, keys, shard=4),
        ],
        "out": [partial(client.get_chunks, keys, 5), lambda: lease.get(5)],
        "stated": [partial(client.get_chunks, keys, stated=5)],
        "layers": [partial(shard, one) for one in (3, ("a", "b"), (1,), (0, 1.5))],
        "kv_heads": [partial(shard, kv_heads=one) for one in ((1, 2), ((0, 1.5),))],
        "rank": [partial(shard.of_rank, SMALL, *one) for one in (("a", 2), (2, 2))],
        "ranks": [partial(shard.of_rank, SMALL, 0, one) for one in (0, "b")],
        "index": [partial(lease.view, one) for one in (-1, 3, "a", None)],
        "ranges": [partial(client.find_segments, [1, 2], one) for one in (None, ["a"])],
        "segment": [partial(span, "a", "b"), partial(span, 0, 1.5)],
        "query": [partial(client.find_segments, [1, 2], [], "q")],
        "after": [partial(client.list, after="a")],
        "prefix": [partial(client.list, prefix=3)],
        "since": [partial(client.events, "x")],
        "engine": [partial(client.lookup, keys=keys, engine=3)],
        "terms": [partial(client.get_levelled, keys, one) for one in (None, 3)],
    }


def test_a_value_of_the_wrong_kind_is_refused_by_the_name_of_its_argument(client: Client) -> None:
    keys = store(client, 1, 3)
    for name, calls in wrong_calls(client, keys).items():
        for call in calls:
            with pytest.raises((InvalidRequestError, LayoutMismatchError), match=f"^{name}="):
                call()
    assert all(is_right(client, *p) for p in zip(keys, client.get_chunks(keys), strict=True))


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


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_every_verb_works_awaited(server: LocalServer, transport: TransportName) -> None:
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)

    async def work() -> None:
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 64))
            puts = await client.put_chunks(chunks_of(client.sync, keys), durable=True)
            assert [put.outcome for put in puts] == [PutOutcome.stored] * 4
            assert (await client.lookup(keys=keys)).ready == 4
            found = await client.get_chunks(keys)
            assert all(is_right(client.sync, *p) for p in zip(keys, found, strict=True))
            room = [empty_tensors(KVLayout.of(SMALL, 16)) for _ in keys]
            assert len(await client.get_chunks(keys, room)) == 4
            assert all(is_right(client.sync, *p) for p in zip(keys, room, strict=True))
            async with client.lease(keys=keys) as lease:
                assert len(await asyncio.to_thread(lease.get)) == 4
            with pytest.raises(LeaseExpiredError):
                await asyncio.to_thread(lease.get)
            assert await client.pin(keys=keys, ttl=60.0) == 4
            assert await client.unpin(keys=keys) == 4
            assert len(await client.stat(keys=keys)) == len(await client.list()) == 4
            assert await client.delete(keys=keys[3:]) == 1
            assert (await client.status()).state == "serving"
            assert await client.clear() == 3
            assert await client.drain()
            kind, words = client.__reduce__()
        async with kind(*words) as other:  # as multiprocessing does
            assert (await other.status()).state == "draining"

    asyncio.run(work())
    assert server.settled().leases == 0


def test_pages_and_layers_are_awaited(server: LocalServer) -> None:
    async def work() -> None:
        options = ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS)
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 32))
            async with client.put_chunk_layers(planned(client.sync, keys)) as put:
                for number, parts in layers_of(client.sync, keys).items():
                    await asyncio.to_thread(put.layer, number, parts)
            assert [one.outcome for one in put.results] == [PutOutcome.stored] * 2
            pages = engine_pages(SMALL, "block kv token head dim", 4, 8, np.random.default_rng(1))
            assert (await client.get(keys=keys, out=pages[range(4)])).tokens == 32
            puts = await client.put(tokens(1, 32), pages[range(4)])
            assert [one.outcome for one in puts] == [PutOutcome.exists] * 2
            async with aclosing(client.get_layers(keys=keys)) as layers:
                found = [(one.id, len(one.tensors)) async for one in layers]
            assert found == [(0, 2), (1, 2)]

    asyncio.run(work())


def test_asyncio_client_has_every_verb_of_the_blocking_one() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert verbs(AsyncClient) == verbs(Client)


def test_layers_of_a_server_that_is_silent_do_not_block_the_event_loop(silent: str) -> None:
    async def work() -> int:
        ticks = 0

        async def read() -> None:
            with suppress(KVStoreError):
                async for _ in client.get_layers(tokens(1, 64)):
                    pass

        async with AsyncClient(silent, SMALL, ClientOptions(deadline_ms=500)) as client:
            reading = asyncio.ensure_future(read())
            while not reading.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await reading
        return ticks

    assert asyncio.run(work()) > 5


def test_heartbeats_keep_an_idle_session_alive_whatever_its_counts_are(
    make_server: ServerMaker,
) -> None:
    server = make_server("--limits", "session_ttl_ms=3000")
    client = server.connect()
    client.keys([])
    (session,) = server.node.sessions.by_id.values()
    counts: Any
    for counts in ({"hits": "many"}, {"\udcff": 1}, None, {"hits": 1}):
        client.counts = lambda counts=counts: counts  # type: ignore[misc]
        active_at = session.active_at
        assert eventually(lambda before=active_at: session.active_at > before)  # type: ignore[misc]
    assert list(server.node.sessions.by_id.values()) == [session]
