"""A shared tier that somebody else empties: what a server has is there again in bounded time."""

from __future__ import annotations

from pathlib import Path

from conftest import ServerMaker
from helpers.local_server import eventually
from helpers.plain_engine import PlainEngine
from helpers.prompts import tokens
from helpers.redis_process import RedisProcess

PROMPT, OTHER = tokens(1, 64), tokens(2, 64)
NAMES = 16
"""In Redis, of eight chunks: each has a manifest and a part."""


def test_redis_flushall_leaves_no_server_that_says_a_chunk_is_there_and_does_not_bring_it(
    make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path
) -> None:
    """FLUSHALL of a Redis that servers share, as operators do it, a restart without its file, or a
    failover to an empty replica: puts were answered ``exists`` out of memory, Redis stayed without
    them, and other nodes never saw them.

    Here what is put again is copied again within a second, and so is, some seconds later, what
    nobody put: a node that comes by then loads both.
    """
    own_redis.start()
    shared = ("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-size", "64MiB")
    first = PlainEngine(make_server(*shared).connect())
    assert first.store(PROMPT) == first.store(OTHER) == 4

    assert eventually(lambda: len(own_redis.names()) == NAMES)
    own_redis.command("FLUSHALL")
    assert first.store(PROMPT) == 0, "they exist, in memory"
    assert eventually(lambda: len(own_redis.names()) == NAMES)
    second = make_server(*shared, "--socket", str(tmp_path / "second.sock"))
    other = PlainEngine(second.connect())
    assert other.load(PROMPT).stored_tokens == other.load(OTHER).stored_tokens == 64
