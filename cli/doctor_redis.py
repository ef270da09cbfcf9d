"""What `kvstore doctor` looks at in Redis: speed, rights, coverage, memory and the directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from redis.exceptions import OutOfMemoryError

from kvstore.cli.finding import Finding
from kvstore.cli.status import directory_line
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.server.settings.settings import Settings
from kvstore.tiers.redis import check_health
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS, RedisClient
from kvstore.tiers.redis_connection import Command

MAX_REDIS_MS = 5.0
PINGS = 20


def check_redis(config: Settings) -> Iterator[Finding]:
    """Whether Redis answers, how fast, what the user may do, and how its servers are."""
    if config.redis_url is None or not ("redis" in config.tiers or config.directory):
        return
    try:
        url = config.redis_access(config.redis_url)
        link = RedisClient("redis", url, config.redis_timeout_ms, 1)
    except (KVStoreError, OSError, ValueError) as error:
        yield Finding("redis", "fail", str(error), "correct --redis and what belongs to it")
        return
    with closing(link):
        name = f"{config.redis_prefix}{{doctor}}".encode()
        try:
            yield _speed(link, name)
        except KVStoreError as error:
            yield Finding("redis", "fail", str(error), "start it, or correct --redis")
            return
        yield _rights(link, name, config)
        yield from _servers(link)


def check_directory(status: pb.StatusResponse) -> Iterator[Finding]:
    """How the server stands among other nodes, if it is to be among them."""
    if not status.HasField("directory"):
        return
    one = status.directory
    fixes = {
        "taken": "give each node a --node-id of its own",
        "unknown": "mend what the reason names; it comes in by itself",
        "full": "so many nodes need a Redis of another --redis-prefix",
    }
    fix = fixes.get(one.standing, fixes["unknown"] if one.failure else "")
    saw = directory_line(one).removeprefix("directory: ")
    yield Finding("directory", "warn" if fix else "ok", saw, fix)


def _speed(link: RedisClient, name: bytes) -> Finding:
    times = []
    for _ in range(PINGS):
        started = time.perf_counter()
        link.run(name, [[b"GETRANGE", name, b"0", b"0"]])
        times.append(1000 * (time.perf_counter() - started))
    median_ms = sorted(times)[PINGS // 2]
    slow = median_ms > MAX_REDIS_MS
    fix = "move it nearer: each lookup that memory cannot answer waits for it" if slow else ""
    return Finding("redis", "warn" if slow else "ok", f"{median_ms:.2f} ms an answer", fix)


def _trials(name: bytes, *, directory: bool) -> dict[str, Command]:
    """Return a harmless use of each command that is needed, on names that end in 10 s."""
    other = name + b":set"
    trials: dict[str, Command] = {
        "set": (b"SET", name, b"x", b"PX", 10_000),
        "expire": (b"EXPIRE", name, 10),
        "scan": (b"SCAN", 0, b"COUNT", 1),
        "eval": (b"EVAL", b"return 1", 1, name),
        "unlink": (b"UNLINK", name),
    }
    if directory:
        trials |= {
            "sadd": (b"SADD", other, 1),
            "srandmember": (b"SRANDMEMBER", other, 1),
            "srem": (b"SREM", other, 1),
            "hset": (b"HSET", name, b"f", b"v"),
            "hget": (b"HGET", name, b"f"),
            "hgetall": (b"HGETALL", name),
            "hdel": (b"HDEL", name, b"f"),
            "time": (b"TIME",),
        }
    return trials


def _rights(link: RedisClient, name: bytes, config: Settings) -> Finding:
    denied = {}
    for word, command in _trials(name, directory=config.directory).items():
        try:
            link.run(name, [command])
        except OutOfMemoryError:  # it may be used; that Redis is full is another finding
            continue
        except KVStoreError as error:
            if "NoPermissionError" in str(error):
                denied[word] = str(error).partition("; allow its user")[0]
            elif word == "set":
                return Finding("redis rights", "warn", f"cannot be tried: {error}", "mend that")
    words = TIER_RIGHTS + (DIRECTORY_RIGHTS if config.directory else ())
    rights = " ".join(f"+{word}" for word in words)
    fix = f"ACL SETUSER its user ~{config.redis_prefix}* {rights}" if denied else ""
    saw = f"denied: {', '.join(f'{word} ({why})' for word, why in denied.items())}"
    return Finding(
        "redis rights",
        "fail" if denied else "ok",
        saw if denied else "every command that is needed",
        fix,
    )


def _servers(link: RedisClient) -> Iterator[Finding]:
    try:
        found = list(check_health(link))
    except KVStoreError as error:
        yield Finding("redis servers", "fail", str(error), "start them")
        return
    for one in found:
        yield Finding("redis servers", "fail" if one.is_loss else "warn", one.saw, one.fix)
    if not found:
        yield Finding("redis servers", "ok", "all answer and have room, as far as may be seen")
