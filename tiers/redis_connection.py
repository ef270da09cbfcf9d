"""A Redis server and its connections: redis-py's, with deadlines, limits and in-place payload.

redis-py bounds each read, not a reply, and hiredis allocates the list that a server announces: 13
bytes from a hostile server block all threads for seconds. So redis-py's Python parser reads, from a
socket that ends every call by its deadline and limits the size of a reply.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from queue import Empty, LifoQueue
from typing import Any, NamedTuple, TypeAlias

from hiredis import pack_command
from redis import exceptions as errors
from redis._parsers import _RESP2Parser
from redis.connection import Connection
from typing_extensions import override

from kvstore.tiers.redis_url import HostPort, Login

Command: TypeAlias = Sequence[bytes | int | memoryview]
Reply: TypeAlias = "bytes | int | errors.RedisError | list[Reply] | None"
Step: TypeAlias = tuple[bytes, bytes, int]
"""A packed command, the expected reply, and the size of the payload that follows with a CRLF."""
Clock: TypeAlias = Callable[[], float]

MAX_HANDSHAKE_BYTES = 16 << 10
SLICE_BYTES = 384 << 10
"""Payload is requested in slices of this size."""
WINDOW = 2
"""Slices in flight on one connection. Redis buffers all requested values before it sends, and the
kernel all unread bytes: two slices stay in the processor's caches end to end. Three connections
read 64 MB in 38 to 40 ms (medians of 40, two cores), with slices of 256 KiB in 43, of 512 in 41
to 42; GET of whole values takes 48 to 50."""
FAR_WINDOW = 11
"""Slices in flight from a distant server, where caches do not matter."""
FAR_S = 0.001
"""A server with a faster answer is on this host, or in the same rack."""
GRACE_S = 0.1
"""Replies that arrived in time are read this long after the deadline: others received first."""

_JOINED_BYTES = _RECEIVE_BYTES = 64 << 10
_MAX_ERROR_BYTES = 512
_END = b"\r\n"


class WrongTypeError(errors.ResponseError):
    """Another kind of value is stored under the name."""


class LoadingError(errors.ResponseError):
    """The server has not loaded its data yet. A ResponseError, unlike redis-py's own class."""


class SlotLostError(errors.ResponseError):
    """No server of the Cluster holds the slot of the name."""


class ReplyParser(_RESP2Parser):
    """redis-py's parser with the errors above."""

    EXCEPTION_CLASSES = {  # noqa: RUF012 - the base class is untyped
        **_RESP2Parser.EXCEPTION_CLASSES,
        "WRONGTYPE": WrongTypeError,
        "LOADING": LoadingError,
        "MASTERDOWN": LoadingError,
    }

    @classmethod
    @override
    def parse_error(cls, response: str) -> Exception:
        if response.startswith("CLUSTERDOWN Hash slot"):
            return SlotLostError(response)
        if "The user executing the script can't" in response:
            return errors.NoPermissionError(response)
        return super().parse_error(response)  # type: ignore[no-any-return, no-untyped-call]


def encode(*words: bytes | int | memoryview) -> bytes:
    """Return one command in the wire format."""
    return pack_command(words)  # type: ignore[arg-type, no-any-return]


def pack(*commands: Command) -> list[bytes | memoryview]:
    """Return *commands* in the wire format; payload views are not copied, unlike in redis-py."""
    packed: list[bytes | memoryview] = []
    text: list[bytes] = []
    for command in commands:
        if memoryview not in map(type, command):
            text.append(encode(*command))
            continue
        (view,) = (word for word in command if isinstance(word, memoryview))
        words = (b"" if word is view else word for word in command)
        head, tail = encode(*words).split(b"$0\r\n", 1)
        packed += [b"".join(text) + head + b"$%d\r\n" % view.nbytes, view]
        text = [tail]
    return [*packed, b"".join(text)]


class ConnectionOptions(NamedTuple):
    """Options of each connection. ``limit`` bounds the connections to one server."""

    timeout_s: float
    limit: int
    login: Login = Login()
    database: int = 0
    tls: ssl.SSLContext | None = None


class DeadlineSocket:
    """A socket whose calls end by ``deadline``, and after *silence_s* without a byte. Bytes that
    arrived before the deadline can be received for GRACE_S after it.
    """

    def __init__(self, sock: socket.socket, silence_s: float, clock: Clock) -> None:
        self.deadline = 0.0
        self.limit_bytes = 0
        """Remaining bytes that ``recv`` may return; a longer reply is invalid."""
        self._sock = sock
        self._wait_s = -1.0
        self._silence_s = silence_s
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _use(self, call: Callable[[Any], Any], argument: object) -> Any:
        left_s = self.deadline - self._clock()
        if left_s < -GRACE_S:
            raise errors.TimeoutError("no answer in time")
        wait_s = min(self._silence_s, max(0.0, left_s))
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            self._sock.settimeout(wait_s)
        try:
            return call(argument)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise errors.TimeoutError("no answer in time") from None

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all *data*."""
        left = memoryview(data)
        while left:
            left = left[self._use(self._sock.send, left) :]

    def recv(self, size: int) -> bytes:
        """Receive at most *size* bytes."""
        data: bytes = self._use(self._sock.recv, size)
        self.limit_bytes -= len(data)
        if self.limit_bytes < 0:
            raise errors.InvalidResponse("the reply exceeds its size limit")
        if not data:
            raise errors.ConnectionError("the server closed the connection")
        return data

    def recv_into(self, outs: Sequence[memoryview]) -> int:
        """Receive available bytes into *outs*; return their number."""
        if isinstance(self._sock, ssl.SSLSocket):
            count: int = self._use(self._sock.recv_into, outs[0])
        else:
            count = self._use(self._sock.recvmsg_into, outs)[0]
        if not count:
            raise errors.ConnectionError("the server closed the connection")
        return count


class RedisConnection(Connection):
    """redis-py's connection; every call ends by the deadline of its ``link``. Raises redis-py's
    errors and OSError; the connection is unusable after one.
    """

    link: DeadlineSocket
    is_quiet = False
    """Whether it is open and has received all replies."""
    answer_s = math.inf
    """Duration of the last call with parsed replies."""
    _sent_at = -math.inf

    def __init__(self, address: HostPort, options: ConnectionOptions, clock: Clock) -> None:
        self._options, self._clock, self._deadline = options, clock, 0.0
        super().__init__(  # type: ignore[no-untyped-call]
            *address,
            db=options.database,
            username=options.login.username or None,
            password=options.login.password or None,
            protocol=2,
            driver_info=None,
            socket_read_size=_RECEIVE_BYTES,
            parser_class=ReplyParser,
        )

    def open(self, deadline: float) -> None:
        """Connect, encrypt and authenticate by *deadline*, or after ``timeout_s``."""
        self._deadline = min(deadline, self._clock() + self._options.timeout_s)
        try:
            self._sock = self._connect()  # type: ignore[assignment]
            self.on_connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            raise errors.TimeoutError("no connection in time") from None
        self.is_quiet = True

    @property  # type: ignore[misc] # it cannot be set
    @override
    def socket_connect_timeout(self) -> float:
        """Half of the remaining time, so that the rest is left for the next address."""
        return max(0.001, (self._deadline - self._clock()) / 2)

    @override
    def _connect(self) -> DeadlineSocket:
        sock = super()._connect()  # type: ignore[no-untyped-call]
        if self._options.tls is not None:
            sock.settimeout(2 * self.socket_connect_timeout)
            sock = self._options.tls.wrap_socket(sock, server_hostname=self.host)
        self.link = DeadlineSocket(sock, self._options.timeout_s, self._clock)
        self.link.deadline = self._deadline
        return self.link

    @override
    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return one reply of the handshake, for redis-py. Raises an error reply."""
        (reply,) = self.read_replies(1, MAX_HANDSHAKE_BYTES)
        self.is_quiet = False  # before ``open`` has succeeded
        if isinstance(reply, errors.RedisError):
            raise reply
        return reply

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all *parts*, joined if they are small."""
        self.is_quiet, self._sent_at = False, self._clock()
        if sum(map(len, parts)) <= _JOINED_BYTES:
            parts = [b"".join(parts)]
        for part in parts:
            self.link.sendall(part)

    def read_replies(self, count: int, limit_bytes: int) -> list[Reply]:
        """Return *count* replies, including errors, of at most *limit_bytes* in total."""
        self.link.limit_bytes = limit_bytes
        read = self._parser.read_response
        try:
            replies = [read(disable_decoding=True) for _ in range(count)]
        except (ValueError, OverflowError, RecursionError):
            raise errors.InvalidResponse("not the protocol of Redis") from None
        if self._parser._buffer.unread_bytes():
            raise errors.InvalidResponse("more replies than commands")
        self.is_quiet, self.answer_s = True, self._clock() - self._sent_at
        return replies

    def transfer(self, steps: Sequence[Step], out: memoryview, window: int) -> Iterator[int]:
        """Run *steps* in order, whose payload fills *out*; yield the bytes filled after each slice.
        *window* slices are in flight, after a first step without payload.
        """
        requests = (request for request, _, _ in steps)
        self.send(list(islice(requests, window + 1)))
        end = 0
        for _, expected, payload_bytes in steps:
            start, end = end, end + payload_bytes
            self.receive(expected, out[start:end])
            if payload_bytes:
                self.send(list(islice(requests, 1)))  # before the caller processes the slice
                yield end
        self.is_quiet = True

    def receive(self, expected: bytes, out: memoryview) -> None:
        """Receive the *expected* reply, then, if *out* is not empty, payload and a CRLF."""
        head, end = memoryview(bytearray(len(expected))), memoryview(bytearray(2))
        left = deque((head, out, end) if len(out) else (head,))
        received = 0
        while left:
            count = self.link.recv_into(list(left))
            received += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
            if head[:received] != expected[:received]:
                got = b"".join(part[:_MAX_ERROR_BYTES] for part in (head, out, end))
                raise self._other_reply(got[: min(received, _MAX_ERROR_BYTES)], expected)
        if len(out) and end != _END:
            raise errors.InvalidResponse("a value of another size than announced")

    def _other_reply(self, got: bytes, expected: bytes) -> Exception:
        """Return the error received in place of *expected*; *got* may end inside it."""
        pairs = enumerate(zip(got, expected, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(got))
        # A value's bytes may look like an error; a real one replaces the value from its head on.
        line = got if expected.startswith(b"$") else got[got.rfind(b"\n", 0, same) + 1 :]
        if not line.startswith(b"-"):
            return errors.InvalidResponse("unexpected reply")
        self.link.limit_bytes = _MAX_ERROR_BYTES
        while _END not in line and len(line) < _MAX_ERROR_BYTES:
            line += self.link.recv(_MAX_ERROR_BYTES - len(line))
        text = line[1:].partition(_END)[0].decode(errors="replace")
        try:
            return ReplyParser.parse_error(text)
        except ValueError:  # a MOVED or ASK with an invalid address
            return errors.ResponseError(text)


class Server:
    """One Redis server and its connections, at most ``limit``. Thread-safe. Each connection has one
    user at a time; a failed one is not reused.
    """

    def __init__(self, address: HostPort, options: ConnectionOptions, clock: Clock) -> None:
        self.address = address
        self._options = options
        self._clock = clock
        self._free: LifoQueue[RedisConnection | None] = LifoQueue()
        """Unused connections; None for each that may be opened."""
        for _ in range(options.limit):
            self._free.put(None)
        self.retry_at = 0.0
        self.refused_at = -math.inf
        self._nearest_s = float("inf")
        """Time of the fastest answer, which estimates the server's distance: others had waits."""
        self._is_closed = False

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)

    @property
    def is_suspended(self) -> bool:
        """Whether the server failed recently and is not used."""
        return self._clock() < self.retry_at

    @property
    def window(self) -> int:
        """Slices in flight on a connection. With TLS caches do not matter either."""
        is_far = self._options.tls is not None or self._nearest_s > FAR_S
        return FAR_WINDOW if is_far else WINDOW

    @contextmanager
    def connection(self, deadline: float) -> Iterator[RedisConnection]:
        """Yield an open, quiet connection, waiting for one until *deadline*. It is closed
        afterwards unless it is quiet again.
        """
        try:
            connection = self._free.get(timeout=max(0.0, deadline - self._clock()))
        except Empty:
            raise errors.TimeoutError("all connections are in use") from None
        try:
            if connection is not None:
                poll = select.poll()
                poll.register(connection.link, select.POLLIN | select.POLLRDHUP)
                if poll.poll(0):  # the server closed it, or sent unexpected bytes
                    connection.disconnect()  # type: ignore[no-untyped-call]
                    connection = None
            if self._is_closed:
                raise errors.ConnectionError("closed")
            if connection is None:
                connection = RedisConnection(self.address, self._options, self._clock)
                connection.open(deadline)
            connection.link.deadline = deadline
            yield connection
            self._nearest_s = min(self._nearest_s, connection.answer_s)
        finally:
            if connection is not None and not connection.is_quiet:
                connection.disconnect()  # type: ignore[no-untyped-call]
                connection = None
            self._free.put(connection)
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Disconnect; connections in use follow when they are returned. Idempotent."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                connection = self._free.get_nowait()
                if connection is not None:
                    connection.disconnect()  # type: ignore[no-untyped-call]
        self._free.put(None)  # wakes a waiter, which then raises
