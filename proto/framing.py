"""A FramedSocket: messages of the bulk channel over one TCP connection, in plain text or TLS.

Frames go from memory to memory; what the kernel's buffers do not take is not sent. Each start of a
server has a key and a certificate of its own for TLS, in memory alone, which others learn by gRPC;
a session trusts that certificate and no other.
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
"""Of one message: the kernel takes twice as many at once."""
STEP_BYTES = 1 << 16
"""Received before it is summed."""
_TIMEVAL = struct.Struct("@ll")
_LEAST_S = 0.001
"""A timeout of 0 would be none."""
_GRAIN_S = 0.01
"""A socket may wait so much longer than what is left: to set its timeout each time costs a call."""


def message_of(message: pb.StreamMessage, pieces: Sequence[Bytes]) -> list[memoryview]:
    """Return a message whose payload is *pieces*, not copied, one behind the other."""
    head = bulk.pack(message, sum(map(len, pieces)))
    return [memoryview(head), *(piece.data for piece in pieces if len(piece))]


def hang_up(link: socket.socket) -> None:
    """End both directions of *link*, which may go over TLS; ``close`` is still due."""
    with suppress(OSError):  # it has ended by itself
        # Not TLS's own: a reader meanwhile would go on without it, and take in ciphertext.
        socket.socket.shutdown(link, socket.SHUT_RDWR)


class FramedSocket:
    """Owns *link*, a connected socket, or one that TLS goes over. Used by one thread at a time.

    Every call raises DeadlineError when nothing moves for ``set_timeout``'s seconds or it is late,
    and TierUnavailableError when the other end, which is *whose*, hung up; *address* is what errors
    call it. *clock* returns monotonic seconds.
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
        self._patience_s = 0.0
        self._lengths = memoryview(bytearray(bulk.LENGTHS.size))
        # In plain text the kernel waits for all of a piece: one call for it, and one wake.
        self._flags = 0 if is_encrypted else socket.MSG_WAITALL
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(True)

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 when it is closed."""
        return self._link.fileno()

    def set_timeout(self, seconds: float, until: float = math.inf) -> None:
        """Wait so long at most for bytes to move, from now on, and for nothing past *until*."""
        self._until = until
        if seconds == self._patience_s:
            return
        self._patience_s = seconds
        if self._is_encrypted:
            self._link.settimeout(seconds)
            return
        whole = int(seconds)
        interval = _TIMEVAL.pack(whole, max(1000, int(1e6 * (seconds - whole))))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def send(self, message: pb.StreamMessage, pieces: Sequence[Bytes] = ()) -> None:
        """Send a message whole, with a payload of *pieces*, MAX_PIECES at most."""
        left = message_of(message, pieces)
        while left:
            self.send_some(left)

    def send_some(self, pieces: list[memoryview]) -> None:
        """Send what is taken at once of a message, and drop that from its *pieces*.

        A DeadlineError before ``until`` leaves them as they are: it may be tried again.
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
        """Whether something came that is not received yet, or the other end hung up."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def drain(self, limit_bytes: int) -> None:
        """Receive for nobody, up to *limit_bytes*, until the other end hangs up or is late."""
        room = memoryview(bytearray(STEP_BYTES))
        try:
            while limit_bytes > 0:
                limit_bytes -= self._guarded(self._link.recv_into, room)
        except (DeadlineError, TierUnavailableError):
            return

    def receive(
        self, header_limit_bytes: int = bulk.MAX_HEADER_BYTES
    ) -> tuple[pb.StreamMessage, int]:
        """Return the next message, and how long the payload is that is to be filled from.

        Raises InvalidRequestError for what is no message.
        """
        self.fill(self._lengths)
        header_bytes, payload_bytes = bulk.unpack_lengths(self._lengths, header_limit_bytes)
        header = bytearray(header_bytes)
        self.fill(memoryview(header))
        return bulk.parse(bytes(header), payload_bytes), payload_bytes

    def fill(self, out: Bytes | memoryview, digest: xxh3_64 | None = None) -> None:
        """Fill *out* with the next bytes, and add them to *digest* while they are in cache.

        Steps are small then: the sender goes on while one is summed, and a core's own cache holds
        it.
        """
        left = out.data if isinstance(out, np.ndarray) else out
        while len(left):
            step = left if digest is None else left[:STEP_BYTES]
            got = self._guarded(self._link.recv_into, step, 0, self._flags)
            if digest is not None:
                digest.update(step[:got])
            left = left[got:]

    def _guarded(self, call: Callable[..., int], *terms: object) -> int:
        """Return how many bytes *call* moved."""
        left_s = self._until - self.clock()
        if left_s < self._patience_s - _GRAIN_S:
            self.set_timeout(max(_LEAST_S, left_s), self._until)
        try:
            moved = call(*terms)
        except (BlockingIOError, TimeoutError):
            raise DeadlineError(f"{self._address} did not answer in time") from None
        except OSError as error:
            raise TierUnavailableError(self._whose, f"{self._address}: {error}") from None
        if not moved:
            raise TierUnavailableError(self._whose, f"{self._address} hung up")
        if self.clock() >= self._until:
            raise DeadlineError(f"{self._address} takes too long")
        return moved

    def hang_up(self) -> None:
        """End both directions, whoever waits in a call of it; ``close`` is still due."""
        hang_up(self._link)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._link.close()


def connect_wire(
    where: str, certificate: bytes, deadline: float, clock: Callable[[], float], whose: str = "peer"
) -> FramedSocket:
    """Connect to *where*, tcp://host:port, by *deadline*; over TLS if there is a *certificate*.

    That is in DER, and the only one trusted. Raises DeadlineError and TierUnavailableError.
    """
    try:
        url = urlsplit(where)
        address = url.hostname or "", url.port or 0
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        share_s = max(_LEAST_S, (deadline - clock()) / len(found))  # of each address
        link = socket.create_connection(address, share_s)
        try:
            if certificate:
                link.settimeout(max(_LEAST_S, deadline - clock()))
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
_SINCE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""It ends with the process, whatever the clocks of hosts."""


def make_tls() -> tuple[ssl.SSLContext, bytes]:
    """Make a key and a certificate: what accepts connections with them, and the latter in DER."""
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
    # It takes keys out of files only.
    with open(os.memfd_create("peer-tls"), "wb", buffering=0) as file:
        file.write(certificate.public_bytes(encodings.PEM) + private)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, certificate.public_bytes(encodings.DER)


def tls_to(certificate: bytes) -> ssl.SSLContext:
    """Return what connects to the server with *certificate*, in DER, and to no other.

    Raises ValueError for what is no certificate.
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
