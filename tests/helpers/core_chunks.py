"""Chunks of a Core below CPU memory, or under a lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from simulation.core import Core, keys_of
from simulation.universe import Version

from kvstore.proto.types import ChunkKey


def drop(core: Core, versions: Sequence[Version], tier: str = "cpu") -> None:
    """Delete a tier's copies."""
    for version in versions:
        assert core.catalog.drop_copy(tier, version.info.key)
        core.moves.eviction.delete_from(core.slot(tier), version.info.key)


def put_low(core: Core, versions: Sequence[Version], tier: str = "disk") -> None:
    """Put chunks and keep them on a lower tier only."""
    core.put(versions)
    for version in versions:
        ticket = core.moves.copy_to(version.info.key, core.slot(tier), urgent=True)
        assert ticket is not None
        assert core.work_queue.wait(ticket, core.later())
    drop(core, versions)
    assert [core.tiers_of(version) for version in versions] == [[tier]] * len(versions)


@contextmanager
def leased(core: Core, versions: Sequence[Version]) -> Iterator[list[ChunkKey]]:
    """Lease chunks until the block ends; yield their keys."""
    lease_id, count = core.store.open_get(core.session, keys_of(versions), 0)
    assert count == len(versions)
    try:
        yield keys_of(versions)
    finally:
        assert core.store.release(core.session, lease_id)
