"""The data plane of one host: descriptors of slabs and staging memory over a Unix socket."""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from kvstore.proto import shm
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, KVStoreError, UnauthenticatedError
from kvstore.server.sessions import Session, SessionTable

_CREDENTIALS = struct.Struct("3i")
_POLL_S = 0.5
_ATTACH_WITHIN_S = 5.0
_BACKLOG = 128

logger = structlog.get_logger(__name__)

SlabFile = Callable[[int, str], tuple[int, int]]
"""Slab id and tenant to a descriptor of the slab, ours to close, and its size.

Raises KVStoreError.
"""


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    since: float
    session: Session | None = None
    staging_map: mmap.mmap | None = field(default=None, repr=False)


class DataPlane:
    """Listen on *path*, check who connects, hand out slabs, take in staging memory.

    One thread serves all peers: messages are 32 bytes and never wait for each other. A peer's
    end closes its session. *clock* returns monotonic seconds.
    Raises InvalidRequestError when another server listens on *path*.
    """

    def __init__(
        self,
        path: Path,
        sessions: SessionTable,
        slab_file: SlabFile,
        clock: Callable[[], float],
        max_peers: int,
        max_staging_bytes: int,
    ) -> None:
        self.path = path
        self._sessions = sessions
        self._slab_file = slab_file
        self._clock = clock
        self._max_peers = max_peers
        self._max_staging_bytes = max_staging_bytes
        self._peers: dict[int, _Peer] = {}
        self._staging: dict[int, Bytes] = {}
        self._listener = _listen(path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_out, self._wake_in = os.pipe()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane", daemon=True)
        self._thread.start()

    def staging(self, session_id: int) -> Bytes:
        """Return the session's staging memory. Raises InvalidRequestError if it brought none."""
        staging = self._staging.get(session_id)
        if staging is None:
            raise InvalidRequestError("session_id", session_id, "attach staging memory first")
        return staging

    def is_alive(self) -> bool:
        """Whether the serving thread lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving, hang up on every peer and remove the socket. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake_in, b".")
        self._thread.join()
        for peer in list(self._peers.values()):
            self._hang_up(peer)
        self._listener.close()
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._peers:
                    self._serve(self._peers[key.fd])
            self._drop_silent_strangers()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("data plane cannot accept", reason=str(error))
            return
        if len(self._peers) >= self._max_peers or not _is_trusted(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._peers[connection.fileno()] = _Peer(connection, self._clock())
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop_silent_strangers(self) -> None:
        oldest = self._clock() - _ATTACH_WITHIN_S
        for peer in list(self._peers.values()):
            if peer.session is None and peer.since < oldest:
                self._hang_up(peer)

    def _serve(self, peer: _Peer) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(peer.connection, shm.MESSAGE_BYTES + 1, 4)
            if not message:
                self._hang_up(peer)
                return
            self._answer(peer, shm.Request.unpack(message), descriptors)
        except UnauthenticatedError:
            self._reply(peer, shm.Reply.denied)
        except KVStoreError as error:
            logger.info("data plane refused", reason=str(error))
            self._reply(peer, shm.Reply.invalid)
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up(peer)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, peer: _Peer, request: shm.Request, descriptors: list[int]) -> None:
        if request.op is shm.Op.attach:
            if peer.session is not None or len(descriptors) != 1:
                raise InvalidRequestError("attach", len(descriptors), "attach once, with one memfd")
            self._attach(peer, request, descriptors[0])
            self._reply(peer, shm.Reply.ok)
            return
        if peer.session is None:
            raise UnauthenticatedError("attach before asking for slabs")
        slab, size_bytes = self._slab_file(request.arg, peer.session.tenant)
        try:
            socket.send_fds(peer.connection, [shm.pack_reply(shm.Reply.ok, size_bytes)], [slab])
        finally:
            os.close(slab)

    def _attach(self, peer: _Peer, request: shm.Request, descriptor: int) -> None:
        if not shm.has_seals(descriptor, shm.SIZE_SEALS):
            raise InvalidRequestError("staging", descriptor, "seal its size against changes")
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != request.arg or not 0 < size_bytes <= self._max_staging_bytes:
            raise InvalidRequestError("staging", size_bytes, f"bring <= {self._max_staging_bytes}")
        session = self._sessions.attach(request.token)
        peer.session = session
        peer.staging_map = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        self._staging[session.session_id] = np.frombuffer(peer.staging_map, np.uint8)

    def _reply(self, peer: _Peer, reply: shm.Reply) -> None:
        try:
            peer.connection.send(shm.pack_reply(reply))
        except OSError:
            self._hang_up(peer)

    def _hang_up(self, peer: _Peer) -> None:
        descriptor = peer.connection.fileno()
        if self._peers.pop(descriptor, None) is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.session is not None:
            # A commit that runs holds its own reference to the mapping until it is done.
            self._staging.pop(peer.session.session_id, None)
            self._sessions.close(peer.session.session_id)


def _is_trusted(connection: socket.socket) -> bool:
    """Whether the peer runs as this server's user, or as root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (os.geteuid(), 0)


def _listen(path: Path) -> socket.socket:
    _make_folder(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if os.path.lexists(path):
            if not path.is_socket():
                raise InvalidRequestError(
                    "socket_path",
                    str(path),
                    "something else is there; choose another with --socket",
                )
            _refuse_second_server(path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, InvalidRequestError) as error:
        listener.close()
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(
            "socket_path", str(path), f"{error.strerror}; choose another with --socket"
        ) from None
    return listener


def _make_folder(folder: Path) -> None:
    """Make the socket's folder, or refuse one in which others could swap the socket."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InvalidRequestError(
            "socket_path", str(folder), f"{error.strerror}; choose another with --socket"
        ) from None
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_open or found.st_uid not in (os.geteuid(), 0):
        raise InvalidRequestError(
            "socket_path", str(folder), "others could swap the socket; use a folder of your own"
        )


def _refuse_second_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
    raise InvalidRequestError(
        "socket_path", str(path), "another server listens there; stop it or choose --socket"
    )
