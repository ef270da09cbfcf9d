"""`kvstore pin` and `unpin`: chunks that are kept from eviction for a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvstore.cli.spaces import Place, Where, digests_from, find, hex_prefix, places
from kvstore.client.client import Client
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChunkKey

BATCH_CHUNKS = 1024
MAX_PREFIX_CHUNKS = 65_536
"""Chunks of one prefix; of more nothing is pinned."""
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|min|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}

Keeping = Callable[[Client, Sequence[ChunkKey]], int]


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a text such as ``90s`` or ``2h``. Raises InvalidRequestError."""
    matched = _DURATION.fullmatch(text)
    if matched is None:
        raise InvalidRequestError("for", text, "write it as 30s, 10min, 2h or 1d")
    return int(matched[1]) * _UNIT_MS[matched[2]]


def keep(where: Where, names: Sequence[str], prefix: str, work: Keeping) -> tuple[int, int]:
    """Do *work* for the chunks called *names*, or those whose digests begin with *prefix*.

    Return for how many it was done, and how many were named. Raises InvalidRequestError,
    KVStoreErrors.
    """
    if bool(names) == bool(prefix):
        raise InvalidRequestError("keys", len(names), "give keys, or --prefix")
    for name in names:
        hex_prefix("key", name)
    with places(where) as opened:
        chosen = _by_prefix(opened, prefix) if prefix else _by_name(opened, names)
        count = done = 0
        for place, keys in chosen:
            count += len(keys)
            for start in range(0, len(keys), BATCH_CHUNKS):
                done += work(place.client, keys[start : start + BATCH_CHUNKS])
    return done, max(count, len(names))


def _by_name(opened: Sequence[Place], names: Sequence[str]) -> list[tuple[Place, list[ChunkKey]]]:
    found = [one for name in names if (one := find(opened, name)) is not None]
    return [(place, [key]) for place, key in found]


def _by_prefix(opened: Sequence[Place], prefix: str) -> list[tuple[Place, list[ChunkKey]]]:
    digits, chosen = hex_prefix("prefix", prefix), []
    for place in opened:
        digests = digests_from(place, digits, MAX_PREFIX_CHUNKS + 1)
        if len(digests) > MAX_PREFIX_CHUNKS:
            fix = f"stands for over {MAX_PREFIX_CHUNKS} chunks; give more digits"
            raise InvalidRequestError("prefix", prefix, fix)
        space = place.client.namespace
        chosen.append((place, [chunk_key(space, digest) for digest in digests]))
    return chosen
