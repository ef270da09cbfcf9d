"""What people ask a server: why a chunk is a miss, whether chunks are sound, to forget some."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.bare_wire import Wire, wire_to
from helpers.coarse_codec import coarse_codec
from helpers.disk_damage import flip_a_bit
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import (
    MEDIUM,
    SMALL,
    assert_reads,
    chunks_of,
    equal,
    frame_of,
    keys_of,
    other_revision,
    outcomes,
    store,
)
from helpers.shards import part_of, shard_of
from simulation.core import Core

from kvstore.client import ClientOptions
from kvstore.client.chunk import Shard
from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    PermissionDeniedError,
)
from kvstore.proto.messages import REFUSED, accuracy_number
from kvstore.proto.plans import Hints
from kvstore.proto.types import (
    DIGEST_BYTES,
    Accuracy,
    ChunkKey,
    KVLayout,
    Match,
    Namespace,
    PutOutcome,
)
from kvstore.server.api.admin_calls import MAX_RANKED
from kvstore.server.api.grpc_server import servicer_of
from kvstore.server.api.service import Backend, Identity
from kvstore.server.api.validation import Checks
from kvstore.server.security.sessions import Session
from kvstore.server.store.explain import (
    MAX_COUNTS,
    MAX_MISSES,
    MAX_REASON_CHARS,
    MAX_REASONS,
    MAX_REPORTS,
    Explainer,
)
from kvstore.server.store.scrub import (
    BATCH_CHUNKS,
    Cleared,
    Scrub,
    ScrubReport,
    Verdict,
    clear,
    keys_of_tenant,
)

BIG = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)


def explained(
    server: LocalServer, keys: list[ChunkKey], least: Accuracy = Accuracy.exact
) -> pb.ExplainResponse:
    request = pb.ExplainRequest(
        key_namespace=keys[0][:DIGEST_BYTES],
        digests=b"".join(key[DIGEST_BYTES:] for key in keys),
        min_accuracy=accuracy_number(least),
    )
    return server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)


def states(reply: pb.ExplainResponse) -> list[str]:
    return [one.state for one in reply.chunks]


def leave_memory(server: LocalServer, keys: list[ChunkKey]) -> None:
    server.settled()
    server.leave_memory(keys)


def leave_alone(server: LocalServer) -> None:
    """Have the breaker of the disk open."""
    for _ in range(3):
        server.node.store.tiers.slots["disk"].breaker.fail("no answer")


def test_what_is_there_is_told_with_its_copies(server: LocalServer) -> None:
    client = server.connect()
    keys = store(client, 1, 3)
    server.settled()
    reply = explained(server, keys)
    assert (reply.hit_chunks, states(reply)) == (3, ["ready"] * 3)
    assert [copy.tier for copy in reply.chunks[0].copies] == ["cpu", "disk"]
    assert reply.chunks[0].copies[0].codec == "raw"
    assert [one.digest for one in reply.chunks] == [key[DIGEST_BYTES:] for key in keys]
    leave_memory(server, keys)
    assert {one.reason for one in explained(server, keys).chunks} == {"on disk"}
    assert [stat.hits for stat in client.stat(keys=keys)] == [0] * 3, "to explain is no use"
    assert server.counter("lookups") == 0


def test_a_chunk_that_nobody_stored_is_unknown_and_hides_those_behind_it(
    server: LocalServer,
) -> None:
    client = server.connect()
    keys = keys_of(client, 1, 4)
    chunks = chunks_of(client, keys)
    client.put_chunks([chunks[0], chunks[1], chunks[3]])
    reply = explained(server, keys)
    assert states(reply) == ["ready", "ready", "unknown", "behind"]
    assert reply.hit_chunks == 2
    assert "chunk 2" in reply.chunks[3].reason
    assert reply.chunks[3].copies


def test_what_is_pending_invalid_deleted_or_expired_says_so(server: LocalServer) -> None:
    wire, client = wire_to(server), server.connect()
    wire.call("Reserve", wire.reserve(2304))
    assert states(explained(server, [wire.key(1)])) == ["pending"]
    promised = keys_of(client, 1, 2)
    assert client.announce_puts(promised, within=60.0) == 2
    reply = explained(server, promised)
    assert states(reply) == ["pending"] * 2
    assert "announced" in reply.chunks[0].reason
    frame = frame_of(wire.key(3), SMALL)
    frame[-1] ^= 1
    with pytest.raises(KVStoreError):
        wire.put_frame(frame)
    (one,) = explained(server, [wire.key(3)]).chunks
    assert one.state == "invalid"
    assert "check" in one.reason
    keys = store(client, 4, 1)
    assert client.delete(keys=keys) == 1
    assert states(explained(server, keys)) == ["deleted"]
    short = store(client, 2, 1, Hints(ttl_ms=60_000))
    server.skip(61)
    assert states(explained(server, short)) == ["expired"]
    assert eventually(lambda: not server.node.store.catalog.holders(short[0]))
    assert states(explained(server, short)) == ["expired"]


def test_a_refused_chunk_says_why_and_one_that_left_long_ago_is_known_to_be_evicted(
    make_server: ServerMaker,
) -> None:
    client = (server := make_server("--tiers", "cpu", "--tenant-quotas", "default=1KiB")).connect()
    keys = keys_of(client, 1, 1)
    assert outcomes(client, chunks_of(client, keys)) == [PutOutcome.refused]
    (one,) = explained(server, keys).chunks
    assert one.state == "refused"
    assert "cpu" in one.reason
    server.close()
    server = make_server("--tiers", "cpu", "--cpu", "16MiB")
    leave_memory(server, keys := store(server.connect(), 1, 1))
    (one,) = explained(server, keys).chunks
    assert (one.state, "no longer kept" in one.reason) == ("evicted", True)


def test_a_damaged_copy_says_on_which_tier(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 2)
    leave_memory(server, keys)
    flip_a_bit(server.config.disk[0].path, keys[1])
    assert states(explained(server, keys)) == ["ready", "ready"]
    assert len(client.get_chunks(keys)) == 1
    reply = explained(server, keys)
    assert states(reply) == ["ready", "corrupt"]
    assert "disk" in reply.chunks[1].reason


def test_a_lossy_copy_is_told_to_who_asks_for_exact(make_server: ServerMaker) -> None:
    with coarse_codec():
        server = make_server("--codec", "disk=coarse")
        keys = store(server.connect(), 1, 1)
        leave_memory(server, keys)
        (one,) = explained(server, keys).chunks
        assert one.state == "lossy"
        assert "bounded" in one.reason
        assert states(explained(server, keys, Accuracy.bounded)) == ["ready"]
        server.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_only_a_tier_has_that_is_left_alone_can_be_put_again_and_is_found_meanwhile(
    make_server: ServerMaker, ranks: int
) -> None:
    server = make_server("--limits", "breaker_retry_ms=60000")
    client = server.connect(representation=MEDIUM)
    keys = store(client, 1, 2)
    leave_memory(server, keys)
    chunks = chunks_of(client, keys)
    assert outcomes(client, chunks) == [PutOutcome.exists] * 2
    leave_alone(server)
    for rank in range(ranks):
        heads = (rank * 4 // ranks, (rank + 1) * 4 // ranks)
        part = shard_of(KVLayout.of(MEDIUM, 16), (0, 4), heads)
        parts = [part_of(chunk, part) for chunk in chunks]
        puts = client.put_chunks(parts, shard=Shard.of_rank(MEDIUM, rank, ranks))
    assert [put.outcome for put in puts] == [PutOutcome.stored] * 2
    assert client.lookup(keys=keys).ready == 2
    assert_reads(client, keys)
    assert outcomes(client, chunks) == [PutOutcome.exists] * 2
    server.node.store.tiers.slots["disk"].breaker.succeed()
    leave_memory(server, keys)
    assert_reads(client, keys)


def test_a_tier_that_is_left_alone_is_named_with_the_reason_also_of_a_miss_meanwhile(
    make_server: ServerMaker,
) -> None:
    server = make_server("--limits", "breaker_retry_ms=60000")
    client = server.connect()
    keys = store(client, 1, 2)
    leave_memory(server, keys)
    assert states(explained(server, keys)) == ["ready"] * 2
    leave_alone(server)
    reply = explained(server, keys)
    assert states(reply) == ["tier_down"] * 2
    assert reply.chunks[0].reason == "on disk, which is degraded: no answer"
    assert reply.hit_chunks == 0
    assert client.lookup(keys=keys).ready == 0
    server.node.store.tiers.slots["disk"].breaker.succeed()
    (miss,) = recent(server).recent
    assert miss.state == "tier_down"
    assert miss.reason == "on disk, which is degraded: no answer; stored since"


# --- who may ask what


def test_a_session_asks_of_its_own_namespace_only_and_what_makes_sense(server: LocalServer) -> None:
    keys, space, connection = store(server.connect(), 1, 2), bytes(16), server.dial()
    session = open_session(connection, other_revision(SMALL)).session_id
    request = pb.ExplainRequest(
        session_id=session, key_namespace=keys[0][:DIGEST_BYTES], digests=keys[0][DIGEST_BYTES:]
    )
    reply = connection.call("Explain", request, DEADLINE_MS, pb.ExplainResponse)
    assert states(reply) == ["other_identity"]
    for fields, error in (
        ({"session_id": 5, "digests": bytes(16)}, LeaseExpiredError),
        ({"session_id": session, "recent": 1}, InvalidRequestError),
        ({"digests": bytes(16)}, InvalidRequestError),
        ({"digests": bytes(16), "key_namespace": bytes(7)}, InvalidRequestError),
        ({"digests": bytes(15), "key_namespace": space}, InvalidRequestError),
        ({"digests": bytes(16), "min_accuracy": 9, "key_namespace": space}, InvalidRequestError),
        ({"digests": bytes(16 * 5000), "key_namespace": space}, InvalidRequestError),
    ):
        request = pb.ExplainRequest(**fields)
        with pytest.raises(error):
            connection.call("Explain", request, DEADLINE_MS, pb.ExplainResponse)


def test_who_is_on_another_host_needs_a_session(server: LocalServer) -> None:
    checks = Checks(4096, 1 << 28, 2000, time.monotonic)
    identity = Identity(1, "", "", 0.0)
    servicer = servicer_of(Backend(server.node.store, server.node.sessions, checks, identity))
    context: Any = SimpleNamespace(peer=lambda: "ipv4:10.1.2.3:4567")
    with pytest.raises(PermissionDeniedError, match="Explain"):
        servicer.Explain(pb.ExplainRequest(recent=1), context)


# --- what missed lately


def recent(server: LocalServer, count: int = 10) -> pb.ExplainResponse:
    request = pb.ExplainRequest(recent=count)
    return server.dial().call("Explain", request, DEADLINE_MS, pb.ExplainResponse)


def test_the_latest_misses_come_first_with_their_reasons(server: LocalServer) -> None:
    client = server.connect(options=ClientOptions("auto", 16, DEADLINE_MS, name="engine-7"))
    keys = store(client, 1, 2)
    assert client.lookup(keys=keys).ready == 2
    assert recent(server).recent == []
    longer = keys_of(client, 1, 4)
    missing = keys_of(client, 2, 3)
    client.lookup(keys=missing)
    client.lookup(keys=longer)
    client.delete(keys=keys[:1])
    client.lookup(keys=keys)
    rows = [(m.client, m.chunks, m.ready, m.state) for m in recent(server).recent]
    assert rows == [
        ("engine-7", 2, 0, "deleted"), ("engine-7", 4, 2, "unknown"), ("engine-7", 3, 0, "unknown")
    ]  # fmt: skip
    client.put_chunks(chunks_of(client, missing))
    first = recent(server).recent[-1]
    assert (first.state, first.reason) == (
        "unknown", "never stored here, or no longer remembered; stored since"
    )  # fmt: skip
    assert [m.state for m in recent(server, 1).recent] == ["deleted"]
    assert_reads(client, missing)


def test_a_miss_of_an_evicted_chunk_names_the_tier_and_when(make_server: ServerMaker) -> None:
    server = make_server("--tiers", "cpu", "--cpu", "4MiB", "--limits", "cpu_slab_bytes=4MiB")
    client = server.connect(options=BIG, representation=MEDIUM)
    keys = store(client, 1, 2)
    for seed in range(2, 40):
        store(client, seed, 2)
    assert client.lookup(keys=keys).ready == 0
    store(client, 1, 2)
    (miss,) = recent(server).recent
    assert miss.state == "evicted"
    assert re.match(r"evicted from cpu [0-9]+ s before", miss.reason)


def test_the_log_of_misses_and_reports_is_bounded() -> None:
    core = Core()
    log, miss = Explainer(core.store, core.moves.clock), Match(0, 0, 1, (), b"", b"")
    for number in range(MAX_MISSES + 20):
        one = session_of(number)
        log.record_lookup(one, [ChunkKey(bytes(32))], miss, Accuracy.exact)
        log.report(one, {"miss_absent": number})
    misses, reports = log.misses(5000), log.reports()
    assert (len(misses), len(reports)) == (MAX_MISSES, MAX_REPORTS)
    assert (misses[0].session.session_id, reports[0].session.session_id) == (1043, 1043)
    core.close()


def session_of(number: int) -> Session:
    space = Namespace(bytes(16))
    return Session(number, "default", "", SMALL, space, bytes(16), b"", 0.0)


def beat(wire: Wire, counts: dict[str, int]) -> None:
    wire.call("Heartbeat", pb.HeartbeatRequest(counts=counts))


def test_counts_of_engines_are_few_and_their_reasons_cut_cleaned_few_and_before_all_counts(
    server: LocalServer,
) -> None:
    wire = wire_to(server)
    beat(wire, {})
    assert recent(server).engines == []
    beat(wire, {"miss_absent": 1})
    beat(wire, {"miss_absent": 3, "miss_late": 1})
    (report,) = recent(server).engines
    assert dict(report.counts) == {"miss_absent": 3, "miss_late": 1}
    assert report.model_id == SMALL.model_id
    counts = {f"count_{number:04}": 1 for number in range(500)} | {"x" * 65: 1, "y" * 1000: 1}
    beat(wire, counts | {"refused: \x1b[31m\nno\u202e pages " + "x" * 10_000: 1})
    (report,) = recent(server).engines
    assert len(report.counts) == MAX_COUNTS
    assert not {"x" * 65, "y" * 1000} & set(report.counts)
    (reason,) = [name for name in report.counts if name.startswith(REFUSED)]
    assert reason.isprintable()
    assert reason.startswith("refused:  [31m no  pages xx")
    assert len(reason) == MAX_REASON_CHARS
    beat(wire, counts | {f"refused: {number}": 1 for number in range(100)} | {"\x07bell": 1})
    (report,) = recent(server).engines
    assert sum(name.startswith(REFUSED) for name in report.counts) == MAX_REASONS
    assert all(name.isprintable() for name in report.counts)


# --- scrubbing and clearing


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
    with pytest.raises(InvalidRequestError, match="ranks"):
        client.stat(keys=keys * MAX_RANKED, ranks=True)
    assert server.settled().leases == 0


def test_a_listing_looks_at_a_chunk_when_its_turn_comes_and_keeps_none(server: LocalServer) -> None:
    client = server.connect()
    keys = sorted(store(client, 1, 4))
    page = server.node.store.catalog.queries.page(Namespace(keys[0][:DIGEST_BYTES]))
    assert next(page).key == keys[0]
    assert client.delete(keys=keys[2:]) == 2
    assert [one.key for one in page] == keys[1:2]


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
