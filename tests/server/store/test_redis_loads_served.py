"""A server that loads raw chunks from Redis asks for nothing twice."""

from __future__ import annotations

from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import LARGE, is_right, store
from helpers.redis_process import RedisProcess

from kvstore.client import ClientOptions
from kvstore.tiers.redis_connection import SLICE_BYTES

CHUNKS = 12
TOKENS = 128


def test_what_is_loaded_together_is_requested_once(
    make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    own_redis.start()
    server = make_server(
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--codec", "redis=raw"),
        *("--cpu", "32MiB", "--redis-timeout-ms", "20000"),
    )
    client = server.connect(
        representation=LARGE, options=ClientOptions("grpc", TOKENS, DEADLINE_MS)
    )
    keys = store(client, 1, CHUNKS)
    assert eventually(
        lambda: all("redis" in {c.tier for c in chunk.copies} for chunk in client.stat(keys=keys))
    )
    server.leave_memory(keys)
    own_redis.client.config_resetstat()
    found = client.get_chunks(keys)
    assert len(found) == CHUNKS
    assert all(is_right(client, key, each) for key, each in zip(keys, found, strict=True))
    # Nothing was asked for in vain: a lookup's manifests, each frame's, and each slice once.
    parts = [name for name in own_redis.names() if not name.endswith(b":m")]
    slices = sum(-(-own_redis.client.strlen(name) // SLICE_BYTES) for name in parts)
    calls = own_redis.client.info("commandstats")["cmdstat_getrange"]["calls"]
    assert slices + CHUNKS <= calls <= slices + 2 * CHUNKS
