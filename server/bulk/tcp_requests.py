"""StreamAnswers: what is asked over a stream: gets of servers and clients, puts of clients, and
what another server finds here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvstore.proto import bulk
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    PermissionDeniedError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket
from kvstore.server.bulk.service import BulkService
from kvstore.server.bulk.tcp_transfers import StreamPut, StreamWork
from kvstore.server.security.authorization import SessionAuth
from kvstore.server.security.sessions import Session, SessionTable

GUEST_GET_S = 60.0
"""What a guest's get takes at most."""
REFUSED_S = 2.0
"""For who was refused in the midst of a put to hear of it; what it sent meanwhile is dropped."""
REFUSED_BYTES = 64 << 20
MAX_STREAMS = 1024
"""And an eighth of the descriptors that are left, at most."""
METHODS: dict[type[bulk.Word], str] = {bulk.Get: "Get", bulk.Find: "Lookup", bulk.Put: "Put"}
"""What of the service each word that asks is of, in the audit log."""


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

    @property
    def is_client(self) -> bool:
        """Whether it is of an engine, not of another server."""
        return self.guest is not None or not self.session.is_peer


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """Who is let in and what is done for them. ``pause`` is called between parts of a frame for
    another server; ``threads`` answer those, ``client_threads`` clients. ``most_streams`` are
    open at once.
    """

    sessions: SessionTable
    auth: SessionAuth
    service: BulkService
    threads: int
    client_threads: int
    clock: Callable[[], float]
    pause: Callable[[], None]
    most_streams: int = MAX_STREAMS


class StreamAnswers:
    """Each call answers one request, in the caller's thread. It raises when the stream is of no use
    any more.
    """

    def __init__(self, terms: StreamTerms) -> None:
        self._terms = terms

    def is_over(self, caller: Caller) -> bool:
        """Whether its session has ended, or the time that a guest was given."""
        guest = caller.guest
        until_s = math.inf if guest is None else caller.session.opened_at + guest.until_s
        return caller.session.is_closed or self._terms.clock() >= until_s

    def note(self, caller: Caller, method: str, outcome: str, frames: int) -> None:
        """Tell the audit log of a request."""
        self._terms.auth.note(caller.session, method, outcome, frames, caller.origin)

    def send(self, caller: Caller, word: bulk.Get, payload: bytes) -> None:
        """Answer a get with frames."""
        if bool(word.flags & bulk.PEER) != caller.session.is_peer:
            raise PermissionDeniedError("flags: servers ask as servers, clients as clients")
        terms = self._terms
        work: StreamWork | None = None
        try:
            session = self._session(caller, word)
            terms.auth.admit(session, "OpenPeer" if session.is_peer else "Get")
            until = terms.clock() + word.deadline_ms / 1000
            if caller.guest is not None:
                until = min(until, terms.clock() + GUEST_GET_S)
                work = StreamWork(caller.wire, word, until, terms.pause)
                self._send_to_guest(caller, caller.guest, work, payload)
            elif session.is_peer:
                work = StreamWork(caller.wire, word, until, terms.pause, is_for_client=False)
                self._send_to_peer(work, payload)
            else:
                work = StreamWork(caller.wire, word, terms.service.checked(word))
                terms.service.get(work, payload)
        except KVStoreError as error:
            if work is not None and work.is_broken:
                raise
            self._refuse(caller, word, error)
            return
        if work.is_broken:
            raise TierUnavailableError("peer", "it did not take what it asked for")
        self.note(caller, "Get", "OK", work.frames_sent)
        # whoever asked for more than came in time hears of it
        caller.wire.set_timeout(bulk.SILENCE_S)
        caller.wire.send(bulk.Done(word.request, work.frames_sent), b"")

    def _send_to_peer(self, work: StreamWork, payload: bytes) -> None:
        peer_server = self._terms.service.peer_server
        with peer_server.admitted(work.word):
            peer_server.get(work, payload)

    def _send_to_guest(
        self, caller: Caller, guest: bulk.Guest, work: StreamWork, payload: bytes
    ) -> None:
        """Not counted at the peer server: its own threads are what bounds it, as other clients."""
        if self.is_over(caller):
            raise UnauthenticatedError("until_s: over; ask your server to be let in again")
        if payload[: len(guest.namespace)] != guest.namespace or work.word.flags != bulk.PEER:
            raise PermissionDeniedError("keys: a guest reads whole chunks of its own namespace")
        self._terms.service.peer_server.get(work, payload)

    def find(self, caller: Caller, word: bulk.Find, payload: bytes) -> None:
        """Answer another server, which asks what is in memory."""
        if caller.guest is not None or not caller.session.is_peer:
            raise PermissionDeniedError("find: only servers ask for it; clients look up over gRPC")
        peer_server = self._terms.service.peer_server
        try:
            self._terms.auth.admit(self._session(caller, word), "OpenPeer")
            with peer_server.admitted(word):
                found = peer_server.find(payload)
        except KVStoreError as error:
            self._refuse(caller, word, error)
            return
        self.note(caller, "Lookup", "OK", 0)
        caller.wire.set_timeout(bulk.SILENCE_S)
        caller.wire.send(bulk.Done(word.request, 0), found)

    def take(self, caller: Caller, word: bulk.Put) -> None:
        """Answer a put: have its frames sent, and store them."""
        if caller.guest is not None or caller.session.is_peer:
            raise PermissionDeniedError("put: only clients of this server put here")
        terms = self._terms
        put: StreamPut | None = None
        try:
            session = self._session(caller, word)
            terms.auth.admit(session, "Put")
            put = StreamPut(caller.wire, word, terms.service.checked_put(word))
            results = terms.service.put(put)
        except KVStoreError as error:
            if put is None or not put.has_begun:
                self._refuse(caller, word, error)
                return
            with suppress(DeadlineError, TierUnavailableError):
                self._refuse(caller, word, error)
                caller.wire.set_timeout(REFUSED_S, terms.clock() + REFUSED_S)
                caller.wire.drain(REFUSED_BYTES)
            raise TierUnavailableError("client", "the rest of its put is of no use") from error
        self.note(caller, "Put", "OK", len(results))
        payload = bulk.pack_outcomes(
            bytes(result.outcome for result in results), [result.reason for result in results]
        )
        caller.wire.set_timeout(bulk.SILENCE_S)
        caller.wire.send(bulk.Done(word.request, len(results)), payload)

    def _session(self, caller: Caller, word: bulk.Get | bulk.Put | bulk.Find) -> Session:
        session = self._terms.sessions.get(caller.session.session_id)
        if word.session_id != session.session_id:
            raise UnauthenticatedError("session_id: ask on the connection of your session")
        return session

    def _refuse(self, caller: Caller, word: bulk.Word, error: KVStoreError) -> None:
        self.note(caller, METHODS[type(word)], type(error).__name__, 0)
        caller.wire.set_timeout(bulk.SILENCE_S)
        refuse(caller.wire, word, error)


def refuse(wire: FramedSocket, word: bulk.Word, error: KVStoreError) -> None:
    """Say that a request failed. Raises as ``FramedSocket.send``."""
    wire.send(bulk.Failed(word.request), bulk.pack_failure(type(error).__name__, str(error)))
