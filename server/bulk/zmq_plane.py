"""The bulk channel between hosts: frames through a ROUTER socket, under credit.

One thread owns the socket and never blocks on anything else; workers ask the manager. A peer
says first which session it belongs to, which it learned through gRPC; all else it says before
is dropped and counted.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import structlog

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvstore.server.bulk.bulk_service import BulkService
from kvstore.server.bulk.bulk_work import GetWork, PutWork
from kvstore.server.bulk.zmq_keys import CurveKeys
from kvstore.server.bulk.zmq_peer import METHODS, Peer, origin_of
from kvstore.server.bulk.zmq_socket import bind_router
from kvstore.server.interceptors import told
from kvstore.server.sessions import Session, SessionTable
from kvstore.server.trust.doorkeeper import Door

PEERS_PER_SESSION = 16
PARTS_PER_TURN = 8
"""Sent of one get before others have their turn."""
SMALL_FIND_BYTES = 2048
"""A question about as many bytes of keys is answered at once: two threads more cost more."""
_MESSAGES_PER_TURN = 64
_POLL_MS = 100
_JOIN_WITHIN_S = 2.0

_Answer: TypeAlias = tuple[bulk.Done | bulk.Failed, bytes]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """``threads`` work at once; ``max_requests`` may be at work or waiting; ``max_links`` are
    connections."""

    threads: int
    max_requests: int
    max_links: int


def _is_another_servers(peer: Peer) -> bool:
    return peer.session.is_peer


class ZmqPlane:
    """Bind *endpoint* and serve ``bulk`` words; *keys* None: in plain text.

    *door* says who may call, and is told what became of calls.

    ``address`` is what clients are told: with ``*`` for the host when every interface is bound.
    Raises InvalidRequestError when it cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        sessions: SessionTable,
        service: BulkService,
        limits: BulkLimits,
        door: Door,
    ) -> None:
        self._door = door
        self.public_key = keys.public if keys else b""
        self._sessions = sessions
        self._service = service
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        self._posts: deque[Callable[[], object]] = deque()
        self._closed = False
        refused = partial(service.count, "zmq_refused_connections")
        self._router, self._cap, self.address = bind_router(
            endpoint, keys, limits.max_links, refused
        )
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards the descriptor against its closing.
        self._wake_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(limits.threads, thread_name_prefix="zmq-work")
        sessions.on_close.append(self._forget_session)
        self._thread = threading.Thread(target=self._run, name="zmq-plane", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread that owns the socket lives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving and close the socket. Idempotent.

        Requests at work are cut short; a worker that sleeps is not waited for.
        """
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._thread.join(_JOIN_WITHIN_S)
        self._workers.shutdown(wait=False, cancel_futures=True)
        with self._wake_lock:
            os.close(self._wakeup)
            self._wakeup = -1

    # --- from other threads

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _post(self, work: Callable[[], object]) -> None:
        """Have the socket's thread do *work*."""
        self._posts.append(work)
        self._wake()

    def _forget_session(self, session: Session) -> None:
        def forget() -> None:
            gone = LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")
            payload = bulk.pack_failure(type(gone).__name__, str(gone))
            for peer in [p for p in self._peers.values() if p.session is session]:
                self._drop(peer)
                self._send(peer.identity, bulk.Failed(0), payload)

        self._post(forget)

    # --- the socket's thread

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._cap.news, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        is_busy = False
        try:
            while not self._closed:
                ready = dict(poller.poll(0 if is_busy else _POLL_MS))
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                self._cap.hold()
                while self._posts:
                    self._posts.popleft()()
                for _ in range(_MESSAGES_PER_TURN):
                    if not self._receive():
                        break
                is_busy = self._pump()
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            context = self._router.context
            self._cap.close()
            self._router.close(0)
            context.term()

    def _receive(self) -> bool:
        """Take one message; False when there is none."""
        import zmq

        try:
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        payload = as_bytes(frames[1].buffer) if len(frames) == 2 else None
        try:
            if not 1 <= len(frames) <= 2:
                raise InvalidRequestError("frames", len(frames), "send a header and a payload")
            size_bytes = None if payload is None else len(payload)
            word = bulk.unpack(frames[0].bytes, size_bytes)
        except InvalidRequestError:
            self._service.count("bulk_invalid_messages")
            return True
        if isinstance(word, bulk.Attach):
            attach = partial(self._attach, identity.bytes, word, origin_of(frames[0]))
            self._answer_errors(identity.bytes, word, attach, origin_of(frames[0]))
        else:
            self._obey(identity.bytes, word, payload)
        return True

    def _obey(self, identity: bytes, word: bulk.Word, payload: Bytes | None) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._service.count("bulk_ignored_messages")
        elif isinstance(word, bulk.Get | bulk.Put | bulk.Find):
            data = b"" if payload is None else payload.tobytes()
            self._answer_errors(identity, word, lambda: self._begin(peer, word, data))
        elif isinstance(word, bulk.Credit | bulk.Part | bulk.Cancel | bulk.Finish):
            self._answer_errors(identity, word, lambda: self._go_on(peer, word, payload))
        else:
            self._service.count("bulk_invalid_messages")

    def _answer_errors(
        self, identity: bytes, word: bulk.Word, work: Callable[[], None], origin: str = ""
    ) -> None:
        try:
            work()
        except KVStoreError as error:
            logger.info("refused", method="zmq", error=type(error).__name__, reason=str(error))
            payload = bulk.pack_failure(type(error).__name__, str(error))
            peer = self._peers.get(identity)
            if peer is not None:
                self._end(peer, word.request)
            self._send(identity, bulk.Failed(word.request), payload)
            whose = peer.session if peer else None
            origin = peer.origin if peer else origin
            self._door.note(whose, METHODS[type(word)], type(error).__name__, 0, origin)

    def _attach(self, identity: bytes, word: bulk.Attach, origin: str) -> None:
        session = self._sessions.get(word.session_id)
        if not hmac.compare_digest(session.attach_token, word.token):
            raise UnauthenticatedError("token: not this session's; open a session first")
        others = sum(peer.session is session for peer in self._peers.values())
        if identity in self._peers or others >= PEERS_PER_SESSION:
            raise QuotaExceededError("peers_per_session", PEERS_PER_SESSION, session.client)
        self._peers[identity] = Peer(identity, session, origin)
        self._send(identity, bulk.Attached(word.request))

    def _begin(self, peer: Peer, word: bulk.Get | bulk.Put | bulk.Find, payload: bytes) -> None:
        if word.session_id != peer.session.session_id or peer.session.is_closed:
            raise UnauthenticatedError("session_id: ask on the connection of your session")
        is_peers = isinstance(word, bulk.Find) or bool(
            isinstance(word, bulk.Get) and word.flags & bulk.PEER
        )
        self._door.admit(peer.session, "OpenPeer" if is_peers else type(word).__name__)
        if word.request in peer.requests or len(peer.requests) >= bulk.MAX_REQUESTS:
            raise QuotaExceededError("requests", bulk.MAX_REQUESTS, peer.session.client)
        if sum(len(one.requests) for one in self._peers.values()) >= self._limits.max_requests:
            raise QuotaExceededError("max_requests", self._limits.max_requests, "this server")
        if is_peers:
            self._service.desk.enter(word)
            peer.desk_work[word.request] = word
        if isinstance(word, bulk.Get):
            get = self._service.new_get(peer.session, word, self._wake)
            peer.gets[word.request] = get
            self._workers.submit(self._work, peer, word, lambda: self._get(get, payload))
        elif isinstance(word, bulk.Find):
            find = partial(self._work, peer, word, partial(self._find, word, payload))
            if len(payload) <= SMALL_FIND_BYTES:
                find()
            else:
                self._workers.submit(find)
        else:
            put = self._service.new_put(peer.session, word)
            peer.puts[word.request] = put
            self._send(peer.identity, bulk.Credit(word.request, put.open()))
            self._workers.submit(self._work, peer, word, lambda: self._put(peer, put))

    def _go_on(
        self,
        peer: Peer,
        word: bulk.Credit | bulk.Part | bulk.Cancel | bulk.Finish,
        payload: Bytes | None,
    ) -> None:
        get, put = peer.gets.get(word.request), peer.puts.get(word.request)
        if isinstance(word, bulk.Credit):
            if get is not None:
                get.budget.grant(word.credit_bytes)
        elif isinstance(word, bulk.Cancel):
            work = get or put
            if work is not None:
                work.cancel()
        elif put is None:
            return  # of a put that is over: it was on its way
        elif isinstance(word, bulk.Part):
            assert payload is not None
            put.receive(word, payload)
        else:
            put.finish(word.frames)

    def _pump(self) -> bool:
        """Send what there is credit for; whether there may be more."""
        is_busy = False
        for peer in sorted(self._peers.values(), key=_is_another_servers):
            # Own clients go first; while they are busy other servers get little.
            parts = 1 if is_busy and peer.session.is_peer else PARTS_PER_TURN
            for get in list(peer.gets.values()):
                is_busy |= self._pump_one(peer, get, parts)
        return is_busy

    def _pump_one(self, peer: Peer, get: GetWork, parts: int) -> bool:
        for _ in range(parts):
            part = get.next_part()
            if part is None or not self._send(peer.identity, part[0], part[1], copy=False):
                return False
            del part
        return True

    def _send(
        self,
        identity: bytes,
        word: bulk.Word,
        payload: bytes | Bytes | None = None,
        *,
        copy: bool = True,
    ) -> bool:
        """Send a message; a peer that is gone, or never reads, is forgotten."""
        import zmq

        more = zmq.SNDMORE if payload is not None else 0
        try:
            self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
            self._router.send(bulk.pack(word), more | zmq.NOBLOCK)
            if payload is not None:
                data = payload if isinstance(payload, bytes) else payload.data
                self._router.send(data, zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError:
            peer = self._peers.get(identity)
            if peer is not None:
                self._drop(peer)
            return False
        return True

    def _drop(self, peer: Peer) -> None:
        self._peers.pop(peer.identity, None)
        for get in peer.gets.values():
            get.cancel()
        for put in peer.puts.values():
            put.cancel()

    def _end(self, peer: Peer, request: int) -> None:
        get, put = peer.gets.pop(request, None), peer.puts.pop(request, None)
        if get is not None:
            get.cancel()
        if put is not None:
            put.cancel()
        let_in = peer.desk_work.pop(request, None)
        if let_in is not None:
            self._service.desk.leave(let_in)

    # --- workers

    def _work(
        self,
        peer: Peer,
        word: bulk.Get | bulk.Put | bulk.Find,
        answer: Callable[[], _Answer],
    ) -> None:
        def answers() -> Generator[_Answer, None, None]:
            yield answer()

        def failure(name: str, text: str) -> _Answer:
            return bulk.Failed(word.request), bulk.pack_failure(name, text)

        for reply, payload in told(answers(), failure, f"zmq {type(word).__name__}"):
            self._post(partial(self._finish, peer, word, reply, payload))

    def _finish(
        self, peer: Peer, asked: bulk.Word, word: bulk.Done | bulk.Failed, payload: bytes
    ) -> None:
        if word.request in peer.requests:  # else its end was written down already
            frames = word.frames if isinstance(word, bulk.Done) else 0
            outcome = "OK" if isinstance(word, bulk.Done) else bulk.failure_name(payload)
            self._door.note(peer.session, METHODS[type(asked)], outcome, frames, peer.origin)
        self._end(peer, word.request)
        if self._peers.get(peer.identity) is peer:
            self._send(peer.identity, word, payload)

    def _get(self, get: GetWork, digests: bytes) -> _Answer:
        self._service.get(get, digests)
        return bulk.Done(get.word.request, get.frames_sent), b""

    def _find(self, word: bulk.Find, wanted: bytes) -> _Answer:
        return bulk.Done(word.request, 0), self._service.find(word, wanted)

    def _put(self, peer: Peer, put: PutWork) -> _Answer:
        def grant(credit_bytes: int) -> None:
            word = bulk.Credit(put.word.request, credit_bytes)
            self._post(partial(self._send, peer.identity, word))

        results = self._service.put(put, grant)
        payload = bulk.pack_outcomes(
            bytes(result.outcome for result in results), [result.reason for result in results]
        )
        return bulk.Done(put.word.request, len(results)), payload
