"""Callers of servers that ask who calls: keys, certificates and clients for the parts of trust."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.client import Access, Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.proto.types import Model
from kvstore.server.security.key_files import make_key, write_keys


def own_certificate(folder: Path) -> tuple[str, ...]:
    """Write a certificate for localhost that signs itself; return the server's flags."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "server.crt").write_bytes(certificate.public_bytes(pem))
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(pem, form, secret))
    (folder / "server.key").chmod(0o600)
    return ("--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key"))


class Tenants:
    """API keys of some tenants, in a file that a server is started with."""

    def __init__(self, folder: Path, *tenants: str) -> None:
        made = [make_key(name, ("read", "write"), os.urandom, time.time()) for name in tenants]
        self._keys = dict(zip(tenants, (text for text, _ in made), strict=True))
        write_keys(folder / "api-keys", [row for _, row in made])
        self.flags = ("--auth-keys", str(folder / "api-keys"))

    def client(
        self,
        tenant: str,
        address: str,
        model: Model,
        transport: TransportName = "auto",
        ca: Path | None = None,
    ) -> Client:
        """Return a client of *tenant*, over TLS where *ca* says whom to believe."""
        access = Access(ca=ca, token=self._keys[tenant])
        address = address.replace("127.0.0.1", "localhost")
        options = ClientOptions(transport, deadline_ms=20_000, access=access)
        return Client(address, model, options)
