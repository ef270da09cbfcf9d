"""The publisher: events over a zmq PUB socket, and to who missed some again over a ROUTER.

As vLLM's ZmqEventPublisher does, so that its readers read ours: batches are numbered from 0, a
reader asks for those from a number on with 8 bytes, big-endian, and the number -1 ends the answer.
Who asks for what is not kept any more is told to forget all, then what is here, then what is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from kvstore.server.events.event_calls import POLL_S, EventDesk
from kvstore.server.events.event_sockets import EventSockets
from kvstore.server.events.event_words import AllBlocksCleared, Word, encode, words_of
from kvstore.server.events.events import Page
from kvstore.server.metrics import Counters

KEPT_BATCHES = 10_000
KEPT_BATCH_BYTES = 64 << 20
"""Of batches that can be asked for again; the oldest go first."""
MAX_REPLAYS = 8
"""Answered side by side; who asks beyond that is not answered, and asks again."""
END = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = 8
_JOIN_WITHIN_S = 2.0

Message = tuple[bytes, bytes, bytes]
"""Topic, number, batch."""


class EventPublisher:
    """Publishes all events of *desk*'s log until ``close``; *boot_id* is in the topic.

    One thread owns the sockets. *wall_clock* returns seconds since 1970.
    """

    def __init__(
        self,
        sockets: EventSockets,
        desk: EventDesk,
        boot_id: int,
        counters: Counters,
        wall_clock: Callable[[], float],
    ) -> None:
        self._sockets = sockets
        self._desk = desk
        self._reader = desk.reader()
        self.topic = b"kvstore@%016x" % boot_id
        self._counters = counters
        self._wall_clock = wall_clock
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._number = 0
        """Of the next batch."""
        self._replays: deque[tuple[list[bytes], Iterator[Message]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread that owns the sockets lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop publishing and close the sockets. Idempotent."""
        self._closed = True
        self._thread.join(_JOIN_WITHIN_S)

    # --- the sockets' thread

    def _run(self) -> None:
        try:
            while not self._closed:
                # Each has its turn: a long answer keeps no event waiting.
                steps = (self._publish, self._sockets.admit, self._receive, self._replay)
                did = [step() for step in steps]
                if not any(did):
                    self._sockets.wait(int(1000 * POLL_S))
        finally:
            self._sockets.close()

    def _publish(self) -> bool:
        """Publish one batch; False when there is nothing new."""
        page = self._reader.poll()
        if page is None:
            return False
        words = _words(page)
        if not words:
            return True
        message = self._message(self._number, words)
        self._number += 1
        self._keep(message)
        self._counters.add("event_batches")
        if self._sockets.pub is not None:
            self._sockets.pub.send_multipart(message, copy=False)
        return True

    def _message(self, number: int, words: list[Word]) -> Message:
        batch = encode(self._wall_clock(), words)
        return self.topic, number.to_bytes(_NUMBER_BYTES, "big"), batch

    def _keep(self, message: Message) -> None:
        self._kept.append(message)
        self._kept_bytes += len(message[2])
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BATCH_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[2])

    def _receive(self) -> bool:
        """Take one request for a replay; False when there is none."""
        import zmq

        if self._sockets.replay is None:
            return False
        try:
            frames = self._sockets.replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 3 or frames[1] or len(frames[2]) != _NUMBER_BYTES:
            self._counters.add("event_invalid_requests")
        elif len(self._replays) < MAX_REPLAYS:
            answer = self._answer(int.from_bytes(frames[2], "big"))
            self._replays.append((frames[:2], answer))
        return True

    def _answer(self, start: int) -> Iterator[Message]:
        """Yield what is kept from number *start* on, or, without all of it, begin anew."""
        first = self._number - len(self._kept)
        if start < first:
            yield from self._anew(start, first - 1)
        number = max(start, first)
        while number < self._number:
            oldest = self._number - len(self._kept)
            if number < oldest:  # dropped since
                yield from self._anew(number, oldest - 1)
                number = oldest
            yield self._kept[number - oldest]
            number += 1

    def _anew(self, number: int, last: int) -> Iterator[Message]:
        """Yield what is here, under numbers from *number* to *last* that nobody can ask for.

        What is here now, and then what is kept of the past in its order, come to what is here: the
        latest word on a chunk is the last.
        """
        reader = self._desk.reader()
        while (page := reader.poll()) is not None:
            words = _words(page)
            if words:
                yield self._message(min(number, last), words)
                number += 1
            if reader.is_level:
                return

    def _replay(self) -> bool:
        """Send the next message of one answer; False when none is under way."""
        if not self._replays or self._sockets.replay is None:
            return False
        who, answer = self._replays.popleft()
        message = next(answer, None)
        if message is None:
            self._sockets.replay.send_multipart((*who, b"", END, b""))
        else:
            self._sockets.replay.send_multipart((*who, *message), copy=False)
            self._replays.append((who, answer))
        return True


def _words(page: Page) -> list[Word]:
    words = words_of(page.events)
    return [AllBlocksCleared(), *words] if page.cleared else words
