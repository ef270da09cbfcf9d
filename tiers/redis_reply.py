"""What Redis answers: a strict parser of RESP2 within limits, and its errors by name."""

from __future__ import annotations

from typing import TypeAlias

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

Reply: TypeAlias = "bytes | int | RedisError | list[Reply] | None"

MAX_LINE_BYTES = 4096
MAX_BULK_BYTES = 1 << 20
"""Larger payloads are read into memory that the caller gives."""
MAX_ITEMS = 1 << 17
MAX_DEPTH = 6


class WrongTypeError(ResponseError):
    """Somebody stored another kind of value under the name."""


class MovedError(ResponseError):
    """Another server holds the slot of the name; the text is its number and ``host:port``."""


class MovingError(ResponseError):
    """The slot of the name is on its way to another server."""


class SlotLostError(ResponseError):
    """No server of the Cluster holds the slot of the name."""


_ERRORS: dict[bytes, type[RedisError]] = {
    b"WRONGTYPE": WrongTypeError,
    b"OOM": OutOfMemoryError,
    b"NOPERM": NoPermissionError,
    b"NOAUTH": AuthenticationError,
    b"WRONGPASS": AuthenticationError,
    b"READONLY": ReadOnlyError,
    b"LOADING": BusyLoadingError,
    b"MASTERDOWN": BusyLoadingError,
    b"MOVED": MovedError,
    b"ASK": MovingError,
    b"TRYAGAIN": MovingError,
    b"CLUSTERDOWN": ClusterDownError,
}


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


def parse_reply(buffer: bytearray, at: int, depth: int = 0) -> tuple[Reply, int] | None:
    """Parse the reply at *at*; return it and where the next one starts, None if it is not whole.

    Raises InvalidResponse.
    """
    end = buffer.find(b"\r\n", at, at + MAX_LINE_BYTES)
    if end < 0:
        if len(buffer) - at >= MAX_LINE_BYTES:
            raise InvalidResponse("a line without an end")
        if len(buffer) > at and buffer[at] not in b"$:+-*":
            raise InvalidResponse("not the protocol of Redis")
        return None
    kind, line, after = buffer[at], bytes(buffer[at + 1 : end]), end + 2
    if kind == 36:  # $
        return _parse_bulk(buffer, _number(line), after)
    if kind == 58:  # :
        return _number(line), after
    if kind == 43:  # +
        return line, after
    if kind == 45:  # -
        return error_of(b"-" + line), after
    if kind == 42:  # *
        return _parse_list(buffer, _number(line), after, depth)
    raise InvalidResponse("not the protocol of Redis")


def _parse_bulk(buffer: bytearray, size: int, at: int) -> tuple[Reply, int] | None:
    if size == -1:
        return None, at
    if not 0 <= size <= MAX_BULK_BYTES:
        raise InvalidResponse("a value larger than any right one")
    end = at + size
    if len(buffer) < end + 2:
        return None
    if buffer[end : end + 2] != b"\r\n":
        raise InvalidResponse("a value of another size than announced")
    return bytes(buffer[at:end]), end + 2


def _parse_list(buffer: bytearray, count: int, at: int, depth: int) -> tuple[Reply, int] | None:
    if count == -1:
        return None, at
    if not 0 <= count <= MAX_ITEMS or depth == MAX_DEPTH:
        raise InvalidResponse("a list larger than any right one")
    items: list[Reply] = []
    for _ in range(count):
        found = parse_reply(buffer, at, depth + 1)
        if found is None:
            return None
        item, at = found
        items.append(item)
    return items, at


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise InvalidResponse("not a number")
    return int(text)
