"""The BlendKeeper: what blending knows over a restart, gates and statistics of variants from
files, contents from frames.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.server.blending.content_reader import ContentReader
from kvstore.server.store.gate_file import GateKeeper
from kvstore.server.store.store import Store
from kvstore.server.store.variant_file import VariantKeeper


class BlendKeeper:
    """For one thread, after birth. *folder* is the disk tier's first, None without that tier;
    *clock* returns seconds.
    """

    def __init__(
        self,
        store: Store,
        folder: Path | None,
        content_limit: int,
        clock: Callable[[], float],
    ) -> None:
        slots = store.tiers.slots
        kept = [slots["cpu"]] + ([slots["disk"]] if folder is not None else [])
        self._gates = GateKeeper(store.blends.gates, folder) if folder is not None else None
        self._variants: VariantKeeper | None = None
        if folder is not None and content_limit:
            self._variants = VariantKeeper(store.blends.contents, folder, clock)
            self._variants.load()
        if self._gates is not None:
            self._gates.load()
        limit = content_limit if folder is not None else 0
        contents = store.blends.contents
        self._reader = ContentReader(store.catalog, contents, kept, limit, clock)

    def step(self) -> None:
        """Read on for a short time, and write what changed."""
        self._reader.step()
        self._save(is_last=False)

    def save(self) -> None:
        """Write what changed, for the last time."""
        self._save(is_last=True)

    def _save(self, *, is_last: bool) -> None:
        if self._variants is not None:
            self._variants.save_if_due(is_last=is_last)
        if self._gates is not None:
            self._gates.save_if_changed()
