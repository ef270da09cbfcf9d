"""Known namespaces as bytes, for the history file. docs/format.md has them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.types import DIGEST_BYTES, Namespace
from kvstore.proto.wire import representation_from_message, representation_to_message
from kvstore.server.known_spaces import MAX_SPACES, Space

MAX_SPACE_BYTES = 1 << 14
"""Of one record; a Representation that takes more is not kept."""
MAX_RECORDS_BYTES = 4 + MAX_SPACES * MAX_SPACE_BYTES

_COUNT = struct.Struct("<I")
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sHHI")


def pack_spaces(spaces: Sequence[Space]) -> bytes:
    """Return the records of the last MAX_SPACES of *spaces*, in their order."""
    records = [
        record for one in spaces[-MAX_SPACES:] if len(record := _pack(one)) <= MAX_SPACE_BYTES
    ]
    return _COUNT.pack(len(records)) + b"".join(records)


def _pack(space: Space) -> bytes:
    message = representation_to_message(space.representation)
    parts = (
        space.tenant.encode()[:0xFFFF],
        space.client.encode()[:0xFFFF],
        message.SerializeToString(deterministic=True),
    )
    return _RECORD.pack(space.namespace, *map(len, parts)) + b"".join(parts)


def unpack_spaces(data: bytes) -> list[Space]:
    """Parse all of *data*. Raises InvalidFrameError."""
    try:
        (count,) = _COUNT.unpack_from(data)
        if count > MAX_SPACES:
            raise InvalidFrameError("spaces", count, f"at most {MAX_SPACES}")
        spaces, at = [], _COUNT.size
        for _ in range(count):
            one, at = _unpack(data, at)
            spaces.append(one)
    except (struct.error, UnicodeDecodeError, DecodeError):
        raise InvalidFrameError("spaces", len(data), "they do not end, or are no text") from None
    if at != len(data):
        raise InvalidFrameError("spaces", len(data), "there is more behind them")
    return spaces


def _unpack(data: bytes, at: int) -> tuple[Space, int]:
    name, *sizes = _RECORD.unpack_from(data, at)
    at += _RECORD.size
    parts = []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    if at > len(data) or _RECORD.size + sum(sizes) > MAX_SPACE_BYTES:
        raise InvalidFrameError("spaces", sum(sizes), "more than there is, or than one may have")
    tenant, client, message = parts
    try:
        kind = representation_from_message(pb.Representation.FromString(message))
    except KVStoreError as error:
        raise InvalidFrameError("spaces", name.hex(), str(error)) from None
    return Space(Namespace(name), tenant.decode(), client.decode(), kind), at
