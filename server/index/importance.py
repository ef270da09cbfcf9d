"""What engines said of the tokens of chunks: which matter, for codecs that spend more on those."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from kvstore.codecs.terms import Importance
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import ChunkKey

MAX_IMPORTANCE_BYTES = 16 << 20
"""Of all chunks; those that were named longest ago are forgotten, and then coded evenly."""
OVERHEAD_BYTES = 256
"""What a chunk takes beside its bytes, so that very short ones are bounded, too."""


class ImportanceTable:
    """A byte for each token, by chunk. Thread-safe.

    At most *limit_bytes* are kept, whatever became of the chunks: a chunk may be encoded again,
    for another tier.
    """

    def __init__(self, limit_bytes: int = MAX_IMPORTANCE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._weights: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()  # guards the two above

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._size_bytes

    def note(self, key: ChunkKey, weights: bytes) -> None:
        """Remember *weights* of the tokens of *key*; what was said before is forgotten."""
        with self._lock:
            self._drop(key)
            self._weights[key] = weights
            self._size_bytes += len(weights) + OVERHEAD_BYTES
            while self._size_bytes > self._limit_bytes:
                self._drop(next(iter(self._weights)))

    def _drop(self, key: ChunkKey) -> None:
        gone = self._weights.pop(key, None)
        if gone is not None:
            self._size_bytes -= len(gone) + OVERHEAD_BYTES

    def of(self, header: FrameHeader) -> Importance | None:
        """Return f32 (tokens,) for the chunk of *header*.

        None when nobody said anything, or of another number of tokens.
        """
        with self._lock:
            weights = self._weights.get(header.key)
        if weights is None or len(weights) != header.layout.tokens:
            return None
        found: Importance = np.frombuffer(weights, np.uint8).astype(np.float32)
        return found
