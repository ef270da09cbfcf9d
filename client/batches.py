"""Batches: lists that are longer than what a server takes in one request, and its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from typing_extensions import override

from kvstore.client.transports.base import ABANDON_S, LayerSink, Put
from kvstore.codecs.base import AnyPart
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


class JoinedSink(LayerSink):
    """The sinks of several batches of *limit* chunks as one."""

    def __init__(self, limit: int) -> None:
        self._sinks: list[LayerSink] = []
        self._limit = limit

    def add(self, sink: LayerSink) -> None:
        """Take the sink of the next batch."""
        self._sinks.append(sink)

    @override
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        if not self._sinks:  # of a put of no chunks
            return
        for sink, (_, some) in zip(self._sinks, batches(layers, self._limit), strict=True):
            sink.write(segment, some)

    @override
    def commit(self) -> list[Put]:
        return [put for sink in self._sinks for put in sink.commit()]

    @override
    def abandon(self, within_s: float = ABANDON_S) -> None:
        until = time.monotonic() + within_s
        for sink in self._sinks:
            sink.abandon(0)  # all are cancelled before any is waited for
        for sink in self._sinks:
            sink.abandon(max(0.0, until - time.monotonic()))
