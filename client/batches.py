"""Batches: lists that are longer than what a server takes in one request, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstore.proto.types import DIGEST_BYTES

MAX_OPEN_BATCHES = 8
"""Batches of one layered get or put, each a stream: all of them are open at the same time."""

T = TypeVar("T")


def batches(items: Sequence[T], limit: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield *items* in runs of *limit* at most, each with the place of its first; one if empty."""
    for first in range(0, max(1, len(items)), limit):
        yield first, items[first : first + limit]


def digest_batches(packed: bytes, limit: int) -> list[bytes]:
    """Cut packed digests into those of *limit* chunks at most."""
    return [bytes(part) for _, part in batches(packed, limit * DIGEST_BYTES)]
