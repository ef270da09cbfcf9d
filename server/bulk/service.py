"""The requests of the bulk channel: gets of clients and peers, puts, finds of peers.

As the gRPC service's Get and Put, but with another transport.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
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
from kvstore.server.bulk.tcp_transfers import FIRST_PART_BYTES, Sending, receive_put, send_parts
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.settings.values import GET_BYTES, Limits
from kvstore.server.store.reads import LayerPart
from kvstore.server.store.store import Store

if TYPE_CHECKING:
    from kvstore.server.telemetry.tracing import Tracing

GUEST_GET_S = 60.0
"""Time limit of a guest's get."""
REFUSED_S = 2.0
"""Time for a client to read why its put was refused; bytes that it sends meanwhile are dropped."""
REFUSED_BYTES = 64 << 20
REASONS_CHARS = 3 << 18
"""Limit for the reasons of all frames of a put, so that one message holds them."""
YIELD_S = 0.001
YIELD_WITHIN_S = 0.01
"""A part for a peer waits YIELD_S if an own client was sent one within this time."""
METHODS = {"get": "Get", "find": "Lookup", "put": "Put"}
"""The service's method for each kind of request, in the audit log."""


@dataclass(slots=True, eq=False)
class Caller:
    """The caller on a stream, from the address *origin*."""

    wire: FramedSocket
    session: Session
    origin: str
    guest: pb.StreamAttach | None = None
    """Credentials of a client of a peer; None: the peer itself, or a client of this server."""
    is_served: bool = False
    sending: Sending | None = None
    """A get whose reader has stalled: it waits without a thread, under its lease."""
    until: float = 0.0
    """When the stalled get is ended."""
    context: Context = field(default_factory=copy_context)
    """Context of the get, for its trace in any thread."""

    @property
    def is_client(self) -> bool:
        """Whether it is an engine's, not another server's."""
        return self.guest is not None or not self.session.is_peer


class BulkService:
    """Each call answers one request, in the caller's thread. Thread-safe.

    A call raises when the stream must be closed.
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
        self._client_sent_at = -math.inf
        """When a part was last sent to an own client."""

    def is_over(self, caller: Caller) -> bool:
        """Whether the caller's session, or a guest's grant, has ended."""
        guest = caller.guest
        until_s = math.inf if guest is None else caller.session.opened_at + guest.until_s
        return caller.session.is_closed or self.clock() >= until_s

    def note(self, caller: Caller, method: str, outcome: str, frames: int) -> None:
        """Record a request in the audit log."""
        self.authorizer.note_on(caller.session, method, outcome, frames, caller.origin)

    # --- gets

    def get(self, caller: Caller, message: pb.StreamMessage) -> Sending:
        """Answer a get with frames, in order, up to the first missing or late one, or with parts.

        At its end their memory is no longer in use.
        """
        request, is_peer = message.get, caller.session.is_peer
        if bool(request.key_namespace) != is_peer:
            raise PermissionDeniedError("key_namespace: required for peers, refused for clients")
        about: AbstractContextManager[object] = nullcontext()
        try:
            self._admit(caller, request.session_id, "OpenPeer" if is_peer else "Get")
            parts, deadline = self._parts(caller, request)
            if not is_peer:
                about = self._traced("Get")
            elif caller.guest is None:  # guests are bounded by the threads for clients
                about = self.peer_server.admitted(GET_BYTES)
            first_bytes = bulk.MAX_PAYLOAD_BYTES
            if caller.is_client and _is_whole(request):
                first_bytes = FIRST_PART_BYTES
            pause = self._yield_to_clients if is_peer else self._note_client
            with about:
                frames = yield from send_parts(
                    caller.wire, message.request, parts, deadline, first_bytes, pause
                )
        except KVStoreError as error:
            self._refuse(caller, message, error)
            return
        if frames is None:
            raise TierUnavailableError("peer", "it stopped reading its answer")
        done = pb.StreamMessage(request=message.request, done=frames)
        self._answer(caller, "Get", frames, done)

    def _parts(
        self, caller: Caller, request: pb.GetRequest
    ) -> tuple[Generator[LayerPart, None, None], float]:
        """Return the parts to send and the deadline; peers and guests get memory only."""
        if not caller.session.is_peer:
            deadline = self._checks.deadline(request.deadline_ms)
            get = GetStream(self._store, self._checks, caller.session, request, deadline)
            return cast("Generator[LayerPart, None, None]", get.parts()), deadline
        deadline, guest = self.clock() + request.deadline_ms / 1000, caller.guest
        if guest is not None:
            if self.is_over(caller):
                raise UnauthenticatedError("until_s: expired; request a new grant from your server")
            if request.key_namespace != guest.key_namespace or not _is_whole(request):
                raise PermissionDeniedError("keys: a guest reads whole chunks of its own namespace")
            deadline = min(deadline, self.clock() + GUEST_GET_S)
        return self.peer_server.parts(request), deadline

    def _note_client(self) -> None:
        self._client_sent_at = self.clock()

    def _yield_to_clients(self) -> None:
        if self.clock() - self._client_sent_at < YIELD_WITHIN_S:
            time.sleep(YIELD_S)

    # --- finds and puts

    def find(self, caller: Caller, message: pb.StreamMessage) -> None:
        """Return to a peer which chunks are in memory."""
        if caller.guest is not None or not caller.session.is_peer:
            raise PermissionDeniedError("find: for peers only; clients look up over gRPC")
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
        """Receive and store the frames of a put."""
        if caller.guest is not None or caller.session.is_peer:
            raise PermissionDeniedError("put: for clients of this server only")
        request, wire = message.put, caller.wire
        has_begun = False
        try:
            self._admit(caller, request.session_id, "Put")
            wire.set_timeout(bulk.SILENCE_S, self._checks.deadline(request.deadline_ms))
            stream = PutStream(self._store, self._checks, request)
            with self._traced("Put"), closing(stream):
                wire.send(pb.StreamMessage(request=message.request, ready=True))
                # From here on the client sends frames, which only closing the stream stops.
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
            raise TierUnavailableError("client", "its put failed; the rest is dropped") from error
        most = REASONS_CHARS // max(1, len(results))
        stored = pb.PutResponse(
            outcomes=bytes(one.outcome for one in results),
            reasons=[one.reason[:most] for one in results],
        )
        answer = pb.StreamMessage(request=message.request, stored=stored)
        self._answer(caller, "Put", len(results), answer)

    # --- all requests

    def _traced(self, method: str) -> AbstractContextManager[None]:
        return nullcontext() if self.tracing is None else self.tracing.call(method, "tcp")

    def _admit(self, caller: Caller, session_id: int, method: str) -> None:
        session = self.sessions.get(caller.session.session_id)
        if session_id != session.session_id:
            raise UnauthenticatedError("session_id: call on the connection of your session")
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
        caller.wire.set_timeout(bulk.SILENCE_S)  # past the deadline it reports how much was sent
        caller.wire.send(answer)

    def _refuse(self, caller: Caller, message: pb.StreamMessage, error: KVStoreError) -> None:
        method = METHODS[str(message.WhichOneof("body"))]
        answer = bulk.failure(message.request, error)
        self._answer(caller, method, 0, answer, type(error).__name__)


def _is_whole(request: pb.GetRequest) -> bool:
    """Whether the get is for whole frames in order."""
    return not (request.ranges or request.layer_major)
