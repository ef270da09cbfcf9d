"""Rows 5 and 6: a Redis or a disk that is slow, silent, empty or full costs a deadline at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest
from conftest import ServerMaker
from faults.oracle import verified
from faults.proxy import FaultProxy, Trouble
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import keys_of, store
from redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.types import ChunkKey

CHUNKS = 4
DEADLINE = ClientOptions("grpc", 16, 400)
LATE_S = 0.35
"""What a busy machine may add to a deadline; bench.trust measures what it is on a quiet one."""


def behind(server_of: ServerMaker, proxy: FaultProxy, *flags: str) -> LocalServer:
    return server_of(
        *("--tiers", "cpu,redis", "--redis", f"redis://{proxy.address}/0"),
        *("--redis-timeout-ms", "200", "--breaker-retry-ms", "100", *flags),
    )


@pytest.fixture
def redis_proxy(own_redis: RedisProcess, proxy: Callable[[int], FaultProxy]) -> FaultProxy:
    own_redis.start()
    return proxy(own_redis.port)


def redis_state(client: Client) -> str:
    (tier,) = (tier for tier in client.status().tiers if tier.name == "redis")
    return tier.state


def is_on_redis(client: Client, keys: list[ChunkKey]) -> bool:
    return all("redis" in {c.tier for c in chunk.copies} for chunk in client.stat(keys))


TROUBLES = {
    "silent": Trouble(is_silent=True),
    "slow": Trouble(delay_s=0.3),
    "a trickle": Trouble(bytes_per_s=2_000),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_what_a_slow_redis_has_is_a_miss_by_the_deadline_and_a_hit_once_it_is_well(
    make_server: ServerMaker, redis_proxy: FaultProxy, kind: str
) -> None:
    server = behind(make_server, redis_proxy)
    writer = server.connect("grpc")
    kept = store(writer, 1, CHUNKS)
    assert eventually(lambda: is_on_redis(writer, kept))
    leave_memory(server, kept)
    client = server.connect(options=DEADLINE)
    client.lookup(kept)
    redis_proxy.to_client = TROUBLES[kind]
    opened = False
    for turn in range(6):
        started = time.monotonic()
        found = verified(client, kept)
        assert time.monotonic() - started < 0.4 + LATE_S
        assert found in range(CHUNKS + 1)
        opened = opened or (turn >= 2 and redis_state(writer) == "degraded")
        started = time.monotonic()
        assert client.lookup(keys_of(client, 1000 + turn, CHUNKS)).ready == 0
        assert time.monotonic() - started < 0.4 + LATE_S
        assert verified(writer, store(writer, 2 + turn, 1)) == 1
    assert opened or kind != "silent"
    redis_proxy.heal()
    seeds = count(100)
    assert eventually(lambda: is_on_redis(writer, store(writer, next(seeds), 1)))
    assert eventually(lambda: redis_state(writer) == "serving")
    assert verified(writer, kept) == CHUNKS


def leave_memory(server: LocalServer, keys: list[ChunkKey]) -> None:
    transfers = server.node.manager.transfers
    for key in keys:
        if transfers.catalog.cast_out("cpu", key, even_if_held=False):
            transfers.delete_from(transfers.cpu, key)


def test_bytes_that_a_network_changes_on_their_way_from_redis_are_never_delivered(
    make_server: ServerMaker, redis_proxy: FaultProxy, amount: Callable[[int, int], int]
) -> None:
    server = behind(make_server, redis_proxy)
    client = server.connect("grpc")
    kept = store(client, 1, CHUNKS)
    assert eventually(lambda: is_on_redis(client, kept))
    read = 0
    for turn in range(amount(3, 2_000)):
        leave_memory(server, kept)
        place = (1_500 + 2_977 * turn) % 9_000
        redis_proxy.to_client = Trouble(flip_at=place) if turn % 3 else Trouble(cut_at=place)
        read += sum(verified(client, [key]) for key in kept)
        redis_proxy.to_client = Trouble()
        if client.lookup(kept).ready < CHUNKS:
            client.delete(kept)
            assert eventually(lambda: is_on_redis(client, store_again(client)))
    assert read
    assert server.counter("corrupt_chunks") + server.counter("lost_chunks")


def store_again(client: Client) -> list[ChunkKey]:
    client.delete(keys_of(client, 1, CHUNKS))
    return store(client, 1, CHUNKS)


def test_a_slow_disk_costs_a_get_its_deadline_and_no_other_get_anything(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.tiers.disk_io import CachedIO

    server = make_server()
    client = server.connect(options=DEADLINE)
    low, high = store(client, 1, CHUNKS), store(client, 2, CHUNKS)
    server.settled()
    leave_memory(server, low)
    read = CachedIO.read
    is_slow = True

    def slowly(self: CachedIO, *arguments: object) -> bool:
        deadline = time.monotonic() + 1.5
        while is_slow and time.monotonic() < deadline:
            time.sleep(0.02)
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedIO, "read", slowly)
    started = time.monotonic()
    assert verified(client, low) == 0
    assert time.monotonic() - started < 0.4 + LATE_S
    assert verified(client, high) == CHUNKS
    assert server.counter("get_late_chunks")
    is_slow = False
    patient = server.connect(options=ClientOptions("grpc", 16, DEADLINE_MS))
    assert eventually(lambda: verified(patient, low) == CHUNKS)
