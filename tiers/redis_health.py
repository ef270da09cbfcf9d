"""What an operator should know of a Redis that answers: who is missing, what is full, what is set
so that it will hurt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_link import RedisLink
from kvstore.tiers.redis_reply import Reply

SLOTS = 16384
FULL_SHARE = 0.95
"""Redis frees nothing of itself under noeviction: writes begin to fail."""


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing that is wrong. ``is_loss``: chunks miss or cannot be put already."""

    saw: str
    fix: str
    is_loss: bool


def concerns(link: RedisLink) -> Iterator[Concern]:
    """Yield what is wrong with the servers behind *link*; what its user may not see is left out.

    Raises TierUnavailableError when none of them answers.
    """
    masters = link.masters()
    answering = []
    for master in masters:
        try:
            link.list_on(master, (b"SCAN", 0, b"COUNT", 1))
            answering.append(master)
        except TierUnavailableError as error:
            if not error.is_partial:
                raise
            fix = "bring it back, or let a replica of it take over"
            yield Concern(f"{master} does not answer; its slots miss", fix, is_loss=True)
    if link.is_cluster and answering:
        yield from _coverage(link, answering)
    for master in answering:
        yield from _memory(link, master)


def _coverage(link: RedisLink, masters: list[Lines]) -> Iterator[Concern]:
    rows = _asked(link, masters[0], b"CLUSTER", b"SLOTS")
    served = _served(rows)
    if isinstance(rows, list) and served < SLOTS:
        fix = "give them one: redis-cli --cluster fix HOST:PORT"
        yield Concern(f"{SLOTS - served} of {SLOTS} slots have no master", fix, is_loss=True)
    question = (b"CONFIG", b"GET", b"cluster-require-full-coverage")
    if any(_asked(link, master, *question) == [question[2], b"yes"] for master in masters):
        yield Concern(
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


def _memory(link: RedisLink, master: Lines) -> Iterator[Concern]:
    text = _asked(link, master, b"INFO", b"memory")
    lines = text.decode(errors="replace").splitlines() if isinstance(text, bytes) else []
    found = dict(line.partition(":")[::2] for line in lines)
    used, most = (_number(found.get(name, "")) for name in ("used_memory", "maxmemory"))
    if most and used >= FULL_SHARE * most and found.get("maxmemory_policy") == "noeviction":
        yield Concern(
            f"{master} is full, {used} of {most} bytes, and evicts nothing (noeviction)",
            "raise its maxmemory, lower --redis-size, or set maxmemory-policy allkeys-lru",
            is_loss=True,
        )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _asked(link: RedisLink, master: Lines, *command: bytes) -> Reply:
    """Return the answer, None when it may not be asked for."""
    try:
        answer: Reply = link.list_on(master, command)
    except TierUnavailableError:
        return None
    return answer
