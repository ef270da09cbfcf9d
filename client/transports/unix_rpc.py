"""Calls to a server on this host over its Unix socket, at a tenth of gRPC's cost."""

from __future__ import annotations

import hmac
import os
import socket
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from kvstore.client.connection import SLACK_S, Connection, Pool, Until
from kvstore.proto import kvstore_pb2 as pb
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
    NONCE_BYTES,
    REPLIES,
    Reply,
    pack_call,
    unpack_answer,
)

MAX_CONNECTIONS = 12
"""Calls at once; more go through gRPC. Below what a server allows one session."""
ENTER_WITHIN_S = 4.0
"""Time to connect, with two answers."""
_JOIN_AGAIN_S = 5.0

T = TypeVar("T")


class Link(socket.socket):
    """A connection to the server's Unix socket."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def is_broken(self) -> bool:
        """Always False: a call on a broken one fails at once, and goes through gRPC."""
        return False

    def wake(self, _: KVStoreError) -> None:
        """Shut it down; the thread that waits on it then closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, eq=False)
class Sent:
    """A call sent on *link*; if that is None, it goes through gRPC.

    ``queue``: pipelined calls, each sent before the earlier ones are answered, on one connection.
    The server answers them with one thread, which is already awake for the next. On separate
    connections each would wake another thread, and their copies would compete. For one thread,
    which waits for the answers in the order of the calls.
    """

    method: str
    request: Any
    until: Until
    queue: deque[Sent] | None
    link: Link | None = None
    is_over: bool = False
    """Whether its last answer has arrived, so that the connection is free."""


class UnixRpc:
    """Calls of one session, on its own connections, one call at a time each. Thread-safe.

    The same verbs and errors as ``Connection``. A call that does not fit a packet, is not among its
    methods, or finds the socket gone or ``links`` closed goes through gRPC.
    """

    def __init__(self, terms: pb.OpenSessionResponse, connection: Connection) -> None:
        self._connection = connection
        self._clock = connection.clock
        join = partial(enter, terms, unix_socket.Op.join)
        self.links = Pool(MAX_CONNECTIONS, join, ENTER_WITHIN_S, _JOIN_AGAIN_S, connection.clock)

    def call(self, method: str, request: Any, deadline_ms: int, reply: type[T]) -> T:
        """Call *method* and return its reply."""
        answer: T = self.wait(self.send(method, request, deadline_ms))
        return answer

    def send(
        self, method: str, request: Any, deadline_ms: int, queue: deque[Sent] | None = None
    ) -> Sent:
        """Start *method*. Pass the result to ``wait``, once."""
        sent = Sent(method, request, Until(deadline_ms, self._clock(), self._clock), queue)
        packet = pack_call(method, request) if method in REPLIES else b""
        if not 0 < len(packet) <= MAX_PACKET_BYTES:
            return sent
        self._connection.breaker.check()
        link = queue[-1].link if queue else None
        with suppress(DeadlineError, TierUnavailableError):
            link = link or self.links.take(sent.until.left_s(SLACK_S) / 2)
        if link is None:
            return sent
        try:
            link.settimeout(sent.until.left_s(SLACK_S))
            link.send(packet)
            sent.link = link
        except OSError:
            return sent
        finally:
            if sent.link is None:
                self.links.give_back(link, is_clean=False)
        if queue is not None:
            queue.append(sent)
        return sent

    def wait(self, sent: Sent) -> Any:
        """Return the reply; a call that the socket did not carry is made now."""
        link, queue = sent.link, sent.queue
        if link is not None:
            if queue is not None:
                assert sent is queue[0], "answers are awaited in call order"
                queue.popleft()
            try:
                reply = self._receive(sent, link)
            finally:
                if not (sent.is_over and queue):
                    self.links.give_back(link, is_clean=sent.is_over)
            if sent.is_over:
                return reply
        left_ms, kind = sent.until.left_ms(1), REPLIES.get(sent.method, object)
        return self._connection.call(sent.method, sent.request, left_ms, kind)

    def stream(self, method: str, request: Any, deadline_ms: int) -> Generator[Any, None, None]:
        """Yield the replies of *method*. Closing the iterator early ends the call."""
        sent = self.send(method, request, deadline_ms)
        if (link := sent.link) is not None:
            has_begun = False
            try:
                while (reply := self._receive(sent, link)) is not None and not sent.is_over:
                    has_begun = True
                    yield reply
            finally:
                self.links.give_back(link, is_clean=sent.is_over)
            if sent.is_over:
                return
            if has_begun:
                raise TierUnavailableError("server", "hung up")
        yield from self._connection.stream(method, request, sent.until.left_ms(1))

    def _receive(self, sent: Sent, link: Link) -> Any:
        """Return the next message of an answer, joined if it was cut; None if it is invalid.

        Unless ``sent.is_over``, do not use *link* again: a late answer must not be taken for the
        next call's. Raises the server's errors, DeadlineError.
        """
        parts: list[bytes] = []
        breaker = self._connection.breaker
        while len(parts) * MAX_PACKET_BYTES < MAX_ANSWER_BYTES:
            try:
                # An answer that arrived in time is taken, however late this runs.
                link.settimeout(sent.until.left_s(SLACK_S))
                answer = unpack_answer(link.recv(MAX_PACKET_BYTES + 1))
            except TimeoutError:
                error = DeadlineError("the server did not answer in time")
                breaker.record(error, sent.until)
                raise error from None
            except (OSError, InvalidRequestError):
                return None
            breaker.record(None)
            parts.append(answer.body)
            if answer.reply is Reply.part:
                continue
            sent.is_over = answer.reply is not Reply.more
            if answer.error is not None:
                raise answer.error
            kind = REPLIES[sent.method]
            try:
                return kind.FromString(parts[0] if len(parts) == 1 else b"".join(parts))
            except DecodeError:
                name = kind.DESCRIPTOR.name
                raise KVStoreError(f"the server's reply is not a {name}") from None
        return None


def enter(
    terms: pb.OpenSessionResponse,
    op: unix_socket.Op,
    within_s: float,
    begin: Callable[[Link], None] = lambda link: None,
    memory: tuple[int, int] | None = None,
) -> Link:
    """Connect and ``attach``, with staging *memory* (its size and descriptor), or ``join``, within
    *within_s*. *begin* gets the connection first. Raises DeadlineError, and TierUnavailableError
    also without proof that the server is the session's: another process listens in its place.
    """
    where, session_id, nonce = terms.socket_path, terms.session_id, os.urandom(NONCE_BYTES)
    with ExitStack() as stack:
        try:
            link = stack.enter_context(closing(Link()))
            begin(link)
            link.settimeout(within_s / 2)  # for each of two answers
            link.connect(where)
            is_known = terms.pid_namespace and terms.pid_namespace == unix_socket.pid_namespace()
            if is_known and unix_socket.peer_ids(link)[0] != terms.server_pid:
                raise InvalidRequestError("socket_path", where, "not the server's process")
            link.send(unix_socket.Request(unix_socket.Op.hello, session_id, nonce).pack())
            theirs, proven = unix_socket.unpack_greeting(link.recv(unix_socket.GREETING_BYTES))
            prove = partial(unix_socket.proof, terms.attach_token)
            expected = prove(unix_socket.Op.hello, session_id, (nonce, theirs))
            if not hmac.compare_digest(expected, proven):
                raise InvalidRequestError("socket_path", where, "not the session's server")
            size_bytes, *files = memory or (0,)
            own = prove(op, session_id, (nonce, theirs))
            socket.send_fds(link, [unix_socket.Request(op, size_bytes, own).pack()], files)
            answer = link.recv(unix_socket.HEADER_BYTES)
            reply, _, _ = unix_socket.unpack_head(answer, unix_socket.REPLY_KINDS)
            if reply is not Reply.ok:
                raise TierUnavailableError("shm", f"{where}: {reply.name}")
        except TimeoutError:
            raise DeadlineError(f"{where}: the server did not answer in time") from None
        except (OSError, InvalidRequestError) as error:
            raise TierUnavailableError("shm", f"{where}: {error}") from None
        stack.pop_all()
    return link
