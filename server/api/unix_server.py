"""The Unix socket for clients of this host and user: descriptors of memory, and calls."""

from __future__ import annotations

import hmac
import mmap
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.unix_socket import (
    HEADER_BYTES,
    MAX_PACKET_BYTES,
    STAGING_SEALS,
    Op,
    Packet,
    Reply,
    Request,
    map_sealed,
    pack_greeting,
    pack_reply,
    peer_ids,
)
from kvstore.server.api.unix_calls import send_packets
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Challenge, Session, SessionTable

CONNECTIONS_PER_SESSION = 16
MAX_STAGING_BYTES = 1 << 30
_ACCEPT_AGAIN_S = 0.5
_ATTACH_WITHIN_S = 5.0
_END_WITHIN_S = 2.0
_THREAD_AGAIN_S = 10.0
_STAGING_DESCRIPTORS = 2
"""Descriptors of a session's memory: its own and that of the map."""
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_IN_A_ROW = 16
"""Messages of one peer before others are served."""
_BACKLOG = 128
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_METHODS = {Op.slab: "Slab", Op.extent: "Extent", Op.ring: "Ring"}
"""Names of operations for roles and the audit log; all others attach."""
_ATTACH = "Attach"
_ORIGIN = "unix"

logger = structlog.get_logger(__name__)

SlabFile = Callable[[int, str], tuple[int, int]]
"""(id of a slab or extent, tenant) -> (descriptor, size); the caller closes the descriptor.

Raises KVStoreError.
"""

TakeRing = Callable[[Session, Request, Bytes], None]
"""(session, request, memory of the ring). Raises KVStoreError."""

Answer = Callable[[Session, Request, bytes], Generator[Packet, None, None]]
"""(session, head, message of a call) -> packets of the answer, errors included."""


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    since: float
    session: Session | None = None
    challenge: Challenge | None = None
    """From its hello, until it is answered."""
    staging: Staging | None = None
    """The memory that it attached."""


class Staging:
    """A session's *memory*, and which of its pages were written: reading an unwritten page would
    allocate it at the server's expense.

    Its seals prevent holes from returning, so each page is checked once. Thread-safe.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self.memory: Bytes = np.frombuffer(memory, np.uint8)
        self._descriptor = os.dup(descriptor)
        self._known = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.bool_)
        self._lock = threading.Lock()  # guards the two above, also during lseek

    def part(self, offset: int, size_bytes: int) -> Bytes:
        """Return a part of the memory, cut at its end.

        Raises InvalidRequestError for a part that was never written.
        """
        is_inside = 0 < size_bytes <= len(self.memory) - offset
        if is_inside and not self._has(offset, size_bytes):
            raise InvalidRequestError("offsets", offset, f"write {size_bytes} bytes there first")
        return self.memory[offset : offset + size_bytes]

    def _has(self, offset: int, size_bytes: int) -> bool:
        first, stop = offset // mmap.PAGESIZE, -(-(offset + size_bytes) // mmap.PAGESIZE)
        with self._lock, suppress(OSError):  # holes to the end, or closed
            while not self._known[first:stop].all():
                first += int(self._known[first:stop].argmin())
                start = first * mmap.PAGESIZE
                if os.lseek(self._descriptor, start, os.SEEK_DATA) != start:
                    return False
                hole = os.lseek(self._descriptor, start, os.SEEK_HOLE)
                self._known[first : -(-hole // mmap.PAGESIZE)] = True
            return True
        return False

    def close(self) -> None:
        """Close the descriptor. Call once."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class UnixServer:
    """Listen on *path*, check peers, share *files*, attach staging memory, answer calls.

    *authorizer* records grants and refusals. Up to *threads* threads wait for messages; the one
    that receives a message answers it, so that no call changes threads. The end of the connection
    that attached a session's memory closes the session; connections that joined it are for calls
    only, answered in order. At most ``sessions.limit`` peers may be without a session; connections
    and staging memory use at most *max_descriptors* in total. ``tick`` is called a few times a
    second. Raises InvalidRequestError when another server listens on *path*.
    """

    def __init__(
        self,
        path: Path,
        sessions: SessionTable,
        files: Mapping[Op, SlabFile],
        authorizer: Authorizer,
        threads: int,
        max_descriptors: int,
    ) -> None:
        self.path = path
        self._sessions = sessions
        self._files = files
        self._clock = authorizer.clock
        self._authorizer = authorizer
        self._most_threads = threads
        self._max_descriptors = max_descriptors
        self.take_ring: TakeRing | None = None
        self.answer: Answer | None = None
        """Answers calls; they are refused while it is None."""
        self._peers: dict[int, _Peer] = {}
        self._staging: dict[int, Staging] = {}
        # Guards the two above and the counts below; held briefly.
        self._lock = threading.Lock()
        self._listener = listen(path)
        self._poll = select.epoll()
        self._poll.register(self._listener, _ONCE)
        self._wakeup = os.eventfd(0)
        self._poll.register(self._wakeup, select.EPOLLIN)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        """Serving threads; one is started when no other waits for messages."""
        self._begun = self._waiting = 0
        self._no_thread_until_s = 0.0
        """No thread is started before this time, after the system refused one."""
        self._begin_thread()

    def _begin_thread(self) -> None:
        with self._lock:
            is_late = self._clock() < self._no_thread_until_s
            if self._begun >= self._most_threads or is_late or self._closed.is_set():
                return
            number = self._begun
            self._begun += 1
            self._waiting += 1
        thread = threading.Thread(target=self._run, name=f"unix-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system refuses more: the others serve on
            with self._lock:
                self._begun -= 1
                self._waiting -= 1
                self._no_thread_until_s = self._clock() + _THREAD_AGAIN_S
            if not number:
                raise
            logger.warning(
                "cannot start a thread", server="unix", reason=str(error), threads=number
            )
            return
        self._threads.append(thread)

    def staging(self, session_id: int) -> Staging:
        """Return the session's staging memory. Raises InvalidRequestError without one."""
        staging = self._staging.get(session_id)
        if staging is None:
            raise InvalidRequestError("session_id", session_id, "attach staging memory first")
        return staging

    def is_alive(self) -> bool:
        """Whether all serving threads are alive."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop serving, close all connections and remove the socket. Idempotent.

        A call that still waits for its deadline delays this by at most _END_WITHIN_S.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        os.eventfd_write(self._wakeup, 1)
        deadline = self._clock() + _END_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        self._poll.unregister(self._wakeup)
        with self._lock:
            for peer in self._peers.values():
                with suppress(OSError):  # closed below, or by the thread that serves it
                    peer.connection.shutdown(socket.SHUT_RDWR)
        while ended := self._poll.poll(0):
            for descriptor, _ in ended:
                self._serve(descriptor)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        # A thread that still runs does not poll again, and finds them closed.
        self._poll.close()
        os.close(self._wakeup)

    # --- threads

    def _run(self) -> None:
        while not self._closed.is_set():
            for descriptor, _ in self._poll.poll(None, 1):
                with self._lock:
                    self._waiting -= 1
                    is_last = not self._waiting
                if is_last:  # start another thread to wait
                    self._begin_thread()
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(descriptor)
                with self._lock:
                    self._waiting += 1

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
        except BlockingIOError:
            return  # the peer has disconnected
        except OSError as error:
            logger.warning("cannot accept", server="unix", reason=str(error))
            self._closed.wait(_ACCEPT_AGAIN_S)  # out of descriptors: wait until some are closed
            return
        finally:
            with suppress(OSError, ValueError):  # closing
                self._poll.modify(self._listener, _ONCE)
        if not is_trusted(connection):
            self._authorizer.note_on(None, _ATTACH, PermissionDeniedError.__name__, 0, _ORIGIN)
            connection.close()
            return
        with self._lock:
            unattached = sum(peer.session is None for peer in self._peers.values())
            has_space = unattached < self._sessions.limit and self._has_space(1)
            if has_space:
                peer = self._peers[connection.fileno()] = _Peer(connection, self._clock())
        if not has_space:
            connection.close()
            logger.warning(
                "connection closed: too many connections", server="unix",
                descriptors=self._max_descriptors, unknown=unattached,
                fix="raise ulimit -n, or --max-sessions",
            )  # fmt: skip
            return
        try:
            self._poll.register(connection, _ONCE)
        except (OSError, ValueError):  # epoll is full, or closing
            self._hang_up(peer)

    def _has_space(self, descriptors: int) -> bool:
        used = len(self._peers) + _STAGING_DESCRIPTORS * len(self._staging)  # under the lock
        return used + descriptors <= self._max_descriptors

    def tick(self) -> None:
        """Disconnect peers that did not attach in time, and those whose session ended."""
        oldest = self._clock() - _ATTACH_WITHIN_S
        with self._lock:  # a peer leaves the table before its descriptor can be reused
            for peer in self._peers.values():
                is_over = peer.session.is_closed if peer.session else peer.since < oldest
                if is_over:
                    with suppress(OSError):  # wakes a thread that closes it, after any answer
                        peer.connection.shutdown(socket.SHUT_RD)

    def _serve(self, descriptor: int) -> None:
        """Answer the messages of a peer; pipelined calls do not wake a thread each."""
        peer = self._peers.get(descriptor)
        if peer is None:
            return
        stays = True
        try:
            for _ in range(0 if self._closed.is_set() else _IN_A_ROW):
                try:
                    received = socket.recv_fds(peer.connection, MAX_PACKET_BYTES + 1, 4)
                except BlockingIOError:
                    break
                stays = self._take(peer, *received[:3])
                if not stays:
                    break
        except OSError:
            stays = False
        if not stays or self._closed.is_set():
            self._hang_up(peer)
        else:
            with suppress(OSError, ValueError):  # closing
                self._poll.modify(peer.connection, _ONCE)

    # --- messages

    def _take(self, peer: _Peer, message: bytes, descriptors: list[int], flags: int) -> bool:
        """Process a message; return False when the connection must be closed."""
        request: Request | None = None
        try:
            if not message:
                return False
            request = Request.unpack(message[:HEADER_BYTES])
            body = message[HEADER_BYTES:]
            if len(message) > MAX_PACKET_BYTES or flags & socket.MSG_TRUNC:
                raise InvalidRequestError("message", len(message), f"at most {MAX_PACKET_BYTES}")
            if request.op is Op.call:
                if peer.session is None:
                    raise UnauthenticatedError("attach or join before calling")
                if self.answer is None:
                    raise InvalidRequestError("op", request.op, "this server accepts no calls here")
                with closing(self.answer(peer.session, request, body)) as packets:
                    return send_packets(peer.connection, packets, self._clock)
            if body:
                raise InvalidRequestError("message", len(message), f"send {HEADER_BYTES}")
            self._obey(peer, request, descriptors)
        except KVStoreError as error:
            self._refuse(peer, request, error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _refuse(self, peer: _Peer, request: Request | None, error: KVStoreError) -> None:
        logger.info("refused", method="unix", reason=str(error))
        if request is not None:  # else noise, which is not audited
            method = _METHODS.get(request.op, _ATTACH)
            self._authorizer.note_on(peer.session, method, type(error).__name__, 0, _ORIGIN)
        is_denied = isinstance(error, UnauthenticatedError | PermissionDeniedError)
        peer.connection.send(pack_reply(Reply.denied if is_denied else Reply.invalid))

    def _obey(self, peer: _Peer, request: Request, descriptors: list[int]) -> None:
        op, reply = request.op, pack_reply(Reply.ok)
        if op in (Op.attach, Op.ring) and len(descriptors) != 1:
            raise InvalidRequestError(op.name, len(descriptors), "send one memfd")
        if op not in _METHODS and peer.session is not None:
            raise InvalidRequestError("op", op.name, "this connection has a session")
        if op in (Op.slab, Op.extent):
            self._send_file(peer, request)
            return
        if op is Op.ring:
            self._ring(peer, request, descriptors[0])
        elif op is Op.hello:
            peer.challenge = challenge = self._sessions.challenge(request.arg, request.token)
            reply = pack_greeting(challenge.nonces[1], challenge.proof(Op.hello))
        elif op is Op.attach:
            self._attach(peer, request, descriptors[0])
        else:
            self._join(peer, request)
        peer.connection.send(reply)

    def _send_file(self, peer: _Peer, request: Request) -> None:
        session = self._admitted(peer, request.op)
        if request.op is Op.extent and "write" not in session.roles:
            # It runs as the server's user and could reopen the file through /proc for writing.
            raise PermissionDeniedError("Extent: needs role write; this session reads copies")
        file = self._files.get(request.op)
        if file is None:
            raise InvalidRequestError("op", request.op.name, "this server shares no files")
        try:
            descriptor, size_bytes = file(request.arg, session.tenant)
        except OSError as error:  # perhaps out of descriptors: the session goes on
            raise TierUnavailableError(request.op.name, f"cannot be opened: {error}") from None
        try:
            reply = pack_reply(Reply.ok, size_bytes)
            socket.send_fds(peer.connection, [reply], [descriptor])
        finally:
            os.close(descriptor)
        self._authorizer.note_on(session, _METHODS[request.op], "OK", 0, _ORIGIN)

    def _admitted(self, peer: _Peer, op: Op) -> Session:
        session = peer.session
        if session is None or session.is_closed:
            raise UnauthenticatedError(f"{op.name}: attach with an open session first")
        # Only the calls that lead to it count for the tenant's rate.
        self._authorizer.admit_on(session, _METHODS[op], is_counted=False)
        return session

    def _attach(self, peer: _Peer, request: Request, descriptor: int) -> None:
        memory = map_sealed(descriptor, MAX_STAGING_BYTES, STAGING_SEALS)
        if len(memory) != request.arg:
            raise InvalidRequestError("staging", len(memory), f"not the stated {request.arg} bytes")
        session = _proven(peer, request)
        with self._lock:
            if session.session_id in self._staging:
                raise InvalidRequestError("attach", session.session_id, "attach once; then join")
            if not self._has_space(_STAGING_DESCRIPTORS):
                fix = "the Unix socket: raise ulimit -n"
                raise QuotaExceededError("descriptors", self._max_descriptors, fix)
            peer.staging = self._staging[session.session_id] = Staging(memory, descriptor)
            peer.session = session
            session.is_attached = True

    def _ring(self, peer: _Peer, request: Request, descriptor: int) -> None:
        session = self._admitted(peer, request.op)
        if peer.staging is None:
            raise UnauthenticatedError("send the ring on the connection that attached")
        if self.take_ring is None:
            raise InvalidRequestError("op", request.op.name, "this server has no gpu tier")
        exported = map_sealed(descriptor, MAX_STAGING_BYTES)
        self.take_ring(session, request, np.frombuffer(exported, np.uint8))
        self._authorizer.note_on(session, _METHODS[request.op], "OK", 0, _ORIGIN)

    def _join(self, peer: _Peer, request: Request) -> None:
        session = _proven(peer, request)
        with self._lock:
            if session.session_id not in self._staging:
                raise InvalidRequestError("join", session.session_id, "attach first")
            joined = sum(other.session is session for other in self._peers.values())
            if joined >= CONNECTIONS_PER_SESSION:
                most = CONNECTIONS_PER_SESSION
                raise QuotaExceededError("connections_per_session", most, session.client)
            peer.session = session

    def _hang_up(self, peer: _Peer) -> None:
        session, staging = peer.session, peer.staging
        with self._lock:
            if self._peers.pop(peer.connection.fileno(), None) is None:
                return
            if session is not None and staging is not None:
                del self._staging[session.session_id]
        with suppress(OSError, ValueError):
            self._poll.unregister(peer.connection)
        peer.connection.close()
        if session is not None and staging is not None:
            # A running commit holds its own reference to the mapping.
            staging.close()
            self._sessions.close(session.session_id)


def _proven(peer: _Peer, request: Request) -> Session:
    """Return the session of the peer's hello, once: the next proof needs another hello."""
    challenge, peer.challenge = peer.challenge, None
    if challenge is None or not hmac.compare_digest(challenge.proof(request.op), request.token):
        raise UnauthenticatedError("send a hello, then a valid proof for the session")
    session = challenge.session
    if session.is_closed:
        raise UnauthenticatedError("the session ended; open another")
    if not session.roles & {"read", "write"}:  # a peer's or an admin's
        raise PermissionDeniedError("Attach: needs role read or write")
    return session


# --- the socket


def is_trusted(connection: socket.socket) -> bool:
    """Whether the peer runs as this server's user, or as root."""
    return peer_ids(connection)[1] in (os.geteuid(), 0)


def listen(path: Path) -> socket.socket:
    """Return a listening SOCK_SEQPACKET socket at *path*, for this user only.

    Raises InvalidRequestError when the path is unusable or another server listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _make_folder(path.parent)
        if os.path.lexists(path):
            if not path.is_socket():
                fix = "not a socket; choose another path with --socket"
                raise InvalidRequestError("socket_path", str(path), fix)
            _refuse_second_server(path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            fix = f"{error.strerror or error}; choose another with --socket"
            raise InvalidRequestError("socket_path", str(path), fix) from None
        raise
    return listener


def _make_folder(folder: Path) -> None:
    missing = [one for one in folder.parents if not one.exists()]
    for one in (*reversed(missing), folder):
        one.mkdir(mode=0o700, exist_ok=True)
    real, owners = folder.resolve(), _trusted_owners()
    folders = {real, *real.parents, *folder.parents}
    swappable = [one for one in folders if _is_swappable(one, owners)]
    if swappable:
        fix = f"others could replace the socket in {max(swappable)}: chmod go-w, or give --socket"
        raise InvalidRequestError("socket_path", str(folder), fix)


def _is_swappable(folder: Path, owners: set[int]) -> bool:
    """Whether users other than *owners* can replace an entry of *folder*."""
    found = folder.stat()
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return bool(is_open) or found.st_uid not in owners


def _trusted_owners() -> set[int]:
    """Return the uids of this user and of root as seen in this user namespace."""
    root = 0
    ranges = [line.split() for line in _UID_MAP.read_text().splitlines()]
    if ranges and all(int(first) for first, *_ in ranges):  # root is not mapped
        root = int(_OVERFLOW_UID.read_text())
    return {os.geteuid(), root}


def _refuse_second_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
        except BlockingIOError:
            pass  # the backlog is full: a server listens
    fix = "another server listens there; stop it or choose --socket"
    raise InvalidRequestError("socket_path", str(path), fix)
