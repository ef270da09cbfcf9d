"""Scrubbing finds damage and keeps its rate; clearing forgets by batches within a time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.bare_wire import wire_to
from helpers.disk_damage import flip_a_bit
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, assert_reads, equal, other_revision, store

from kvstore.client import AsyncClient, ClientOptions
from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.api.admin_calls import MAX_RANKED
from kvstore.server.store.scrub import (
    BATCH_CHUNKS,
    Cleared,
    Scrub,
    ScrubReport,
    Verdict,
    clear,
    keys_of_tenant,
)

CHUNKS = 4


def scrub_of(server: LocalServer, rate: int = 0) -> Scrub:
    return Scrub(server.node.store.moves, ["disk"], rate)


def test_a_pass_over_sound_chunks_finds_nothing_counts_them_and_keeps_its_rate(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(server.connect(), 1, CHUNKS)
    server.settled()
    report = scrub_of(server).run_pass(["cpu", "disk"], 0)
    assert (report.total_chunks, report.checked_chunks) == (2 * CHUNKS, 2 * CHUNKS)
    assert (report.damaged_chunks, report.passes, report.is_running) == (0, 1, False)
    assert server.counter("scrubbed_chunks") == 2 * CHUNKS
    assert server.counter("scrubbed_bytes") == report.checked_bytes > 2000 * CHUNKS
    assert server.counter("scrub_passes") == 1
    assert_reads(server.connect(), keys)
    assert server.settled().held == 0
    scrub, waits = scrub_of(server), list[float]()
    monkeypatch.setattr(scrub._closing, "wait", waits.append)
    report = scrub.run_pass(["disk"], 1000)
    assert waits[-1] == pytest.approx(report.checked_bytes / 1000, rel=0.5)


def test_damage_is_found_quarantined_and_can_be_put_again(server: LocalServer) -> None:
    client = server.connect()
    keys = store(client, 1, CHUNKS)
    server.settled()
    flip_a_bit(server.config.disk[0].path, keys[2])
    assert scrub_of(server).run_pass(["disk"], 0).damaged_chunks == 1
    assert server.counter("corrupt_chunks") == 1
    server.settled()
    assert [{c.tier for c in chunk.copies} for chunk in client.stat(keys=[keys[2]])] == [{"cpu"}]
    assert client.delete(keys=keys) == CHUNKS
    assert_reads(client, store(client, 1, CHUNKS))
    moves = server.node.store.moves
    frame = moves.tiers.cpu_tier.peek(keys[0])
    assert frame is not None
    frame.flags.writeable = True
    frame[-1] ^= 1
    assert scrub_of(server).check(keys[0], moves.tiers.cpu)[0] is Verdict.damaged
    assert "cpu" not in moves.catalog.holders(keys[0])


def test_chunks_of_a_tier_that_does_not_answer_are_left_alone(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(server.connect(), 1, CHUNKS)
    server.settled()
    with monkeypatch.context() as broken:
        broken.setattr("os.preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        report = scrub_of(server).run_pass(["disk"], 0)
    assert (report.unread_chunks, report.damaged_chunks) == (CHUNKS, 0)
    assert server.settled().tiers[1][1].chunks == CHUNKS
    assert_reads(server.connect(), keys)


def test_a_pass_is_asked_for_and_followed_over_the_wire(make_server: ServerMaker) -> None:
    server = make_server()
    store(server.connect(), 1, CHUNKS)
    server.settled()
    wire = wire_to(server)
    assert not wire.call("Scrub", pb.ScrubRequest()).running
    assert wire.call("Scrub", pb.ScrubRequest(begin=True, bytes_per_s=1)).begun
    assert not wire.call("Scrub", pb.ScrubRequest(begin=True)).begun
    assert eventually(lambda: wire.call("Scrub", pb.ScrubRequest()).total_chunks == CHUNKS)
    assert wire.call("Scrub", pb.ScrubRequest()).running
    with pytest.raises(InvalidRequestError, match="tape"):
        wire.call("Scrub", pb.ScrubRequest(begin=True, tiers=["tape"]))


def test_the_background_verifies_by_itself(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.store.scrub.REST_S", 0.05)
    server = make_server("--scrub-bytes-per-s", "1GiB", "--scrub-tiers", "cpu,disk")
    store(server.connect(), 1, CHUNKS)
    server.settled()
    assert eventually(lambda: server.counter("scrubbed_chunks") >= 2 * CHUNKS)
    assert isinstance(server.node._scrub.report(), ScrubReport)


def test_a_reader_that_finds_damage_which_is_none_deletes_nothing(server: LocalServer) -> None:
    """What it saw was its network's doing."""
    client = server.connect()
    keys = store(client, 1, CHUNKS)
    server.settled()
    wire = wire_to(server)
    request = pb.DeleteRequest(digests=b"".join(key[16:] for key in keys), if_damaged=True)
    assert wire.call("Delete", request).deleted == 0
    assert_reads(client, keys)
    flip_a_bit(server.config.disk[0].path, keys[0])
    assert wire.call("Delete", request).deleted == 1
    assert_reads(client, keys)


def test_what_there_is_no_time_for_is_left_and_a_tenants_chunks_are_found_without_sessions(
    server: LocalServer,
) -> None:
    keys = store(server.connect("grpc"), 1, 2)
    keys += store(server.connect("grpc", other_revision(SMALL)), 1, 3)
    core = server.node.store
    core.spaces.restore([])
    assert set(keys_of_tenant(core, "default")) == set(keys_of_tenant(core, "*")) == set(keys)
    assert keys_of_tenant(core, "acme") == []
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
    with client.lease(keys=keys[:4]):
        dry = clear(core, keys, core.moves.clock() + 60, dry_run=True)
        done = clear(core, keys, core.moves.clock() + 60)
        assert (dry.deleted, dry.leased) == (done.deleted, done.leased) == (BATCH_CHUNKS + 2, 4)
        assert dry.deleted_bytes == done.deleted_bytes
    assert len(core.catalog) == 4


def test_a_frame_comes_whole_and_verified_and_looks_are_no_uses(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 3)
    found = client.frame(keys[1])
    assert found is not None
    header, data = found
    assert (header.key, header.position, len(data)) == (keys[1], 16, header.frame_bytes)
    tensors = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, np.frombuffer(data, np.uint8), tensors)
    assert equal(tensors, client.get_chunks(keys)[1])
    assert client.frame(client.keys(list(range(5000, 5016)))[0]) is None
    assert [one.hits for one in client.stat(keys=keys, ranks=True)] == [0, 0, 0]
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
                await client.stat(keys=keys * MAX_RANKED, ranks=True)

    server.settled()
    asyncio.run(look())


def test_top_prefixes_are_the_ends_of_what_was_found_most(server: LocalServer) -> None:
    client = server.connect("grpc")
    shared, rare = store(client, 1, 4), store(client, 2, 2)
    for _ in range(10):
        client.lookup(keys=shared[:3])
    client.lookup(keys=shared)
    client.lookup(keys=rare)
    found = server.node.store.catalog.queries.top_prefixes(5)
    assert (found[0].key, found[0].hits, found[0].context_tokens) == (shared[2], 11, 32)
    assert {(one.key, one.hits) for one in found[1:]} == {(shared[3], 1), (rare[1], 1)}
    assert [one.key for one in server.node.store.catalog.queries.top_prefixes(1)] == [shared[2]]
