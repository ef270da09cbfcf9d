"""Connections to one Redis server, a bounded number."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from socket import socket

from redis.exceptions import ConnectionError, TimeoutError

from kvstore.tiers.redis_open import LineOptions, open_socket
from kvstore.tiers.redis_url import HostPort

DEFAULT_CONNECTIONS = 16
MAX_CONNECTIONS = 64
"""The most that may be configured for one server."""
NEAR_S = 0.001
"""A server whose first bytes come so soon is on this host, or in the same rack."""
_FIRSTS = 32


class Lines:
    """The connections to one server. Thread-safe.

    A caller has one at a time, at most ``limit`` are open, and one that failed is not used
    again. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        address: HostPort,
        options: LineOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._options = options
        self._clock = clock
        self._free = threading.BoundedSemaphore(options.limit)
        self._idle: deque[socket] = deque()
        self._is_closed = False
        self._rests_until = 0.0
        self._first_s = 0.0
        self._firsts: deque[float] = deque(maxlen=_FIRSTS)
        self._lock = threading.Lock()  # guards the two above

    def note_first(self, seconds: float) -> None:
        """Take note how long the first bytes of a reply took: the server's distance, and its rest.

        The quickest of the last ones says how far it is: the others waited for a processor.
        """
        with self._lock:
            self._firsts.append(seconds)
            self._first_s = min(self._firsts)

    def slices_ahead(self, near: int, far: int) -> int:
        """Return how many slices are to be on their way on a line: more than *near* when what a
        slice takes is little beside the way, and *far* at most.
        """
        if self._options.tls is not None:
            return far  # encryption leaves no more in the caches than that
        return min(far, near * max(1, int(self._first_s / NEAR_S)))

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)

    def rest(self, seconds: float) -> None:
        """Leave the server alone for a while: it failed."""
        self._rests_until = self._clock() + seconds

    @property
    def is_resting(self) -> bool:
        """Whether the server is being left alone."""
        return self._clock() < self._rests_until

    def borrow(self, deadline: float) -> socket:
        """Return a connection that is open and quiet, waiting for one up to *deadline*.

        Raises redis' errors and OSError.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TimeoutError("all connections are in use")
        return self._ready(deadline)

    def borrow_spare(self, deadline: float) -> socket | None:
        """Return a connection if one is to be had without waiting for others."""
        return self._ready(deadline) if self._free.acquire(blocking=False) else None

    def _ready(self, deadline: float) -> socket:
        """Return an idle connection that still works, else a new one."""
        try:
            while (line := self._pop()) is not None:
                if _is_quiet(line):
                    return line
                line.close()
            if self._is_closed:
                raise ConnectionError("closed")
            return open_socket(self.address, self._options, deadline, self._clock)
        except BaseException:
            self._free.release()
            raise

    def _pop(self) -> socket | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, line: socket, *, is_clean: bool) -> None:
        """Take a borrowed connection back; hang up unless all its replies were read."""
        if is_clean:
            self._idle.append(line)
        else:
            line.close()
        self._free.release()
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Hang up; what is borrowed follows as it comes back. Idempotent."""
        self._is_closed = True
        while (line := self._pop()) is not None:
            line.close()


def _is_quiet(line: socket) -> bool:
    """Whether the server neither hung up nor sent what nobody asked for."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return not poll.poll(0)
