"""Segments of traces as the token ids they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.trace_files import Segment

Tokens = NDArray[np.int32]

_FIRST_ID = 3
_IDS = 31_997
_KEPT_TOKENS = 16 << 20


class TokenStreams:
    """Makes the tokens of segments: token j of segment s is 3 + splitmix64(s * 2**32 + j) % 31997.

    splitmix64 is Steele, Lea and Flood's (OOPSLA 2014), with the state as its argument. Streams
    that were made are kept, up to 16 Mi tokens of them.
    """

    def __init__(self) -> None:
        self._made: dict[int, Tokens] = {}
        self._kept = 0

    def join(self, segments: Sequence[Segment]) -> Tokens:
        """Return the tokens of segments, one after the other: (tokens,)."""
        parts = [self._stream(number, count)[:count] for number, count in segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _stream(self, number: int, count: int) -> Tokens:
        stream = self._made.get(number)
        if stream is not None and len(stream) >= count:
            return stream
        made = _tokens(number, count)
        self._kept += count - (0 if stream is None else len(stream))
        if self._kept > _KEPT_TOKENS:
            self._made.clear()
            self._kept = count
        self._made[number] = made
        return made


def _tokens(number: int, count: int) -> Tokens:
    mixed = np.uint64(number << 32) + np.arange(count, dtype=np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)  # arrays of numpy wrap around, as splitmix64 does
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (_FIRST_ID + mixed % np.uint64(_IDS)).astype(np.int32)
