"""Outcomes: what last became of a chunk, for Explain."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvstore.proto.types import ChunkKey

MAX_OUTCOMES = 16_384
"""Chunks whose last outcome is remembered; the oldest is forgotten first. About 6 MB."""

MAX_DETAIL_CHARS = 200


class Fate(Enum):
    """What can become of a chunk; the value is Explain's word."""

    refused = "refused"
    invalid = "invalid"
    evicted = "evicted"
    corrupt = "corrupt"
    unreadable = "unreadable"
    codec_removed = "codec_removed"
    lost = "lost"
    deleted = "deleted"
    expired = "expired"


class Outcome(NamedTuple):
    """*tier* is empty where none was concerned, *at_s* a time on the table's clock."""

    fate: Fate
    tier: str
    detail: str
    at_s: float


class Outcomes:
    """The last outcome of each of the latest chunks. Thread-safe; *clock* returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Ordered: a plain dictionary looks for its first entry among those that were deleted.
        self._by_key: OrderedDict[ChunkKey, Outcome] = OrderedDict()
        self._lock = threading.Lock()  # guards the dictionary

    def note(self, key: ChunkKey, fate: Fate, tier: str = "", detail: str = "") -> None:
        """Keep what became of a chunk in place of what was known of it."""
        outcome = Outcome(fate, tier, detail[:MAX_DETAIL_CHARS], self._clock())
        with self._lock:
            self._by_key[key] = outcome
            self._by_key.move_to_end(key)
            if len(self._by_key) > MAX_OUTCOMES:
                self._by_key.popitem(last=False)

    def of(self, key: ChunkKey) -> Outcome | None:
        """Return what last became of a chunk; None when that is not known."""
        with self._lock:
            return self._by_key.get(key)
