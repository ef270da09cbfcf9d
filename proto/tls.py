"""TLS between servers that learn each other's certificate by gRPC.

Each start has a key and a certificate of its own, in memory alone; a session trusts that
certificate and no other.
"""

from __future__ import annotations

import datetime
import os
import ssl
from typing import NamedTuple

_NAME = "kvstore peer"
_SINCE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""It ends with the process, whatever the clocks of hosts."""


class OwnTls(NamedTuple):
    """What a server accepts connections with, and its certificate in DER for others."""

    context: ssl.SSLContext
    certificate: bytes


def make_tls() -> OwnTls:
    """Make a key, and a certificate of it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = _strict(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    _load(context, certificate.public_bytes(serialization.Encoding.PEM) + private)
    return OwnTls(context, certificate.public_bytes(serialization.Encoding.DER))


def tls_to(certificate: bytes) -> ssl.SSLContext:
    """Return what connects to the server with *certificate*, in DER, and to no other.

    Raises ValueError for what is no certificate.
    """
    context = _strict(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate names no host: it is the only one believed
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


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give *context* a key and certificate, which it takes out of files only."""
    descriptor = os.memfd_create("peer-tls")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
