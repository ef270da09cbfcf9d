"""Clearing by steps, and looks at what is here: within a time, in order, and nobody's use."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from conftest import ServerMaker
from local_server import DEADLINE_MS, LocalServer
from prompts import SMALL, equal, other_revision, store

from kvstore.client import AsyncClient, ClientOptions
from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.api.admin_calls import MAX_RANKED
from kvstore.server.store.clear import BATCH_CHUNKS, Cleared, clear, keys_of_tenant


def test_what_there_is_no_time_for_is_left_and_counted(server: LocalServer) -> None:
    keys = store(server.connect("grpc"), 1, 5)
    core = server.node.store
    late = core.moves.clock()
    assert clear(core, keys, late) == Cleared(left=5)
    assert core.catalog.is_held(keys[0]) is False
    server.settled()
    whole = clear(core, keys, late + 60, dry_run=True)
    assert (whole.deleted, whole.leased, whole.left) == (5, 0, 0)
    half = clear(core, keys, late + 60, "disk")
    assert (half.deleted, half.deleted_bytes * 2) == (5, whole.deleted_bytes)
    assert len(core.catalog) == 5


def test_a_long_clearing_goes_by_batches_and_spares_what_is_read(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, BATCH_CHUNKS + 6)
    server.settled()
    core = server.node.store
    with client.lease(keys[:4]):
        dry = clear(core, keys, core.moves.clock() + 60, dry_run=True)
        done = clear(core, keys, core.moves.clock() + 60)
        assert (dry.deleted, dry.leased) == (done.deleted, done.leased) == (BATCH_CHUNKS + 2, 4)
        assert dry.deleted_bytes == done.deleted_bytes
    assert len(core.catalog) == 4


def test_a_tenants_chunks_are_found_though_its_sessions_are_forgotten(
    make_server: ServerMaker,
) -> None:
    server = make_server()
    keys = store(server.connect("grpc"), 1, 2)
    store(server.connect("grpc", other_revision(SMALL)), 1, 3)
    core = server.node.store
    core.spaces.restore([])
    assert len(keys_of_tenant(core, "default")) == 5
    assert keys_of_tenant(core, "acme") == []
    assert set(keys) < set(keys_of_tenant(core, "*"))


def test_a_frame_comes_whole_and_verified_and_looks_are_no_uses(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 3)
    found = client.frame(keys[1])
    assert found is not None
    header, data = found
    assert (header.key, header.position, len(data)) == (keys[1], 16, header.frame_bytes)
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, np.frombuffer(data, np.uint8), tensors)
    assert equal(tensors, client.get(keys)[1])
    assert client.frame(client.keys(list(range(5000, 5016)))[0]) is None
    assert [one.hits for one in client.stat(keys, ranks=True)] == [0, 0, 0]
    assert server.settled().leases == 0


def test_pages_are_in_the_order_of_digests_for_both_clients(server: LocalServer) -> None:
    keys = store(server.connect("grpc"), 1, 6)
    digests = sorted(key[DIGEST_BYTES:] for key in keys)

    async def look() -> None:
        options = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS)
        async with AsyncClient(server.address, SMALL, options) as client:
            page = await client.list(2, after=digests[1])
            assert [one.digest for one in page] == digests[2:4]
            (one,) = await client.list(prefix=digests[5][:6])
            assert one.digest == digests[5]
            found = await client.frame(keys[0])
            assert found is not None
            assert found[0].key == keys[0]
            assert await client.clear("disk", dry_run=True) == 6
            with pytest.raises(InvalidRequestError, match="ranks"):
                await client.stat(keys * MAX_RANKED, ranks=True)

    server.settled()
    asyncio.run(look())


def test_top_prefixes_are_the_ends_of_what_was_found_most(server: LocalServer) -> None:
    client = server.connect("grpc")
    shared, rare = store(client, 1, 4), store(client, 2, 2)
    for _ in range(10):
        client.lookup(shared[:3])
    client.lookup(shared)
    client.lookup(rare)
    found = server.node.store.catalog.queries.top_prefixes(5)
    assert (found[0].key, found[0].hits, found[0].tokens) == (shared[2], 11, 48)
    assert {(one.key, one.hits) for one in found[1:]} == {(shared[3], 1), (rare[1], 1)}
    assert [one.key for one in server.node.store.catalog.queries.top_prefixes(1)] == [shared[2]]
