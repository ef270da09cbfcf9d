"""The messages of the bulk channel, between a reader or writer of frames and a server over TCP.

A message is a length-prefixed ``StreamMessage`` of kvstore.proto; the payload of a frame part
follows it. docs/format.md specifies the framing. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError, revive
from kvstore.proto.frame import pack_components
from kvstore.proto.keys import keys_of_digests
from kvstore.proto.messages import MESSAGE_BYTES, pack_info, unpack_info
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, KVLayout, Namespace

MAGIC = b"KVS\x03"
"""The last byte is the version."""
TOKEN_BYTES = 16

MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = MESSAGE_BYTES

SILENCE_S = 6.0
"""The connection is closed when a peer neither sends nor receives for this long in a request."""

LENGTHS = struct.Struct("<4sII")
_MAX_TEXT_CHARS = 1024
_ROW_SLACK_BYTES = 8
"""Upper bound of protobuf's overhead per row."""


def pack(message: pb.StreamMessage, payload_bytes: int = 0) -> bytes:
    """Return the bytes that precede a message's payload."""
    header = message.SerializeToString()
    return LENGTHS.pack(MAGIC, len(header), payload_bytes) + header


def unpack_lengths(
    begun: bytes | memoryview, header_limit_bytes: int = MAX_HEADER_BYTES
) -> tuple[int, int]:
    """Return the lengths of header and payload of a message from its first bytes.

    Raises InvalidRequestError if it is no message, or too long.
    """
    magic, header_bytes, payload_bytes = LENGTHS.unpack_from(begun)
    if magic != MAGIC:
        raise InvalidRequestError("header", magic, f"use version {MAGIC[-1]}")
    if header_bytes > header_limit_bytes:
        raise InvalidRequestError("header", header_bytes, f"at most {header_limit_bytes} bytes")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidRequestError("payload", payload_bytes, f"at most {MAX_PAYLOAD_BYTES} bytes")
    return header_bytes, payload_bytes


def parse(header: bytes, payload_bytes: int) -> pb.StreamMessage:
    """Parse a header. Raises InvalidRequestError for no message, or for an unexpected payload."""
    message = pb.StreamMessage()
    try:
        message.ParseFromString(header)
    except DecodeError as error:
        raise InvalidRequestError("header", len(header), str(error)) from None
    kind = message.WhichOneof("body")
    if kind is None:
        raise InvalidRequestError("kind", None, f"use version {MAGIC[-1]}")
    if payload_bytes and kind != "part":
        raise InvalidRequestError("payload", payload_bytes, f"{kind} has none")
    return message


def failure(request: int, error: KVStoreError) -> pb.StreamMessage:
    """Return the message that ends *request* with *error*."""
    failed = pb.StreamError(name=type(error).__name__, text=str(error)[:_MAX_TEXT_CHARS])
    return pb.StreamMessage(request=request, failed=failed)


def error_of(failed: pb.StreamError) -> KVStoreError:
    """Return the error that *failed* carries."""
    return revive(failed.name, failed.text)


def keys_of(request: pb.GetRequest | pb.FindRequest, limit: int) -> list[ChunkKey]:
    """Return the chunks that another server requests, at most *limit*.

    Raises InvalidRequestError.
    """
    if len(request.key_namespace) != DIGEST_BYTES:
        raise InvalidRequestError("key_namespace", len(request.key_namespace), "give 16 bytes")
    return keys_of_digests(request.digests, Namespace(request.key_namespace), limit)


def found_rows(infos: Iterable[ChunkInfo | None]) -> pb.FindResponse:
    """Return the reply to a find: index rows, empty for chunks that are not in memory.

    Rows that do not fit one message are left out.
    """
    found = pb.FindResponse()
    size = _ROW_SLACK_BYTES
    layout: KVLayout | None = None
    components = b""
    for info in infos:
        if info is not None and info.layout is not layout:  # hashing it costs as much as a row
            layout, components = info.layout, pack_components(info.layout)
        row = b"" if info is None else pack_info(info, components)
        size += len(row) + _ROW_SLACK_BYTES
        if size > MAX_HEADER_BYTES:
            break
        found.rows.append(row)
    return found


def found_infos(keys: Sequence[ChunkKey], found: pb.FindResponse) -> list[ChunkInfo | None]:
    """Return the chunks found for *keys*; None for those that are absent or were left out.

    Raises InvalidFrameError, also when a row names another chunk than was requested.
    """
    if len(found.rows) > len(keys):
        raise InvalidFrameError("rows", len(found.rows), f"at most {len(keys)}, as requested")
    infos = [unpack_info(row) if row else None for row in found.rows]
    for key, info in zip(keys, infos, strict=False):
        if info is not None and info.key != key:
            raise InvalidFrameError("key", info.key.hex(), f"requested {key.hex()}")
    return infos + [None] * (len(keys) - len(infos))


GUEST_S = 300
"""Lifetime of a guest's token, and so the most that a revoked client keeps its access."""

_GUEST_TERMS = struct.Struct("<Q16sI")
_GUEST_PURPOSE = b"kvstore guest"


def guest_token(secret: bytes, session_id: int, namespace: bytes, until_s: int) -> bytes:
    """Return HMAC-SHA256 (RFC 2104) under *secret* of a guest's rights, cut to 16 bytes.

    The owner of a session at the other server issues one without a request to that server.
    """
    terms = _GUEST_PURPOSE + _GUEST_TERMS.pack(session_id, namespace, until_s)
    return hmac.new(secret, terms, hashlib.sha256).digest()[:TOKEN_BYTES]


def is_genuine(attach: pb.StreamAttach, secret: bytes) -> bool:
    """Return whether *attach* proves the session with *secret*, or a guest that it admits."""
    token = secret
    if attach.key_namespace:
        if len(attach.key_namespace) != DIGEST_BYTES:
            return False
        token = guest_token(secret, attach.session_id, attach.key_namespace, attach.until_s)
    return hmac.compare_digest(token, attach.token)
