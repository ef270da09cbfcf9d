"""A LoadWatch: ends loads from a server that hangs, long before their deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 0.01
"""A load that brought nothing for so long is looked after. With what that takes, 20 ms at most, and
a step of the engine a server that hangs costs less than 50 ms."""

AGAIN_S = 0.1
"""How soon once more, where it was only slow."""


class LoadWatch:
    """Watches the loads of one worker, in a thread that starts with the first of them.

    *end_if_hung* asks whether the server hangs, ends the loads that wait for it if it does, and
    returns that. For one thread that loads.
    """

    def __init__(self, end_if_hung: Callable[[], bool]) -> None:
        self._end_if_hung = end_if_hung
        self._thread: threading.Thread | None = None
        self._is_loading = self._is_closed = False
        self._arrived = 0
        self._changed = threading.Condition()  # guards the three above

    @contextmanager
    def over(self) -> Iterator[None]:
        """Watch what is loaded meanwhile."""
        self._set(is_loading=True)
        try:
            yield
        finally:
            self._set(is_loading=False)

    def _set(self, *, is_loading: bool) -> None:
        with self._changed:
            self._is_loading = is_loading
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-watch", daemon=True)
            self._thread.start()

    def note_arrival(self) -> None:
        """Something came of what is being loaded."""
        self._arrived += 1

    def _run(self) -> None:
        while self._await_load():
            patience_s = QUIET_S
            while self._is_quiet(patience_s):
                if self._end_if_hung():
                    self._set(is_loading=False)
                    break
                patience_s = AGAIN_S

    def _await_load(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_loading or self._is_closed)
            return not self._is_closed

    def _is_quiet(self, patience_s: float) -> bool:
        """Whether the load still waits after a time in which nothing came."""
        while True:
            arrived = self._arrived
            with self._changed:
                self._changed.wait_for(lambda: not self._is_loading, patience_s)
                if not self._is_loading or self._is_closed:
                    return False
            if self._arrived == arrived:
                return True

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._is_closed, self._is_loading = True, False
            self._changed.notify_all()
