"""Announced uses: chunks that a batch to come needs so often more, kept until it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvstore.proto.types import ChunkKey

MAX_ANNOUNCED = 1 << 18
"""Chunks in announcements at once; of more nothing is kept."""
MAX_BATCHES = 256
"""Announcements at once; of more nothing is kept."""


@dataclass(slots=True)
class _Batch:
    """What one announcement still needs of each chunk, and until when it stands."""

    session_id: int
    until: float
    left: dict[ChunkKey, int]


class PlannedUses:
    """Remaining uses by chunk (BatchLLM, arXiv 2412.03594). The catalog's lock guards it.

    A chunk counts as used when a lookup that leases it finds it, and when it is put, as whoever
    computed it had asked for it. It is kept while uses are left and it is within *limit_bytes*.
    ``until`` is in the clock's seconds.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._batches: list[_Batch] = []
        self._count = 0
        self._kept: dict[ChunkKey, int] = {}
        self._kept_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of the chunks kept, once for each, of whatever tier they were noted."""
        return self._kept_bytes

    def announce(self, session_id: int, uses: Mapping[ChunkKey, int], until: float) -> None:
        """A batch will use chunks so often."""
        room = MAX_ANNOUNCED - self._count
        left = dict(list(uses.items())[:room])
        if left and len(self._batches) < MAX_BATCHES:
            self._batches.append(_Batch(session_id, until, left))
            self._count += len(left)

    def keep(self, key: ChunkKey, size_bytes: int) -> bool:
        """A chunk of so many bytes is here: keep it if it is needed. False if that is too much."""
        if key in self._kept or not self._is_needed(key):
            return True
        if self._kept_bytes + size_bytes > self._limit_bytes:
            return False
        self._kept[key] = size_bytes
        self._kept_bytes += size_bytes
        return True

    def _is_needed(self, key: ChunkKey) -> bool:
        return any(key in batch.left for batch in self._batches)

    def used(self, keys: Iterable[ChunkKey], session_id: int = 0) -> None:
        """Chunks were used once, those of the session's own batches first."""
        batches = sorted(self._batches, key=lambda batch: batch.session_id != session_id)
        for key in keys:
            batch = next((batch for batch in batches if key in batch.left), None)
            if batch is None:
                continue
            batch.left[key] -= 1
            if not batch.left[key]:
                del batch.left[key]
                self._count -= 1
                if not self._is_needed(key):
                    self.gone(key)
        self._drop(lambda batch: not batch.left)

    def gone(self, key: ChunkKey) -> None:
        """A chunk is kept no more."""
        self._kept_bytes -= self._kept.pop(key, 0)

    def expire(self, now: float) -> None:
        """Forget announcements whose time is up."""
        self._drop(lambda batch: batch.until <= now)

    def end(self, session_id: int) -> None:
        """Forget the announcements of a session."""
        self._drop(lambda batch: batch.session_id == session_id)

    def _drop(self, is_over: Callable[[_Batch], bool]) -> None:
        over = [batch for batch in self._batches if is_over(batch)]
        if not over:
            return
        self._batches = [batch for batch in self._batches if not is_over(batch)]
        self._count = sum(len(batch.left) for batch in self._batches)
        for key in [key for batch in over for key in batch.left]:
            if not self._is_needed(key):
                self.gone(key)
