"""Prompts with lossy copies only, on a disk tier with a lossy codec."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.local_server import LocalServer, eventually

from kvstore.proto.types import Accuracy, ChunkKey


def exact_on_redis(url: str) -> Sequence[str]:
    """Return the flags of a server with a lossy disk and, farther away, an exact Redis."""
    tiers = ("--tiers", "cpu,disk,redis", "--codec", "disk=coarse", "--codec", "redis=raw")
    return (*tiers, "--redis", url, "--redis-timeout-ms", "20000")


def leave_on_disk(
    server: LocalServer, keys: Sequence[ChunkKey], *, exact_on: str | None = None
) -> None:
    """Drop the copies of *keys* in memory once the lossy ones are on disk.

    *exact_on*: the only tier that still has exact ones.
    """
    expected = {"disk", exact_on or "disk"}
    catalog, moves = server.node.store.catalog, server.node.store.moves
    assert eventually(lambda: all(expected <= {*catalog.holders(key)} for key in keys))
    server.settled()
    for key in keys:
        assert catalog.drop_copy("cpu", key)
        moves.eviction.delete_from(moves.tiers.cpu, key)
        exact = [*catalog.holders(key, Accuracy.exact)]
        assert exact == ([exact_on] if exact_on else []), "an exact copy is left"
