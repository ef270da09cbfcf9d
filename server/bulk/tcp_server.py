"""The bulk channel: TCP connections over which peers read this server's memory, and clients get
and put frames.

One thread waits on all idle connections; other threads answer requests. Each connection that has
not attached yet has its own thread. Clients, including guests of peers, share a pool of threads;
gets that resume after a stall have another.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import structlog

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket, hang_up, make_tls
from kvstore.server.api.interceptors import known_errors
from kvstore.server.bulk.service import METHODS, BulkService, Caller
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import is_loopback, join_endpoint, parse_endpoint

HELLO_S = 4.0
"""Time for the handshake and the first message."""
MAX_STRANGERS = 64
"""Connections that have not attached. For one more, the oldest from the address with the most is
closed, so that no address blocks the others."""
MAX_CLIENT_STREAMS = 512
"""At most half of all streams, so that peers can connect."""
STREAMS_PER_SESSION = 16
GUEST_STREAMS_PER_SESSION = 128
"""Streams of all clients of one peer."""
MAX_STREAMS = 1024
"""At most an eighth of the remaining descriptors."""
MAX_WAITING_GETS = 64
"""Stalled gets that hold their lease; the connection of a further one is closed."""
END_THREADS = 4
"""Threads that end stalled gets: that may wait for a tier."""
ATTACH_BYTES = 256
"""Limit of the first header, which arrives before authentication."""
_SWEEP_S = 0.5

logger = structlog.get_logger(__name__)


class BulkServer:
    """Serves gets of peers, and gets and puts of clients, at ``config.bulk``.

    ``address`` is the address to connect to, with ``*`` for the host when every interface is bound.
    On loopback it is in plain text, with no ``certificate``. Raises InvalidRequestError when the
    address is not available.
    """

    def __init__(self, config: Settings, service: BulkService, most_streams: int) -> None:
        host, port = parse_endpoint(config.bulk)
        self._tls: ssl.SSLContext | None = None
        self.certificate = b""
        if not is_loopback(host):
            self._tls, self.certificate = make_tls()
        self._listener, self.address = listen(host, port)
        self._listener.setblocking(False)
        self.service = service
        self._most_streams = most_streams
        self._client_threads = config.workers
        self._clock = service.clock
        self._streams: set[Caller] = set()
        self._unattached: dict[socket.socket, str] = {}
        """Address of each, the oldest first."""
        self._back: list[Caller] = []
        """Answered streams to wait on again."""
        self._clients_served = 0
        """Calls of clients in progress."""
        self._closed = False
        # Guards the four above.
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hellos = ThreadPoolExecutor(MAX_STRANGERS, "stream-hello")
        self._workers = ThreadPoolExecutor(config.limits.peer_requests + 1, "stream-work")
        self._for_clients = ThreadPoolExecutor(config.workers, "stream-client")
        self._resumed = ThreadPoolExecutor(config.workers, "stream-resumed")
        """Resumes clients' stalled gets, which new ones must not delay."""
        self._ending = ThreadPoolExecutor(END_THREADS, "stream-ending")
        self._thread = threading.Thread(target=self._run, name="stream-plane", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the waiting thread is alive."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        with self._lock:
            for link in self._unattached:
                hang_up(link)
        self._hellos.shutdown(wait=True)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.wire.hang_up()
        self._workers.shutdown(wait=True, cancel_futures=True)
        # A client's get may wait for a tier up to its deadline: it closes its stream then.
        for pool in (self._for_clients, self._resumed, self._ending):
            pool.shutdown(wait=False, cancel_futures=True)
        for stream in streams:
            if not stream.is_served:
                self._end(stream)
        self._listener.close()
        os.close(self._wakeup)

    # --- the waiting thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(self._wakeup, selectors.EVENT_READ)
            swept_at = self._clock()
            while not self._closed:
                for key, _ in waiting.select(_SWEEP_S):
                    self._notice(waiting, key)
                with self._lock:
                    back, self._back = self._back, []
                for one in back:
                    sends = selectors.EVENT_WRITE if one.sending else selectors.EVENT_READ
                    waiting.register(one.wire, sends, one)
                if self._clock() - swept_at >= _SWEEP_S:
                    swept_at = self._clock()
                    self._sweep(waiting)

    def _notice(self, waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept(waiting)
        elif key.fileobj == self._wakeup:
            os.eventfd_read(self._wakeup)
        else:
            waiting.unregister(key.fileobj)
            if not key.data.is_client:
                self._workers.submit(self._serve, key.data)
            elif key.data.sending is not None:
                self._resumed.submit(self._serve, key.data)
            else:
                self._serve_client(key.data)

    def _serve_client(self, stream: Caller) -> None:
        """Serve a client, or hang up when all threads are busy, which slow peers can cause.

        The client then falls back to gRPC.
        """
        with self._lock:
            is_full = self._clients_served >= self._client_threads
            self._clients_served += not is_full
        if is_full:
            self.service.note(stream, "Get", "QuotaExceededError", 0)
            self._drop(stream)
        else:
            self._for_clients.submit(self._serve, stream)

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        try:
            link, address = self._listener.accept()
        except OSError:
            # Disconnected, or out of descriptors: an immediate retry would fail for ever.
            waiting.unregister(self._listener)
            return
        try:
            if self._tls is not None:
                link = self._tls.wrap_socket(link, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it hung up at once
            link.close()
            return
        unattached, origin = self._unattached, f"stream:{address[0]}"
        with self._lock:
            if len(unattached) >= MAX_STRANGERS:
                counts = Counter(unattached.values())
                gone = max(unattached, key=lambda one: counts[unattached[one]])
                del unattached[gone]
                hang_up(gone)  # its thread closes it
            has_space = len(unattached) + len(self._streams) < self._most_streams
            if has_space:
                unattached[link] = origin
        if has_space:
            try:
                self._hellos.submit(self._welcome, link, origin, self._clock() + HELLO_S)
                return
            except RuntimeError:  # the system refuses a thread
                with self._lock:
                    unattached.pop(link, None)
        link.close()

    def _sweep(self, waiting: selectors.BaseSelector) -> None:
        """Hang up on stalled gets and ended sessions; listen again."""
        if self._listener.fileno() not in waiting.get_map():
            waiting.register(self._listener, selectors.EVENT_READ)
        now = self._clock()
        for key in list(waiting.get_map().values()):
            stream: Caller | None = key.data
            if stream is None:
                continue
            is_stalled = stream.sending is not None and now >= stream.until
            if is_stalled or self.service.is_over(stream):
                waiting.unregister(key.fileobj)
                if stream.sending is None:
                    self._drop(stream)
                else:  # may wait for a tier
                    self._ending.submit(self._end, stream)

    # --- serving threads

    def _welcome(self, link: socket.socket, origin: str, until: float) -> None:
        """Do the handshake, and attach a connection by its first message."""
        stream: Caller | None = None
        try:
            link.settimeout(HELLO_S)
            if isinstance(link, ssl.SSLSocket):
                link.do_handshake()
            is_encrypted = self._tls is not None
            wire = FramedSocket(link, "peer", self._clock, is_encrypted=is_encrypted)
            wire.set_timeout(HELLO_S, until)
            message, _ = wire.receive(ATTACH_BYTES)
            with known_errors("stream Attach"):
                try:
                    stream = self._attached(wire, message, origin)
                except KVStoreError as error:
                    wire.send(bulk.failure(message.request, error))
                    raise
            wire.send(pb.StreamMessage(request=message.request, ready=True))
        except (OSError, KVStoreError) as error:
            link.close()
            name = type(error).__name__
            logger.info("refused", method="stream", error=name, reason=str(error))
            self.service.authorizer.note_on(None, "Attach", name, 0, origin)
            if stream is not None:
                self._drop(stream)
                stream = None
        finally:
            with self._lock:
                self._unattached.pop(link, None)
        if stream is not None:
            self._wait_again(stream)

    def _attached(self, wire: FramedSocket, message: pb.StreamMessage, origin: str) -> Caller:
        if not message.HasField("attach"):
            raise UnauthenticatedError("attach the connection first")
        attach = message.attach
        session = self.service.sessions.get(attach.session_id)
        guest = attach if attach.key_namespace else None
        stream = Caller(wire, session, origin, guest)
        is_genuine = bulk.is_genuine(attach, session.attach_token)
        is_genuine = is_genuine and (guest is None or session.is_peer)
        if not is_genuine or self.service.is_over(stream):
            raise UnauthenticatedError("token: not this session's; open a session first")
        self._add_stream(stream)
        return stream

    def _add_stream(self, stream: Caller) -> None:
        """Check the limits and add the stream in one step, so that none is exceeded."""
        session = stream.session
        most = STREAMS_PER_SESSION if stream.guest is None else GUEST_STREAMS_PER_SESSION
        with self._lock:
            of_session = [one for one in self._streams if one.session is session]
            if sum((one.guest is None) is (stream.guest is None) for one in of_session) >= most:
                raise QuotaExceededError("streams_per_session", most, session.client)
            most_clients = min(MAX_CLIENT_STREAMS, self._most_streams // 2)
            is_full = sum(one.is_client for one in self._streams) >= most_clients
            if is_full and stream.is_client:
                raise QuotaExceededError("client_streams", most_clients, session.client)
            self._streams.add(stream)

    def _serve(self, stream: Caller) -> None:
        """Answer one request, or resume a get; hang up after an invalid one."""
        stream.is_served, stays = True, False
        is_new, method = stream.sending is None, "Get"
        try:
            if is_new:
                stream.wire.set_timeout(bulk.SILENCE_S, self._clock() + bulk.SILENCE_S)
                message, _ = stream.wire.receive()
                kind = str(message.WhichOneof("body"))
                method = METHODS.get(kind, method)
            with known_errors(f"stream {method}"):
                if is_new:
                    self._answer(stream, message, kind)
                if stream.sending is not None:  # until it ends or its reader stalls
                    stream.until = stream.context.run(next, stream.sending, 0.0)
                    stream.sending = stream.sending if stream.until else None
            stays = self._may_wait(stream)
        except KVStoreError as error:
            if not isinstance(error, TierUnavailableError):  # else it disconnected
                name = type(error).__name__
                logger.info("refused", method="stream", error=name, reason=str(error))
                self.service.note(stream, method, name, 0)
        finally:
            with self._lock:
                self._clients_served -= is_new and stream.is_client
            if self._closed or not stays:
                self._end(stream)
        stream.is_served = False
        if stays:
            self._wait_again(stream)

    def _may_wait(self, stream: Caller) -> bool:
        """Whether it may hold its lease until its reader resumes."""
        if stream.sending is None:
            return True
        with self._lock:
            waiting = sum(one.sending is not None and not one.is_served for one in self._streams)
        return waiting < MAX_WAITING_GETS

    def _answer(self, stream: Caller, message: pb.StreamMessage, kind: str) -> None:
        """Answer a request; ``_serve`` iterates over the parts of a get."""
        if kind == "get":
            stream.context = copy_context()
            stream.sending = self.service.get(stream, message)
        elif kind == "put":
            self.service.put(stream, message)
        elif kind == "find":
            self.service.find(stream, message)
        elif kind != "cancel":  # a late cancel is ignored
            raise InvalidRequestError("kind", kind, "send gets and puts")

    def _end(self, stream: Caller) -> None:
        """End its get, with the lease, and hang up."""
        sending, stream.sending = stream.sending, None
        try:
            if sending is not None:
                stream.context.run(sending.close)
        finally:
            self._drop(stream)

    def _wait_again(self, stream: Caller) -> None:
        with self._lock:
            self._back.append(stream)
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def _drop(self, stream: Caller) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.wire.close()


_ANY_HOST = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with
_BACKLOG = 128


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Bind *host* and *port*; return the listener, and the address to connect to.

    Raises InvalidRequestError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = host.replace("*", _ANY_HOST[0])
        listener = socket.create_server((bound, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        fix = f"{error.strerror}; is it in use? choose another address"
        raise InvalidRequestError("bulk", join_endpoint(host, port), fix) from None
    named = "*" if host in _ANY_HOST else f"[{host}]" if ":" in host else host
    return listener, f"tcp://{named}:{listener.getsockname()[1]}"
