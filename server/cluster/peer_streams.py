"""PeerStreams: TCP connections over which other servers read this one's memory, and clients frames.

One thread waits for all who say nothing; threads answer who asked. Who has not said yet whose
connection it is has threads of his own to be slow with, and so have clients, those of other
servers, their guests, among them.
"""

from __future__ import annotations

import hmac
import math
import os
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from kvstore.proto import bulk
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.guest_token import is_genuine
from kvstore.proto.stream_wire import StreamWire
from kvstore.server.bulk.bulk_service import BulkService
from kvstore.server.bulk.zmq_peer import Door
from kvstore.server.cluster.stream_work import SILENCE_S, StreamWork
from kvstore.server.sessions import Session, SessionTable

if TYPE_CHECKING:
    import ssl

HELLO_S = 2.0
"""For the handshake and the first word."""
MAX_STRANGERS = 64
"""Connections that have not said whose they are."""
MAX_STREAMS = 1024
MAX_CLIENT_STREAMS = 512
"""Of them those of clients, so that other servers find room."""
STREAMS_PER_SESSION = 16
GUEST_STREAMS_PER_SESSION = 128
"""Of the clients of one other server, all together."""
GUEST_GET_S = 60.0
"""What a guest's get takes at most."""
HELLO_THREADS = 2
_SWEEP_S = 1.0

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    wire: StreamWire
    session: Session
    origin: str
    """The address that it came from."""
    guest: bulk.Guest | None = None
    """What a client of the session's server was let in by; None: it is that server, or a client
    of this one.
    """
    is_served: bool = False

    @property
    def is_client(self) -> bool:
        """Whether it is of an engine, not of another server."""
        return self.guest is not None or not self.session.is_peer


@dataclass(slots=True, eq=False)
class _Stranger:
    link: socket.socket
    until: float
    origin: str


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """Who is let in and what is done for them. ``pause`` is called between parts of a frame for
    another server; ``threads`` answer those, ``client_threads`` clients.
    """

    sessions: SessionTable
    door: Door
    service: BulkService
    threads: int
    client_threads: int
    clock: Callable[[], float]
    pause: Callable[[], None]


class PeerStreams:
    """Serves gets of peers and clients on *listener*; over TLS with *tls*.

    ``address`` is what they connect to, with ``*`` for the host when every interface is bound.
    """

    def __init__(
        self, listener: socket.socket, address: str, tls: ssl.SSLContext | None, terms: StreamTerms
    ) -> None:
        self.address = address
        self._tls = tls
        self._terms = terms
        self._listener = listener
        listener.setblocking(False)
        self._streams: set[_Stream] = set()
        self._strangers: set[_Stranger] = set()
        self._back: list[_Stream] = []
        """Answered, and to be waited for again."""
        self._getting = 0
        """Gets of clients that are answered now."""
        self._closed = False
        # Guards the four above.
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hellos = ThreadPoolExecutor(HELLO_THREADS, thread_name_prefix="stream-hello")
        self._workers = ThreadPoolExecutor(terms.threads, thread_name_prefix="stream-work")
        self._getters = ThreadPoolExecutor(terms.client_threads, thread_name_prefix="stream-get")
        self._thread = threading.Thread(target=self._run, name="peer-streams", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread that waits for all of them lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams, strangers = list(self._streams), list(self._strangers)
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for stream in streams:
            stream.wire.hang_up()
        for stranger in strangers:
            stranger.link.close()
        self._hellos.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown(wait=True, cancel_futures=True)
        # A client's get may wait for a tier up to its deadline: it closes its stream then.
        self._getters.shutdown(wait=False, cancel_futures=True)
        for stream in streams:
            if not stream.is_served:
                stream.wire.close()
        self._listener.close()
        os.close(self._wakeup)

    # --- the thread that waits

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(self._wakeup, selectors.EVENT_READ)
            swept_at = self._terms.clock()
            while not self._closed:
                for key, _ in waiting.select(_SWEEP_S):
                    self._notice(waiting, key)
                with self._lock:
                    back, self._back = self._back, []
                for stream in back:
                    waiting.register(stream.wire, selectors.EVENT_READ, stream)
                if self._terms.clock() - swept_at >= _SWEEP_S:
                    swept_at = self._terms.clock()
                    self._sweep(waiting)

    def _notice(self, waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept(waiting)
        elif key.fileobj == self._wakeup:
            os.eventfd_read(self._wakeup)
        else:
            waiting.unregister(key.fileobj)
            if isinstance(key.data, _Stranger):
                self._hellos.submit(self._welcome, key.data)
            elif not key.data.is_client:
                self._workers.submit(self._serve, key.data)
            else:
                self._serve_client(key.data)

    def _serve_client(self, stream: _Stream) -> None:
        """Hang up when all threads are at work: readers that are slow to take keep them so.

        The client asks through the bulk channel then, where nobody waits for another.
        """
        with self._lock:
            is_full = self._getting >= self._terms.client_threads
            self._getting += not is_full
        if is_full:
            self._note(stream, "QuotaExceededError", 0)
            self._drop(stream)
        else:
            self._getters.submit(self._serve, stream)

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        try:
            link, address = self._listener.accept()
        except OSError:
            # Gone again, or no descriptor is left: asked again at once it would say so for ever.
            waiting.unregister(self._listener)
            return
        stranger = _Stranger(link, self._terms.clock() + HELLO_S, f"stream:{address[0]}")
        with self._lock:
            known = len(self._strangers)
            is_full = known >= MAX_STRANGERS or known + len(self._streams) >= MAX_STREAMS
            if not is_full:
                self._strangers.add(stranger)
        if is_full:
            link.close()
        else:
            waiting.register(link, selectors.EVENT_READ, stranger)

    def _sweep(self, waiting: selectors.BaseSelector) -> None:
        """Hang up on who says nothing, and on those whose session has ended; listen again."""
        if self._listener.fileno() not in waiting.get_map():
            waiting.register(self._listener, selectors.EVENT_READ)
        now = self._terms.clock()
        for key in list(waiting.get_map().values()):
            if isinstance(key.data, _Stranger) and now >= key.data.until:
                waiting.unregister(key.fileobj)
                self._forget(key.data)
            elif isinstance(key.data, _Stream) and self._is_over(key.data):
                waiting.unregister(key.fileobj)
                self._drop(key.data)

    def _is_over(self, stream: _Stream) -> bool:
        guest = stream.guest
        until_s = math.inf if guest is None else stream.session.opened_at + guest.until_s
        return stream.session.is_closed or self._terms.clock() >= until_s

    # --- threads that answer

    def _welcome(self, stranger: _Stranger) -> None:
        """Hear whose connection it is."""
        link = stranger.link
        try:
            link.settimeout(HELLO_S)
            if self._tls is not None:
                link = self._tls.wrap_socket(link, server_side=True)
            wire = StreamWire(link, "peer", self._terms.clock, is_encrypted=self._tls is not None)
            wire.patience(HELLO_S, stranger.until + HELLO_S)
            stream = self._attached(wire, stranger.origin)
        except (OSError, KVStoreError) as error:
            logger.info("refused", method="stream", reason=str(error))
            self._terms.door.note(None, "Attach", type(error).__name__, 0, stranger.origin)
            self._forget(stranger)
            link.close()
            return
        with self._lock:
            self._strangers.discard(stranger)
        self._wait_again(stream)

    def _attached(self, wire: StreamWire, origin: str) -> _Stream:
        word, _ = wire.receive()
        try:
            if not isinstance(word, bulk.Attach | bulk.Guest):
                raise UnauthenticatedError("say first whose connection it is")
            session = self._terms.sessions.get(word.session_id)
            guest = word if isinstance(word, bulk.Guest) else None
            stream = _Stream(wire, session, origin, guest)
            if not _is_genuine(session, word) or self._is_over(stream):
                raise UnauthenticatedError("token: not this session's; open a session first")
            self._take_room(stream)
        except KVStoreError as error:
            _refuse(wire, word, error)
            raise
        try:
            wire.send(bulk.Attached(word.request))
        except KVStoreError:
            self._drop(stream)
            raise
        return stream

    def _take_room(self, stream: _Stream) -> None:
        """Count it from now on: two who come at once do not both have the last place."""
        session = stream.session
        most = STREAMS_PER_SESSION if stream.guest is None else GUEST_STREAMS_PER_SESSION
        with self._lock:
            alike = [one for one in self._streams if one.session is session]
            if sum((one.guest is None) is (stream.guest is None) for one in alike) >= most:
                raise QuotaExceededError("streams_per_session", most, session.client)
            is_full = sum(one.is_client for one in self._streams) >= MAX_CLIENT_STREAMS
            if is_full and stream.is_client:
                raise QuotaExceededError("client_streams", MAX_CLIENT_STREAMS, session.client)
            self._streams.add(stream)

    def _serve(self, stream: _Stream) -> None:
        """Answer one request; who does not ask as agreed is hung up on."""
        stream.is_served, is_answered = True, False
        try:
            stream.wire.patience(SILENCE_S, self._terms.clock() + SILENCE_S)
            word, size_bytes = stream.wire.receive()
            payload = stream.wire.take(size_bytes)
            if not isinstance(word, bulk.Get):
                raise InvalidRequestError("kind", type(word).__name__, "streams are for gets")
            if bool(word.flags & bulk.PEER) != stream.session.is_peer:
                raise PermissionDeniedError("flags: servers ask as servers, clients as clients")
            self._answer(stream, word, payload)
            is_answered = True
        except KVStoreError as error:
            if not isinstance(error, TierUnavailableError):  # it hung up, which it may
                logger.info("refused", method="stream", reason=str(error))
                self._note(stream, type(error).__name__, 0)
        finally:
            with self._lock:
                self._getting -= stream.is_client
            if self._closed or not is_answered:
                self._drop(stream)
        stream.is_served = False
        if is_answered:
            self._wait_again(stream)

    def _answer(self, stream: _Stream, word: bulk.Get, payload: bytes) -> None:
        terms = self._terms
        work: StreamWork | None = None
        try:
            session = terms.sessions.get(stream.session.session_id)
            if word.session_id != session.session_id:
                raise UnauthenticatedError("session_id: ask on the connection of your session")
            terms.door.admit(session, "OpenPeer" if session.is_peer else "Get")
            until = terms.clock() + word.deadline_ms / 1000
            if stream.guest is not None:
                until = min(until, terms.clock() + GUEST_GET_S)
                work = StreamWork(stream.wire, word, until, terms.pause)
                self._get_for_guest(stream, stream.guest, work, payload)
            elif session.is_peer:
                work = StreamWork(stream.wire, word, until, terms.pause, is_for_client=False)
                self._get_for_peer(work, payload)
            else:
                work = StreamWork(stream.wire, word, terms.service.checked(word))
                terms.service.get(work, payload)
        except KVStoreError as error:
            if work is not None and work.is_broken:
                raise
            self._note(stream, type(error).__name__, 0)
            stream.wire.patience(SILENCE_S)
            _refuse(stream.wire, word, error)
            return
        if work.is_broken:
            raise TierUnavailableError("peer", "it did not take what it asked for")
        self._note(stream, "OK", work.frames_sent)
        stream.wire.patience(SILENCE_S)  # whoever asked for more than came in time hears of it
        stream.wire.send(bulk.Done(word.request, work.frames_sent), b"")

    def _get_for_peer(self, work: StreamWork, payload: bytes) -> None:
        desk = self._terms.service.desk
        desk.enter(work.word)
        try:
            desk.get(work, payload)
        finally:
            desk.leave(work.word)

    def _get_for_guest(
        self, stream: _Stream, guest: bulk.Guest, work: StreamWork, payload: bytes
    ) -> None:
        """Not counted at the desk: its own threads are what bounds it, as other clients."""
        if self._is_over(stream):
            raise UnauthenticatedError("until_s: over; ask your server to be let in again")
        if payload[: len(guest.namespace)] != guest.namespace or work.word.flags != bulk.PEER:
            raise PermissionDeniedError("keys: a guest reads whole chunks of its own namespace")
        self._terms.service.desk.get(work, payload)

    def _note(self, stream: _Stream, outcome: str, frames: int) -> None:
        self._terms.door.note(stream.session, "Get", outcome, frames, stream.origin)

    def _wait_again(self, stream: _Stream) -> None:
        with self._lock:
            self._back.append(stream)
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def _drop(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.wire.close()

    def _forget(self, stranger: _Stranger) -> None:
        with self._lock:
            self._strangers.discard(stranger)
        stranger.link.close()


def _is_genuine(session: Session, word: bulk.Attach | bulk.Guest) -> bool:
    if isinstance(word, bulk.Attach):
        return hmac.compare_digest(session.attach_token, word.token)
    return session.is_peer and is_genuine(word, session.attach_token)


def _refuse(wire: StreamWire, word: bulk.Word, error: KVStoreError) -> None:
    wire.send(bulk.Failed(word.request), bulk.pack_failure(type(error).__name__, str(error)))
