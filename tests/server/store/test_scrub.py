"""Scrubbing: damage is found before anybody asks, sound copies stay, the rate is kept."""

from __future__ import annotations

import pytest
from bare_wire import wire_to
from conftest import ServerMaker
from disk_damage import flip_a_bit
from local_server import LocalServer, eventually
from prompts import assert_reads, store

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.store.scrub import Scrub, ScrubReport, Verdict

CHUNKS = 4


def scrub_of(server: LocalServer, rate: int = 0) -> Scrub:
    return Scrub(server.node.store.moves, ["disk"], rate, server.node._clock)


def test_a_pass_over_sound_chunks_finds_nothing_and_counts_them(server: LocalServer) -> None:
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


def test_damage_is_found_quarantined_and_can_be_put_again(server: LocalServer) -> None:
    client = server.connect()
    keys = store(client, 1, CHUNKS)
    server.settled()
    flip_a_bit(server.config.disk.path, keys[2])
    assert scrub_of(server).run_pass(["disk"], 0).damaged_chunks == 1
    assert server.counter("corrupt_chunks") == 1
    server.settled()
    assert [{c.tier for c in chunk.copies} for chunk in client.stat([keys[2]])] == [{"cpu"}]
    assert client.delete(keys) == CHUNKS
    assert_reads(client, store(client, 1, CHUNKS))


def test_damage_in_memory_is_found_too(server: LocalServer) -> None:
    keys = store(server.connect(), 1, 1)
    moves = server.node.store.moves
    frame = moves.tiers.cpu_tier.peek(keys[0])
    assert frame is not None
    frame.flags.writeable = True
    frame[-1] ^= 1
    assert scrub_of(server).check(keys[0], moves.tiers.cpu)[0] is Verdict.damaged
    assert "cpu" not in moves.catalog.holders(keys[0])


def test_a_pass_keeps_its_rate(server: LocalServer) -> None:
    store(server.connect(), 1, CHUNKS)
    server.settled()
    scrub = scrub_of(server)
    waits: list[float] = []
    scrub._wait = waits.append  # type: ignore[assignment, method-assign]
    report = scrub.run_pass(["disk"], 1000)
    assert waits[-1] == pytest.approx(report.checked_bytes / 1000, rel=0.5)


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
    flip_a_bit(server.config.disk.path, keys[0])
    assert wire.call("Delete", request).deleted == 1
    assert_reads(client, keys)
