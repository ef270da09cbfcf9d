"""What servers tell each other on the bulk channel: which chunks are meant, which are in memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvstore.proto.bulk import MAX_PAYLOAD_BYTES
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.frame import pack_components
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, KVLayout, Namespace
from kvstore.proto.wire import keys_of_digests, pack_info, unpack_info

_LENGTH = struct.Struct("<H")


def pack_wanted(keys: Sequence[ChunkKey]) -> bytes:
    """Return the payload that names *keys* of one namespace: that, then their digests."""
    return b"".join([keys[0][:DIGEST_BYTES], *(key[DIGEST_BYTES:] for key in keys)])


def unpack_wanted(payload: bytes, limit: int) -> list[ChunkKey]:
    """Parse it. Raises InvalidRequestError for one cut short, and for more than *limit* keys."""
    if len(payload) < DIGEST_BYTES:
        raise InvalidRequestError("payload", len(payload), "begins with a namespace")
    space = Namespace(payload[:DIGEST_BYTES])
    return keys_of_digests(payload[DIGEST_BYTES:], space, limit)


def pack_found(infos: Iterable[ChunkInfo | None]) -> bytes:
    """Return the payload that answers a find: each chunk's index row behind its length, 0 for
    one that is not in memory. What does not fit one message is left out.
    """
    rows: list[bytes] = []
    size = 0
    layout: KVLayout | None = None
    components = b""
    for info in infos:
        if info is not None and info.layout is not layout:
            layout, components = info.layout, pack_components(info.layout)
        row = b"" if info is None else pack_info(info, components)
        size += _LENGTH.size + len(row)
        if size > MAX_PAYLOAD_BYTES:
            break
        rows += [_LENGTH.pack(len(row)), row]
    return b"".join(rows)


def unpack_found(keys: Sequence[ChunkKey], payload: bytes) -> list[ChunkInfo | None]:
    """Parse the answer to a find of *keys*; None for those that are not there, or were left out.

    Raises InvalidFrameError, also when a row is of another chunk than was asked for.
    """
    found: list[ChunkInfo | None] = []
    at = 0
    while at < len(payload):
        if len(found) == len(keys) or at + _LENGTH.size > len(payload):
            raise InvalidFrameError("payload", len(payload), f"answers for {len(keys)} chunks")
        (size,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if at + size > len(payload):
            raise InvalidFrameError("row", size, "ends behind the message")
        found.append(unpack_info(payload[at : at + size]) if size else None)
        at += size
    for key, info in zip(keys, found, strict=False):
        if info is not None and info.key != key:
            raise InvalidFrameError("key", info.key.hex(), f"asked for {key.hex()}")
    return found + [None] * (len(keys) - len(found))
