"""The link to one server: a session, opened at first use and again when it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from kvstore.client.connection import Connection, Until
from kvstore.client.decode import Reader
from kvstore.client.forks import keep
from kvstore.client.options import ClientOptions
from kvstore.client.planning import LinkMeter, Meters
from kvstore.client.session import Session, is_silent
from kvstore.client.transports.base import Transport
from kvstore.client.transports.grpc import StreamTransport
from kvstore.client.transports.shared_memory import ShmTransport, can_share_memory
from kvstore.client.transports.tcp import BulkTransport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, ChunkKey, Model, Namespace

FIRST_GUESS_BYTES_PER_S = 1.25e9
"""Assumed bandwidth until the first measurement: ten gigabits a second. With a low guess a client
would compute instead of loading, and never measure."""
FIRST_DECODE_BYTES_PER_S = 250e6
"""Assumed decode speed until the first measurement: half of one core's."""
MAX_OPEN_BATCHES = 8
"""Batches of one layered get or put, each a stream: all of them are open at the same time."""
_DIGEST = f"V{DIGEST_BYTES}"
"""numpy dtype of a digest or namespace, to split the hundreds of keys of a prompt at once."""
T = TypeVar("T")
LeftMs = Callable[[], int]
"""Returns the time left for a call, in ms. Raises DeadlineError when none is."""


class ServerLink:
    """A connection, a session with its transport, and threads. Thread-safe. *counts* returns the
    counters of each heartbeat. It must not refer to the client: that is collected first.
    """

    def __init__(
        self,
        address: str,
        model: Model,
        options: ClientOptions,
        counts: Callable[[], Mapping[str, int]],
        shared_memory: type[ShmTransport] = ShmTransport,
    ) -> None:
        self.address = address
        self.model = model
        self.options = options
        self._counts = counts
        self._shared_memory = shared_memory
        self.reader = Reader(options.copy_threads)
        self.meters = Meters(
            LinkMeter(FIRST_GUESS_BYTES_PER_S, time.monotonic), LinkMeter(FIRST_DECODE_BYTES_PER_S)
        )
        self.transport: Transport | None = None
        self._connection: Connection | None = None
        self._is_closed = False
        # Guards the three above; held while a session opens, so that only one does.
        self._lock = threading.RLock()
        # Held to drop a session, without waiting for one to open.
        self._drop_lock = threading.Lock()

    # --- the session

    @property
    def connection(self) -> Connection:
        """The channel to the server, made at first use. Raises InvalidRequestError."""
        connection = self._connection
        if connection is not None:
            return connection
        with self._lock:
            if self._connection is None:
                retry_after_ms, access = self.options.retry_after_ms, self.options.access
                self._connection = Connection(
                    self.address, retry_after_ms, access=access, usual_ms=self.options.deadline_ms
                )
                if self._is_closed:
                    self._connection.close()
            return self._connection

    def connected(self, left_ms: LeftMs | None = None) -> Transport:
        """Return the transport of the session; open it within the deadline of the options and the
        time left for the call. Raises KVStoreErrors, one of them when closed.
        """
        most_ms = self.options.deadline_ms
        left_ms = Until(most_ms if left_ms is None else min(left_ms(), most_ms)).left_ms
        if not self._lock.acquire(timeout=left_ms() / 1000):
            raise DeadlineError("another call was still opening the session")
        try:
            if self._is_closed:
                raise KVStoreError("the client is closed")
            if self.transport is None:
                session = Session(
                    self.connection, self.model, self.options, self._counts, left_ms()
                )
                try:
                    self.transport = self._transport(session, left_ms)
                except BaseException:
                    session.run_last(session.close)  # in its thread: the caller need not wait
                    raise
            return self.transport
        finally:
            self._lock.release()

    def _transport(self, session: Session, left_ms: LeftMs) -> Transport:
        wanted = self.options.transport
        is_short = 2 * left_ms() < self.options.deadline_ms  # the next call may have more time
        if wanted == "shm" or (wanted == "auto" and can_share_memory(session)):
            try:
                # Half of the time left, as below, if gRPC is to be tried next.
                return self._shared_memory(session, left_ms() / (1000 if is_short else 2000))
            except (TierUnavailableError, InvalidRequestError, OSError) as error:
                if wanted == "shm" or (is_short and isinstance(error, DeadlineError)):
                    raise
        if wanted == "tcp" or (wanted == "auto" and session.terms.bulk_address):
            try:
                transport = BulkTransport(session)
                # Half of the time left: if there is no answer, gRPC is tried next.
                transport.connect(left_ms() / 2000)
                return transport
            except (TierUnavailableError, DeadlineError, QuotaExceededError) as error:
                if wanted == "auto" and is_short and isinstance(error, DeadlineError):
                    return transport  # a later call has the time
                if wanted == "tcp":
                    raise
        return StreamTransport(session)

    def run(self, work: Callable[[Transport, LeftMs], T], deadline_ms: int | None = None) -> T:
        """Run *work* within *deadline_ms*, by default that of the options. Retry it once when a
        lease was lost: that of the session, which is opened again, or of a chunk.
        """
        granted_ms = self.options.deadline_ms if deadline_ms is None else deadline_ms
        left_ms = Until(granted_ms).left_ms
        transport = self.transport or self.connected(left_ms)
        try:
            try:
                return work(transport, left_ms)
            except LeaseExpiredError:
                self.renew(transport, left_ms())
            return work(self.connected(left_ms), left_ms)
        except DeadlineError as error:
            self.connection.breaker.record_call(error, granted_ms)
            raise

    def renew(self, transport: Transport, deadline_ms: int = 0) -> None:
        """Drop the session of *transport* if the server has lost it."""
        if not transport.is_spent:
            try:
                transport.session.heartbeat(deadline_ms)
            except LeaseExpiredError:
                pass
            else:
                return
        if self._drop_session(transport):
            session = transport.session
            session.run_last(lambda: session.close(notify_server=False))  # no wait for a heartbeat

    def _drop_session(self, transport: Transport) -> bool:
        """Close *transport* if it is the current one; return whether it was."""
        with self._drop_lock:
            if self.transport is not transport:
                return False
            self.transport = None
        transport.close()
        return True

    def end_session(self) -> None:
        """End the session, if there is one; the next call opens another."""
        transport = self.transport
        if transport is not None and self._drop_session(transport):
            transport.session.close()

    def end_if_hung(self) -> bool:
        """See ``Client.end_if_hung``."""
        if (transport := self.transport) is not None:
            is_hung = transport.hangs()
        else:
            is_hung = not self.connection.breaker.is_open and is_silent(self.connection)
        if is_hung:
            (transport or self.connection).hang_up()
        return is_hung

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
        """Close in the session's thread: the garbage collector may not take a lock or wait."""
        transport = self.transport
        if transport is not None:
            transport.session.run_last(self.close)

    def left(self) -> ServerLink:
        """In a child: leave everything to the parent; return a new link. Sends nothing."""
        keep(self)
        if self.transport is not None:
            self.transport.leave()
        self.reader.leave()
        link = ServerLink(self.address, self.model, self.options, self._counts, self._shared_memory)
        link._is_closed = self._is_closed
        return link

    # --- calls

    def call(self, method: str, request: Any, reply: type[T], deadline_ms: int = 0) -> T:
        """Call *method* without a session, or with that of *request*."""
        return self.connection.call(method, request, deadline_ms or self.options.deadline_ms, reply)

    def call_keys(
        self, method: str, request: Any, keys: Sequence[ChunkKey], reply: type[T]
    ) -> list[T]:
        """Call *method* for *keys*, a batch at a time; return the replies."""

        def work(transport: Transport, left_ms: LeftMs) -> list[T]:
            terms, replies = transport.session.terms, list[T]()
            request.session_id = terms.session_id
            digests = packed(keys, transport.session.namespace)
            for _, some in digest_batches(digests, terms.max_batch_chunks):
                request.digests = some
                replies.append(self.call(method, request, reply, left_ms()))
            return replies

        return self.run(work)

    def release(self, leases: Sequence[int], hints: Hints = NO_HINTS) -> None:
        """End *leases*. On failure they end with their session or expire."""
        if leases:
            with suppress(KVStoreError):
                self.connected().release(leases, self.options.deadline_ms, hints)

    def quarantine(self, transport: Transport, key: ChunkKey, left_ms: LeftMs) -> None:
        """Make the server check the chunk of *key*, which is wrong here, and delete it if damaged.
        Without time left this is up to its next reader.
        """
        session_id = transport.session.terms.session_id
        request = pb.DeleteRequest(
            session_id=session_id, digests=bytes(key[DIGEST_BYTES:]), if_damaged=True
        )
        with suppress(KVStoreError):
            self.call("Delete", request, pb.DeleteResponse, left_ms())


def packed(keys: Sequence[ChunkKey], space: Namespace) -> bytes:
    """Return the digests of *keys*, one after another.

    Raises InvalidRequestError unless it is a list of keys of *space*.
    """
    if isinstance(keys, Sequence):
        with suppress(TypeError):
            joined = b"".join(keys)
            halves = np.ndarray((len(keys), 2), _DIGEST, joined)
            is_whole = set(map(len, keys)) <= {KEY_BYTES}
            if is_whole and halves[:, 0].tobytes() == space * len(keys):
                return halves[:, 1].tobytes()
        for key in keys:  # slow: finds the wrong one
            if not isinstance(key, bytes | bytearray | memoryview):
                fix = "give a list of bytes: name chunks with keys()"
                raise InvalidRequestError("key", key, fix)
            if len(key) != KEY_BYTES or key[:DIGEST_BYTES] != space:
                fix = f"not in this client's namespace {space.hex()}; name chunks with keys()"
                raise InvalidRequestError("key", key.hex(), fix)
    raise not_keys(keys)


def not_keys(keys: object) -> InvalidRequestError:
    """Return the error for *keys* that are not a list."""
    return InvalidRequestError("keys", keys, "give a list of what keys() returns")


def check_kind(
    name: str, value: object, kind: type, *, is_list: bool = False, or_none: bool = False
) -> None:
    """Raise InvalidRequestError unless *value* is of *kind*, or a sequence of such, or None."""
    fix = f"give a list of {kind.__name__}" if is_list else f"give {kind.__name__}"
    if is_list and not isinstance(value, Sequence):
        raise InvalidRequestError(name, type(value).__name__, fix)
    for one in value if is_list else (value,):  # type: ignore[attr-defined]
        if not isinstance(one, kind) and not (one is None and or_none):
            raise InvalidRequestError(name, type(one).__name__, fix)


def batches(items: Sequence[T], limit: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield *items* in runs of *limit* at most, each with its first index; one run if empty."""
    for first in range(0, max(1, len(items)), limit):
        yield first, items[first : first + limit]


def digest_batches(packed: bytes, limit: int) -> Iterator[tuple[int, bytes]]:
    """Do the same with packed digests; *limit* counts chunks."""
    step = limit * DIGEST_BYTES
    for at in range(0, max(1, len(packed)), step):
        yield at // DIGEST_BYTES, packed[at : at + step]
