"""The node directory over a real Redis: who is found, who is not, and what it never does."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ServerMaker
from helpers.local_server import LocalServer, eventually
from helpers.prompts import store
from helpers.redis_process import RedisProcess
from structlog.testing import capture_logs

from kvstore.cli.server import directory_line, fetch_status, look_at
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.directory import (
    BUCKETS,
    MAX_HOLDERS,
    MAX_PENDING,
    Directory,
    open_directory,
)
from kvstore.server.cluster.membership import Membership, MembershipState, NodeAddress
from kvstore.server.settings.settings import load_config
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web.gauges import gauges
from kvstore.tiers.redis_client import RedisClient

TTL_MS = 500
LONG_MS = 4000
PREFIX = "kvs:1:"
PATIENT_S = 10.0

DirectoryMaker = Callable[..., Directory]
LOST = TierUnavailableError("redis", "a master is down")


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def node(number: int, name: str = "") -> NodeAddress:
    address = f"10.0.0.{number}:7421"
    return NodeAddress(name or f"n{number}", (1 << 64) - number, f"tcp://{address}", address)


@pytest.fixture
def redis(redis_process: RedisProcess) -> RedisProcess:
    redis_process.reset()
    return redis_process


@pytest.fixture
def make_directory(redis: RedisProcess) -> Iterator[DirectoryMaker]:
    """Make directories, each of a node of its own, that are closed in the end."""
    made: list[Directory] = []
    numbers = count(1)

    def make(
        me: NodeAddress | None = None,
        limit: int = 1000,
        ttl_ms: int = TTL_MS,
        timeout_ms: int = 2000,
        clock: Callable[[], float] = time.monotonic,
    ) -> Directory:
        link = RedisClient("redis", redis.url, timeout_ms, 4)
        limits = Limits(
            directory_ttl_ms=ttl_ms, directory_chunks=limit, breaker_retry_ms=2 * ttl_ms
        )
        me = me or node(next(numbers))
        made.append(Directory(link, me, PREFIX, limits, Counters(), clock))
        return made[-1]

    yield make
    for directory in made:
        directory.close()


def two(make: DirectoryMaker, ttl_ms: int = TTL_MS) -> tuple[Directory, Directory]:
    """Return two directories that know of each other.

    On a busy machine a node may be late to beat, and nobody for a moment: tests that look once
    give them LONG_MS.
    """
    first, second = make(ttl_ms=ttl_ms), make(ttl_ms=ttl_ms)
    first.start()
    second.start()
    for one in (first, second):
        assert eventually(lambda one=one: len(one.report().nodes) == 1)  # type: ignore[misc]
    return first, second


def finds(directory: Directory, *numbers: int) -> dict[int, tuple[str, ...]]:
    found = directory.holders([key(number) for number in numbers], PATIENT_S)
    return {int.from_bytes(k, "big"): tuple(n.node_id for n in v) for k, v in found.items()}


def said(directory: Directory) -> int:
    return directory._counters["directory_words"]


def test_what_a_node_seals_others_find_and_it_does_not_find_itself(
    make_directory: DirectoryMaker,
) -> None:
    first, second = two(make_directory, LONG_MS)
    first.announce([key(1), key(2)])
    assert eventually(lambda: finds(second, 1, 2, 3, 4) == {1: ("n1",), 2: ("n1",)})
    assert second.holders([key(1)], PATIENT_S)[key(1)] == (first.me,)
    assert finds(first, 1, 2) == {}
    second.announce([key(2)])
    assert eventually(lambda: finds(first, 1, 2) == {2: ("n2",)})
    first.close()  # who leaves is gone at once
    third = make_directory(ttl_ms=LONG_MS)
    third.start()
    assert eventually(lambda: third.report().standing == "known")
    assert [one.node_id for one in third.report().nodes] == ["n2"]


STANDINGS: tuple[
    tuple[MembershipState, tuple[bytes | TierUnavailableError, ...], MembershipState], ...
] = (
    (MembershipState.known, (b"taken", b"taken", b"old"), MembershipState.taken),
    (MembershipState.known, (b"taken", b"old", b"old"), MembershipState.known),
    (MembershipState.known, (b"taken", b"old", LOST), MembershipState.known),
    (MembershipState.known, (b"full", b"old", LOST), MembershipState.known),
    (MembershipState.known, (b"taken", LOST, LOST), MembershipState.taken),
    (MembershipState.unknown, (b"taken", b"new", LOST), MembershipState.taken),
    (MembershipState.unknown, (b"full", b"new", LOST), MembershipState.full),
    (MembershipState.unknown, (b"taken", b"new", b"new"), MembershipState.known),
    (MembershipState.unknown, (b"taken", b"full", b"new"), MembershipState.known),
    (MembershipState.unknown, (b"new", b"new", b"new"), MembershipState.known),
)


def test_a_node_stands_as_most_of_the_answers_say_and_half_turn_away_a_new_one_alone() -> None:
    """A hash that lost its rows lets anybody in, and half of two is not most."""
    for before, words, after in STANDINGS:
        link = Mock()
        roster = Membership(link, PREFIX, node(1), TTL_MS)
        if before is MembershipState.known:
            link.execute.return_value = [[b"old", b"", []]] * 3
            roster.beat()
        assert roster.state is before
        link.execute.return_value = [one if one is LOST else [one, b"", []] for one in words]
        roster.beat()
        assert roster.state is after


def test_node_that_falls_silent_is_nobody_and_its_entries_are_taken_out(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    _, second = two(make_directory)
    silent = Membership(RedisClient("redis", redis.url, 2000, 1), PREFIX, node(7), TTL_MS)
    silent.beat()
    redis.client.sadd(at(1), -7)
    assert eventually(lambda: finds(second, 1) == {1: ("n7",)})
    assert eventually(lambda: finds(second, 1) == {})
    assert eventually(lambda: [one.node_id for one in second.report().nodes] == ["n1"])
    # asked for again after a while, the entry is found to be a dead node's
    assert eventually(lambda: finds(second, 1) == {} and not redis.client.exists(at(1)))
    silent._link.close()


def at(number: int) -> str:
    return f"{PREFIX}{{{number % BUCKETS}}}:at:{key(number).hex()}"


def test_stamps_from_the_future_do_not_keep_a_dead_node_alive(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    _, second = two(make_directory)
    far_ms = int(time.time() * 1000) + 3_600_000
    for tag in "013":
        row = f"{far_ms} {TTL_MS} 77 10.0.0.7:1 -"
        redis.client.hset(f"{PREFIX}{{{tag}}}:nodes", "dead", row)
    assert eventually(lambda: len(second.report().nodes) == 2)
    assert eventually(lambda: len(second.report().nodes) == 1)


def test_two_nodes_with_one_id_are_found_out_and_the_later_stays_out(
    make_directory: DirectoryMaker,
) -> None:
    first = make_directory(node(1, "same"), ttl_ms=LONG_MS)  # a busy machine may be late to beat
    first.start()
    assert eventually(lambda: first.report().standing == "known")
    with capture_logs() as logs:
        later = make_directory(node(2, "same"))
        later.start()
        assert eventually(lambda: later.report().standing == "taken")
    (error,) = [row for row in logs if row["log_level"] == "error"]
    assert error["other"] == first.me.grpc_address
    assert "--node-id" in error["fix"]
    later.announce([key(1)])
    time.sleep(2 * TTL_MS / 1000)
    assert first.report().standing == "known"
    assert later.report().standing == "taken"
    assert said(later) == 0
    first.close()
    assert eventually(lambda: later.report().standing == "known")
    assert eventually(lambda: said(later) == 1)


def test_redis_that_lost_everything_is_told_again(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    first, second = two(make_directory)
    first.announce([key(1)])
    assert eventually(lambda: finds(second, 1) == {1: ("n1",)})
    redis.client.flushall()
    assert eventually(lambda: finds(second, 1) == {1: ("n1",)})


def test_redis_that_is_down_finds_nobody_within_the_deadline_and_is_told_later(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    ahead_s = 0.0
    lasting = partial(
        make_directory, ttl_ms=LONG_MS, timeout_ms=20_000, clock=lambda: time.monotonic() + ahead_s
    )
    first, second = two(lasting)
    with redis.frozen():
        first.announce([key(1)])
        started = time.monotonic()
        assert second.holders([key(1)], 0.05) == {}
        assert time.monotonic() - started < 10.0, "half of what Redis is waited for elsewhere"
        assert second._counters["directory_unanswered"] == 1
        for _ in range(5):
            second.holders([key(1)], 0.01)
        assert second._counters["directory_questions"] == 3, "then it is left alone"
        ahead_s += 2 * LONG_MS / 1000
        assert eventually(lambda: not second.report().nodes)
    assert eventually(lambda: finds(second, 1) == {1: ("n1",)})


def test_rubbish_in_redis_is_nobody(make_directory: DirectoryMaker, redis: RedisProcess) -> None:
    first, second = two(make_directory, LONG_MS)
    first.announce([key(1)])
    assert eventually(lambda: said(first) == 1)
    redis.client.set(at(2), b"a string")
    redis.client.sadd(at(3), b"word", b"9" * 40, b"-0", b"\xff\xfe", b"two words")
    redis.client.sadd(at(4), b"two\nlines")
    for row in (b"x", b"", b"1 2 3", b"9999999999999 1200 5 spaces in it x", b"\xff" * 500):
        redis.client.hset(f"{PREFIX}{{0}}:nodes", row[:9] or b"empty", row)
    assert finds(second, 1, 2, 3, 4) == {1: ("n1",)}
    make_directory(ttl_ms=LONG_MS).start()  # who knows the new one has read the table since
    assert eventually(lambda: len(second.report().nodes) > 1)
    assert [one.node_id for one in second.report().nodes] == ["n1", "n3"]
    assert finds(second, 1, 2, 3, 4) == {1: ("n1",)}


def test_full_redis_is_said_and_what_was_to_be_said_is_when_there_is_room(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    first, second = two(make_directory)
    first.announce([key(1)])
    assert eventually(lambda: said(first) == 1)
    redis.client.config_set("maxmemory", 1)
    first.announce([key(2)])
    assert eventually(lambda: "Redis is full; raise its maxmemory" in first.report().failure)
    redis.client.config_set("maxmemory", 0)
    assert eventually(lambda: first.report().standing == "known")
    assert eventually(lambda: not first.report().failure)
    assert eventually(lambda: finds(second, 1) == {1: ("n1",)})


def test_user_without_the_rights_gets_none_in_and_is_told_which_it_needs(
    redis: RedisProcess,
) -> None:
    redis.client.acl_setuser(
        "few", enabled=True, passwords=["+pw"], keys=[f"{PREFIX}*"], commands=["+get", "+eval"]
    )
    link = RedisClient("redis", redis.url.replace("://", "://few:pw@"), 2000, 1)
    with (
        closing(link),
        pytest.raises(TierUnavailableError, match=r"NoPermission.*\+hgetall \+time"),
    ):
        Membership(link, PREFIX, node(1), TTL_MS).beat()


def dropped(directory: Directory) -> int:
    return directory._counters["directory_dropped_words"]


def test_entries_hold_only_the_newest_word_and_stay_bounded(make_directory: DirectoryMaker) -> None:
    entries = make_directory(limit=3)
    entries.announce([key(n) for n in range(5)])
    assert dropped(entries) == 2
    entries.withdraw([key(0), key(4)])
    assert entries._take() == [(key(0), False), (key(1), True), (key(2), True)]
    entries.announce([key(0)])
    entries.withdraw([key(2)])
    assert entries._take() == [(key(0), True), (key(2), False)]
    entries._put_back([key(0), key(1), key(2)])
    assert entries._take() == [(key(0), True), (key(1), True), (key(2), False)], "what is true now"
    assert (dropped(entries), entries.report().announced) == (2, 2)
    entries = make_directory(limit=2 * MAX_PENDING)
    entries.announce([key(n) for n in range(MAX_PENDING + 1)])
    assert dropped(entries) == 1
    entries.withdraw([key(0), key(MAX_PENDING)])
    assert dropped(entries) == 1
    entries._put_back([key(1), key(MAX_PENDING + 1)])
    assert dropped(entries) == 2, "room is kept for others"


def test_entries_are_said_again_at_half_of_their_life_and_when_forgotten(
    make_directory: DirectoryMaker,
) -> None:
    now = [0.0]
    entries = make_directory(clock=lambda: now[0])
    entries.announce([key(1)])
    now[0] = 1000.0
    entries.announce([key(2)])
    entries._take()
    entries._repeat()
    assert not entries.report().waiting
    now[0] = 1900.0
    entries._repeat()
    assert entries._take() == [(key(1), True)]
    entries._lost_at = now[0]
    entries._repeat()
    assert entries._take() == [(key(2), True)], "what was just said was said to the new one"
    now[0] = 1901.0
    entries._lost_at = now[0]
    entries._repeat()
    entries._repeat()
    assert sorted(entries._take()) == [(key(1), True), (key(2), True)]


def test_node_that_cannot_be_named_is_refused() -> None:
    for name, incarnation, address in [
        ("", 1, "h:1"),
        ("a b", 1, "h:1"),
        ("a", 0, "h:1"),
        ("a", 1 << 64, "h:1"),
        ("a", 1, ""),
        ("a", 1, "h 1"),
        ("a", 1, "h" * 200),
    ]:
        with pytest.raises(InvalidRequestError):
            NodeAddress(name, incarnation, "", address)


def test_holders_of_one_chunk_are_bounded(
    make_directory: DirectoryMaker, redis: RedisProcess
) -> None:
    link = RedisClient("redis", redis.url, 2000, 1)
    others = [node(number) for number in range(20, 32)]
    for other in others:
        Membership(link, PREFIX, other, 60_000).beat()
        redis.client.sadd(at(1), other.incarnation - (1 << 64))
    link.close()
    asking = make_directory()
    asking.start()
    assert eventually(lambda: len(asking.report().nodes) == len(others))
    found = asking.holders([key(1)], PATIENT_S)[key(1)]
    assert len(found) == MAX_HOLDERS
    assert set(found) <= set(others)


# --- nodes that share a Redis and its directory


def directory_of(server: LocalServer) -> Directory:
    assert server.node.directory is not None
    return server.node.directory


def holders(server: LocalServer, keys: list[ChunkKey]) -> list[list[str]]:
    found = directory_of(server).holders(keys, 5.0)
    return [[node.node_id for node in found.get(key, ())] for key in keys]


def test_node_is_advertised_as_others_reach_it() -> None:
    for flags, bulk_address, expected in [
        (["--listen", "127.0.0.1:0"], "", ("127.0.0.1:7", "")),
        (["--listen", "[::1]:0"], "ipc:///x", ("[::1]:7", "")),
        (["--advertise", "n1.pool"], "tcp://*:9", ("n1.pool:7", "tcp://n1.pool:9")),
        (["--advertise", "fd00::1"], "tcp://[fd00::1]:9", ("[fd00::1]:7", "tcp://[fd00::1]:9")),
    ]:
        config = load_config(["--directory", "--redis", "redis://127.0.0.1:1", *flags])
        directory = open_directory(config, 5, 7, bulk_address, Counters(), lambda: 0.0)
        assert (directory.me.grpc_address, directory.me.bulk_address) == expected
        assert directory.me.node_id.endswith(":7")
        directory.close()


def test_directory_whose_tls_files_are_none_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    config = load_config(
        ["--directory", "--redis", "rediss://h", "--redis-tls-ca", str(tmp_path / "ca.pem")]
    )
    with pytest.raises(InvalidRequestError, match="PEM"):
        open_directory(config, 5, 7, "", Counters(), lambda: 0.0)


def test_nodes_find_what_lies_in_each_others_memory_until_it_is_deleted_and_status_shows_them(
    make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    common = (
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-prefix", "pair:"),
        *("--directory", "--limits", "directory_ttl_ms=4000", "--redis-timeout-ms", "20000"),
        *("--http", "127.0.0.1:0"),
    )
    first, second = (
        make_server(*common, "--node-id", name, "--socket", str(tmp_path / f"{name}.sock"))
        for name in "ab"
    )
    for node in (first, second):
        assert eventually(lambda node=node: len(directory_of(node).report().nodes) == 1)  # type: ignore[misc]
    client = first.connect("grpc")
    keys = store(client, 1, 3)
    assert eventually(lambda: holders(second, keys) == [["a"]] * 3)
    assert holders(first, keys) == [[]] * 3
    # a chunk that is just being copied to Redis is not deleted
    assert eventually(lambda: client.delete(keys=keys[:1]) == 1 or not client.stat(keys=keys[:1]))
    assert eventually(lambda: holders(second, keys) == [[], ["a"], ["a"]])
    assert all(name.startswith(b"pair:") for name in own_redis.names())
    own, where = (f"127.0.0.1:{node.node.port}" for node in (first, second))
    reply = fetch_status(own)
    assert reply.directory is not None
    page = urllib.request.urlopen(f"http://127.0.0.1:{first.node.http_port}/data", timeout=20)
    with page:
        assert json.load(page)["nodes"] == [["a", own, "this one"], ["b", where, "lives"]]
    (seen,) = reply.directory.nodes
    assert (seen.node_id, seen.grpc_address) == ("b", where)
    assert seen.incarnation == directory_of(second).me.incarnation
    shown = look_at("x", reply)["directory"]
    line = directory_line(shown)
    assert line == f"directory: a, {reply.directory.announced} chunks announced; sees b at {where}"
    assert (shown["standing"], shown["nodes"][0]["node_id"]) == ("known", "b")
    levels = {row[0]: row[3] for row in gauges(first.node.store, 0, directory_of(first))}
    assert (levels["directory_up"], levels["directory_nodes"]) == (1, 1)
