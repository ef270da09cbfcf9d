"""The ZmqLinks of one session: connected when they are needed, kept for the next request."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvstore.client.session import Session
from kvstore.client.zmq_link import ZmqLink, endpoint
from kvstore.proto.errors import DeadlineError, KVStoreError, TierUnavailableError

if TYPE_CHECKING:
    import zmq

MAX_LINKS = 8
"""Requests at once; more go through gRPC. Below what a server allows one session."""


class ZmqLinks:
    """Thread-safe. Raises TierUnavailableError at birth when the server does not take part."""

    def __init__(self, session: Session) -> None:
        import zmq

        self._session = session
        self._where = endpoint(session.terms.zmq_address, session.connection.address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._idle: list[ZmqLink] = []
        self._busy: set[ZmqLink] = set()
        self._links = 0
        self._is_closed = False
        # Guards the four above.
        self._lock = threading.Lock()
        try:
            # Half of what a call may take: where nobody answers, gRPC is still to be asked.
            first = self.take(time.monotonic() + session.options.deadline_ms / 2000)
        except KVStoreError:
            self._context.term()
            raise
        assert first is not None
        self.give_back(first, is_clean=True)

    def __len__(self) -> int:
        """Return how many there are."""
        return self._links

    def take(self, deadline: float) -> ZmqLink | None:
        """Return a link of our own for a while; None when as many as there may be are in use."""
        self._session.connection.gate.check()
        while True:
            with self._lock:
                if self._is_closed:
                    raise KVStoreError("the client is closed")
                if not self._idle:
                    break
                link = self._idle.pop()
                self._busy.add(link)
            if not link.is_broken():
                return link
            self.give_back(link, is_clean=False)
        return self._connected(deadline)

    def give_back(self, link: ZmqLink, *, is_clean: bool) -> None:
        """Take back a link; one whose request did not come to its end is closed."""
        with self._lock:
            self._busy.discard(link)
            if is_clean and not self._is_closed:
                self._idle.append(link)
                return
        link.close()
        self._forget()

    def hang_up(self) -> None:
        """Have whoever waits on one of them wait no more."""
        with self._lock:
            for link in self._busy:
                link.give_up()

    def leave(self) -> None:
        """In a child: leave the sockets to the parent, whose threads they need."""
        self._lock = threading.Lock()  # another thread may have had it
        self._is_closed = True
        self._links += 1  # one that never ends: the context is not to be ended here
        for link in (*self._idle, *self._busy):
            link.leave()
        self._idle = []

    def close(self) -> None:
        """Close those that are idle; requests at work end. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            idle, self._idle = self._idle, []
            is_last = not self._links
        for link in idle:
            self.give_back(link, is_clean=False)
        if is_last:
            self._context.term()

    def _connected(self, deadline: float) -> ZmqLink | None:
        with self._lock:
            if self._links >= MAX_LINKS:
                return None
            self._links += 1
        try:
            link = ZmqLink(
                self._context, self._where, self._session.terms, lambda: self._is_closed, deadline
            )
        except KVStoreError as error:
            self._forget()
            if isinstance(error, DeadlineError | TierUnavailableError):
                self._session.heartbeat()  # a server that was restarted may be found elsewhere
            raise
        with self._lock:
            self._busy.add(link)
        return link

    def _forget(self) -> None:
        with self._lock:
            self._links -= 1
            is_last = self._is_closed and not self._links
        if is_last:
            self._context.term()
