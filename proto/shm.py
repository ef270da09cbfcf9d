"""The words of the Unix socket over which server and client exchange memory.

One SOCK_SEQPACKET message each way, 32 bytes, little-endian, descriptors beside them as
SCM_RIGHTS. docs/format.md specifies both. Memory travels as memfds with seals: the receiver
maps nothing that its sender could still truncate under it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from blake3 import blake3

from kvstore.proto.errors import InvalidRequestError

_REQUEST = struct.Struct("<4sHHQ16s")
_REPLY = struct.Struct("<4sHHQ16x")
_MAGIC = b"KVSM"
_VERSION = 2
MESSAGE_BYTES = _REQUEST.size
assert _REPLY.size == MESSAGE_BYTES
NONCE_BYTES = 16
PROOF_BYTES = 16
GREETING_BYTES = MESSAGE_BYTES + NONCE_BYTES + PROOF_BYTES
_PROVEN = struct.Struct("<HQ16s16s")
_PURPOSE = b"kvstore socket"
_CREDENTIALS = struct.Struct("3i")

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
ARENA_SLAB = 0
"""What a client asks for to map the memory of a device; slabs of CPU memory count from 1."""
SIZE_SEALS = SEAL_SHRINK | SEAL_GROW | SEAL_SEAL
"""The size can never change again: reading a mapping of it cannot fault."""
STAGING_SEALS = SIZE_SEALS | SEAL_FUTURE_WRITE
"""Nor can what was written be taken back, so that reading it allocates nothing: only mappings
made before may write, and the kernel punches no holes."""


class Op(IntEnum):
    """What a client asks.

    ``hello`` says which session it is about, and has the server prove that it is that session's.
    ``attach`` then brings staging memory and the client's proof; ``join`` a proof, on a further
    connection for calls (proto/calls.py). ``slab`` and ``extent`` ask for descriptors. ``ring``
    brings that of device memory to put out of, and in place of a proof says which device.
    """

    attach = 1
    slab = 2
    join = 3
    call = 4
    extent = 5
    ring = 6
    hello = 7


class Reply(IntEnum):
    """What the server answers. ``ok`` to ``slab`` comes with the slab's descriptor, to ``hello``
    with a nonce and the server's proof.

    ``more``, ``failed`` and ``part`` answer calls only.
    """

    ok = 0
    denied = 1
    unknown = 2
    invalid = 3
    more = 4
    failed = 5
    part = 6


# By their numbers, as every call asks twice: members of an enum are found much more slowly.
_OPS = {int(op): op for op in Op}
_REPLIES = {int(reply): reply for reply in Reply}


@dataclass(frozen=True, slots=True)
class Request:
    """``arg`` is the size of the staging memory or of the ring, the slab's or the session's id.

    ``token`` is a nonce of the client's, its proof, or a device's.
    """

    op: Op
    arg: int
    token: bytes = bytes(16)

    def pack(self) -> bytes:
        """Return the message."""
        return _REQUEST.pack(_MAGIC, _VERSION, self.op, self.arg, self.token)

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        """Parse a message. Raises InvalidRequestError."""
        if len(message) != MESSAGE_BYTES:
            raise InvalidRequestError("message", len(message), f"send {MESSAGE_BYTES} bytes")
        magic, version, number, arg, token = _REQUEST.unpack(message)
        op = _OPS.get(number)
        if magic != _MAGIC or version != _VERSION or op is None:
            what = (magic, version, number)
            raise InvalidRequestError("message", what, f"speak version {_VERSION}")
        return cls(op, arg, token)


def pack_reply(reply: Reply, arg: int = 0) -> bytes:
    """Return a reply; *arg* is the slab's size in bytes where one comes along."""
    return _REPLY.pack(_MAGIC, _VERSION, reply, arg)


def unpack_reply(message: bytes) -> tuple[Reply, int]:
    """Parse a reply. Raises InvalidRequestError."""
    if len(message) != MESSAGE_BYTES:
        raise InvalidRequestError("reply", len(message), f"expected {MESSAGE_BYTES} bytes")
    magic, version, number, arg = _REPLY.unpack(message)
    reply = _REPLIES.get(number)
    if magic != _MAGIC or version != _VERSION or reply is None:
        raise InvalidRequestError("reply", (magic, version, number), f"speak version {_VERSION}")
    return reply, arg


def proof(secret: bytes, op: Op, session_id: int, nonces: tuple[bytes, bytes]) -> bytes:
    """Return what only who has the session's *secret* can say: of ``hello`` the server, of
    ``attach`` and ``join`` the client. *nonces* are the client's and the server's of the hello.

    HMAC-SHA256, cut to 16 bytes. The secret itself never goes over the socket: a process that
    listens in the server's place learns nothing that it could use there.
    """
    terms = _PURPOSE + _PROVEN.pack(op, session_id, *nonces)
    return hmac.new(secret, terms, hashlib.sha256).digest()[:PROOF_BYTES]


def pack_greeting(nonce: bytes, proven: bytes) -> bytes:
    """Return the answer to a hello."""
    return pack_reply(Reply.ok) + nonce + proven


def unpack_greeting(message: bytes) -> tuple[bytes, bytes]:
    """Return the server's nonce and proof. Raises InvalidRequestError."""
    reply, _ = unpack_reply(message[:MESSAGE_BYTES])
    if reply is not Reply.ok or len(message) != GREETING_BYTES:
        raise InvalidRequestError("hello", reply.name, "open another session")
    middle = MESSAGE_BYTES + NONCE_BYTES
    return message[MESSAGE_BYTES:middle], message[middle:]


def create_memfd(name: str, size_bytes: int) -> int:
    """Return a new memfd of *size_bytes* that can be sealed; the caller owns the descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_sealed(descriptor: int, most_bytes: int, seals: int = SIZE_SEALS) -> mmap.mmap:
    """Map a memfd of the other side for reading. Raises InvalidRequestError."""
    if not has_seals(descriptor, seals):
        raise InvalidRequestError("memfd", descriptor, f"add the seals {seals:#x} to it")
    size_bytes = os.fstat(descriptor).st_size
    if not 0 < size_bytes <= most_bytes:
        raise InvalidRequestError("memfd", size_bytes, f"bring <= {most_bytes} bytes")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)


def device_token(identity: str) -> bytes:
    """Return what stands for a device in a message."""
    return blake3(identity.encode()).digest(16)


def add_seals(descriptor: int, seals: int) -> None:
    """Seal a memfd for good."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)


def has_seals(descriptor: int, seals: int) -> bool:
    """Whether a descriptor is a memfd with at least these seals."""
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS) & seals == seals
    except OSError:
        return False


def host_id() -> str:
    """Name this host and its boot: equal on both sides exactly when memory can be shared."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def peer_ids(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket; of one that listens,
    those that began to. Raises OSError.
    """
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def pid_namespace() -> int:
    """Name the space that this process's id is a number of; 0 where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
