"""A LocalLink: calls to a server on this host over its Unix socket, a tenth of gRPC's cost."""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.client.connection import SLACK_S, Connection
from kvstore.client.session import SessionTerms
from kvstore.proto import unix_socket
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.unix_socket import (
    MAX_ANSWER_BYTES,
    MAX_PACKET_BYTES,
    REPLIES,
    Answer,
    pack_call,
    unpack_answer,
)

MAX_CONNECTIONS = 12
"""Calls at once; more go through gRPC. Below what a server allows one session."""

_JOIN_WITHIN_S = 2.0
_JOIN_AGAIN_S = 5.0

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class _Broken(Exception):
    """The socket does not carry the call, or what came is no answer: gRPC is asked instead."""


class _Asked(NamedTuple):
    """A call that was sent; its answer comes on ``link``. ``until`` is in the clock's seconds."""

    link: socket.socket
    until: float


class LocalLink:
    """Calls of one session, on connections of their own, one call at a time each. Thread-safe.

    The same verbs and errors as ``Connection``. What does not fit a packet, is not among its
    methods or finds the socket gone is called through gRPC.
    """

    def __init__(self, terms: SessionTerms, connection: Connection) -> None:
        self._terms = terms
        self._connection = connection
        self._clock = connection.clock
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._is_closed = False
        self._join_at = 0.0
        """Before that no more connections are made: the last that was to join could not."""
        self._lock = threading.Lock()  # guards the four above

    def call(self, method: str, request: Any, deadline_ms: int, reply: type[T]) -> T:
        """Call *method* and return its reply."""
        until = self._until(deadline_ms)
        try:
            answer: T = self._reply(self._ask(method, request, until), reply)
        except _Broken:
            return self._connection.call(method, request, self._left_ms(until), reply)
        return answer

    def send(
        self, method: str, request: Any, deadline_ms: int, queue: CallQueue | None = None
    ) -> Callable[[], Any]:
        """Start *method*; the returned function waits for its reply. It must be called, once."""
        until = self._until(deadline_ms)
        try:
            asked = self._ask(method, request, until, queue)
        except _Broken:
            return self._connection.send(method, request, self._left_ms(until))
        kind: Any = REPLIES.get(method)

        def wait() -> Any:
            try:
                return self._reply(asked, kind, queue)
            except _Broken:
                return self._connection.call(method, request, self._left_ms(until), kind)

        return wait

    def queue(self) -> CallQueue:
        """Return a queue of calls that share one connection while any is unanswered."""
        return CallQueue(self)

    def stream(self, method: str, request: Any, deadline_ms: int) -> Generator[Any, None, None]:
        """Yield the replies of *method*. Closing the iterator early ends the call."""
        until = self._until(deadline_ms)
        has_begun = False
        try:
            with closing(self._replies(method, request, until)) as replies:
                for reply in replies:
                    has_begun = True
                    yield reply
                return
        except _Broken:
            if has_begun:
                raise TierUnavailableError("server", "hung up") from None
        yield from self._connection.stream(method, request, self._left_ms(until))

    def close(self) -> None:
        """Hang up: calls that run or come later go through gRPC. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for link in idle:
            self._drop(link)
        _wake(busy)

    def leave(self) -> None:
        """In a child: close its descriptors, so that no call is sent over the parent's sockets."""
        self._lock = threading.Lock()  # another thread may have had it
        self._is_closed = True
        self._idle = []
        for link in self._all:
            link.close()

    def hang_up(self) -> None:
        """End the calls that run: they, too, go through gRPC, as far as its gate lets them."""
        with self._lock:
            busy = self._all.difference(self._idle)
        _wake(busy)

    # --- one call

    def _ask(
        self, method: str, request: Any, until: float, queue: CallQueue | None = None
    ) -> _Asked:
        """Send a call. Raises _Broken when it did not reach the server."""
        if method not in REPLIES:
            raise _Broken
        packet = pack_call(method, request)
        if len(packet) > MAX_PACKET_BYTES:
            raise _Broken
        self._connection.gate.check()
        link = (queue.link if queue is not None else None) or self._take(until)
        try:
            link.settimeout(self._left_s(until))
            link.send(packet)
        except OSError:
            self._drop(link)
            raise _Broken from None
        except BaseException:
            self._drop(link)
            raise
        if queue is not None:
            queue.link = link
            queue.unanswered += 1
        return _Asked(link, until)

    def _reply(self, asked: _Asked, kind: Any, queue: CallQueue | None = None) -> Any:
        is_over = False
        try:
            answer = self._receive(asked)
            if answer.reply is unix_socket.Reply.more:
                raise _Broken
            is_over = True
        finally:
            if queue is None or queue.is_done(asked.link, is_over=is_over):
                self._put_away(asked.link, is_over=is_over)
        if answer.error is not None:
            raise answer.error
        return parse_answer(kind, answer.body)

    def _replies(self, method: str, request: Any, until: float) -> Generator[Any, None, None]:
        asked = self._ask(method, request, until)
        kind: Any = REPLIES.get(method)
        is_over = False
        try:
            while True:
                answer = self._receive(asked)
                is_over = answer.reply is not unix_socket.Reply.more
                if answer.error is not None:
                    raise answer.error
                if is_over:
                    return
                yield parse_answer(kind, answer.body)
        finally:
            self._put_away(asked.link, is_over=is_over)

    def _receive(self, asked: _Asked) -> Answer:
        """Receive one message, joined if it was cut.

        Whatever this raises, the connection is not to be used again: a late answer must not be
        taken for the next call's.
        """
        answer = self._packet(asked)
        if answer.reply is not unix_socket.Reply.part:
            return answer
        parts = [answer.body]
        most = MAX_ANSWER_BYTES // MAX_PACKET_BYTES
        while answer.reply is unix_socket.Reply.part and len(parts) < most:
            answer = self._packet(asked)
            parts.append(answer.body)
        if answer.reply is unix_socket.Reply.part:
            raise _Broken
        return answer._replace(body=b"".join(parts))

    def _packet(self, asked: _Asked) -> Answer:
        try:
            asked.link.settimeout(self._left_s(asked.until))
            packet = asked.link.recv(MAX_PACKET_BYTES + 1)
        except TimeoutError:
            error = DeadlineError("the server did not answer in time")
            self._connection.gate.note(error)
            raise error from None
        except OSError:
            packet = b""
        if not packet:
            raise _Broken
        self._connection.gate.note(None)
        try:
            return unpack_answer(packet)
        except InvalidRequestError:
            raise _Broken from None

    def _until(self, deadline_ms: int) -> float:
        return self._clock() + deadline_ms / 1000 + SLACK_S

    def _left_s(self, until: float) -> float:
        """What may still be waited: what arrived in time is taken, however late we look."""
        return max(until - self._clock(), SLACK_S)

    def _left_ms(self, until: float) -> int:
        """The deadline of a call through gRPC, which gives it the slack again."""
        return max(1, round(1000 * (until - self._clock() - SLACK_S)))

    # --- connections

    def _take(self, until: float) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise _Broken
            if self._idle:
                return self._idle.pop()
            if len(self._all) >= MAX_CONNECTIONS or self._clock() < self._join_at:
                raise _Broken
            try:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError:  # out of descriptors
                raise _Broken from None
            self._all.add(link)
        is_joined = False
        try:
            is_joined = self._join(link, until)
        finally:
            if not is_joined:
                self._drop(link)
        if not is_joined:
            raise _Broken
        return link

    def _join(self, link: socket.socket, until: float) -> bool:
        """Whether the server let *link* join; where it does not say, half the time is left."""
        link.settimeout(min(_JOIN_WITHIN_S, self._left_s(until) / 4))  # for each of two answers
        try:
            reply = enter(link, self._terms, unix_socket.Op.join)
        except (OSError, InvalidRequestError):
            reply = unix_socket.Reply.unknown
        if reply is not unix_socket.Reply.ok:
            with self._lock:
                self._join_at = self._clock() + _JOIN_AGAIN_S
        return reply is unix_socket.Reply.ok

    def _put_away(self, link: socket.socket, *, is_over: bool) -> None:
        """Keep a connection whose call is over for the next one; hang up on any other."""
        with self._lock:
            is_kept = is_over and not self._is_closed
            if is_kept:
                self._idle.append(link)
        if not is_kept:
            self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        with self._lock:
            self._all.discard(link)
        link.close()


def enter(
    link: socket.socket,
    terms: SessionTerms,
    op: unix_socket.Op,
    size_bytes: int = 0,
    descriptors: Sequence[int] = (),
) -> unix_socket.Reply:
    """Connect *link* and ``attach``, with staging memory of *size_bytes*, or ``join``.

    The server proves first that it is the session's. Raises InvalidRequestError when it does not:
    another process listens in its place; and OSError.
    """
    link.connect(terms.socket_path)
    is_known = terms.pid_namespace and terms.pid_namespace == unix_socket.pid_namespace()
    if is_known and unix_socket.peer_ids(link)[0] != terms.server_pid:
        raise InvalidRequestError("socket_path", terms.socket_path, "not the server's process")
    session_id, nonce = terms.session_id, os.urandom(unix_socket.NONCE_BYTES)
    link.send(unix_socket.Request(unix_socket.Op.hello, session_id, nonce).pack())
    theirs, proven = unix_socket.unpack_greeting(link.recv(unix_socket.GREETING_BYTES))
    nonces = (nonce, theirs)
    expected = unix_socket.proof(terms.attach_token, unix_socket.Op.hello, session_id, nonces)
    if not hmac.compare_digest(expected, proven):
        raise InvalidRequestError("socket_path", terms.socket_path, "not the session's server")
    own = unix_socket.proof(terms.attach_token, op, session_id, nonces)
    socket.send_fds(link, [unix_socket.Request(op, size_bytes, own).pack()], descriptors)
    return unix_socket.unpack_reply(link.recv(unix_socket.HEADER_BYTES))[0]


class CallQueue:
    """Calls that are sent before those ahead of them are answered, all on one connection.

    The server answers them with one thread, which is awake when the next is due. Side by side, a
    call each wakes another, and they copy against each other. For one thread, which waits for the
    answers in the order in which it sent the calls.
    """

    def __init__(self, calls: LocalLink) -> None:
        self._calls = calls
        self._sent = self._waited = 0
        self.link: socket.socket | None = None
        """The connection, while answers are to come on it."""
        self.unanswered = 0

    def send(self, method: str, request: Any, deadline_ms: int) -> Callable[[], Any]:
        """Do what ``LocalLink.send`` does."""
        wait = self._calls.send(method, request, deadline_ms, self)
        number = self._sent
        self._sent += 1

        def wait_in_turn() -> Any:
            assert number == self._waited, "the answer is another call's"
            self._waited += 1
            return wait()

        return wait_in_turn

    def is_done(self, link: socket.socket, *, is_over: bool) -> bool:
        """Take note of an answer, or that it will not come; whether *link* is given up then."""
        self.unanswered -= 1
        if is_over and self.unanswered:
            return False
        if link is self.link:
            self.link = None
        return True


def _wake(links: Iterable[socket.socket]) -> None:
    """End connections whose users wait on them, and close them then."""
    for link in links:
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def parse_answer(kind: type[M], body: bytes) -> M:
    """Return the message of *kind* that *body* is. Raises KVStoreError."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise KVStoreError(f"the server's answer is no {kind.DESCRIPTOR.name}") from None
