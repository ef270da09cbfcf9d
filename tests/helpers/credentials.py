"""Credentials for tests: a CA, certificates and API keys."""

from __future__ import annotations

import datetime
import ipaddress
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from kvstore.server.security.key_files import ApiKey, make_key, parse_keys, write_keys

_DAY = datetime.timedelta(days=1)


class Authority:
    """A CA that signs certificates for tests, into PEM files of *folder*."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        tenant: str = "",
        roles: Sequence[str] = (),
        days: float = 1,
        hosts: Sequence[str] = ("localhost",),
        key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None,
    ) -> tuple[Path, Path]:
        """Return the files of a certificate for *hosts*, valid for *days*, and its *key*."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if tenant:
            subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, tenant))
        subject += [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles]
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(subject))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(
                x509.SubjectAlternativeName([_named(host) for host in hosts]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        cert_path, key_path = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        pem = serialization.Encoding.PEM
        _replace(cert_path, certificate.public_bytes(pem))
        form = serialization.PrivateFormat.PKCS8
        _replace(key_path, key.private_bytes(pem, form, serialization.NoEncryption()))
        return cert_path, key_path

    def revoke(self, *certificates: Path, hours: float = 1, critical: bool = False) -> Path:
        """Write a certificate revocation list; return its file."""
        now = datetime.datetime.now(datetime.UTC)
        listed = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name)
            .last_update(now - 2 * _DAY)
            .next_update(now + datetime.timedelta(hours=hours))
        )
        for path in certificates:
            serial = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
            row = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
            listed = listed.add_revoked_certificate(row.build())
        if critical:
            listed = listed.add_extension(x509.DeltaCRLIndicator(1), critical=True)
        path = self.folder / f"{self.path.stem}.crl"
        pem = serialization.Encoding.PEM
        _replace(path, listed.sign(self._key, hashes.SHA256()).public_bytes(pem))
        return path


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.chmod(0o600)
    draft.replace(path)


class KeyRing:
    """A file of API keys; ``make`` adds one and returns it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_keys(path, [])

    def make(self, tenant: str, *roles: str) -> str:
        text, row = make_key(tenant, roles or ("read", "write"), os.urandom, time.time())
        write_keys(self.path, [*self.rows(), row])
        return text

    def rows(self) -> list[ApiKey]:
        return list(parse_keys(self.path.read_bytes()).rows.values())

    def revoke(self, key: str) -> None:
        write_keys(self.path, [row for row in self.rows() if row.id not in key])
