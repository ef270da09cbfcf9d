"""The ZeroMQ sockets of published events: limits, access control and keys."""

from __future__ import annotations

import os
import re
import socket as sockets
import stat
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security.key_files import WatchedFile
from kvstore.server.settings.values import parse_endpoint

Socket: TypeAlias = "zmq.Socket[bytes]"

SECRET_NAME = "server.secret"  # noqa: S105 - a file's name


def load_key(folder: Path) -> bytes:
    """Return the secret key in *folder*, as Z85 text; generate it if there is none.

    Raises InvalidRequestError for an unusable key, or one that others could read.
    """
    path = folder / SECRET_NAME
    fix = "others could read the key; chown it to this user, chmod go="
    _make_private(folder, "events_keys", fix)
    try:
        if not path.exists():
            # Atomic: if two servers start together, one wins.
            with tempfile.NamedTemporaryFile(dir=folder) as draft, suppress(FileExistsError):
                draft.write(zmq.curve_keypair()[1] + b"\n")
                draft.flush()
                os.fsync(draft.fileno())
                os.link(draft.name, path)  # of mode 0600
        _check_private(path, "events_keys", fix)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise _unusable("events_keys", folder, error) from None
    try:
        zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        fix = "has no key of 40 characters; delete it to generate another"
        raise InvalidRequestError("events_keys", str(path), fix) from None
    return secret


def _make_private(folder: Path, name: str, fix: str) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, name, fix)
    except OSError as error:
        raise _unusable(name, folder, error) from None


def _check_private(path: Path, name: str, fix: str) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidRequestError(name, str(path), fix)


def _unusable(name: str, folder: Path, error: OSError) -> InvalidRequestError:
    fix = f"{error.strerror}; name a folder that this user can write"
    return InvalidRequestError(name, str(folder), fix)


_EVENT = struct.Struct("=Hi")


class ConnectionCap:
    """Limits *socket*, not bound yet, to *most* connections; *refused* is called for each beyond.

    ZeroMQ accepts every connection, and each costs a descriptor and buffers before authentication.
    A monitor socket reports connections: beyond the limit the latest is closed.

    For the thread that owns the socket: call ``hold`` when ``news`` is readable.
    """

    def __init__(self, socket: Socket, most: int, refused: Callable[[], object]) -> None:
        self._socket = socket
        self._most = most
        self._refused = refused
        self._open: set[int] = set()
        where = f"inproc://connections-{id(self):x}"
        # Unbounded, as ZeroMQ's own thread writes here and would block. Few events arrive between
        # two iterations of the loop.
        self.news = socket.context.socket(zmq.PAIR)
        self.news.rcvhwm = 0
        socket.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.news.connect(where)

    def hold(self) -> None:
        """Process connects and disconnects, and close connections beyond the limit."""
        with suppress(zmq.Again):
            while True:
                kind, descriptor = _EVENT.unpack(self.news.recv_multipart(zmq.NOBLOCK)[0])
                if kind == zmq.EVENT_DISCONNECTED:
                    self._open.discard(descriptor)
                elif len(self._open) < self._most:
                    self._open.add(descriptor)
                else:
                    self._hang_up(descriptor)
                    self._refused()

    def _hang_up(self, descriptor: int) -> None:
        """Shut down a connection as its peer would; ZeroMQ then closes it."""
        scheme, _, place = _bound(self._socket).partition("://")
        family = sockets.AF_UNIX if scheme == "ipc" else sockets.AF_INET6
        expected = place if scheme == "ipc" else (int(place.rpartition(":")[2]),)
        with suppress(OSError):  # already closed
            own_descriptor = os.dup(descriptor)
            try:
                link = sockets.socket(family, sockets.SOCK_STREAM, fileno=own_descriptor)
            except OSError:  # no socket; ``fromfd`` would not close it then
                os.close(own_descriptor)
                return
            with link:
                own = link.getsockname()  # a path, or host, port and more
                # The descriptor may be reused: only connections to this address are shut down.
                if expected in (own, own[1:2]):
                    link.shutdown(sockets.SHUT_RDWR)


def _bound(socket: Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode()  # tcp://HOST:PORT or ipc://PATH


SEND_QUEUE_BATCHES = 10_000
"""Queue of one reader. Beyond it batches are lost, which the reader detects by their numbers."""
REPLAY_QUEUE_BATCHES = 64
"""Queue of one replay. Beyond it the answer waits."""
MAX_CONNECTIONS = 64
"""Limit per socket. Further connections are closed."""
MAX_REQUEST_BYTES = 1024
"""Limit of a reader's messages: a subscription, a number, and 400 for authentication."""
_HANDSHAKE_MS = 5000
_HEARTBEAT_MS, _SILENCE_MS = 5000, 15_000
_HANDLER = "inproc://zeromq.zap.01"  # authenticates each connection (ZeroMQ RFC 27)
_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with
_KEY = re.compile(rb"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


def parse_readers(data: bytes) -> frozenset[bytes]:
    """Return the keys of a file, one per line, with ``;`` comments. Raises InvalidRequestError."""
    lines = [line.partition(b";")[0].strip() for line in data.splitlines()]
    keys = [line for line in lines if line]
    for key in keys:
        if not _KEY.fullmatch(key):
            fix = "give a CURVE public key of 40 characters (Z85) on each line"
            raise InvalidRequestError("events_readers", key.decode("ascii", "replace"), fix)
    return frozenset(keys)


def bind_to(socket: Socket, endpoint: str) -> str:
    """Bind *socket* to *endpoint*, host:port or ipc:PATH; return the address to connect to.

    It has ``*`` for the host when every interface is bound.
    """
    if endpoint.startswith("ipc:"):
        socket.bind(f"ipc://{endpoint.removeprefix('ipc:')}")
        return _bound(socket)
    socket.ipv6 = endpoint.startswith("[")
    socket.bind(f"tcp://{endpoint}")
    bound = _bound(socket)
    return f"tcp://*:{urlsplit(bound).port}" if parse_endpoint(endpoint)[0] in _ANY_HOST else bound


class EventSockets:
    """A PUB socket and a ROUTER for replays, either of which may be None, with access control.

    With the server's *secret* key and *readers*, keys as Z85 text, connections authenticate by
    CURVE. ``addresses`` are those to connect to. *refused* is called for each connection beyond the
    limit. Raises InvalidRequestError.
    """

    def __init__(
        self,
        publish: str,
        replay: str,
        secret: bytes = b"",
        readers: WatchedFile[frozenset[bytes]] | None = None,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._secret, self.readers, self._refused = secret, readers, refused
        self._caps: list[ConnectionCap] = []
        self._poller = zmq.Poller()
        self.addresses: list[str] = []
        self.pub: Socket | None = None
        self.replay: Socket | None = None
        self._admission: Socket | None = None
        try:
            if readers is not None:
                self._admission = self._context.socket(zmq.REP)
                self._admission.bind(_HANDLER)
                self._poller.register(self._admission, zmq.POLLIN)
            if publish != "off":
                self.pub = self._bound(zmq.PUB, publish, "events")
            if replay != "off":
                self.replay = self._bound(zmq.ROUTER, replay, "events_replay")
                self._poller.register(self.replay, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    def _bound(self, kind: int, endpoint: str, name: str) -> Socket:
        if endpoint.startswith("ipc:"):
            fix = "others could connect; use a folder of this user only: chmod 700"
            _make_private(Path(endpoint.removeprefix("ipc:")).parent, name, fix)
        socket = self._context.socket(kind)
        socket.sndhwm = SEND_QUEUE_BATCHES
        if kind == zmq.ROUTER:
            socket.sndhwm = REPLAY_QUEUE_BATCHES
            socket.router_mandatory = True  # a full queue is an error, not a silent loss
        socket.rcvhwm = 64
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _SILENCE_MS
        socket.copy_threshold = 0  # replayed batches share memory, however many readers wait
        if self.readers is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._secret
            socket.setsockopt(zmq.ZAP_DOMAIN, b"events")
        self._caps.append(ConnectionCap(socket, MAX_CONNECTIONS, self._refused))
        self._poller.register(self._caps[-1].news, zmq.POLLIN)
        try:
            self.addresses.append(bind_to(socket, endpoint))
        except zmq.ZMQError as error:
            fix = f"{error.strerror}; is it in use? choose another address"
            raise InvalidRequestError(name, endpoint, fix) from None
        return socket

    def wait(self, timeout_ms: int) -> None:
        """Wait for a request or a connection."""
        self._poller.poll(timeout_ms)

    def admit(self) -> None:
        """Authenticate new connections, and close those beyond the limit."""
        for cap in self._caps:
            cap.hold()
        with suppress(zmq.Again):
            for _ in range(MAX_CONNECTIONS):  # bounded, so that events are not delayed
                if self._admission is None or self.readers is None:
                    return
                frames = self._admission.recv_multipart(zmq.NOBLOCK)
                version, request, _, _, _, mechanism, *proof = frames
                self.readers.refresh()
                is_key = mechanism == b"CURVE" and [len(one) for one in proof] == [32]
                is_known = is_key and z85.encode(proof[0]) in self.readers.value
                answer = (b"200", b"OK") if is_known else (b"400", b"unknown key")
                self._admission.send_multipart((version, request, *answer, b"", b""))

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        self._context.destroy(linger=0)
