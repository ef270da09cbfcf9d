"""Costs of a lookup, a directory query and a byte on this machine, and hits in a peer's memory.

All over the loopback. A hit includes the lookup, the transfer and every checksum, and alternates
with a bare ZeroMQ transfer of the same bytes. A client's first read goes through the memory of its
own server; later reads go directly to the other server.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import redis

from bench.lib.bare import raw_stream, raw_zmq
from bench.lib.report import Report, gbps, paired
from bench.lib.workload import (
    MIB,
    MODEL,
    TINY,
    buffers,
    check,
    chunk_bytes,
    connect,
    keys_of,
    make_chunks,
    redis_server,
    serving,
)
from kvstore.client import Client
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


# --- hits in the memory of another node

HIT_CHUNKS, REPEATS = 16, 15
PROMPTS, PROMPT_CHUNKS = 400, 32
_FLAGS = ("--tiers", "cpu", "--cpu", "512MiB", "--limits", "peer_timeout_ms=2000")
_REACHED_WITHIN_S = 20.0
_ANNOUNCED_WITHIN_S = 2.0
"""The directory has the entries of a node by then."""


class HitTimes(NamedTuple):
    """Best seconds of a hit, and of the bare transfer."""

    size_bytes: int
    hit_s: float
    raw_s: float


@contextmanager
def two_nodes(*flags: str) -> Iterator[tuple[str, str]]:
    """Run two servers, the second of which reads the first's memory; yield their addresses.

    It finds the first by address, or with *flags* by the directory.
    """
    with serving(*_FLAGS, *flags, "--bulk", "127.0.0.1:0") as (first, _):
        peers = "directory" if flags else first
        with serving(*_FLAGS, *flags, "--peers", peers) as (second, _):
            yield first, second


def _reached(reader: Client, keys: Sequence[ChunkKey]) -> None:
    until = time.monotonic() + _REACHED_WITHIN_S
    while reader.lookup(keys=keys).ready < len(keys):
        if time.monotonic() > until:
            raise RuntimeError("the second server did not reach the first")
        time.sleep(0.05)


def hit_against_raw(chunks: int, repeats: int) -> HitTimes:
    """Time hits of *chunks* chunks in turns with the bare transfer; every byte is verified."""
    with (
        two_nodes() as (first, second),
        connect(first, MODEL) as writer,
        connect(second, MODEL) as reader,
    ):
        keys, sent = make_chunks(writer, chunks, 6)
        writer.put_chunks(sent)
        size, out = chunk_bytes(sent), buffers(MODEL, chunks)
        _reached(reader, keys)

        def hit() -> float:
            reader.delete(keys=keys)
            started = time.perf_counter()
            with reader.lease(keys=keys) as lease:
                assert len(lease.get(out)) == len(keys)
            # A chunk that has just arrived may still be in use, and is not deleted then.
            is_hit = set(lease.match.tiers) == {"peer"}
            return time.perf_counter() - started if is_hit else math.inf

        while not reader.status().counters["peer_lent_chunks"]:
            hit()  # through its own server at first
        times: list[float] = []
        with raw_zmq(size) as receive:
            _, raw_s = paired(lambda: times.append(hit()), receive, repeats)
        check(sent, out)
    return HitTimes(size, min(times), raw_s)


def lookups(*flags: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each of PROMPTS: of chunks in a peer's memory, and of missing ones.

    *flags* as in ``two_nodes``.
    """
    found: list[float] = []
    missed: list[float] = []
    with (
        two_nodes(*flags) as (first, second),
        connect(first, TINY) as writer,
        connect(second, TINY) as reader,
    ):
        prompts = [make_chunks(writer, PROMPT_CHUNKS, seed) for seed in range(PROMPTS)]
        for _, chunks in prompts:
            writer.put_chunks(chunks)
        _reached(reader, prompts[0][0])
        if flags:
            time.sleep(_ANNOUNCED_WITHIN_S)
        for seed, (keys, _) in enumerate(prompts[1:], PROMPTS):
            absent = keys_of(reader, PROMPT_CHUNKS, seed)  # not the seed of a prompt
            for wanted, ready, seconds in ((keys, len(keys), found), (absent, 0, missed)):
                started = time.perf_counter()
                assert reader.lookup(keys=wanted).ready == ready
                seconds.append(time.perf_counter() - started)
    return found, missed


def add_nodes(report: Report) -> None:
    """Add hits of HIT_CHUNKS of 8 MiB, a bare loop that receives and sums, and lookups."""
    hit = hit_against_raw(HIT_CHUNKS, REPEATS)
    with raw_zmq(hit.size_bytes) as receive, raw_stream(hit.size_bytes, summed=True) as straight:
        straight_s, raw_s = paired(straight, receive, REPEATS)
    against = f"raw zmq {gbps(hit.size_bytes, hit.raw_s)}, bar 1.3"
    report.add("peer_hit_over_raw", hit.hit_s / hit.raw_s, gbps(hit.size_bytes, hit.hit_s), against)
    what = "a bare loop: receive in place, sum"
    report.add("peer_hit_limit_over_raw", straight_s / raw_s, what)
    fixed = lookups()
    with redis_server() as port:
        shared = lookups("--directory", "--redis", f"redis://127.0.0.1:{port}/0")
    names = ("found", "missed", "directory_found", "directory_missed")
    for name, seconds in zip(names, (*fixed, *shared), strict=True):
        what = f"{len(seconds)} lookups of {PROMPT_CHUNKS} chunks"
        for share in (50, 99):
            value_ms = 1e3 * float(np.percentile(seconds, share))
            report.add(f"peer_lookup_{name}_ms_p{share}", value_ms, what)
