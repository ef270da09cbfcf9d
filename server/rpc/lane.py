"""A Lane: the threads that answer one kind of call, and what waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from typing_extensions import override

from kvstore.server.rpc.patience import Patience


class Lane(futures.ThreadPoolExecutor):
    """Threads that answer one kind of call; ``waiting`` counts what none has begun.

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
        self._most_unheard = workers // 2
        self.waiting = self._unheard = 0
        self._here = threading.local()
        self._count_lock = threading.Lock()  # guards the two numbers

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
            self.waiting += 1

        def begun(*words: Any, **named: Any) -> Any:
            with self._count_lock:
                self.waiting -= 1
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
                self.waiting -= 1
            raise
