"""Hits in another node's memory, against a bare ZeroMQ transfer of the same bytes.

Both over the loopback, in turns. Our time includes the lookup, the transfer and every checksum. A
client's first read goes through the memory of its own server; later reads go directly to the other
server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from bench.lib.bare import raw_stream, raw_zmq
from bench.lib.report import Report, gbps, paired
from bench.lib.workload import (
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

CHUNKS, REPEATS = 16, 15
LOOKUPS, LOOKUP_CHUNKS = 400, 32
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
    """Return the seconds of each of LOOKUPS: of chunks in a peer's memory, and of missing ones.

    *flags* as in ``two_nodes``.
    """
    found: list[float] = []
    missed: list[float] = []
    with (
        two_nodes(*flags) as (first, second),
        connect(first, TINY) as writer,
        connect(second, TINY) as reader,
    ):
        prompts = [make_chunks(writer, LOOKUP_CHUNKS, seed) for seed in range(LOOKUPS)]
        for _, chunks in prompts:
            writer.put_chunks(chunks)
        _reached(reader, prompts[0][0])
        if flags:
            time.sleep(_ANNOUNCED_WITHIN_S)
        for seed, (keys, _) in enumerate(prompts[1:], LOOKUPS):
            absent = keys_of(reader, LOOKUP_CHUNKS, seed)  # not the seed of a prompt
            for wanted, ready, seconds in ((keys, len(keys), found), (absent, 0, missed)):
                started = time.perf_counter()
                assert reader.lookup(keys=wanted).ready == ready
                seconds.append(time.perf_counter() - started)
    return found, missed


def add_nodes(report: Report) -> None:
    """Add hits of CHUNKS of 8 MiB, a bare loop that receives and sums, and lookups."""
    hit = hit_against_raw(CHUNKS, REPEATS)
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
        what = f"{len(seconds)} lookups of {LOOKUP_CHUNKS} chunks"
        for share in (50, 99):
            value_ms = 1e3 * float(np.percentile(seconds, share))
            report.add(f"peer_lookup_{name}_ms_p{share}", value_ms, what)
