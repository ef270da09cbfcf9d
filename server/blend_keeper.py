"""The BlendKeeper: what blending knows over a restart, gates from a file, contents from frames."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.server.content_reader import ContentReader
from kvstore.server.gate_file import GateKeeper
from kvstore.server.manager import TierManager


class BlendKeeper:
    """For one thread, after birth. *folder* is the disk tier's first; *clock* returns seconds."""

    def __init__(
        self, manager: TierManager, folder: Path, content_limit: int, clock: Callable[[], float]
    ) -> None:
        shelf = manager.transfers.shelves["disk"]
        self._gates = GateKeeper(manager.blends.gates, folder)
        self._gates.load()
        self._reader = ContentReader(manager.catalog, shelf, content_limit, clock)

    def step(self) -> None:
        """Read on for a short time, and write what changed."""
        self._reader.step()
        self.save()

    def save(self) -> None:
        """Write what changed."""
        self._gates.save_if_changed()
