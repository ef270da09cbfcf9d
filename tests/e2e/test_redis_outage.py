"""A server whose Redis is down, dies, comes back or is shared: puts and gets go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import assert_reads, chunks_of, is_right, keys_of
from helpers.redis_process import RedisProcess

from kvstore.client import Client
from kvstore.client.options import TransportName
from kvstore.proto.types import ChunkKey, PutOutcome

ServerMaker = Callable[..., LocalServer]

TRANSPORTS: tuple[TransportName, ...] = ("shm", "grpc")


def with_redis(make_server: ServerMaker, redis: RedisProcess, *flags: str) -> LocalServer:
    return make_server(
        *("--tiers", "cpu,disk,redis", "--redis", redis.url, "--redis-size", "64MiB"),
        *("--redis-timeout-ms", "1000", "--limits", "breaker_retry_ms=100", *flags),
    )


def second_node(make_server: ServerMaker, url: str, folder: Path) -> LocalServer:
    """A server beside the first, with no disk."""
    return make_server(
        *("--tiers", "cpu,redis", "--redis", url, "--redis-size", "64MiB"),
        *("--socket", str(folder / "second.sock"), "--redis-timeout-ms", "1000"),
    )


def round_trip(client: Client, seed: int) -> list[ChunkKey]:
    """Put a prompt and read it back; return its keys."""
    keys = keys_of(client, seed, 3)
    puts = client.put_chunks(chunks_of(client, keys))
    assert [put.outcome for put in puts] == [PutOutcome.stored] * 3
    found = client.get_chunks(keys)
    assert [is_right(client, *pair) for pair in zip(keys, found, strict=True)] == [True] * 3
    return keys


def tiers_of(client: Client, keys: list[ChunkKey]) -> list[set[str]]:
    return [{copy.tier for copy in chunk.copies} for chunk in client.stat(keys=keys)]


def state(client: Client) -> tuple[str, str]:
    """Return what the status says of Redis, and why."""
    (tier,) = [tier for tier in client.status().tiers if tier.name == "redis"]
    return tier.state, tier.reason


def is_on_redis(client: Client, keys: list[ChunkKey]) -> bool:
    return all("redis" in tiers for tiers in tiers_of(client, keys))


def assert_recovers(client: Client, seeds: Iterator[int]) -> None:
    """Fail unless puts reach Redis again, and the status says so."""

    def is_back() -> bool:  # a busy machine may be late for a call once more
        is_there = is_on_redis(client, round_trip(client, next(seeds)))
        return is_there and state(client) == ("serving", "")

    assert eventually(is_back)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_server_starts_and_serves_without_its_redis_and_says_so(
    make_server: ServerMaker, own_redis: RedisProcess, transport: TransportName
) -> None:
    server = with_redis(make_server, own_redis)
    client = server.connect(transport)
    seeds = count(1)
    for _ in range(6):
        keys = round_trip(client, next(seeds))
        assert client.lookup(keys=[*keys, *keys_of(client, next(seeds), 1)]).ready == 3
    assert eventually(lambda: state(client)[0] == "degraded")
    assert own_redis.url.removesuffix("/0") in state(client)[1]
    assert eventually(lambda: tiers_of(client, keys) == [{"cpu", "disk"}] * 3)
    own_redis.start()
    assert_recovers(client, seeds)


def test_redis_that_dies_and_returns_costs_no_put_and_no_get(
    make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    own_redis.start()
    server = with_redis(make_server, own_redis)
    client = server.connect()
    seeds = count(1)
    assert_recovers(client, seeds)
    for _ in range(2):
        own_redis.stop()
        for _ in range(6):
            round_trip(client, next(seeds))
        assert eventually(lambda: state(client)[0] == "degraded")
        own_redis.start()
        assert_recovers(client, seeds)
    assert server.counter("put_refused_chunks") == 0
    assert server.settled().leases == 0


def test_chunks_that_only_redis_had_are_misses_while_it_is_gone(
    make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    first = with_redis(make_server, own_redis)
    writer = first.connect()
    keys = round_trip(writer, 1)
    assert eventually(lambda: is_on_redis(writer, keys))
    second = second_node(make_server, own_redis.url, tmp_path)
    reader = second.connect()
    assert reader.namespace == writer.namespace
    assert reader.lookup(keys=keys).tiers == ("redis",) * 3
    assert_reads(second.connect("grpc"), keys)
    second.leave_memory(keys)
    own_redis.stop()
    assert reader.get_chunks(keys) == []
    assert len(writer.get_chunks(keys)) == 3
