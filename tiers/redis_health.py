"""What an operator should know of a Redis that answers: who is missing, what is full, what is set
so that it will hurt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.redis_client import RedisClient
from kvstore.tiers.redis_connection import Reply
from kvstore.tiers.redis_servers import SLOTS, Server

FULL_SHARE = 0.95
"""Redis frees nothing of itself under noeviction: writes begin to fail."""


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One thing that is wrong. ``is_loss``: chunks miss or cannot be put already."""

    saw: str
    fix: str
    is_loss: bool


def check_health(client: RedisClient) -> Iterator[HealthFinding]:
    """Yield what is wrong with the servers behind *client*; what its user may not see is left out.

    Raises TierUnavailableError when none of them answers.
    """
    masters = client.masters()
    answering = []
    for master in masters:
        try:
            client.run_on(master, (b"SCAN", 0, b"COUNT", 1))
            answering.append(master)
        except TierUnavailableError as error:
            if not error.is_partial:
                raise
            fix = "bring it back, or let a replica of it take over"
            yield HealthFinding(f"{master} does not answer; its slots miss", fix, is_loss=True)
    if client.is_cluster and answering:
        yield from _coverage(client, answering)
    for master in answering:
        yield from _memory(client, master)


def _coverage(client: RedisClient, masters: list[Server]) -> Iterator[HealthFinding]:
    rows = _asked(client, masters[0], b"CLUSTER", b"SLOTS")
    served = _served(rows)
    if isinstance(rows, list) and served < SLOTS:
        fix = "give them one: redis-cli --cluster fix HOST:PORT"
        yield HealthFinding(f"{SLOTS - served} of {SLOTS} slots have no master", fix, is_loss=True)
    question = (b"CONFIG", b"GET", b"cluster-require-full-coverage")
    if any(_asked(client, master, *question) == [question[2], b"yes"] for master in masters):
        yield HealthFinding(
            "the Redis Cluster refuses every key while one master is down",
            "set cluster-require-full-coverage to no on all its nodes",
            is_loss=False,
        )


def _served(rows: Reply) -> int:
    count = 0
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [int(first), int(last), *_]:
                count += last - first + 1
    return count


def _memory(client: RedisClient, master: Server) -> Iterator[HealthFinding]:
    text = _asked(client, master, b"INFO", b"memory")
    lines = text.decode(errors="replace").splitlines() if isinstance(text, bytes) else []
    found = dict(line.partition(":")[::2] for line in lines)
    used, most = (_number(found.get(name, "")) for name in ("used_memory", "maxmemory"))
    if most and used >= FULL_SHARE * most and found.get("maxmemory_policy") == "noeviction":
        yield HealthFinding(
            f"{master} is full, {used} of {most} bytes, and evicts nothing (noeviction)",
            "raise its maxmemory, lower --redis-size, or set maxmemory-policy allkeys-lru",
            is_loss=True,
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _asked(client: RedisClient, master: Server, *command: bytes) -> Reply:
    """Return the answer, None when it may not be asked for."""
    try:
        answer: Reply = client.run_on(master, command)
    except TierUnavailableError:
        return None
    return answer
