"""Prompts of which only lossy copies are left: those on a disk whose codec loses something."""

from __future__ import annotations

from collections.abc import Sequence

from local_server import LocalServer, eventually

from kvstore.proto.types import ChunkKey, Fidelity


def leave_on_disk(server: LocalServer, keys: Sequence[ChunkKey]) -> None:
    """Drop the copies of *keys* in memory once those on disk are there, which are lossy."""
    catalog, transfers = server.node.manager.catalog, server.node.manager.transfers
    assert eventually(lambda: all("disk" in catalog.holders(key) for key in keys))
    server.settled()
    for key in keys:
        assert catalog.cast_out("cpu", key)
        transfers.delete_from(transfers.cpu, key)
        assert not catalog.holders(key, Fidelity.exact), "the codec kept it without loss"
