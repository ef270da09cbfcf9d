"""A Lane: the threads that answer one kind of call, and what waits for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
from typing_extensions import override

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


LATE_S = 0.2
"""A lane whose calls wait longer before they are begun takes no more than each thread's next."""


class Lane(futures.ThreadPoolExecutor):
    """Threads that answer one kind of call, and the calls that wait for them.

    Half of them at most wait in gRPC for the one message of a call, which nobody can end; the
    calls that come then wait with ``patience``, a quarter more, which costs a tenth of a short
    answer. *clock* gives monotonic seconds.
    """

    def __init__(
        self, name: str, workers: int, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(workers, thread_name_prefix=name)
        self.limit = limit
        self.patience = Patience(workers // 4, clock)
        self._workers = workers
        self._clock = clock
        self._most_unheard = workers // 2
        self._came: deque[float] = deque()
        """When the calls came that none has begun, the oldest first."""
        self._waited_s = 0.0
        self._unheard = 0
        self._here = threading.local()
        self._count_lock = threading.Lock()  # guards the three above

    @property
    def waiting(self) -> int:
        """Calls that none has begun."""
        return len(self._came)

    @property
    def is_late(self) -> bool:
        """Whether calls wait longer than they should, and each thread has more than one to come.

        What counts is how long the last that was begun had waited, after K. Nichols and
        V. Jacobson, "Controlling Queue Delay", ACM Queue 2012. Threads that all stand still begin
        none: then it is the limit that counts.
        """
        return self._waited_s > LATE_S and len(self._came) > self._workers

    @property
    def is_full(self) -> bool:
        """Whether the next call would wait too long."""
        return self.waiting >= self.limit

    @property
    def is_held(self) -> bool:
        """Whether too many threads wait in gRPC for a message."""
        return self._unheard >= self._most_unheard

    def heard(self) -> None:
        """Take note that the message of this thread's call is there, or watched for."""
        if not self._here.is_heard:
            self._here.is_heard = True
            with self._count_lock:
                self._unheard -= 1

    @override
    def submit(self, fn: Callable[..., Any], /, *words: Any, **named: Any) -> futures.Future[Any]:
        with self._count_lock:
            self._came.append(self._clock())

        def begun(*words: Any, **named: Any) -> Any:
            with self._count_lock:
                self._waited_s = self._clock() - self._came.popleft()
                self._unheard += 1
            self._here.is_heard = False
            try:
                return fn(*words, **named)
            finally:
                self.heard()  # a call that was cancelled never gets to its behavior

        try:
            return super().submit(begun, *words, **named)
        except RuntimeError:  # it is shut down
            with self._count_lock:
                self._came.pop()
            raise
