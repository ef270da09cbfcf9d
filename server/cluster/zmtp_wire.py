"""A ZmtpWire: ZeroMQ's protocol spoken by hand, so that payloads land where they are kept.

ZMTP 3.1 (rfc.zeromq.org/spec/37) as a DEALER under the NULL mechanism, in plain text. libzmq
receives into memory of its own, in a thread of its own: a copy of every byte and two changes of
thread a message, which are a third of what a transfer takes on a machine with few processors.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import DeadlineError, InvalidRequestError, TierUnavailableError

_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_HEAD, _LONG_HEAD = 2, 9
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
_PING, _PONG = b"\x04PING", b"\x04PONG"
_TTL_BYTES = 2
_MAX_PING_CONTEXT = 16
_BUFFER_BYTES = 1024
MAX_SMALL_BYTES = 512
"""Of a header or a command: more is no message of the bulk channel."""
MAX_UNSENT_BYTES = 4 << 20


class ZmtpWire:
    """To *address*, ``tcp://HOST:PORT`` or ``ipc://PATH``, whose host should be a number.

    *clock* returns monotonic seconds. Raises TierUnavailableError.
    """

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._is_ready = False
        self._unsent = bytearray(_GREETING)
        self._waiting = bytearray()
        """Messages that may not be sent before the other side is ready."""
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._payload_bytes = 0
        self._greeted = False
        try:
            self._socket = _connecting(address)
        except (OSError, ValueError) as error:
            raise self._unavailable(str(error)) from None
        self._poll = select.poll()
        self._events = select.POLLIN | select.POLLOUT
        self._poll.register(self._socket, self._events)

    # --- as Wire says

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, or keep it until the other side is ready. Raises TierUnavailableError."""
        queue = self._unsent if self._is_ready else self._waiting
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            queue += _head(_MORE if index < last else 0, len(frame))
            queue += frame
        if len(queue) > MAX_UNSENT_BYTES:
            raise self._unavailable("does not read what it is sent")
        if self._is_ready:
            self._flush()

    def receive(self, deadline: float) -> tuple[bytes, int | None]:
        """Return the next message's header and its payload's size."""
        if self._payload_bytes:
            raise InvalidRequestError("payload", self._payload_bytes, "is to be taken first")
        if not self._is_ready:
            self._shake_hands(deadline)
        while True:
            flags, body = self._small_frame(deadline)
            if not flags & _COMMAND:
                break
            self._obey(body)
        if not flags & _MORE:
            return body, None
        flags, head_bytes, size_bytes = self._head(deadline)
        if flags & (_MORE | _COMMAND) or size_bytes > bulk.MAX_WIRE_BYTES:
            raise InvalidRequestError("frames", (flags, size_bytes), "two at most, of a MiB")
        self._start += head_bytes
        self._payload_bytes = size_bytes
        return body, size_bytes

    def fill(self, out: Bytes, deadline: float) -> None:
        """Receive the next bytes of the payload where *out* is."""
        if len(out) > self._payload_bytes:
            raise InvalidRequestError("payload", self._payload_bytes, f"{len(out)} are asked for")
        self._payload_bytes -= len(out)
        room = out.data
        ready = min(self._stop - self._start, len(room))
        room[:ready] = self._view[self._start : self._start + ready]
        self._start += ready
        room = room[ready:]
        while len(room):  # nothing is buffered any more: what follows the payload may come with it
            count = self._read([room, self._view], deadline)
            self._start, self._stop = 0, max(0, count - len(room))
            room = room[count:]

    def tend(self) -> bool:
        """Answer heartbeats. Whether it may be used again: it stands, and nothing was said."""
        try:
            while self._is_ready and not self._payload_bytes:
                flags, body = self._small_frame(-1.0)
                if not flags & _COMMAND:
                    return False
                self._obey(body)
        except DeadlineError:
            return self._is_ready
        except (TierUnavailableError, InvalidRequestError):
            return False
        return False

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    # --- the protocol

    def _shake_hands(self, deadline: float) -> None:
        if not self._greeted:
            self._need(_GREETING_BYTES, deadline)
            greeting = self._take(_GREETING_BYTES)
            if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3:
                raise InvalidRequestError("greeting", greeting[:11], "not ZMTP 3")
            mechanism = greeting[_MECHANISM].rstrip(b"\0")
            if mechanism != b"NULL":
                raise InvalidRequestError("mechanism", mechanism, "NULL was agreed on")
            self._unsent += _head(_COMMAND, len(_READY)) + _READY
            self._flush()
            self._greeted = True
        flags, body = self._small_frame(deadline)
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise InvalidRequestError("handshake", body[:32], "READY was to come")
        self._is_ready = True
        self._unsent += self._waiting
        self._waiting.clear()
        self._flush()

    def _obey(self, command: bytes) -> None:
        """Answer a heartbeat; other commands ask for nothing."""
        if command.startswith(_PING):
            context = command[len(_PING) + _TTL_BYTES :][:_MAX_PING_CONTEXT]
            self._unsent += _head(_COMMAND, len(_PONG) + len(context)) + _PONG + context
            self._flush()

    def _small_frame(self, deadline: float) -> tuple[int, bytes]:
        """Return flags and body of a frame that is no payload; it is taken whole or not at all."""
        flags, head_bytes, size_bytes = self._head(deadline)
        if size_bytes > MAX_SMALL_BYTES:
            raise InvalidRequestError("frame", size_bytes, f"at most {MAX_SMALL_BYTES} bytes")
        self._need(head_bytes + size_bytes, deadline)
        return flags, self._take(head_bytes + size_bytes)[head_bytes:]

    def _head(self, deadline: float) -> tuple[int, int, int]:
        """Return a frame's flags, how many bytes they and its size take, and its size."""
        self._need(_SHORT_HEAD, deadline)
        flags = self._view[self._start]
        if not flags & _LONG:
            return flags, _SHORT_HEAD, self._view[self._start + 1]
        self._need(_LONG_HEAD, deadline)
        size = self._view[self._start + 1 : self._start + _LONG_HEAD]
        return flags, _LONG_HEAD, int.from_bytes(size, "big")

    # --- bytes

    def _need(self, count: int, deadline: float) -> None:
        """Have *count* bytes in the buffer, at most _BUFFER_BYTES."""
        if self._start + count > _BUFFER_BYTES or self._start == self._stop:
            left = bytes(self._view[self._start : self._stop])
            self._view[: len(left)] = left
            self._start, self._stop = 0, len(left)
        while self._stop - self._start < count:
            self._stop += self._read([self._view[self._stop :]], deadline)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._view[self._start : self._start + count])
        self._start += len(taken)
        return taken

    def _read(self, rooms: list[memoryview], deadline: float) -> int:
        """Fill *rooms*, one after another, with what is there; wait for it if there is nothing."""
        while True:
            try:
                count = self._socket.recvmsg_into(rooms)[0]
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise self._unavailable(error.strerror or str(error)) from None
            if not count:
                raise self._unavailable("hung up")
            return count

    def _wait(self, deadline: float) -> None:
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._poll.modify(self._socket, events)
        left_s = deadline - self._clock()
        if left_s <= 0 or not self._poll.poll(max(1, int(1000 * left_s))):
            raise DeadlineError(f"{self._address} did not answer in time")
        if self._unsent:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._unavailable(error.strerror or str(error)) from None

    def _unavailable(self, reason: str) -> TierUnavailableError:
        return TierUnavailableError("peer", f"{self._address}: {reason}")


def _head(flags: int, size_bytes: int) -> bytes:
    if size_bytes < 256:
        return bytes((flags, size_bytes))
    return bytes((flags | _LONG,)) + size_bytes.to_bytes(8, "big")


def _connecting(address: str) -> socket.socket:
    """Return a socket that connects by itself. Raises OSError, ValueError."""
    scheme, _, place = address.partition("://")
    if scheme == "ipc":
        link, where = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), place
    else:
        host, _, port = place.rpartition(":")
        family, kind, protocol, _, found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        link, where = socket.socket(family, kind, protocol), found  # type: ignore[assignment]
    try:
        link.setblocking(False)
        if scheme != "ipc":
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.connect(where)
    except BlockingIOError:
        return link
    except BaseException:
        link.close()
        raise
    return link
