"""One connection to a Redis server: redis-py's, with a deadline, strict replies, payload in place.

redis-py bounds each read, not a reply, and hiredis allocates the list that a server announces: 13
bytes of a hostile one hold all threads for seconds. Here every read ends by the call's deadline,
and what is parsed has limits.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from redis.connection import Connection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from typing_extensions import override

from kvstore.tiers.redis_url import HostPort, Login

Argument: TypeAlias = bytes | int | memoryview
Command: TypeAlias = Sequence[Argument]
Reply: TypeAlias = "bytes | int | RedisError | list[Reply] | None"

MAX_LINE_BYTES = 4096
MAX_BULK_BYTES = 1 << 20
"""Larger payloads are received into memory that the caller gives."""
MAX_ITEMS = 1 << 17
MAX_DEPTH = 6
MAX_HANDSHAKE_BYTES = 16 << 10
SLICE_BYTES = 1 << 18
"""Payload is requested in slices of this size."""
WINDOW = 2
"""Slices requested and not yet here, on one connection. Redis copies all that is requested before
it sends, and the kernel what the reader has not taken: two slices stay in the processor's caches
from one end to the other (measured: 4.3 GB/s on one connection, 1.9 with four)."""
GRACE_S = 0.1
"""What came in time is still read for so long: another server of the call may have used it up."""

_SEND_BUFFERS = 64
_RECEIVE_BYTES = 64 << 10
_MAX_ERROR_BYTES = 512
_END = b"\r\n"
_LATE = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, socket.timeout)


class WrongTypeError(ResponseError):
    """Another kind of value is stored under the name."""


class MovedError(ResponseError):
    """Another server holds the slot of the name; the text is its number and ``host:port``."""


class SlotLostError(ResponseError):
    """No server of the Cluster holds the slot of the name."""


_ERRORS: dict[bytes, type[RedisError]] = {
    b"WRONGTYPE": WrongTypeError, b"OOM": OutOfMemoryError, b"NOPERM": NoPermissionError,
    b"NOAUTH": AuthenticationError, b"WRONGPASS": AuthenticationError,
    b"READONLY": ReadOnlyError, b"LOADING": BusyLoadingError, b"MASTERDOWN": BusyLoadingError,
    b"MOVED": MovedError, b"ASK": TryAgainError, b"TRYAGAIN": TryAgainError,
    b"CLUSTERDOWN": ClusterDownError,
}  # fmt: skip


def error_of(line: bytes) -> RedisError:
    """Return the error that *line* is, its ``-`` included."""
    kind, _, rest = line[1:].partition(b" ")
    if line.startswith(b"-CLUSTERDOWN Hash slot"):
        return SlotLostError(line[1:].decode(errors="replace"))
    if rest.startswith(b"The user executing the script can't"):
        return NoPermissionError(rest.decode(errors="replace"))
    found = _ERRORS.get(kind)
    text = line[1:] if found is None else rest
    return (found or ResponseError)(text.decode(errors="replace"))


class ReplyReader:
    """Read RESP2 replies of *limit_bytes* at most together, which *receive* puts into a buffer.

    Raises InvalidResponse for what no right reply is, and whatever *receive* raises.
    """

    def __init__(self, receive: Callable[[memoryview], int], limit_bytes: int) -> None:
        self._receive = receive
        self._left_bytes = limit_bytes
        self._room = memoryview(bytearray(_RECEIVE_BYTES))
        self._unread = bytearray()
        self._at = 0

    def read(self, count: int) -> list[Reply]:
        """Return *count* replies, which must be all there are; an error is one of them."""
        replies = [self._reply(0) for _ in range(count)]
        if self._at < len(self._unread):
            raise InvalidResponse("more replies than commands")
        return replies

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return error_of(line)
        digits = text.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 19:
            raise InvalidResponse("not a number")
        size = int(text)
        if kind == b":" or size == -1:
            return size if kind == b":" else None
        if kind == b"$":
            return self._bulk(size)
        if not 0 <= size <= MAX_ITEMS or depth == MAX_DEPTH:
            raise InvalidResponse("a list larger than any right one")
        return [self._reply(depth + 1) for _ in range(size)]

    def _line(self) -> bytes:
        while True:
            if self._unread[self._at : self._at + 1] not in b"$:+-*":
                raise InvalidResponse("not the protocol of Redis")
            end = self._unread.find(_END, self._at, self._at + MAX_LINE_BYTES)
            if end >= 0:
                line = bytes(self._unread[self._at : end])
                self._at = end + 2
                return line
            if len(self._unread) - self._at >= MAX_LINE_BYTES:
                raise InvalidResponse("not the protocol of Redis")
            self._receive_more()

    def _bulk(self, size: int) -> bytes:
        if not 0 <= size <= MAX_BULK_BYTES:
            raise InvalidResponse("a value larger than any right one")
        while len(self._unread) - self._at < size + 2:
            self._receive_more()
        start, end = self._at, self._at + size
        self._at = end + 2
        if self._unread[end : self._at] != _END:
            raise InvalidResponse("a value of another size than announced")
        return bytes(self._unread[start:end])

    def _receive_more(self) -> None:
        del self._unread[: self._at]
        self._at = 0
        count = self._receive(self._room)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise InvalidResponse("the reply is larger than any right one")
        self._unread += self._room[:count]


def pack(*commands: Command) -> list[bytes | memoryview]:
    """Return *commands* as they are sent; views are sent as they are, which redis-py would copy."""
    packed: list[bytes | memoryview] = []
    text: list[bytes] = []
    for command in commands:
        text.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, memoryview):
                packed += [b"".join(text) + b"$%d\r\n" % argument.nbytes, argument]
                text = [_END]
            else:
                data = argument if isinstance(argument, bytes) else b"%d" % argument
                text.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return [*packed, b"".join(text)]


class Step(NamedTuple):
    """A packed command, and its reply: *expected*, and then, if any, payload and a CRLF."""

    request: bytes
    expected: bytes
    payload_bytes: int = 0


def slice_steps(name: bytes, start: int, stop: int) -> Iterator[Step]:
    """Yield what brings the bytes from *start* to *stop* of the value called *name*, by slices."""
    head = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(name), name)
    for first in range(start, stop, SLICE_BYTES):
        end = min(first + SLICE_BYTES, stop)
        a, b = b"%d" % first, b"%d" % (end - 1)
        request = b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (head, len(a), a, len(b), b)
        yield Step(request, b"$%d\r\n" % (end - first), end - first)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How each connection is opened. ``limit`` bounds those to one server."""

    timeout_s: float
    limit: int
    login: Login = field(default_factory=Login)
    database: int = 0
    tls: ssl.SSLContext | None = None


class RedisConnection(Connection):
    """redis-py's connection, every call on which ends by ``deadline``, on *clock*.

    What came before the deadline can be read for GRACE_S after it. Raises redis-py's errors and
    OSError; after one, the connection is of no use.
    """

    def __init__(
        self, address: HostPort, options: ConnectionOptions, clock: Callable[[], float]
    ) -> None:
        login = options.login
        super().__init__(  # type: ignore[no-untyped-call]
            *address,
            db=options.database,
            username=login.username or None,
            password=login.password or None,
            protocol=2,
            driver_info=None,
            socket_read_size=1,  # redis-py's own parser reads nothing
        )
        self.deadline = 0.0
        self.sock: socket.socket
        self._tls = options.tls
        self._silence_s = options.timeout_s
        self._clock = clock
        self._wait_s = -1.0

    def open(self, deadline: float) -> None:
        """Connect, encrypt and authenticate by *deadline*, or after ``timeout_s``."""
        self.deadline = min(deadline, self._clock() + self._silence_s)
        try:
            self.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.disconnect()  # type: ignore[no-untyped-call] # redis-py does after its errors only
            if isinstance(error, ConnectionError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # it says more than redis-py's text
            raise

    @override
    def _connect(self) -> Any:
        sock = self._reach()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in self.socket_keepalive_options.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.settimeout(self._left_s())
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        return sock

    def _reach(self) -> socket.socket:
        """Connect to the host's first address that answers; each has its share of what is left.

        redis-py gives each the whole time.
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        reason = OSError("the host has no address")
        for at, (family, kind, protocol, _, address) in enumerate(found):
            share_s = self._left_s() / (len(found) - at)
            sock = None
            try:
                sock = socket.socket(family, kind, protocol)  # no IPv6 here is no reason to stop
                sock.settimeout(share_s)
                sock.connect(address)
            except OSError as error:
                if sock is not None:
                    sock.close()
                reason = error
            else:
                return sock
        raise reason

    def _left_s(self) -> float:
        left_s = self.deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError("no connection in time")
        return left_s

    @override
    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return one reply of the handshake, for redis-py. Raises what is an error."""
        (reply,) = self.read_replies(1, MAX_HANDSHAKE_BYTES)
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def _bound(self) -> None:
        """Have the next use of the socket end in time."""
        left_s = self.deadline - self._clock()
        if left_s < -GRACE_S:
            raise TimeoutError("no answer in time")
        wait_s = min(self._silence_s, max(0.0, left_s))
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            self.sock.settimeout(wait_s)

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send all *parts*."""
        left: deque[memoryview] = deque(memoryview(part) for part in parts)
        while left:
            self._bound()
            try:
                if self._tls is not None:
                    count = self.sock.send(left[0])
                else:
                    count = self.sock.sendmsg(list(islice(left, _SEND_BUFFERS)))
            except OSError as error:
                raise _in_time(error) from None
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def _receive(self, rooms: Sequence[memoryview]) -> int:
        """Fill *rooms*, as far as something came; return how far."""
        self._bound()
        try:
            if self._tls is not None:
                count: int = self.sock.recv_into(rooms[0])
            else:
                count = self.sock.recvmsg_into(rooms)[0]
        except OSError as error:
            raise _in_time(error) from None
        if not count:
            raise ConnectionError("the server hung up")
        return count

    def read_replies(self, count: int, limit_bytes: int) -> list[Reply]:
        """Return *count* replies of *limit_bytes* at most; an error is one of them."""
        return ReplyReader(lambda room: self._receive([room]), limit_bytes).read(count)

    def receive(self, expected: bytes, room: memoryview) -> None:
        """Receive a reply that is *expected*; where *room* is not empty, payload and a CRLF too."""
        head, end = memoryview(bytearray(len(expected))), memoryview(bytearray(2))
        left = deque((head, room, end) if len(room) else (head,))
        came = 0
        while left:
            count = self._receive(list(left))
            came += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
            known = min(came, len(expected))
            if head[:known] != expected[:known]:
                got = b"".join(bytes(part[:_MAX_ERROR_BYTES]) for part in (head, room, end))
                raise _other_reply(got[: min(came, _MAX_ERROR_BYTES)], expected)
        if len(room) and end != _END:
            raise InvalidResponse("a value of another size than announced")


def _in_time(error: OSError) -> Exception:
    """Return redis-py's TimeoutError where *error* of a socket says that it waited in vain."""
    return TimeoutError("no answer in time") if isinstance(error, _LATE) else error


def _other_reply(got: bytes, expected: bytes) -> RedisError:
    """Return the error that came in place of what was expected."""
    pairs = zip(got, expected, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
    text, _, _ = got[same:].partition(_END)
    is_error = text.startswith(b"-") and (same == 0 or got[same - 1] == 10)  # of a line of its own
    return error_of(text) if is_error else InvalidResponse("another reply")


@dataclass(slots=True)
class Transfer:
    """The value of one key received in place: *steps* in order, whose payload fills *out*.

    *arrived* is called, after each slice, with how much has come.
    """

    steps: Sequence[Step]
    out: memoryview
    arrived: Callable[[int], object] = bool
    filled_bytes: int = 0

    def run(self, connection: RedisConnection, window: int) -> None:
        """Receive all, *window* slices on their way."""
        self.filled_bytes = 0
        queue, free = deque(self.steps), window
        for step in self.steps:
            free = _request(connection, queue, free)
            end = self.filled_bytes + step.payload_bytes
            connection.receive(step.expected, self.out[self.filled_bytes : end])
            if step.payload_bytes:
                self.filled_bytes = end
                free = _request(connection, queue, free + 1)  # before what is called takes time
                self.arrived(end)


def _request(connection: RedisConnection, queue: deque[Step], free: int) -> int:
    """Request what comes next, with *free* slices at most; return how many are free then."""
    requests = []
    while queue and (free > 0 or not queue[0].payload_bytes):
        step = queue.popleft()
        free -= step.payload_bytes > 0
        requests.append(step.request)
    if requests:
        connection.send([b"".join(requests)])
    return free
