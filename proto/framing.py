"""A FramedSocket: messages of the bulk channel over one TCP connection, in plain text or TLS.

Frames are sent from and received into the caller's memory, without a copy. A server makes a new TLS
key and certificate at each start, held in memory only, and publishes the certificate by gRPC; a
session trusts that certificate and no other.
"""

from __future__ import annotations

import datetime
import math
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np
from xxhash import xxh3_64

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import DeadlineError, TierUnavailableError

MAX_PIECES = 512
"""Pieces of one message: half of what the kernel accepts in one call."""
STEP_BYTES = 1 << 16
"""Bytes received before each checksum step."""
_TIMEVAL = struct.Struct("@ll")
_MIN_TIMEOUT_S = 0.001
"""A timeout of 0 would mean none."""
_SLACK_S = 0.01
"""A wait may exceed the deadline by this much, which saves setting the timeout before each call."""


def message_of(message: pb.StreamMessage, pieces: Sequence[Bytes]) -> list[memoryview]:
    """Return a message whose payload is *pieces* back to back, without copying them."""
    head = bulk.pack(message, sum(map(len, pieces)))
    return [memoryview(head), *(piece.data for piece in pieces if len(piece))]


def hang_up(link: socket.socket) -> None:
    """Shut down both directions of *link*, with or without TLS; the caller still closes it."""
    with suppress(OSError):  # the connection is already closed
        # Not TLS's own shutdown: a concurrent reader would continue in plain text, on ciphertext.
        socket.socket.shutdown(link, socket.SHUT_RDWR)


class FramedSocket:
    """Owns *link*, a connected socket with or without TLS. Used by one thread at a time.

    Every call raises DeadlineError when no byte moves for ``set_timeout``'s seconds or the deadline
    passes, and TierUnavailableError when the other end closes the connection; errors name it by
    *whose* and *address*. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        link: socket.socket,
        address: str,
        clock: Callable[[], float],
        *,
        is_encrypted: bool,
        whose: str = "peer",
    ) -> None:
        self._link = link
        self._whose = whose
        self._address = address
        self.clock = clock
        self._until = math.inf
        self._is_encrypted = is_encrypted
        self._timeout_s = 0.0
        self._lengths = memoryview(bytearray(bulk.LENGTHS.size))
        # In plain text the kernel waits for a whole piece: one call and one wake-up.
        self._flags = 0 if is_encrypted else socket.MSG_WAITALL
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(True)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 when it is closed."""
        return self._link.fileno()

    def set_timeout(self, seconds: float, until: float = math.inf) -> None:
        """Limit each wait for bytes to *seconds*, and all of them to the time *until*."""
        self._until = until
        if seconds == self._timeout_s:
            return
        self._timeout_s = seconds
        if self._is_encrypted:
            self._link.settimeout(seconds)
            return
        whole = int(seconds)
        interval = _TIMEVAL.pack(whole, max(1000, int(1e6 * (seconds - whole))))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def send(self, message: pb.StreamMessage, pieces: Sequence[Bytes] = ()) -> None:
        """Send a whole message with a payload of *pieces*, at most MAX_PIECES."""
        left = message_of(message, pieces)
        while left:
            self.send_some(left)

    def send_some(self, pieces: list[memoryview]) -> None:
        """Send as much of a message as one call takes, and remove that from its *pieces*.

        A DeadlineError before ``until`` leaves them unchanged: the caller may retry.
        """
        if self._is_encrypted:
            sent = self._guarded(self._link.send, pieces[0])
        else:
            sent = self._guarded(self._link.sendmsg, pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = pieces[0][sent:]

    def has_more(self) -> bool:
        """Return whether bytes wait to be received, or the other end closed the connection."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def drain(self, limit_bytes: int) -> None:
        """Receive and discard up to *limit_bytes*, until the other end closes or is late."""
        scratch = memoryview(bytearray(STEP_BYTES))
        try:
            while limit_bytes > 0:
                limit_bytes -= self._guarded(self._link.recv_into, scratch)
        except (DeadlineError, TierUnavailableError):
            return

    def receive(
        self, header_limit_bytes: int = bulk.MAX_HEADER_BYTES
    ) -> tuple[pb.StreamMessage, int]:
        """Return the next message, and the length of the payload to ``fill`` from.

        Raises InvalidRequestError if it is no message.
        """
        self.fill(self._lengths)
        header_bytes, payload_bytes = bulk.unpack_lengths(self._lengths, header_limit_bytes)
        header = bytearray(header_bytes)
        self.fill(memoryview(header))
        return bulk.parse(bytes(header), payload_bytes), payload_bytes

    def fill(self, out: Bytes | memoryview, digest: xxh3_64 | None = None) -> None:
        """Fill *out* with the next bytes, and add them to *digest* while they are in cache.

        With a *digest*, steps are small enough for a core's cache, and the sender continues
        during each sum.
        """
        left = out.data if isinstance(out, np.ndarray) else out
        while len(left):
            step = left if digest is None else left[:STEP_BYTES]
            got = self._guarded(self._link.recv_into, step, 0, self._flags)
            if digest is not None:
                digest.update(step[:got])
            left = left[got:]

    def _guarded(self, call: Callable[..., int], *terms: object) -> int:
        """Return how many bytes *call* moved. Raises as every call does."""
        left_s = self._until - self.clock()
        if left_s < self._timeout_s - _SLACK_S:
            self.set_timeout(max(_MIN_TIMEOUT_S, left_s), self._until)
        try:
            moved = call(*terms)
        except (BlockingIOError, TimeoutError):
            raise DeadlineError(f"{self._address} did not answer in time") from None
        except OSError as error:
            raise TierUnavailableError(self._whose, f"{self._address}: {error}") from None
        if not moved:
            raise TierUnavailableError(self._whose, f"{self._address} closed the connection")
        if self.clock() >= self._until:
            raise DeadlineError(f"{self._address} took too long")
        return moved

    def hang_up(self) -> None:
        """Shut down both directions, also under a waiting call; the caller still closes it."""
        hang_up(self._link)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._link.close()


def connect_wire(
    where: str, certificate: bytes, deadline: float, clock: Callable[[], float], whose: str = "peer"
) -> FramedSocket:
    """Connect to *where*, tcp://host:port, by *deadline*; over TLS if there is a *certificate*.

    It is in DER, and the only one trusted. Raises DeadlineError and TierUnavailableError.
    """
    try:
        url = urlsplit(where)
        address = url.hostname or "", url.port or 0
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        share_s = max(_MIN_TIMEOUT_S, (deadline - clock()) / len(found))  # of each address
        link = socket.create_connection(address, share_s)
        try:
            if certificate:
                link.settimeout(max(_MIN_TIMEOUT_S, deadline - clock()))
                link = tls_to(certificate).wrap_socket(link)
            return FramedSocket(link, where, clock, is_encrypted=bool(certificate), whose=whose)
        except BaseException:
            link.close()
            raise
    except TimeoutError:
        raise DeadlineError(f"{where} did not answer in time") from None
    except (OSError, ValueError) as error:
        raise TierUnavailableError(whose, f"{where}: {error}") from None


_CERTIFICATE_NAME = "kvstore peer"
_SINCE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""The certificate ends with the process; its dates must not depend on the hosts' clocks."""


def make_tls() -> tuple[ssl.SSLContext, bytes]:
    """Make a key and a certificate; return a server's context, and the certificate in DER."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _CERTIFICATE_NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    encodings, plain = serialization.Encoding, serialization.NoEncryption()
    private = key.private_bytes(encodings.PEM, serialization.PrivateFormat.PKCS8, plain)
    context = _strict(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    # load_cert_chain reads keys from files only.
    with open(os.memfd_create("peer-tls"), "wb", buffering=0) as file:
        file.write(certificate.public_bytes(encodings.PEM) + private)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.public_bytes(encodings.DER)


def tls_to(certificate: bytes) -> ssl.SSLContext:
    """Return a context that connects only to the server with *certificate*, in DER.

    Raises ValueError if it is no certificate.
    """
    context = _strict(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate names no host: it alone is trusted
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as error:
        raise ValueError(str(error)) from None
    return context


def _strict(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
