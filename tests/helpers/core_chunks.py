"""Chunks of a Core where a test wants them: below CPU memory, or under a lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from simulation.core import Core, keys_of
from simulation.universe import Version

from kvstore.proto.types import ChunkKey


def drop(core: Core, versions: Sequence[Version], tier: str = "cpu") -> None:
    """Have a tier lose its copies."""
    for version in versions:
        assert core.catalog.drop_copy(tier, version.info.key)
        core.moves.eviction.delete_from(core.slot(tier), version.info.key)


def put_low(core: Core, versions: Sequence[Version], tier: str = "disk") -> None:
    """Put chunks so that only a lower tier has them."""
    core.put(versions)
    for version in versions:
        ticket = core.moves.copy_to(version.info.key, core.slot(tier), urgent=True)
        assert ticket is not None
        assert core.work_queue.wait(ticket, core.later())
    drop(core, versions)
    assert [core.tiers_of(version) for version in versions] == [[tier]] * len(versions)


@contextmanager
def leased(core: Core, versions: Sequence[Version]) -> Iterator[list[ChunkKey]]:
    """The keys of chunks that are leased meanwhile."""
    lease_id, known = core.store.open_get(core.session, keys_of(versions), 0)
    assert known == len(versions)
    try:
        yield keys_of(versions)
    finally:
        assert core.store.release(core.session, lease_id)
