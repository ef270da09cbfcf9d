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
from typing import TYPE_CHECKING, cast

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket
from kvstore.server.api.get_stream import GetStream
from kvstore.server.api.put_stream import PutStream
from kvstore.server.api.validation import Checks
from kvstore.server.bulk.peer_server import PeerServer
from kvstore.server.bulk.tcp_transfers import FIRST_PART_BYTES, PartSender, Sending, receive_put
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.settings.values import GET_BYTES, Limits
from kvstore.server.store.reads import LayerPart
from kvstore.server.store.store import Store

if TYPE_CHECKING:
    from kvstore.server.telemetry.tracing import Tracing

GUEST_GET_S = 60.0
"""What a guest's get takes at most."""
REFUSED_S = 2.0
"""For a client whose put was refused in its midst to read why; what it sends meanwhile is
dropped."""
REFUSED_BYTES = 64 << 20
REASONS_CHARS = 3 << 18
"""Of all frames of a put, so that one message has them."""
YIELD_S = 0.001
"""Before a part for another server, while this one's own clients are sent frames."""
METHODS = {"get": "Get", "find": "Lookup", "put": "Put"}
"""The service's method for each kind of request, in the audit log."""


@dataclass(slots=True, eq=False)
class Caller:
    """Whose stream it is, from the address *origin*."""

    wire: FramedSocket
    session: Session
    origin: str
    guest: pb.StreamAttach | None = None
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
        """Gets of this server's own clients that frames are sent to now: other servers wait."""
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

    def get(self, caller: Caller, message: pb.StreamMessage) -> Sending:
        """Answer a get with frames, in order, up to the first missing or late one, or with parts.

        Their memory is in use no more at its end.
        """
        request, is_peer = message.get, caller.session.is_peer
        if bool(request.key_namespace) != is_peer:
            raise PermissionDeniedError("key_namespace: servers name theirs, and clients none")
        sender = PartSender(caller.wire, message.request, self.clock)
        try:
            self._admit(caller, request.session_id, "OpenPeer" if is_peer else "Get")
            if is_peer:
                yield from self._get_of_peer(caller, sender, request)
            else:
                deadline = self._checks.deadline(request.deadline_ms)
                first_bytes = FIRST_PART_BYTES if _is_whole(request) else bulk.MAX_PAYLOAD_BYTES
                with self._own_gets_changed(1), self._traced("Get"):
                    get = GetStream(self._store, self._checks, caller.session, request, deadline)
                    parts = cast("Generator[LayerPart, None, None]", get.parts())
                    for until in sender.send_all(parts, deadline, first_bytes=first_bytes):
                        with self._own_gets_changed(-1):  # it waits, and takes nothing
                            yield until
        except KVStoreError as error:
            if sender.is_broken:
                raise
            self._refuse(caller, message, error)
            return
        if sender.is_broken:
            raise TierUnavailableError("peer", "it did not take what it asked for")
        done = pb.StreamMessage(request=message.request, done=sender.frames_sent)
        self._answer(caller, "Get", sender.frames_sent, done)

    def _get_of_peer(self, caller: Caller, sender: PartSender, request: pb.GetRequest) -> Sending:
        """Send what is in memory to another server, or to its client, which is a guest here."""
        until, guest = self.clock() + request.deadline_ms / 1000, caller.guest
        if guest is None:
            with self.peer_server.admitted(GET_BYTES):
                parts = self.peer_server.parts(request)
                yield from sender.send_all(parts, until, self._yield_to_clients)
            return
        # Guests are not counted at the peer server: their threads bound them, as other clients.
        if self.is_over(caller):
            raise UnauthenticatedError("until_s: over; ask your server to be let in again")
        if request.key_namespace != guest.key_namespace or not _is_whole(request):
            raise PermissionDeniedError("keys: a guest reads whole chunks of its own namespace")
        yield from sender.send_all(
            self.peer_server.parts(request),
            min(until, self.clock() + GUEST_GET_S),
            self._yield_to_clients,
            first_bytes=FIRST_PART_BYTES,
        )

    def _yield_to_clients(self) -> None:
        if self._own_gets:
            time.sleep(YIELD_S)

    @contextmanager
    def _own_gets_changed(self, change: int) -> Iterator[None]:
        with self._lock:
            self._own_gets += change
        try:
            yield
        finally:
            with self._lock:
                self._own_gets -= change

    # --- finds and puts

    def find(self, caller: Caller, message: pb.StreamMessage) -> None:
        """Report to another server what is in memory."""
        if caller.guest is not None or not caller.session.is_peer:
            raise PermissionDeniedError("find: only servers ask for it; clients look up over gRPC")
        try:
            self._admit(caller, message.find.session_id, "OpenPeer")
            with self.peer_server.admitted():
                found = self.peer_server.find(message.find)
        except KVStoreError as error:
            self._refuse(caller, message, error)
        else:
            answer = pb.StreamMessage(request=message.request, found=found)
            self._answer(caller, "Lookup", 0, answer)

    def put(self, caller: Caller, message: pb.StreamMessage) -> None:
        """Have the frames of a put sent, and store them where they are received."""
        if caller.guest is not None or caller.session.is_peer:
            raise PermissionDeniedError("put: only clients of this server put here")
        request, wire = message.put, caller.wire
        has_begun = False
        try:
            self._admit(caller, request.session_id, "Put")
            if request.layer_major:
                raise InvalidRequestError("layer_major", True, "put so through gRPC")
            wire.set_timeout(bulk.SILENCE_S, self._checks.deadline(request.deadline_ms))
            stream = PutStream(self._store, self._checks, request)
            with self._traced("Put"), closing(stream):
                wire.send(pb.StreamMessage(request=message.request, ready=True))
                # From here on frames are on their way, and only the end of the stream ends them.
                has_begun = True
                receive_put(wire, message, stream, self.sessions)
                results = stream.finish()
        except KVStoreError as error:
            if not has_begun:
                self._refuse(caller, message, error)
                return
            with suppress(DeadlineError, TierUnavailableError):
                self._refuse(caller, message, error)
                wire.set_timeout(REFUSED_S, self.clock() + REFUSED_S)
                wire.drain(REFUSED_BYTES)
            raise TierUnavailableError("client", "the rest of its put is of no use") from error
        most = REASONS_CHARS // max(1, len(results))
        stored = pb.PutResponse(
            outcomes=bytes(one.outcome for one in results),
            reasons=[one.reason[:most] for one in results],
        )
        answer = pb.StreamMessage(request=message.request, stored=stored)
        self._answer(caller, "Put", len(results), answer)

    # --- all of them

    def _traced(self, method: str) -> AbstractContextManager[None]:
        return nullcontext() if self.tracing is None else self.tracing.call(method, "tcp")

    def _admit(self, caller: Caller, session_id: int, method: str) -> None:
        session = self.sessions.get(caller.session.session_id)
        if session_id != session.session_id:
            raise UnauthenticatedError("session_id: ask on the connection of your session")
        self.authorizer.admit_on(session, method)

    def _answer(
        self,
        caller: Caller,
        method: str,
        frames: int,
        answer: pb.StreamMessage,
        outcome: str = "OK",
    ) -> None:
        self.note(caller, method, outcome, frames)
        caller.wire.set_timeout(bulk.SILENCE_S)  # of a get it has how much came in time
        caller.wire.send(answer)

    def _refuse(self, caller: Caller, message: pb.StreamMessage, error: KVStoreError) -> None:
        method = METHODS[str(message.WhichOneof("body"))]
        answer = bulk.failure(message.request, error)
        self._answer(caller, method, 0, answer, type(error).__name__)


def _is_whole(request: pb.GetRequest) -> bool:
    """Whether frames come from their first byte to their last, one after the other."""
    return not (request.ranges or request.layer_major)
