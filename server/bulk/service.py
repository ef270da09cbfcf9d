"""The requests of the bulk channel: gets of clients and servers, puts, what another server finds.

The same as the gRPC service's Get and Put; only the bytes move otherwise.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.proto import bulk
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket
from kvstore.proto.row_mask import SkippedRows
from kvstore.server.api.get_stream import frame_part, range_parts
from kvstore.server.api.put_stream import PutStream
from kvstore.server.api.validation import Checks, fidelity
from kvstore.server.bulk.peer_server import PeerServer
from kvstore.server.bulk.tcp_transfers import PartSender, PutReceiver, Sending
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.settings.values import Limits
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import LayerPart, RangeRead
from kvstore.server.store.store import Store

if TYPE_CHECKING:
    from kvstore.server.telemetry.tracing import Tracing

GUEST_GET_S = 60.0
"""What a guest's get takes at most."""
REFUSED_S = 2.0
"""For a client whose put was refused in its midst to read why; what it sends meanwhile is
dropped."""
REFUSED_BYTES = 64 << 20
YIELD_S = 0.001
"""Before a part for another server, while this one's own clients are sent frames."""
METHODS: dict[type[bulk.Word], str] = {bulk.Get: "Get", bulk.Find: "Lookup", bulk.Put: "Put"}
"""The service's method for each word of a request, in the audit log."""


@dataclass(slots=True, eq=False)
class Caller:
    """Whose stream it is, from the address *origin*."""

    wire: FramedSocket
    session: Session
    origin: str
    guest: bulk.Guest | None = None
    """What a client of the session's server was let in by; None: it is that server, or a client
    of this one.
    """
    is_served: bool = False
    sending: Sending | None = None
    """A get whose reader takes nothing: it waits without a thread, under its lease."""
    until: float = 0.0
    """When that has lasted too long."""
    context: Context = field(default_factory=copy_context)
    """Of the get: its trace goes on in whatever thread does."""

    @property
    def is_client(self) -> bool:
        """Whether it is of an engine, not of another server."""
        return self.guest is not None or not self.session.is_peer


class BulkService:
    """Each call answers one request, in the caller's thread. Thread-safe.

    It raises when the stream is of no use any more.
    """

    def __init__(
        self,
        store: Store,
        sessions: SessionTable,
        checks: Checks,
        authorizer: Authorizer,
        limits: Limits,
    ) -> None:
        self.sessions = sessions
        self.clock = checks.clock
        self.authorizer = authorizer
        self.peer_server = PeerServer(store.moves, limits)
        self.tracing: Tracing | None = None
        self._store = store
        self._checks = checks
        self._own_gets = 0
        """Gets of this server's own clients that are answered now."""
        self._lock = threading.Lock()  # guards that

    def is_over(self, caller: Caller) -> bool:
        """Whether its session has ended, or the time that a guest was given."""
        guest = caller.guest
        until_s = math.inf if guest is None else caller.session.opened_at + guest.until_s
        return caller.session.is_closed or self.clock() >= until_s

    def note(self, caller: Caller, method: str, outcome: str, frames: int) -> None:
        """Record a request in the audit log."""
        self.authorizer.note_on(caller.session, method, outcome, frames, caller.origin)

    # --- gets

    def get(self, caller: Caller, word: bulk.Get, payload: bytes) -> Sending:
        """Answer a get with frames, in order, up to the first missing or late one, or with parts.

        Their memory is in use no more at its end.
        """
        if bool(word.flags & bulk.PEER) != caller.session.is_peer:
            raise PermissionDeniedError("flags: servers ask as servers, clients as clients")
        sender = PartSender(caller.wire, word, self.clock)
        try:
            session = self._admitted(caller, word, "OpenPeer" if caller.session.is_peer else "Get")
            if session.is_peer:
                yield from self._get_of_peer(caller, sender, payload)
            else:
                _check_get_flags(word.flags)
                deadline = self._checks.deadline(word.deadline_ms)
                with self._own_get():
                    parts = self._parts(session, word, payload, deadline)
                    yield from sender.send_all(parts, deadline, has_short_part=True)
        except KVStoreError as error:
            if sender.is_broken:
                raise
            self._refuse(caller, word, error)
            return
        if sender.is_broken:
            raise TierUnavailableError("peer", "it did not take what it asked for")
        self._done(caller, word, sender.frames_sent)

    def _get_of_peer(self, caller: Caller, sender: PartSender, payload: bytes) -> Sending:
        """Send what is in memory to another server, or to its client, which is a guest here."""
        word, guest = sender.word, caller.guest
        until = self.clock() + word.deadline_ms / 1000
        # Guests are not counted at the peer server: their threads bound them, as other clients.
        admitted = self.peer_server.admitted(word) if guest is None else nullcontext()
        if guest is not None:
            until = min(until, self.clock() + GUEST_GET_S)
            if self.is_over(caller):
                raise UnauthenticatedError("until_s: over; ask your server to be let in again")
            if payload[: len(guest.namespace)] != guest.namespace or word.flags != bulk.PEER:
                raise PermissionDeniedError("keys: a guest reads whole chunks of its own namespace")
        with admitted:
            parts = self.peer_server.parts(word.flags, payload)
            yield from sender.send_all(
                parts, until, self._yield_to_clients, has_short_part=guest is not None
            )

    def _yield_to_clients(self) -> None:
        if self._own_gets:
            time.sleep(YIELD_S)

    @contextmanager
    def _own_get(self) -> Iterator[None]:
        with self._lock:
            self._own_gets += 1
        try:
            with self._traced("Get"):
                yield
        finally:
            with self._lock:
                self._own_gets -= 1

    def _parts(
        self, session: Session, word: bulk.Get, digests: bytes, deadline: float
    ) -> Generator[LayerPart, None, None]:
        """Yield what is requested, under a lease. Each part's memory is lent until the next.

        With the flags of ranges and of rows, *digests* is what ``unpack_ranges`` and
        ``unpack_skipped`` parse.
        """
        ranges: list[bulk.Range] = []
        if word.flags & bulk.RANGES:
            digests, ranges = bulk.unpack_ranges(digests)
        skip_rows = b""
        if word.flags & bulk.SKIP_ROWS:
            digests, skip_rows = bulk.unpack_skipped(digests)
        keys = self._checks.keys(session, digests)
        self._checks.ranges(ranges, len(keys))
        skipped = SkippedRows.unpack(skip_rows, len(keys))
        lease_id, known = self._store.open_get(session, keys, word.lease_id)
        keys, reads = keys[:known], self._store.reads
        try:
            least = fidelity(word.flags >> bulk.FIDELITY_SHIFT & 3)
            if word.flags & bulk.RANGES:
                yield from range_parts(RangeRead(reads, session, least, deadline), keys, ranges)
            elif word.flags & bulk.LAYER_MAJOR:
                layered = LayerwiseRead(self._store.moves, session, keys, deadline, least)
                layered.skipped = skipped
                yield from layered.parts()
            else:
                for result in reads.get(session, keys, deadline, least=least):
                    yield frame_part(result)
        finally:
            if not word.lease_id:
                self._store.release(session, lease_id)

    # --- finds and puts

    def find(self, caller: Caller, word: bulk.Find, payload: bytes) -> None:
        """Report to another server what is in memory."""
        if caller.guest is not None or not caller.session.is_peer:
            raise PermissionDeniedError("find: only servers ask for it; clients look up over gRPC")
        try:
            self._admitted(caller, word, "OpenPeer")
            with self.peer_server.admitted(word):
                found = self.peer_server.find(payload)
        except KVStoreError as error:
            self._refuse(caller, word, error)
        else:
            self._done(caller, word, 0, found)

    def put(self, caller: Caller, word: bulk.Put) -> None:
        """Have the frames of a put sent, and store them where they are received."""
        if caller.guest is not None or caller.session.is_peer:
            raise PermissionDeniedError("put: only clients of this server put here")
        receiver = PutReceiver(caller.wire, word, self.sessions)
        try:
            self._admitted(caller, word, "Put")
            _check_flags(word.flags, bulk.DURABLE)
            caller.wire.set_timeout(bulk.SILENCE_S, self._checks.deadline(word.deadline_ms))
            durable = bool(word.flags & bulk.DURABLE)
            stream = PutStream(
                self._store, self._checks, durable=durable, deadline_ms=word.deadline_ms
            )
            with self._traced("Put"), closing(stream):
                receiver.receive(stream)
                results = stream.finish()
        except KVStoreError as error:
            if not receiver.has_begun:
                self._refuse(caller, word, error)
                return
            with suppress(DeadlineError, TierUnavailableError):
                self._refuse(caller, word, error)
                caller.wire.set_timeout(REFUSED_S, self.clock() + REFUSED_S)
                caller.wire.drain(REFUSED_BYTES)
            raise TierUnavailableError("client", "the rest of its put is of no use") from error
        payload = bulk.pack_outcomes(
            bytes(result.outcome for result in results), [result.reason for result in results]
        )
        self._done(caller, word, len(results), payload)

    # --- all of them

    def _traced(self, method: str) -> AbstractContextManager[None]:
        return nullcontext() if self.tracing is None else self.tracing.call(method, "tcp")

    def _admitted(
        self, caller: Caller, word: bulk.Get | bulk.Put | bulk.Find, method: str
    ) -> Session:
        session = self.sessions.get(caller.session.session_id)
        if word.session_id != session.session_id:
            raise UnauthenticatedError("session_id: ask on the connection of your session")
        self.authorizer.admit_on(session, method)
        return session

    def _done(self, caller: Caller, word: bulk.Word, frames: int, payload: bytes = b"") -> None:
        self.note(caller, METHODS[type(word)], "OK", frames)
        # Of a get it has how much came in time.
        caller.wire.set_timeout(bulk.SILENCE_S)
        caller.wire.send(bulk.Done(word.request, frames), payload)

    def _refuse(self, caller: Caller, word: bulk.Word, error: KVStoreError) -> None:
        self.note(caller, METHODS[type(word)], type(error).__name__, 0)
        caller.wire.set_timeout(bulk.SILENCE_S)
        refuse(caller.wire, word, error)


def refuse(wire: FramedSocket, word: bulk.Word, error: KVStoreError) -> None:
    """Report that a request failed. Raises as ``FramedSocket.send``."""
    wire.send(bulk.Failed(word.request), bulk.pack_failure(type(error).__name__, str(error)))


def _check_get_flags(flags: int) -> None:
    known = bulk.LAYER_MAJOR | bulk.RANGES | 3 << bulk.FIDELITY_SHIFT
    if flags & bulk.LAYER_MAJOR and not flags & bulk.RANGES:
        known |= bulk.SKIP_ROWS
    _check_flags(flags, known)


def _check_flags(flags: int, known: int) -> None:
    if flags & ~known:
        raise InvalidRequestError("flags", flags, f"this server knows {known}")
