"""The protocol between server and client over the Unix socket; docs/format.md specifies it.

*Memory*: one SOCK_SEQPACKET message each way, 32 bytes, little-endian, with descriptors as
SCM_RIGHTS. Memory is passed as sealed memfds, so that the sender cannot truncate what the
receiver maps.

*Calls* carry the service's messages at a tenth of gRPC's cost. A call is one packet: a ``Request``
whose arg is the method's number, then the request message. The answer is one packet per message, a
reply header before it: ``more`` if others follow, ``ok`` for the last (empty for a streaming
method), or ``failed``. A message too long for a packet is split: all but the last are ``part``.

*Places* locate frames that a reader on the server's host reads directly, 32 bytes each.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, revive
from kvstore.proto.messages import MESSAGE_BYTES

_HEADER = struct.Struct("<4sHHQ16s")
_MAGIC = b"KVSM"
_VERSION = 2
HEADER_BYTES = _HEADER.size
NONCE_BYTES = 16
PROOF_BYTES = 16
GREETING_BYTES = HEADER_BYTES + NONCE_BYTES + PROOF_BYTES
_PROVEN = struct.Struct("<HQ16s16s")
_PURPOSE = b"kvstore socket"
_CREDENTIALS = struct.Struct("3i")

Packet: TypeAlias = bytes
K = TypeVar("K")

SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
ARENA_SLAB = 0
"""Slab number of a device's memory; slabs of CPU memory count from 1."""
SIZE_SEALS = SEAL_SHRINK | SEAL_GROW | SEAL_SEAL
"""The size can never change, so reading a mapping cannot fault."""
STAGING_SEALS = SIZE_SEALS | SEAL_FUTURE_WRITE
"""Also forbids new writable mappings and hole punching, so that reading allocates no pages."""


class Op(IntEnum):
    """``hello`` names a session, and the server proves that it owns it.

    ``attach`` then sends staging memory and the client's proof; ``join`` a proof, on a further
    connection for calls (``pack_call``). ``slab`` and ``extent`` get descriptors. ``ring`` sends
    device memory to put from, with the device's name in place of a proof.
    """

    attach = 1
    slab = 2
    join = 3
    call = 4
    extent = 5
    ring = 6
    hello = 7


class Reply(IntEnum):
    """The server's reply. ``ok`` to ``slab`` carries its descriptor, to ``hello`` a nonce and a
    proof; ``more``, ``failed`` and ``part`` answer calls only.
    """

    ok = 0
    denied = 1
    unknown = 2
    invalid = 3
    more = 4
    failed = 5
    part = 6


# Looked up twice a call; an enum's own lookup is much slower.
_OPS = {int(op): op for op in Op}
REPLY_KINDS = {int(reply): reply for reply in Reply}


@dataclass(frozen=True, slots=True)
class Request:
    """``arg`` is the size of the staging memory or of the ring, or a slab or session id.

    ``token`` is the client's nonce or proof, or a ``device_token``.
    """

    op: Op
    arg: int
    token: bytes = bytes(16)

    def pack(self) -> bytes:
        """Return the message's bytes."""
        return _HEADER.pack(_MAGIC, _VERSION, self.op, self.arg, self.token)

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        """Parse a message. Raises InvalidRequestError."""
        return cls(*unpack_head(message, _OPS))


def pack_reply(reply: Reply, arg: int = 0) -> bytes:
    """Return a reply; *arg* is the slab's size in bytes if it carries one."""
    return _HEADER.pack(_MAGIC, _VERSION, reply, arg, b"")


def unpack_head(message: bytes, kinds: Mapping[int, K]) -> tuple[K, int, bytes]:
    """Return kind, number and token of a request, or of a reply (*kinds* is REPLY_KINDS).

    Raises InvalidRequestError.
    """
    if len(message) != HEADER_BYTES:
        raise InvalidRequestError("message", len(message), f"expected {HEADER_BYTES} bytes")
    magic, version, number, arg, token = _HEADER.unpack(message)
    kind = kinds.get(number)
    if magic != _MAGIC or version != _VERSION or kind is None:
        raise InvalidRequestError("message", (magic, version, number), f"use version {_VERSION}")
    return kind, arg, token


def proof(secret: bytes, op: Op, session_id: int, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the proof of owning the session's *secret*: the server's in ``hello``, the client's in
    ``attach`` and ``join``. *nonces* are the client's and the server's of the hello.

    HMAC-SHA256, cut to 16 bytes. The secret itself never goes over the socket, where another
    process may listen in the server's place.
    """
    terms = _PURPOSE + _PROVEN.pack(op, session_id, *nonces)
    return hmac.new(secret, terms, hashlib.sha256).digest()[:PROOF_BYTES]


def pack_greeting(nonce: bytes, proven: bytes) -> bytes:
    """Return the answer to a hello."""
    return pack_reply(Reply.ok) + nonce + proven


def unpack_greeting(message: bytes) -> tuple[bytes, bytes]:
    """Return the server's nonce and proof. Raises InvalidRequestError."""
    reply = unpack_head(message[:HEADER_BYTES], REPLY_KINDS)[0]
    if reply is not Reply.ok or len(message) != GREETING_BYTES:
        raise InvalidRequestError("hello", reply.name, "open another session")
    middle = HEADER_BYTES + NONCE_BYTES
    return message[HEADER_BYTES:middle], message[middle:]


def create_memfd(name: str, size_bytes: int) -> int:
    """Return a new sealable memfd of *size_bytes*; the caller owns the descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_sealed(descriptor: int, most_bytes: int, seals: int = SIZE_SEALS) -> mmap.mmap:
    """Map a received memfd for reading. Raises InvalidRequestError."""
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
    except OSError:  # no memfd
        is_sealed = False
    if not is_sealed:
        raise InvalidRequestError("memfd", descriptor, f"add the seals {seals:#x} to it")
    size_bytes = os.fstat(descriptor).st_size
    if not 0 < size_bytes <= most_bytes:
        raise InvalidRequestError("memfd", size_bytes, f"at most {most_bytes} bytes")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)


def device_token(identity: str) -> bytes:
    """Return the 16-byte name of a device in messages."""
    return blake3(identity.encode()).digest(16)


def add_seals(descriptor: int, seals: int) -> None:
    """Seal a memfd."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def host_id() -> str:
    """Return the id of this host's boot: equal on both sides if memory can be shared."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def peer_ids(link: socket.socket) -> tuple[int, int]:
    """Return process and user id of the other end of a Unix socket, or of the process that
    called listen on it. Raises OSError.
    """
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def pid_namespace() -> int:
    """Return the id of this process's pid namespace; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


MAX_PACKET_BYTES = 1 << 17
"""Fits the default send buffer of a socket; a longer call goes through gRPC."""
MAX_BODY_BYTES = MAX_PACKET_BYTES - HEADER_BYTES
"""Bytes of a message in one packet; a longer answer is split."""
MAX_ANSWER_BYTES = 2 * MESSAGE_BYTES
"""A longer joined message of an answer is refused, as by gRPC."""


class Method(NamedTuple):
    """One method of the service and its messages."""

    name: str
    request: type[Message]
    reply: type[Message]


def _method(name: str) -> Method:
    method = pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name[name]
    return Method(name, getattr(pb, method.input_type.name), getattr(pb, method.output_type.name))


_NAMES = "Lookup Get Release Reserve Commit Abort - Resolve ReportReuse PutDevice"
METHODS = {number: _method(name) for number, name in enumerate(_NAMES.split(), 1) if name != "-"}
"""Methods callable over the socket: those of every put and get. Numbers are never reused."""

REPLIES = {method.name: method.reply for method in METHODS.values()}
"""Reply types by method name."""
_CALLS = {method.name: Request(Op.call, number).pack() for number, method in METHODS.items()}


def pack_call(method: str, request: Message) -> Packet:
    """Return the packet of a call; it may be longer than MAX_PACKET_BYTES."""
    return _CALLS[method] + request.SerializeToString()


def unpack_call(request: Request, body: bytes) -> tuple[str, Message]:
    """Return the method's name and its request message. Raises InvalidRequestError."""
    method = METHODS.get(request.arg)
    if method is None:
        raise InvalidRequestError("method", request.arg, f"use one of {sorted(METHODS)}")
    try:
        return method.name, method.request.FromString(body)
    except DecodeError:
        expected = method.request.DESCRIPTOR.name
        raise InvalidRequestError("body", len(body), f"send a {expected}") from None


def pack_answer(answer: Message | None, *, more: bool = False) -> list[Packet]:
    """Return the packets of one message of an answer; None: the empty end of a stream."""
    head = pack_reply(Reply.more if more else Reply.ok)
    if answer is None:
        return [head]
    body = answer.SerializeToString()
    if len(body) <= MAX_BODY_BYTES:
        return [head + body]
    part = pack_reply(Reply.part)
    pieces = [body[i : i + MAX_BODY_BYTES] for i in range(0, len(body), MAX_BODY_BYTES)]
    return [*(part + piece for piece in pieces[:-1]), head + pieces[-1]]


def pack_failure(name: str, text: str) -> Packet:
    """Return the packet of an error by its class name."""
    return pack_reply(Reply.failed) + f"{name}\0{text}".encode()


class Answer(NamedTuple):
    """A packet of an answer; one with an ``error`` is the last."""

    reply: Reply
    body: bytes
    error: KVStoreError | None = None


def unpack_answer(packet: Packet) -> Answer:
    """Parse a packet of an answer. Raises InvalidRequestError."""
    if len(packet) > MAX_PACKET_BYTES:
        raise InvalidRequestError("answer", len(packet), f"at most {MAX_PACKET_BYTES} bytes")
    reply = unpack_head(packet[:HEADER_BYTES], REPLY_KINDS)[0]
    body = packet[HEADER_BYTES:]
    if reply is Reply.failed:
        name, _, text = body.decode(errors="replace").partition("\0")
        return Answer(reply, b"", revive(name, text))
    if reply not in (Reply.ok, Reply.more, Reply.part):
        return Answer(reply, b"", KVStoreError(f"the server refused the call: {reply.name}"))
    return Answer(reply, body)


_ROW = struct.Struct("<IBB2xQQQ")
ROW_BYTES = _ROW.size


class Reach(IntEnum):
    """What a place's number counts: nothing, slabs of sealed memory, files, arenas of a device
    (there is one, number 0), or other servers that the reader requests the frame from.
    """

    none = 0
    memory = 1
    file = 2
    device = 3
    peer = 4


class Place(NamedTuple):
    """One frame: ``size_bytes`` from ``offset`` of the slab or file ``number``.

    ``tier`` is an index into the reply's tier names. The eight bytes before ``offset`` hold
    ``generation`` while a place in memory is valid; it is 0 for other places.
    """

    number: int
    reach: int
    tier: int
    offset: int
    size_bytes: int
    generation: int


PLACE_ROW = np.dtype(
    {"names": Place._fields, "formats": ["<u4", "u1", "u1", "<u8", "<u8", "<u8"]}, align=True
)
"""numpy's dtype of the rows, to write hundreds at once."""
assert PLACE_ROW.itemsize == ROW_BYTES

NOWHERE = Place(0, Reach.none, 0, 0, 0, 0)
"""A chunk that has to be loaded first."""


_PLACE_OF = partial(tuple.__new__, Place)
"""Makes a place of an unpacked row without ``_make``'s length check, in a third of its time."""


def pack_places(places: Iterable[Place]) -> bytes:
    """Return the rows of *places*."""
    pack = _ROW.pack
    return b"".join([pack(*place) for place in places])


def unpack_places(rows: bytes) -> list[Place]:
    """Return the places of *rows*. Raises InvalidRequestError for a partial row."""
    if len(rows) % ROW_BYTES:
        raise InvalidRequestError("places", len(rows), f"send rows of {ROW_BYTES} bytes")
    return list(map(_PLACE_OF, _ROW.iter_unpack(rows)))
