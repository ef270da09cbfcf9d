"""Calls to a server on this host over its Unix socket, at a tenth of gRPC's cost."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.client.connection import SLACK_S, Connection, Pool, Until
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
    Reply,
    pack_call,
    unpack_answer,
)

MAX_CONNECTIONS = 12
"""Calls at once; more go through gRPC. Below what a server allows one session."""

_JOIN_WITHIN_S = 2.0
_JOIN_AGAIN_S = 5.0

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class _Fallback(Exception):
    """The socket does not carry the call, or what came is no answer: it goes through gRPC."""


class _Link:
    """A connection."""

    __slots__ = ("socket",)

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close(self) -> None:
        self.socket.close()

    def wake(self) -> None:
        """End the connection under who waits on it, and closes it then."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class UnixRpc:
    """Calls of one session, on connections of their own, one call at a time each. Thread-safe.

    The same verbs and errors as ``Connection``. What does not fit a packet, is not among its
    methods or finds the socket gone is called through gRPC.
    """

    def __init__(self, terms: SessionTerms, connection: Connection) -> None:
        self._terms = terms
        self._connection = connection
        self._clock = connection.clock
        self.links: Pool[_Link] = Pool(MAX_CONNECTIONS, _Link.close, _Link.wake)
        self._join_at = 0.0
        """Before that no more connections are made: the last that was to join could not."""

    def call(self, method: str, request: Any, deadline_ms: int, reply: type[T]) -> T:
        """Call *method* and return its reply."""
        until = Until.of(deadline_ms, self._clock)
        try:
            answer: T = self._reply(self._begin(method, request, until), until, reply)
        except _Fallback:
            return self._connection.call(method, request, until.left_ms(), reply)
        return answer

    def send(
        self, method: str, request: Any, deadline_ms: int, queue: CallQueue | None = None
    ) -> Callable[[], Any]:
        """Start *method*; the returned function waits for its reply. It must be called, once: what
        the socket does not carry is called then.
        """
        until, kind = Until.of(deadline_ms, self._clock), REPLIES.get(method, object)
        link: _Link | None = None
        with suppress(_Fallback):
            link = self._begin(method, request, until, queue)

        def wait() -> Any:
            with suppress(_Fallback):
                if link is not None:
                    return self._reply(link, until, kind, queue)
            return self._connection.call(method, request, until.left_ms(), kind)

        return wait

    def stream(self, method: str, request: Any, deadline_ms: int) -> Generator[Any, None, None]:
        """Yield the replies of *method*. Closing the iterator early ends the call."""
        until = Until.of(deadline_ms, self._clock)
        link = None
        has_begun = is_over = False
        try:
            link = self._begin(method, request, until)
            while True:
                answer = self._receive(link, until)
                is_over = answer.reply is not Reply.more
                if answer.error is not None:
                    raise answer.error
                if is_over:
                    return
                has_begun = True
                yield parse_answer(REPLIES[method], answer.body)
        except _Fallback:
            if has_begun:
                raise TierUnavailableError("server", "hung up") from None
        finally:
            if link is not None:
                self.links.give_back(link, is_clean=is_over)
        yield from self._connection.stream(method, request, until.left_ms())

    def close(self) -> None:
        """Hang up: calls that run or come later go through gRPC. Idempotent."""
        self.links.close()

    def leave(self) -> None:
        """In a child: close its descriptors, so that no call is sent over the parent's sockets."""
        self.links.leave()

    def hang_up(self) -> None:
        """End the calls that run: they, too, go through gRPC, as far as its breaker lets them."""
        self.links.hang_up()

    # --- one call

    def _begin(
        self, method: str, request: Any, until: Until, queue: CallQueue | None = None
    ) -> _Link:
        """Send a call. Raises _Fallback when it did not reach the server."""
        if method not in REPLIES:
            raise _Fallback
        packet = pack_call(method, request)
        if len(packet) > MAX_PACKET_BYTES:
            raise _Fallback
        self._connection.breaker.check()
        link = (queue.link if queue is not None else None) or self._take(until)
        is_sent = False
        try:
            link.socket.settimeout(until.left_s(SLACK_S))
            link.socket.send(packet)
            is_sent = True
        except OSError:
            raise _Fallback from None
        finally:
            if not is_sent:
                self.links.give_back(link, is_clean=False)
        if queue is not None:
            queue.link = link
            queue.unanswered += 1
        return link

    def _reply(self, link: _Link, until: Until, kind: Any, queue: CallQueue | None = None) -> Any:
        is_over = False
        try:
            answer = self._receive(link, until)
            if answer.reply is Reply.more:
                raise _Fallback
            is_over = True
        finally:
            if queue is None or queue.is_done(link, is_over=is_over):
                self.links.give_back(link, is_clean=is_over)
        if answer.error is not None:
            raise answer.error
        return parse_answer(kind, answer.body)

    def _receive(self, link: _Link, until: Until) -> Answer:
        """Receive the next message, joined if it was cut.

        Whatever this raises, the connection is not to be used again: a late answer must not be
        taken for the next call's.
        """
        parts: list[bytes] = []
        while True:
            answer = self._packet(link, until)
            if answer.reply is not Reply.part and not parts:
                return answer
            parts.append(answer.body)
            if answer.reply is not Reply.part:
                return answer._replace(body=b"".join(parts))
            if len(parts) * MAX_PACKET_BYTES >= MAX_ANSWER_BYTES:
                raise _Fallback

    def _packet(self, link: _Link, until: Until) -> Answer:
        breaker = self._connection.breaker
        try:
            # What arrived in time is taken, however late we look.
            link.socket.settimeout(until.left_s(SLACK_S))
            packet = link.socket.recv(MAX_PACKET_BYTES + 1)
        except TimeoutError:
            error = DeadlineError("the server did not answer in time")
            breaker.note(error, until)
            raise error from None
        except OSError:
            raise _Fallback from None
        if not packet:
            raise _Fallback
        breaker.note(None)
        try:
            return unpack_answer(packet)
        except InvalidRequestError:
            raise _Fallback from None

    # --- connections

    def _take(self, until: Until) -> _Link:
        link = self.links.take()
        if link is not None:
            return link
        if self._clock() < self._join_at or not self.links.may_make():
            raise _Fallback
        try:
            link = _Link()
        except OSError:  # out of descriptors
            raise _Fallback from None
        finally:
            self.links.made(link)
        is_joined = False
        try:
            is_joined = self._join(link.socket, until)
        finally:
            if not is_joined:
                self.links.give_back(link, is_clean=False)
        if not is_joined:
            raise _Fallback
        return link

    def _join(self, link: socket.socket, until: Until) -> bool:
        """Whether the server let *link* join; where it does not say, half the time is left."""
        # For each of two answers.
        link.settimeout(min(_JOIN_WITHIN_S, until.left_s(SLACK_S) / 4))
        try:
            reply = enter(link, self._terms, unix_socket.Op.join)
        except (OSError, InvalidRequestError):
            reply = Reply.unknown
        if reply is not Reply.ok:
            self._join_at = self._clock() + _JOIN_AGAIN_S
        return reply is Reply.ok


def enter(
    link: socket.socket,
    terms: SessionTerms,
    op: unix_socket.Op,
    size_bytes: int = 0,
    descriptors: Sequence[int] = (),
) -> Reply:
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

    def __init__(self, calls: UnixRpc) -> None:
        self._calls = calls
        self._sent = self._waited = 0
        self.link: _Link | None = None
        """The connection, while answers are to come on it."""
        self.unanswered = 0

    def send(self, method: str, request: Any, deadline_ms: int) -> Callable[[], Any]:
        """Do what ``UnixRpc.send`` does."""
        wait = self._calls.send(method, request, deadline_ms, self)
        number = self._sent
        self._sent += 1

        def wait_in_turn() -> Any:
            assert number == self._waited, "the answer is another call's"
            self._waited += 1
            return wait()

        return wait_in_turn

    def is_done(self, link: _Link, *, is_over: bool) -> bool:
        """Note an answer, or that it will not come; whether *link* is given up then."""
        self.unanswered -= 1
        if is_over and self.unanswered:
            return False
        if link is self.link:
            self.link = None
        return True


def parse_answer(kind: type[M], body: bytes) -> M:
    """Return the message of *kind* that *body* is. Raises KVStoreError."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise KVStoreError(f"the server's answer is no {kind.DESCRIPTOR.name}") from None
