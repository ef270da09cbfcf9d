"""A client of LMCache's multiprocess server; runs by path in LMCache's environment.

It drives the client of ``lmcache bench server``, one chunk of 256 tokens a request, and answers
each input line with a line of JSON. A chunk is delivered if the lookup finds it and the retrieve
succeeds; bytes are not compared, in LMCache's favour.
"""

from __future__ import annotations

import json
import sys
import time

import lmcache.cli.commands.bench.server_bench.helpers as helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

SHAPE = "(2,1024,16,8,128):float16:1"
"""One layer: a chunk is 1 MiB."""


def start(url: str, instance: int) -> ServerBenchClient:
    """Return a registered client; two clients of one server need two instance ids."""
    helpers._INSTANCE_ID_BASE = instance
    # Its default polls every 50 ms for a prefetch, most of a read's time.
    helpers._poll_prefetch_status.__defaults__ = (1000, 0.002)
    config = BenchConfig(
        url, "", "cpu", "lmcache_driven", 1, False, 256, SHAPE, num_blocks=1024, block_size=16
    )
    client = ServerBenchClient(config, lambda _: None)
    client.start()
    return client


def store(client: ServerBenchClient, number: int) -> bool:
    """Store chunk *number*; return whether that succeeded."""
    request = client.create_request(number, f"store-{number}", "cold")
    client.lookup(request)
    result = client.store(request, 0, request.num_full_tokens)
    client.end_session(request)
    return bool(result and result.succeeded)


def read(client: ServerBenchClient, number: int, attempt: int) -> bool:
    request = client.create_request(number, f"read-{number}-{attempt}", "warm")
    found = client.lookup(request)
    result = client.retrieve(request, 0, request.num_full_tokens) if found.is_full_hit else None
    client.end_session(request)
    return bool(result and result.succeeded)


def store_all(client: ServerBenchClient, first: int, count: int) -> dict[str, float]:
    """Store chunks *first* to *first* + *count*, one after another."""
    return {"stored": sum(store(client, number) for number in range(first, first + count))}


def write(client: ServerBenchClient, first: int, per_s: float, seconds: float) -> dict[str, float]:
    """Store new chunks from number *first* on, *per_s* a second."""
    started, sent = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        store(client, first + sent)
        sent += 1
        time.sleep(max(0.0, started + sent / per_s - time.monotonic()))
    return {"sent": sent, "seconds": time.monotonic() - started}


def read_all(client: ServerBenchClient, count: int, seconds: float) -> dict[str, float]:
    """Read chunks 0 to *count* once each, then repeat until *seconds* have passed."""
    started = time.monotonic()
    reads = delivered = 0
    while reads < count or time.monotonic() - started < seconds:
        delivered += read(client, reads % count, time.monotonic_ns())
        reads += 1
    return {"reads": reads, "delivered": delivered}


def answer(client: ServerBenchClient, words: list[str]) -> dict[str, float]:
    if words[0] == "store":
        return store_all(client, int(words[1]), int(words[2]))
    if words[0] == "write":
        return write(client, int(words[1]), float(words[2]), float(words[3]))
    return read_all(client, int(words[1]), float(words[2]))


def main(url: str, instance: str) -> None:
    client = start(url, int(instance))
    try:
        print(json.dumps({"ready": 1}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(client, line.split())), flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
