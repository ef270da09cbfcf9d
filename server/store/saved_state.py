"""The HistoryKeeper: has what policies learned written now and then, and read at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from kvstore.proto.errors import KVStoreError
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.known_models import ModelRegistry
from kvstore.server.index.saved_history import FILE_NAME, SavedHistory, read_history, write_history
from kvstore.server.telemetry.metrics import Counters

SAVE_EVERY_S = 300.0
"""A power cut costs what was learned since, and no chunk."""

logger = structlog.get_logger(__name__)

Clock = Callable[[], float]


class HistoryKeeper:
    """Keeps the history file of *folder*. For one thread, after ``load``.

    *clock* returns monotonic seconds, *wall* those since 1970: ages go on while no server runs.
    """

    def __init__(
        self, catalog: Catalog, folder: Path, counters: Counters, clock: Clock, wall: Clock
    ) -> None:
        self._catalog = catalog
        self._folder = folder
        self._counters = counters
        self._clock = clock
        self._wall = wall
        self._saved_s = clock()
        self.spaces = ModelRegistry()
        """Kept with the rest: what namespaces stand for."""

    def load(self) -> int:
        """Remember what an earlier run knew, before anything else happens; return how many chunks.

        A file that is not there or cannot be used is as good as none.
        """
        try:
            saved = read_history(self._folder)
            if saved is None:
                return 0
            written_s = (self._folder / FILE_NAME).stat().st_mtime
            self.spaces.restore(saved.spaces)
            return self._catalog.restore(_older(saved, self._wall() - written_s))
        except (KVStoreError, OSError) as error:
            self._counters.add("unusable_histories")
            logger.warning("what policies had learned is lost", reason=str(error))
            return 0

    def save_if_due(self) -> bool:
        """Write the file if that was long ago. Return whether it is now."""
        return self._clock() - self._saved_s >= SAVE_EVERY_S and self.save()

    def save(self) -> bool:
        """Write the file. Return whether that was possible."""
        self._saved_s = self._clock()
        try:
            spaces = tuple(reversed(self.spaces.all()))
            write_history(self._folder, replace(self._catalog.save(), spaces=spaces))
        except OSError as error:
            logger.warning("what policies learned was not saved", reason=str(error))
            return False
        return True


def _older(saved: SavedHistory, seconds: float) -> SavedHistory:
    """Return *saved* as it is *seconds* later; a clock that went back in between counts as none."""
    chunks = saved.state.chunks.copy()
    elapsed_s = max(0.0, seconds)
    chunks["age_s"] += elapsed_s
    mortal = chunks["left_s"] > 0
    chunks["left_s"][mortal] = (chunks["left_s"][mortal] - elapsed_s).clip(min=1e-9)
    return replace(saved, state=replace(saved.state, chunks=chunks))
