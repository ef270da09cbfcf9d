"""Costs of a lookup, a directory query and a byte, measured on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
import redis

from bench.cluster.nodes import hit_against_raw
from bench.lib.workload import MIB, TINY, connect, make_chunks, redis_server, serving
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.directory import Directory
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.redis_client import RedisClient
from kvstore.tiers.redis_url import DEFAULT_PREFIX

LOOKUPS, LOOKUP_CHUNKS = 300, 24
"""Mean blocks of a prompt of the conversation trace."""
ROUNDS, ENTRIES, START_S = 200, 20_000, 30.0
PARTS, PEER_CHUNKS = 64, 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a processor, bytes, and bytes a second, measured.

    ``lookup_s``: the server's processor time for a leased lookup of LOOKUP_CHUNKS chunks.
    ``query_s``, ``extra_key_s``, ``entry_s``: Redis' for one query of the directory, for each key
    in it beyond the first, and for one entry written or removed. ``entry_bytes``: Redis' memory
    for an entry. ``round_trip_s``: latency of a query of LOOKUP_CHUNKS keys at a node.
    ``read_byte_s``, ``write_byte_s``: Redis' processor time. ``redis_bytes_per_s``,
    ``peer_bytes_per_s``: one reader over the loopback; of a peer including the lookup.
    """

    lookup_s: float
    query_s: float
    extra_key_s: float
    entry_s: float
    entry_bytes: float
    round_trip_s: float
    read_byte_s: float
    write_byte_s: float
    redis_bytes_per_s: float
    peer_bytes_per_s: float


def measure() -> Costs:
    """Return the costs of this machine; about ten seconds. Needs redis-server."""
    lookup_s, hit = _lookup_s(), hit_against_raw(PEER_CHUNKS, 3)
    with redis_server() as port, redis.Redis(port=port) as link:
        directory, data = _directory(link, port), _data(link)
    return Costs(lookup_s, *directory, *data, hit.size_bytes / hit.hit_s)


def _lookup_s() -> float:
    flags = ("--tiers", "cpu", "--cpu", "64MiB")
    with serving(*flags) as (address, pid), connect(address, TINY) as client:
        keys, chunks = make_chunks(client, LOOKUP_CHUNKS, 1)
        client.put_chunks(chunks)
        process = psutil.Process(pid)
        before = sum(process.cpu_times()[:2])
        for _ in range(LOOKUPS):
            with client.lease(keys=keys) as lease:
                assert lease.match.ready == len(keys)
        return float(sum(process.cpu_times()[:2]) - before) / LOOKUPS


def _directory(link: redis.Redis, port: int) -> tuple[float, float, float, float, float]:
    """Measure the node directory: one node announces, another queries."""
    keys = [ChunkKey(os.urandom(32)) for _ in range(ENTRIES)]
    with closing(_node(port, "one")) as one, closing(_node(port, "two")) as two:
        for node in (one, two):
            node.start()
        _wait(lambda: two.report().standing == "known" and bool(one.report().nodes))
        before_bytes = _info(link, "memory", "used_memory")
        with _spent(link) as announced:
            one.announce(keys)
            _wait(lambda: one.report().waiting == 0)
        _wait(lambda: len(two.holders(keys[-1:], 1.0)) == 1)
        entry_bytes = (_info(link, "memory", "used_memory") - before_bytes) / ENTRIES

        def query(count: int) -> tuple[float, float]:
            waits = []
            with _spent(link) as spent:
                for turn in range(ROUNDS):
                    at = turn * count % (ENTRIES - count)
                    started = time.perf_counter()
                    assert len(two.holders(keys[at : at + count], 1.0)) == count
                    waits.append(time.perf_counter() - started)
            return spent() / ROUNDS, median(waits)

        one_s, _ = query(1)
        many_s, round_trip_s = query(LOOKUP_CHUNKS)
    key_s = max(0.0, many_s - one_s) / (LOOKUP_CHUNKS - 1)
    return one_s, key_s, announced() / ENTRIES, entry_bytes, round_trip_s


def _node(port: int, name: str) -> Directory:
    link = RedisClient("redis", f"redis://127.0.0.1:{port}/0", 2000, 2)
    number = int.from_bytes(os.urandom(7), "big")
    me = NodeAddress(name, number, f"tcp://127.0.0.1:{number % 60_000}", "127.0.0.1:1")
    return Directory(link, me, DEFAULT_PREFIX, Limits(directory_ttl_ms=2000), Counters())


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("the directory did not settle")
        time.sleep(0.01)


def _data(link: redis.Redis) -> tuple[float, float, float]:
    parts = [os.urandom(MIB) for _ in range(4)]
    with _spent(link) as written:
        for number in range(PARTS):
            link.set(f"part:{number}", parts[number % 4])
    with _spent(link) as read:
        started = time.perf_counter()
        for number in range(PARTS):
            assert link.get(f"part:{number}") == parts[number % 4]
        wall_s = time.perf_counter() - started
    size_bytes = PARTS * MIB
    return read() / size_bytes, written() / size_bytes, size_bytes / wall_s


@contextmanager
def _spent(link: redis.Redis) -> Iterator[Callable[[], float]]:
    """Yield a function that returns, after the block, Redis' processor seconds in it."""
    names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
    before, found = _info(link, "cpu", *names), [0.0]
    yield lambda: found[0]
    found[0] = _info(link, "cpu", *names) - before


def _info(link: redis.Redis, section: str, *names: str) -> float:
    info: Any = link.info(section)
    return float(sum(info[name] for name in names))
