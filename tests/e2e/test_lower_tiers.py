"""Lower tiers as clients see them: a Redis that dies and returns, and encryption at rest."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from conftest import ServerMaker
from helpers.local_server import LocalServer, eventually
from helpers.prompts import (
    MEDIUM,
    assert_reads,
    chunks_of,
    is_right,
    keys_of,
    parts_of,
    store,
    tensors_of,
)
from helpers.redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.security.key_files import next_key, parse_encryption_keys, write_keys

CHUNK_TOKENS = 64


def with_redis(make_server: ServerMaker, redis: RedisProcess) -> LocalServer:
    return make_server(
        *("--tiers", "cpu,disk,redis", "--redis", redis.url, "--redis-size", "64MiB"),
        *("--redis-timeout-ms", "1000", "--limits", "breaker_retry_ms=100"),
    )


def round_trip(client: Client, seed: int) -> list[ChunkKey]:
    keys = store(client, seed, 3)
    assert_reads(client, keys)
    return keys


def tiers_of(client: Client, keys: list[ChunkKey]) -> list[set[str]]:
    return [{copy.tier for copy in chunk.copies} for chunk in client.stat(keys=keys)]


def state(client: Client) -> tuple[str, str]:
    """What the status says of Redis, and why."""
    (tier,) = [tier for tier in client.status().tiers if tier.name == "redis"]
    return tier.state, tier.reason


def assert_recovers(client: Client, seeds: Iterator[int]) -> None:
    """Fail unless puts reach Redis again, and the status says so."""

    def is_back() -> bool:  # a busy machine may be late for a call once more
        tiers = tiers_of(client, round_trip(client, next(seeds)))
        return all("redis" in each for each in tiers) and state(client) == ("serving", "")

    assert eventually(is_back)


def test_server_starts_and_serves_without_its_redis_and_says_so(
    make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    client, seeds = with_redis(make_server, own_redis).connect("grpc"), count(1)
    for _ in range(6):
        keys = round_trip(client, next(seeds))
        assert client.lookup(keys=[*keys, *keys_of(client, next(seeds), 1)]).ready == 3
    assert eventually(lambda: state(client)[0] == "degraded")
    assert own_redis.url.removesuffix("/0") in state(client)[1]
    assert eventually(lambda: tiers_of(client, keys) == [{"cpu", "disk"}] * 3)
    own_redis.start()
    assert_recovers(client, seeds)


def test_redis_that_dies_and_returns_costs_no_put_and_no_get_but_of_what_it_alone_had(
    make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    server, seeds = with_redis(make_server, own_redis), count(1)
    client = server.connect()
    assert_recovers(client, seeds)
    shared = round_trip(client, next(seeds))
    assert eventually(lambda: all("redis" in each for each in tiers_of(client, shared)))
    second = make_server(
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-size", "64MiB"),
        *("--socket", str(tmp_path / "second.sock"), "--redis-timeout-ms", "1000"),
    )
    reader = second.connect()
    assert reader.lookup(keys=shared).tiers == ("redis",) * 3
    assert_reads(reader, shared)
    second.leave_memory(shared)
    own_redis.stop()
    assert reader.get_chunks(shared) == []
    for _ in range(6):
        round_trip(client, next(seeds))
    assert eventually(lambda: state(client)[0] == "degraded")
    assert_reads(client, shared)
    own_redis.start()
    assert_recovers(client, seeds)
    assert server.counter("put_refused_chunks") == 0
    assert server.settled().leases == 0


# --- encryption at rest


def key_file(path: Path) -> Path:
    write_keys(path, [next_key([], os.urandom, time.time())])
    return path


def client_of(server: LocalServer) -> Client:
    options = ClientOptions("grpc", chunk_tokens=CHUNK_TOKENS, deadline_ms=20_000)
    return server.connect(representation=MEDIUM, options=options)


def sample_of(key: ChunkKey) -> bytes:
    return parts_of(tensors_of(key, MEDIUM, CHUNK_TOKENS))[0].tobytes()[:32]


def assert_comes(client: Client, keys: list[ChunkKey]) -> None:
    """All of *keys* come, and right: a get may end early where the disk is late."""
    found: list[ChunkTensors] = []

    def is_whole() -> bool:
        found[:] = client.get_chunks(keys)
        return len(found) == len(keys)

    assert eventually(is_whole)
    assert all(is_right(client, *pair) for pair in zip(keys, found, strict=True))


def test_files_show_nothing_and_after_a_rotation_both_epochs_are_read_but_no_retired_one(
    tmp_path: Path, make_server: ServerMaker
) -> None:
    path = key_file(tmp_path / "keys")
    server = make_server("--encryption-keys", str(path), "--cpu", "4MiB")
    client = client_of(server)
    first, second = keys_of(client, 1, 12), keys_of(client, 2, 12)  # 6 MiB
    puts = client.put_chunks(chunks_of(client, first), durable=True)
    assert {put.outcome for put in puts} == {PutOutcome.stored}, puts
    rows = list(parse_encryption_keys(path.read_bytes()).values())
    write_keys(path, [*rows, later := next_key(rows, os.urandom, time.time())])
    client.put_chunks(chunks_of(client, second), durable=True)
    assert_comes(client, first)
    assert_comes(client, second)
    folder = server.config.disk[0].path
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert len(files) > 6 << 20
    assert not any(sample_of(key) in files for key in (*first, *second))
    assert server.node.store.tiers.file_backed is None
    write_keys(path, [later])
    server.stop()
    again = make_server("--encryption-keys", str(path), "--cpu", "4MiB")
    client = client_of(again)
    assert [client.get_chunks([key]) for key in first] == [[]] * len(first)
    assert_comes(client, second)
    assert again.counter("corrupt_chunks") == len(first)
    client.put_chunks(chunks_of(client, first), durable=True)
    assert_comes(client, first)


def test_two_servers_share_an_encrypted_redis(
    tmp_path: Path, make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    own_redis.start()
    flags = (
        *("--encryption-keys", str(key_file(tmp_path / "keys")), "--tiers", "cpu,redis"),
        *("--redis", own_redis.url, "--redis-timeout-ms", "20000", "--socket", "off"),
    )
    writer, reader = (client_of(make_server(*flags)) for _ in "12")
    keys = store(writer, 1, 4)
    assert eventually(lambda: reader.lookup(keys=keys).ready == len(keys))
    assert_reads(reader, keys)
    values = [own_redis.value(name) for name in own_redis.names()]
    assert values
    assert not any(sample_of(keys[0]) in bytes(value) for value in values)
