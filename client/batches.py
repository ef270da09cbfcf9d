"""Batches: lists that are longer than what a server takes in one request, and its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from kvstore.client.layer_feed import LayerFeed, Opened, Range
from kvstore.client.layer_sink import ABANDON_S, LayerSink
from kvstore.client.transport import Put
from kvstore.codecs.base import AnyPart
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import DeadlineError, TierUnavailableError
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


class JoinedFeed(LayerFeed):
    """The feeds of several batches of *limit* chunks as one; those that follow a gap stay shut.

    Each of *feeds* is entered when it is needed, and left with *stack*.
    """

    def __init__(
        self, stack: ExitStack, feeds: Iterable[AbstractContextManager[LayerFeed]], limit: int
    ) -> None:
        self._stack = stack
        self._feeds = feeds
        self._limit = limit
        self._open: list[LayerFeed] = []
        self._numbers: list[tuple[LayerFeed, int]] = []
        """By the number of a range, whose it is and its number there. Empty for a single feed,
        which has the same numbers.
        """

    @override
    def headers(self) -> list[Opened]:
        found: list[Opened] = []
        try:
            for feed in self._feeds:
                self._open.append(self._stack.enter_context(feed))
                self.is_cut = self._open[0].is_cut
                some = self._open[-1].headers()
                first = len(found)
                found += [replace(one, index=first + one.index) for one in some] if first else some
                if len(some) < self._limit:
                    break
        except (DeadlineError, TierUnavailableError):
            if not found:
                raise
        return found

    @override
    def expect(self, plan: Sequence[Range]) -> None:
        if len(self._open) == 1:
            self._open[0].expect(plan)
            return
        parts: list[list[Range]] = [[] for _ in self._open]
        for wanted in plan:
            number, chunk = divmod(wanted.chunk, self._limit)
            self._numbers.append((self._open[number], len(parts[number])))
            parts[number].append(wanted._replace(chunk=chunk))
        for feed, part in zip(self._open, parts, strict=True):
            feed.expect(part)

    @override
    def take(self, number: int) -> Bytes | None:
        if len(self._open) == 1:
            return self._open[0].take(number)
        feed, place = self._numbers[number]
        return feed.take(place)

    @override
    def drop(self, chunk: int) -> None:
        for number, feed in enumerate(self._open):
            first = number * self._limit
            if chunk < first + self._limit:
                feed.drop(max(0, chunk - first))

    @override
    def end(self) -> None:
        for feed in self._open:
            feed.end()


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
