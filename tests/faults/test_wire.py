"""Rows 7 and 8: what networks do between clients and servers, and between servers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from conftest import ProcessMaker, ServerMaker
from faults.oracle import fetched, verified
from faults.proxy import FaultProxy, Trouble
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.networks import hosts_apart, part, probed, rejoin
from helpers.prompts import MEDIUM, chunks_of, keys_of, store
from helpers.redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey

CHUNKS = 3
OPTIONS = ClientOptions("grpc", 64, 2000, retry_after_ms=1)


def works(client: Client, keys: list[ChunkKey]) -> int:
    """Return how many chunks came, all of them right; -1 for an error of the store."""
    try:
        return verified(client, keys)
    except KVStoreError:
        return -1


def test_what_a_network_changes_is_an_error_or_a_miss_and_never_wrong(
    make_server: ServerMaker, proxy: Callable[[int], FaultProxy], amount: Callable[[int, int], int]
) -> None:
    server = make_server("--default-deadline-ms", "1000")
    between = proxy(server.node.port)
    direct = server.connect("grpc", MEDIUM, ClientOptions("grpc", 64, DEADLINE_MS))
    told = store(direct, 0, CHUNKS)
    outcomes = dict.fromkeys(range(-1, CHUNKS + 1), 0)
    turns = amount(16, 1_500)
    with Client(between.address, MEDIUM, OPTIONS) as client:
        for turn in range(turns):
            assert eventually(lambda: works(client, told) == CHUNKS)
            place = 60_013 * turn % (CHUNKS * 256 << 10)
            kind = turn % 4
            if kind == 0:
                between.to_client = Trouble(flip_at=place)
            elif kind == 1:
                between.to_client = Trouble(cut_at=place)
            elif kind == 2:
                between.to_server = Trouble(flip_at=place)
            else:
                between.to_server = Trouble(cut_at=place)
            if kind < 2:
                outcomes[works(client, told)] += 1
            else:
                put_half(client, direct, seed=turn + 1)
            between.heal()
            between.cut()
        assert eventually(lambda: works(client, told) == CHUNKS)
    assert outcomes[-1] + outcomes[0] + outcomes[1] + outcomes[2]
    usage = server.settled()
    assert usage.pending_puts == usage.tiers[0][1].reservations == 0


def put_half(client: Client, direct: Client, seed: int) -> None:
    """Put through a network in trouble: whole chunks are visible then, or none."""
    try:
        keys = keys_of(client, seed, 2)
        client.put_chunks(chunks_of(client, keys))
    except KVStoreError:
        keys = keys_of(direct, seed, 2)
    for key in keys:
        verified(direct, [key])
    direct.delete(keys=keys)


def node_of(make_server: ServerMaker, proxy: FaultProxy, folder: Path) -> LocalServer:
    return make_server(
        *("--tiers", "cpu,redis", "--redis", f"redis://{proxy.address}/0"),
        *("--redis-timeout-ms", "200", "--limits", "breaker_retry_ms=100"),
        *("--socket", str(folder / f"{proxy.port}.sock")),
    )


def test_nodes_without_each_other_serve_what_they_have_and_share_again_after(
    make_server: ServerMaker,
    proxy: Callable[[int], FaultProxy],
    own_redis: RedisProcess,
    tmp_path: Path,
) -> None:
    own_redis.start()
    proxies = [proxy(own_redis.port) for _ in range(3)]
    nodes = [node_of(make_server, one, tmp_path) for one in proxies]
    clients = [node.connect("grpc") for node in nodes]
    common = store(clients[0], 1, CHUNKS)
    assert eventually(lambda: fetched(clients[1], common) == CHUNKS)
    assert eventually(lambda: fetched(clients[2], common) == CHUNKS)
    proxies[0].go_silent()
    alone = store(clients[0], 2, CHUNKS)
    together = store(clients[1], 3, CHUNKS)
    assert fetched(clients[0], common) == fetched(clients[0], alone) == CHUNKS
    assert eventually(lambda: fetched(clients[2], together) == CHUNKS)
    assert fetched(clients[2], alone) == 0
    # Another version under the same names, on both sides: whichever is read is whole.
    clients[1].delete(keys=common)
    proxies[0].heal()
    seeds = count(100)
    assert eventually(lambda: fetched(clients[2], store(clients[0], next(seeds), 1)) == 1)
    for client in clients:
        assert eventually(lambda client=client: fetched(client, together) == CHUNKS)  # type: ignore[misc]
        for key in common:
            fetched(client, [key])


@pytest.mark.slow
@pytest.mark.usefixtures("only_long")
def test_hosts_whose_network_parts_serve_what_they_have_and_share_again_after(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    names = [f"kvhost{number}" for number in range(1, 4)]
    redis = RedisProcess(tmp_path, "--protected-mode", "no", "--bind", "0.0.0.0")
    with hosts_apart(names):
        redis.start()
        try:
            places = []
            for name in names:
                process = server_process(
                    *("--tiers", "cpu,redis", "--cpu", "16MiB", "--redis-timeout-ms", "200"),
                    *("--redis", f"redis://10.99.7.254:{redis.port}/0"),
                    *("--limits", "breaker_retry_ms=100"),
                )
                process.launcher = ["ip", "netns", "exec", name]
                process.start()
                places.append(process.address)
            assert probed(names[0], places[0], "1", "1") == [3]
            assert eventually(lambda: probed(names[1], places[1], "", "1") == [3])
            part(names[0])
            assert probed(names[0], places[0], "2", "1,2") == [3, 3]
            assert probed(names[1], places[1], "3", "1,2,3") == [3, 0, 3]
            assert eventually(lambda: probed(names[2], places[2], "", "3") == [3])
            rejoin(names[0])
            assert eventually(lambda: probed(names[0], places[0], "", "3") == [3])
        finally:
            redis.stop()
            redis.client.close()
