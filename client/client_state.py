"""ClientState: what a client has open in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.client.connection import Connection
from kvstore.client.decode import Reader
from kvstore.client.forks import keep
from kvstore.client.levelled_get import Meters
from kvstore.client.link_meter import LinkMeter
from kvstore.client.transport import Transport
from kvstore.proto.errors import KVStoreError

FIRST_GUESS_BYTES_PER_S = 1.25e9
"""What is thought of the link until something came over it: ten gigabits a second, as who thinks
little of it computes, and never learns."""
FIRST_DECODE_BYTES_PER_S = 250e6
"""What is thought of decoding until something was decoded: half of what one core does."""


class ClientState:
    """A connection, a session by one transport, and threads. Thread-safe.

    It knows nothing of the client, which ends it when it is closed or dropped, and leaves it to
    the parent in a child.
    """

    def __init__(self, dial: Callable[[], Connection], copy_threads: int) -> None:
        self._dial = dial
        self._copy_threads = copy_threads
        self.reader = Reader(copy_threads)
        self.meters = Meters(
            LinkMeter(FIRST_GUESS_BYTES_PER_S, time.monotonic), LinkMeter(FIRST_DECODE_BYTES_PER_S)
        )
        self.transport: Transport | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        # Guards the three above; held while a session opens, which happens once.
        self._lock = threading.RLock()

    @property
    def connection(self) -> Connection:
        """The channel to the server; made at the first use. Raises InvalidRequestError."""
        connection = self._connection
        if connection is not None:
            return connection
        with self._lock:
            if self._connection is None:
                self._connection = self._dial()
                if self._is_closed:
                    self._connection.close()
            return self._connection

    def connected(self, connect: Callable[[], Transport]) -> Transport:
        """Return the transport, which *connect* makes. Raises KVStoreError once it is closed."""
        with self._lock:
            if self._is_closed:
                raise KVStoreError("the client is closed")
            if self.transport is None:
                self.transport = connect()
            return self.transport

    def disconnect(self, transport: Transport, *, tell_server: bool) -> None:
        """End the session of *transport*, if it is the one that there is."""
        with self._lock:
            if self.transport is not transport:
                return
            self.transport = None
        transport.close()
        transport.session.close(tell_server=tell_server)

    def end_session(self) -> None:
        """End the session, if there is one; the next call opens another."""
        with self._lock:
            transport = self.transport
        if transport is not None:
            self.disconnect(transport, tell_server=True)

    def close(self) -> None:
        """End the session and close the connection. Idempotent."""
        with self._lock:
            self._is_closed = True
            connection = self._connection
        self.end_session()
        if connection is not None:
            connection.close()
        self.reader.close()

    def drop(self) -> None:
        """Have ``close`` done by a thread of ours: this may be called while garbage is collected,
        when no lock may be taken and nothing waited for.
        """
        transport = self.transport
        if transport is not None:
            transport.session.say(self.close)

    def left(self) -> ClientState:
        """Leave all this to the parent; return what a child begins with. Sends nothing."""
        keep(self)
        if self.transport is not None:
            self.transport.leave()
        self.reader.leave()
        state = ClientState(self._dial, self._copy_threads)
        state._is_closed = self._is_closed
        return state
