"""Clearing: forgetting all that a tenant has, or all there is, in batches and within a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.proto.types import ChunkKey, Namespace
from kvstore.server.store.store import Store

EVERY_TENANT = "*"
BATCH_CHUNKS = 64
"""Chunks that are forgotten between two looks at the clock."""


class Cleared(NamedTuple):
    """What went, what somebody reads or pinned, and what there was no time for."""

    deleted: int = 0
    leased: int = 0
    deleted_bytes: int = 0
    left: int = 0


def clear(
    store: Store,
    keys: Sequence[ChunkKey],
    deadline: float,
    tier: str = "",
    *,
    dry_run: bool = False,
) -> Cleared:
    """Forget the copies of *keys*, or those on *tier*; with *dry_run* only count them.

    *deadline* is a point on the store's clock.
    """
    catalog, clock = store.catalog, store.moves.clock
    keys = [key for key in keys if not tier or tier in catalog.holders(key)]
    deleted = leased = freed_bytes = 0
    for start in range(0, len(keys), BATCH_CHUNKS):
        if clock() >= deadline:
            return Cleared(deleted, leased, freed_bytes, len(keys) - start)
        batch = keys[start : start + BATCH_CHUNKS]
        before = _bytes(store, batch, tier)
        if dry_run:
            stay = [key for key in batch if catalog.is_held(key)]
            went, kept = len(batch) - len(stay), len(stay)
        else:
            went, kept = store.delete(batch, deadline, tier)
            stay = batch
        deleted, leased = deleted + went, leased + kept
        freed_bytes += max(0, before - _bytes(store, stay, tier))
    return Cleared(deleted, leased, freed_bytes)


def _bytes(store: Store, keys: Sequence[ChunkKey], tier: str) -> int:
    copies = (store.catalog.copies(key) for key in keys)
    return sum(
        info.size_bytes for each in copies for name, info in each.items() if tier in ("", name)
    )


def keys_of_tenant(store: Store, tenant: str) -> list[ChunkKey]:
    """Return the chunks here of *tenant*; of each, for EVERY_TENANT.

    Chunks that only a shared tier has, of a namespace that no session here had, are nobody's.
    """
    catalog = store.catalog
    if tenant == EVERY_TENANT:
        return catalog.queries.keys_from(b"")
    spaces = [one for one in catalog.queries.spaces() if _tenant_of(store, one) == tenant]
    return [key for space in spaces for key in catalog.queries.keys_from(space)]


def _tenant_of(store: Store, space: Namespace) -> str | None:
    known = store.spaces.of(space)
    if known is not None:
        return known.tenant
    for key in store.catalog.queries.keys_from(space):
        for name in store.catalog.holders(key):
            tier = store.tiers.slots[name].tier
            if not tier.shared:
                return tier.tenant_of(key)
    return None
