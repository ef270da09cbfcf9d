"""Rows 5 and 6: a Redis or a disk that is slow, silent, empty or full costs a deadline at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

import pytest
from conftest import ServerMaker
from faults.oracle import verified
from faults.proxy import FaultProxy, Trouble
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import keys_of, store
from helpers.redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey

CHUNKS = 4
DEADLINE_S, LATE_S = 0.4, 0.05
"""What a get may take, and what it may take more."""
DEADLINE = ClientOptions("grpc", 16, int(1000 * DEADLINE_S), retry_after_ms=1)


def in_time(ask: Callable[[], object]) -> bool:
    """Whether *ask* is over by its deadline where the machine has time for it.

    A machine that is busy makes one late, and none early: what waits for a tier is always late.
    """

    def once() -> bool:
        started = time.monotonic()
        try:
            ask()
        except KVStoreError:  # told by its own deadline: the server was late to answer
            return False
        return time.monotonic() - started < DEADLINE_S + LATE_S

    return eventually(once)


def behind(server_of: ServerMaker, proxy: FaultProxy, *flags: str) -> LocalServer:
    return server_of(
        *("--tiers", "cpu,redis", "--redis", f"redis://{proxy.address}/0"),
        # Longer than any deadline here: it is the deadline that ends a get. Copies have the time.
        *("--redis-timeout-ms", "2000", "--limits", "breaker_retry_ms=100", *flags),
    )


@pytest.fixture
def redis_proxy(own_redis: RedisProcess, proxy: Callable[[int], FaultProxy]) -> FaultProxy:
    own_redis.start()
    return proxy(own_redis.port)


def is_on_redis(client: Client, keys: list[ChunkKey]) -> bool:
    return all("redis" in {c.tier for c in chunk.copies} for chunk in client.stat(keys=keys))


def kept_on_redis(client: Client) -> list[ChunkKey]:
    keys = store(client, 1, CHUNKS)
    assert eventually(lambda: is_on_redis(client, keys))
    return keys


TROUBLES = {
    "silent": Trouble(is_silent=True),
    "slow": Trouble(delay_s=0.3),
    "a trickle": Trouble(bytes_per_s=2_000),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_what_a_slow_redis_has_is_a_miss_by_the_deadline_and_a_hit_once_it_is_well(
    make_server: ServerMaker, redis_proxy: FaultProxy, kind: str
) -> None:
    # It is asked always.
    server = behind(make_server, redis_proxy, "--limits", "breaker_failures=1000")
    writer = server.connect("grpc")
    kept = kept_on_redis(writer)
    server.leave_memory(kept)
    client = server.connect(options=DEADLINE)
    assert in_time(lambda: client.lookup(keys=keys_of(client, 999, 1)))
    redis_proxy.to_client = TROUBLES[kind]
    seeds = count(1000)
    for seed in (2, 3):
        assert in_time(lambda: verified(client, kept))
        assert in_time(lambda: client.lookup(keys=keys_of(client, next(seeds), CHUNKS)))
        assert verified(writer, store(writer, seed, 1)) == 1
    assert writer.lookup(keys=keys_of(writer, 998, CHUNKS)).ready == 0
    redis_proxy.heal()
    assert eventually(lambda: is_on_redis(writer, store(writer, next(seeds), 1)))
    assert eventually(lambda: verified(writer, kept) == CHUNKS)


def test_bytes_that_a_network_changes_on_their_way_from_redis_are_never_delivered(
    make_server: ServerMaker, redis_proxy: FaultProxy, amount: Callable[[int, int], int]
) -> None:
    server = behind(make_server, redis_proxy)
    client = server.connect("grpc")
    kept = kept_on_redis(client)
    read = 0
    for turn in range(amount(3, 2_000)):
        server.leave_memory(kept)
        place = (1_500 + 2_977 * turn) % 9_000
        redis_proxy.to_client = Trouble(flip_at=place) if turn % 3 else Trouble(cut_at=place)
        read += sum(verified(client, [key]) for key in kept)
        redis_proxy.to_client = Trouble()
        if client.lookup(keys=kept).ready < CHUNKS:
            client.delete(keys=kept)
            assert kept_on_redis(client) == kept
    assert read
    assert server.counter("corrupt_chunks") + server.counter("lost_chunks")


def test_a_slow_disk_costs_a_get_its_deadline_and_no_other_get_anything(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.tiers.disk_io import FileIO

    server = make_server()
    writer, client = server.connect("grpc"), server.connect(options=DEADLINE)
    low, high = store(writer, 1, CHUNKS), store(writer, 2, CHUNKS)
    assert in_time(lambda: client.lookup(keys=high))
    server.settled()
    server.leave_memory(low)
    read = FileIO.read
    is_well = threading.Event()

    def slowly(self: FileIO, *arguments: object) -> bool:
        is_well.wait(60)
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FileIO, "read", slowly)
    try:
        found: list[int] = []
        assert in_time(lambda: found.append(verified(client, low)))
        assert not any(found)
        assert server.counter("get_late_chunks")
        assert in_time(lambda: verified(client, high))
        patient = server.connect(options=ClientOptions("grpc", 16, DEADLINE_MS))
        assert verified(patient, high) == CHUNKS
    finally:
        is_well.set()
    assert eventually(lambda: verified(patient, low) == CHUNKS)
