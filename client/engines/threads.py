"""Threads that do what an engine hands over, and that no process waits for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

_Queue: TypeAlias = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThreads:
    """*count* threads that do what is submitted, in its order. Thread-safe.

    The threads of a ThreadPoolExecutor would do all that waits before a process ends, and each
    piece of it may wait for the store.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._queue: _Queue = SimpleQueue()
        self._is_closed = False
        self._lock = threading.Lock()  # guards the field above: what is queued is done or cancelled
        self._count = count
        for _ in range(count):
            threading.Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have *work* done; after ``close`` return a future that is cancelled. Never raises."""
        future: Future[T] = Future()
        with self._lock:
            if not self._is_closed:
                self._queue.put((future, work))
                return future
        _cancel(future)
        return future

    def close(self) -> None:
        """Cancel what waits, and end the threads after what they do now. Idempotent."""
        with self._lock:
            self._is_closed = True
        with suppress(Empty):
            while True:
                if (waiting := self._queue.get_nowait()) is not None:
                    _cancel(waiting[0])
        for _ in range(self._count):
            self._queue.put(None)


def _run(queue: _Queue) -> None:
    while (submitted := queue.get()) is not None:
        future, work = submitted
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - who asks for the result gets it
            future.set_exception(error)
        del submitted, future, work  # an idle thread keeps nothing alive


def _cancel(future: Future[Any]) -> None:
    future.cancel()
    future.set_running_or_notify_cancel()  # else who waits for it is not told
