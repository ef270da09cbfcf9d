"""Patience: threads wait for what callers send only so long, and only so many of them.

A caller that sends a call's headers and no message, or a message and never the next, holds the
thread that waits for it. Who has waited too long is ended; so is, after a moment, whoever has
waited longest while too many wait, so that some threads are always left to answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from kvstore.proto.errors import InvalidRequestError

STALL_S = 15.0
"""What any message may take to come."""
GRACE_S = 3.0
"""Whoever has waited less is not ended to make room: its message is on the way."""

T = TypeVar("T")


class Patience:
    """Waits for messages in the thread of their call; at most *most* wait beyond ``GRACE_S``.

    Somebody calls ``tick`` now and then. Thread-safe; *clock* returns monotonic seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._waiting: OrderedDict[int, tuple[float, grpc.ServicerContext]] = OrderedDict()
        self._last = 0
        self._lock = threading.Lock()  # guards the two above

    def only(self, messages: Iterator[T], context: grpc.ServicerContext) -> T:
        """Return the one message of a call. Raises InvalidRequestError when there is none."""
        message = self._next(messages, context)
        if message is None:
            raise InvalidRequestError("message", None, "send one with the call")
        return message

    def each(self, messages: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """Yield the messages of a call."""
        while (message := self._next(messages, context)) is not None:
            yield message

    def _next(self, messages: Iterator[T], context: grpc.ServicerContext) -> T | None:
        with self._lock:
            self._last = number = self._last + 1
            self._waiting[number] = self._clock(), context
        try:
            return next(messages, None)
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def tick(self) -> int:
        """End the calls that were waited for too long; return how many."""
        now = self._clock()
        ended: list[Any] = []
        with self._lock:
            while self._waiting:
                number, (since, context) = next(iter(self._waiting.items()))
                are_many = len(self._waiting) > self._most
                if now - since < (GRACE_S if are_many else STALL_S):
                    break
                del self._waiting[number]
                ended.append(context)
        for context in ended:
            context.cancel()
        return len(ended)

    def __len__(self) -> int:
        return len(self._waiting)
