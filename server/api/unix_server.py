"""The data plane of one host: descriptors and calls over a Unix socket."""

from __future__ import annotations

import hmac
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.unix_socket import MAX_PACKET_BYTES, Packet
from kvstore.server.api.unix_listener import can_send, is_trusted, listen
from kvstore.server.api.written_pages import WrittenPages
from kvstore.server.security.authorization import SessionAuth, check_session_role
from kvstore.server.security.sessions import Challenge, Session, SessionTable

CONNECTIONS_PER_SESSION = 16
SEND_WITHIN_S = 5
_POLL_S = 0.5
_ATTACH_WITHIN_S = 5.0
_END_WITHIN_S = 2.0
_THREAD_AGAIN_S = 10.0
_STAGING_DESCRIPTORS = 2
"""Of a session's memory: the map has one of its own."""
_IN_A_ROW = 16
"""Messages of one peer before others have their turn."""

_METHODS = {
    unix_socket.Op.slab: "Slab",
    unix_socket.Op.extent: "Extent",
    unix_socket.Op.ring: "Ring",
}
"""What roles and the audit log call an operation; all others are ways to attach."""
_ATTACH = "Attach"
_ORIGIN = "unix"

logger = structlog.get_logger(__name__)

SlabFile = Callable[[int, str], tuple[int, int]]
"""A slab's or extent's id and a tenant to a descriptor of it, ours to close, and its size.

Raises KVStoreError.
"""

TakeRing = Callable[[Session, unix_socket.Request, Bytes], None]
"""Given a session, what it says of its ring, and what it exported. Raises KVStoreError."""

Answer = Callable[[Session, unix_socket.Request, bytes], Generator[Packet, None, None]]
"""A call's session, head and message to the packets of its answer, errors among them."""


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """``threads`` answer at once, at most; ``max_sessions`` peers may be about to say who they are.

    Connections and staging memory have ``max_descriptors`` of the process in all.
    """

    max_sessions: int
    max_staging_bytes: int
    threads: int
    max_descriptors: int


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    since: float
    session: Session | None = None
    challenge: Challenge | None = None
    """Of its hello, until it is answered."""
    staging_map: mmap.mmap | None = field(default=None, repr=False)
    is_busy: bool = False
    """A thread serves it: nobody else may close its connection."""


class _Staging(NamedTuple):
    """A session's memory, and what of it was written."""

    memory: Bytes
    written: WrittenPages


class DataPlane:
    """Listen on *path*, check who connects, hand out *files*, take in staging memory, answer calls.

    *auth* has written down what was given and refused.

    Several threads wait for messages side by side: whoever gets one answers it, so that no
    call is handed from thread to thread. The end of the connection that brought a session's
    memory closes the session; connections that joined it are for calls only, answered in order.
    *clock* returns monotonic seconds. Raises InvalidRequestError when another server listens on
    *path*.
    """

    def __init__(
        self,
        path: Path,
        sessions: SessionTable,
        files: Mapping[unix_socket.Op, SlabFile],
        clock: Callable[[], float],
        limits: PlaneLimits,
        auth: SessionAuth,
    ) -> None:
        self.path = path
        self._sessions = sessions
        self._files = files
        self._clock = clock
        self._limits = limits
        self._auth = auth
        self.take_ring: TakeRing | None = None
        self._answer: Answer | None = None
        self._peers: dict[int, _Peer] = {}
        self._staging: dict[int, _Staging] = {}
        # Guards the two above, for dictionary operations only.
        self._lock = threading.Lock()
        self._listener = listen(path)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN | select.EPOLLONESHOT)
        self._wake_out, self._wake_in = os.pipe()
        self._poll.register(self._wake_out, select.EPOLLIN)
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="dataplane-keeper", daemon=True)
        self._threads: list[threading.Thread] = []
        """Those that serve; one is started when no other waits for messages."""
        self._begun = self._waiting = 0
        self._users = 2
        """Who still uses the poll: the threads, and whoever closes the plane."""
        self._no_thread_until_s = 0.0
        """Before that no more are started: the system gave none."""
        self._begin_thread()
        self._keeper.start()

    def _begin_thread(self) -> None:
        """Start another thread, up to the limit, unless the plane is closing."""
        with self._lock:
            is_late = self._clock() < self._no_thread_until_s
            if self._begun >= self._limits.threads or is_late or self._closed.is_set():
                return
            number = self._begun
            self._begun += 1
            self._waiting += 1
            self._users += 1
        thread = threading.Thread(target=self._run, name=f"dataplane-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more: those there are serve on
            with self._lock:
                self._begun -= 1
                self._waiting -= 1
                self._users -= 1
                self._no_thread_until_s = self._clock() + _THREAD_AGAIN_S
            if not number:
                raise
            logger.warning("data plane has no further thread", reason=str(error), threads=number)
            return
        self._threads.append(thread)

    def _leave_waiting(self) -> None:
        """A thread has something to do: another waits for messages in its place."""
        with self._lock:
            self._waiting -= 1
            is_last = not self._waiting
        if is_last:
            self._begin_thread()

    def answer_calls(self, answer: Answer) -> None:
        """Have *answer* answer calls; until then they are refused."""
        self._answer = answer

    def staging(self, session_id: int) -> Bytes:
        """Return the session's staging memory. Raises InvalidRequestError if it brought none."""
        return self._staging_of(session_id).memory

    def _staging_of(self, session_id: int) -> _Staging:
        staging = self._staging.get(session_id)
        if staging is None:
            raise InvalidRequestError("session_id", session_id, "attach staging memory first")
        return staging

    def check_written(self, session_id: int, offset: int, size_bytes: int) -> None:
        """Raise InvalidRequestError for a part of staging memory that its session never wrote.

        Reading it would allocate it, and the server would pay. What lies outside has no bytes.
        """
        memory, written = self._staging_of(session_id)
        if offset + size_bytes <= len(memory) and not written.has(offset, size_bytes):
            raise InvalidRequestError("offsets", offset, f"write {size_bytes} bytes there first")

    def is_alive(self) -> bool:
        """Whether every serving thread lives."""
        return all(thread.is_alive() for thread in (self._keeper, *self._threads))

    def close(self) -> None:
        """Stop serving, hang up on every peer and remove the socket. Idempotent.

        A call that still sleeps out its deadline is waited for only a moment.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake_in, b".")
        deadline = self._clock() + _END_WITHIN_S
        for thread in (self._keeper, *self._threads):
            thread.join(max(0.0, deadline - self._clock()))
        for peer in list(self._peers.values()):
            if self._claim(peer):
                self._hang_up(peer)
            else:  # closed by the thread that serves it, woken by this
                with suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        """Close what the threads wait on, once nobody does."""
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._poll.close()
            os.close(self._wake_out)
            os.close(self._wake_in)

    # --- threads

    def _run(self) -> None:
        """Serve what comes."""
        try:
            while not self._closed.is_set():
                for descriptor, _ in self._poll.poll(None, 1):
                    self._leave_waiting()
                    if descriptor == self._listener.fileno():
                        self._accept()
                    else:
                        self._serve(descriptor)
                    with self._lock:
                        self._waiting += 1
        finally:
            self._let_go()

    def _keep(self) -> None:
        """Keep out who does not say who they are."""
        try:
            while not self._closed.wait(_POLL_S):
                self._drop_idlers()
        finally:
            self._let_go()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            connection = None  # who connected is gone again
        except OSError as error:
            logger.warning("data plane cannot accept", reason=str(error))
            connection = None
            self._closed.wait(_POLL_S)  # out of descriptors: some may be closed meanwhile
        with suppress(OSError, ValueError):  # closing
            self._poll.modify(self._listener, select.EPOLLIN | select.EPOLLONESHOT)
        if connection is not None:
            self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        is_welcome = is_trusted(connection)
        if not is_welcome:
            self._auth.note(None, _ATTACH, PermissionDeniedError.__name__, 0, _ORIGIN)
        with self._lock:
            strangers = sum(peer.session is None for peer in self._peers.values())
            has_room = strangers < self._limits.max_sessions and self._has_room(1)
            if is_welcome and has_room:
                peer = self._peers[connection.fileno()] = _Peer(connection, self._clock())
        if not is_welcome or not has_room:
            connection.close()
            if is_welcome:
                logger.warning(
                    "data plane hung up on a connection: it has as many as it may",
                    descriptors=self._limits.max_descriptors,
                    unknown=strangers,
                    fix="raise ulimit -n, or --max-sessions",
                )
            return
        try:
            self._poll.register(connection, select.EPOLLIN | select.EPOLLONESHOT)
        except (OSError, ValueError):  # no room for more, or closing
            self._hang_up(peer)

    def _has_room(self, descriptors: int) -> bool:
        """Whether so many more are left for peers. For holders of the lock."""
        used = len(self._peers) + _STAGING_DESCRIPTORS * len(self._staging)
        return used + descriptors <= self._limits.max_descriptors

    def _drop_idlers(self) -> None:
        """Hang up on peers that never said who they are, and on those whose session ended."""
        oldest = self._clock() - _ATTACH_WITHIN_S
        for peer in list(self._peers.values()):
            is_silent = peer.session is None and peer.since < oldest
            if (is_silent or (peer.session and peer.session.is_closed)) and self._claim(peer):
                self._hang_up(peer)

    def _claim(self, peer: _Peer | None) -> bool:
        """Whether the peer is now ours to serve, until its ``is_busy`` ends."""
        with self._lock:
            if peer is None or peer.is_busy:
                return False
            peer.is_busy = True
            return True

    def _serve(self, descriptor: int) -> None:
        peer = self._peers.get(descriptor)
        if peer is None or not self._claim(peer):
            return
        try:
            stays = self._take_all(peer) and not self._closed.is_set()
        except OSError:
            stays = False
        if not stays:
            self._hang_up(peer)
            return
        peer.is_busy = False
        # From here on others may hang up on it: then its socket is closed, which is a ValueError.
        with suppress(OSError, ValueError):
            self._poll.modify(peer.connection, select.EPOLLIN | select.EPOLLONESHOT)

    # --- messages

    def _take_all(self, peer: _Peer) -> bool:
        """Answer what waits: False when the peer hung up or is to be hung up on.

        Calls that were sent ahead are taken one behind the other, and wake no thread each.
        """
        for _ in range(_IN_A_ROW):
            try:
                message, descriptors, flags, _ = socket.recv_fds(
                    peer.connection, MAX_PACKET_BYTES + 1, 4
                )
            except BlockingIOError:
                return True
            if not self._take(peer, message, descriptors, flags):
                return False
        return True

    def _take(self, peer: _Peer, message: bytes, descriptors: list[int], flags: int) -> bool:
        """Answer one message. False when the peer hung up or is to be hung up on."""
        request: unix_socket.Request | None = None
        try:
            if not message:
                return False
            request = unix_socket.Request.unpack(message[: unix_socket.HEADER_BYTES])
            body = message[unix_socket.HEADER_BYTES :]
            if len(message) > MAX_PACKET_BYTES or flags & socket.MSG_TRUNC:
                raise InvalidRequestError("message", len(message), f"at most {MAX_PACKET_BYTES}")
            if request.op is unix_socket.Op.call:
                return self._take_call(peer, request, body)
            if body:
                raise InvalidRequestError(
                    "message", len(message), f"send {unix_socket.HEADER_BYTES}"
                )
            self._obey(peer, request, descriptors)
        except KVStoreError as error:
            self._refuse(peer, request, error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _refuse(
        self, peer: _Peer, request: unix_socket.Request | None, error: KVStoreError
    ) -> None:
        logger.info("data plane refused", reason=str(error))
        if request is not None:  # or else it is noise, which nobody wants written down
            method = _METHODS.get(request.op, _ATTACH)
            self._auth.note(peer.session, method, type(error).__name__, 0, _ORIGIN)
        is_denied = isinstance(error, UnauthenticatedError | PermissionDeniedError)
        reply = unix_socket.Reply.denied if is_denied else unix_socket.Reply.invalid
        peer.connection.send(unix_socket.pack_reply(reply))

    def _take_call(self, peer: _Peer, request: unix_socket.Request, body: bytes) -> bool:
        if peer.session is None:
            raise UnauthenticatedError("attach or join before calling")
        if self._answer is None:
            raise InvalidRequestError("op", request.op, "this server takes no calls here")
        with closing(self._answer(peer.session, request, body)) as packets:
            return self._send(peer.connection, packets)

    def _send(self, connection: socket.socket, packets: Iterable[Packet]) -> bool:
        """Send *packets*; False once the peer let us wait SEND_WITHIN_S in all."""
        left_s = float(SEND_WITHIN_S)
        for packet in packets:
            while True:
                try:
                    connection.send(packet)
                except BlockingIOError:
                    started = self._clock()
                    if left_s <= 0 or not can_send(connection, left_s):
                        return False
                    left_s -= self._clock() - started
                else:
                    break
        return True

    def _obey(self, peer: _Peer, request: unix_socket.Request, descriptors: list[int]) -> None:
        if request.op in (unix_socket.Op.slab, unix_socket.Op.extent):
            self._send_file(peer, request)
            return
        if request.op in (unix_socket.Op.attach, unix_socket.Op.ring) and len(descriptors) != 1:
            raise InvalidRequestError(request.op.name, len(descriptors), "bring one memfd")
        if request.op is unix_socket.Op.ring:
            self._ring(peer, request, descriptors[0])
        elif peer.session is not None:
            raise InvalidRequestError("op", request.op.name, "this connection has a session")
        elif request.op is unix_socket.Op.hello:
            peer.challenge = challenge = self._sessions.challenge(request.arg, request.token)
            proven = challenge.proof(unix_socket.Op.hello)
            peer.connection.send(unix_socket.pack_greeting(challenge.nonces[1], proven))
            return
        elif request.op is unix_socket.Op.attach:
            self._attach(peer, request, descriptors[0])
        else:
            self._join(peer, request)
        peer.connection.send(unix_socket.pack_reply(unix_socket.Reply.ok))

    def _send_file(self, peer: _Peer, request: unix_socket.Request) -> None:
        session = self._admitted(peer, request.op)
        if request.op is unix_socket.Op.extent and "write" not in session.roles:
            # As the server's user it can open the file anew through /proc, for writing too.
            raise PermissionDeniedError("Extent: this session may not write, and gets copies")
        file = self._files.get(request.op)
        if file is None:
            raise InvalidRequestError("op", request.op.name, "this server shares no files")
        try:
            descriptor, size_bytes = file(request.arg, session.tenant)
        except OSError as error:  # out of descriptors, say: no reason to end the session
            raise TierUnavailableError(request.op.name, f"cannot be opened: {error}") from None
        try:
            reply = unix_socket.pack_reply(unix_socket.Reply.ok, size_bytes)
            socket.send_fds(peer.connection, [reply], [descriptor])
        finally:
            os.close(descriptor)
        self._auth.note(session, _METHODS[request.op], "OK", 0, _ORIGIN)

    def _admitted(self, peer: _Peer, op: unix_socket.Op) -> Session:
        """Return the peer's session. Raises UnauthenticatedError, PermissionDeniedError."""
        session = peer.session
        if session is None or session.is_closed:
            raise UnauthenticatedError(f"{op.name}: attach with a session that is open first")
        # The calls that lead to it count for the tenant's rate, it does not.
        check_session_role(session.roles, _METHODS[op])
        return session

    def _attach(self, peer: _Peer, request: unix_socket.Request, descriptor: int) -> None:
        most_bytes = self._limits.max_staging_bytes
        memory = unix_socket.map_sealed(descriptor, most_bytes, unix_socket.STAGING_SEALS)
        if len(memory) != request.arg:
            raise InvalidRequestError("staging", len(memory), f"not the {request.arg} it says")
        session = _proven(peer, request)
        with self._lock:
            if session.session_id in self._staging:
                raise InvalidRequestError("attach", session.session_id, "attach once; then join")
            if not self._has_room(_STAGING_DESCRIPTORS):
                most = self._limits.max_descriptors
                raise QuotaExceededError("descriptors", most, "the Unix socket: raise ulimit -n")
            written = WrittenPages(os.dup(descriptor), len(memory))
            self._staging[session.session_id] = _Staging(np.frombuffer(memory, np.uint8), written)
            peer.session, peer.staging_map = session, memory
            session.is_attached = True

    def _ring(self, peer: _Peer, request: unix_socket.Request, descriptor: int) -> None:
        session = self._admitted(peer, request.op)
        if peer.staging_map is None:
            raise UnauthenticatedError("bring a ring on the connection that attached")
        if self.take_ring is None:
            raise InvalidRequestError("op", request.op.name, "this server has no gpu tier")
        exported = unix_socket.map_sealed(descriptor, self._limits.max_staging_bytes)
        self.take_ring(session, request, np.frombuffer(exported, np.uint8))
        self._auth.note(session, _METHODS[request.op], "OK", 0, _ORIGIN)

    def _join(self, peer: _Peer, request: unix_socket.Request) -> None:
        session = _proven(peer, request)
        with self._lock:
            if session.session_id not in self._staging:
                raise InvalidRequestError("join", session.session_id, "attach first")
            joined = sum(other.session is session for other in self._peers.values())
            if joined >= CONNECTIONS_PER_SESSION:
                raise QuotaExceededError(
                    "connections_per_session", CONNECTIONS_PER_SESSION, session.client
                )
            peer.session = session

    def _hang_up(self, peer: _Peer) -> None:
        staging: _Staging | None = None
        with self._lock:
            if self._peers.pop(peer.connection.fileno(), None) is None:
                return
            if peer.session is not None and peer.staging_map is not None:
                # A commit that runs holds its own reference to the mapping until it is done.
                staging = self._staging.pop(peer.session.session_id)
        if staging is not None:  # a look at it may still run, which takes a moment
            staging.written.close()
        with suppress(OSError, ValueError):
            self._poll.unregister(peer.connection)
        peer.connection.close()
        if peer.session is not None and peer.staging_map is not None:
            self._sessions.close(peer.session.session_id)


def _proven(peer: _Peer, request: unix_socket.Request) -> Session:
    """Return the session of the peer's hello, once: its next proof needs another.

    Raises UnauthenticatedError, and PermissionDeniedError for who has no use for memory: another
    server, an admin.
    """
    challenge, peer.challenge = peer.challenge, None
    if challenge is None or not hmac.compare_digest(challenge.proof(request.op), request.token):
        raise UnauthenticatedError("say hello, and prove that the session is yours")
    session = challenge.session
    if session.is_closed:
        raise UnauthenticatedError("the session ended; open another")
    if not session.roles & {"read", "write"}:
        raise PermissionDeniedError("Attach: this session may neither read nor write")
    return session
