"""Certificates of the server, which can be replaced at run time, and of callers; CRLs."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError
from kvstore.server.security.key_files import WatchedFile
from kvstore.server.security.sessions import ROLES, Principal

if TYPE_CHECKING:
    from cryptography import x509


MAX_LISTS = 64
REMEMBERED = 1024
"""Cached parsed certificates."""

_CURVES = ("secp256r1", "secp384r1")
_END = b"-----END X509 CRL-----"


@dataclass(frozen=True, slots=True)
class Revocations:
    """Revoked certificates, by ``proof_of_certificate``."""

    proofs: frozenset[bytes]
    until_s: float
    """Earliest next update of the lists, in seconds since 1970."""


@lru_cache(REMEMBERED)
def proof_of_certificate(pem: bytes) -> bytes:
    """Return the hash of a certificate's issuer and serial number."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(pem)
    return _proof(certificate.issuer.public_bytes(), certificate.serial_number)


def _proof(issuer: bytes, serial: int) -> bytes:
    return hashlib.sha256(b"%x:" % serial + issuer).digest()[:16]


def parse_revocations(data: bytes, authorities: bytes) -> Revocations:
    """Return the revocations in the CRLs of *data*, in PEM.

    Raises InvalidRequestError for CRLs not signed by one of *authorities*, out of date, or with
    critical extensions (delta or indirect CRLs).
    """
    from cryptography import x509

    try:
        signers = x509.load_pem_x509_certificates(authorities)
        pieces = data.split(_END)
        lists = [x509.load_pem_x509_crl(piece + _END) for piece in pieces[:-1]]
    except ValueError as error:
        raise _refused("...", f"is not valid PEM: {error}") from None
    if not 0 < len(lists) <= MAX_LISTS or pieces[-1].strip():
        raise _refused(len(lists), f"give 1 to {MAX_LISTS} lists in PEM and nothing else")
    for one in lists:
        _check(one, signers)
    revoked = (_proof(one.issuer.public_bytes(), row.serial_number) for one in lists for row in one)
    return Revocations(frozenset(revoked), min(_until_s(one) for one in lists))


def _check(one: x509.CertificateRevocationList, signers: Sequence[x509.Certificate]) -> None:
    issuer = one.issuer.rfc4514_string()
    keys = [signer.public_key() for signer in signers if signer.subject == one.issuer]
    if not any(one.is_signature_valid(key) for key in keys):  # type: ignore[arg-type] # no DH signs
        raise _refused(issuer, "is not signed by an authority of tls_client_ca")
    critical = [extension.oid.dotted_string for extension in one.extensions if extension.critical]
    if critical:
        raise _refused(issuer, f"has extensions that must be understood: {', '.join(critical)}")
    if _until_s(one) <= time.time():
        raise _refused(issuer, "is out of date; get the next one from the authority")


def _until_s(one: x509.CertificateRevocationList) -> float:
    return one.next_update_utc.timestamp() if one.next_update_utc else math.inf


def _refused(value: object, fix: str) -> InvalidRequestError:
    return InvalidRequestError("tls_crl", value, fix)


ENGINE_ROLES = frozenset({"read", "write"})
"""Roles of a certificate that names none."""


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return credentials that reload changed files at each handshake.

    *client_ca* None: no client certificates. Raises InvalidRequestError for mismatched files.
    """
    paths = (cert, key) if client_ca is None else (cert, key, client_ca)
    files = WatchedFile(paths, checked_pair)

    def configuration() -> grpc.ServerCertificateConfiguration:
        cert, key, *authorities = files.value
        return grpc.ssl_server_certificate_configuration([(key, cert)], *authorities)

    def replaced() -> Any:  # grpc's stubs omit None
        return configuration() if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(configuration(), replaced, client_ca is not None)


def checked_pair(cert: bytes, key: bytes, *client_ca: bytes) -> tuple[bytes, ...]:
    """Return the files if they match and gRPC can use them. Raises InvalidRequestError."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    field = "tls_cert"
    try:
        own = x509.load_pem_x509_certificates(cert)[0].public_key()
        field = "tls_key"
        other = serialization.load_pem_private_key(key, None).public_key()
        field = "tls_client_ca"
        for authorities in client_ca:
            x509.load_pem_x509_certificates(authorities)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidRequestError(field, "...", f"is not valid PEM: {error}") from None
    curve = own.curve.name if isinstance(own, ec.EllipticCurvePublicKey) else ""
    if not isinstance(own, rsa.RSAPublicKey) and curve not in _CURVES:
        # With others gRPC listens, and no client of it can connect.
        fix = "use a key of RSA, P-256 or P-384: gRPC's clients accept no other"
        raise InvalidRequestError("tls_cert", "...", fix)
    if own != other:
        raise InvalidRequestError("tls_key", "...", "is not the key of tls_cert")
    return cert, key, *client_ca


@lru_cache(REMEMBERED)
def principal_of_certificate(pem: bytes) -> Principal:
    """Return the principal of certificate *pem*, which TLS has verified.

    The subject's organization is the tenant, the common name the name, organizational units are
    roles. Raises UnauthenticatedError.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = x509.load_pem_x509_certificate(pem)
    tenants = _named(certificate, NameOID.ORGANIZATION_NAME)
    names = _named(certificate, NameOID.COMMON_NAME)
    roles = frozenset(_named(certificate, NameOID.ORGANIZATIONAL_UNIT_NAME)) or ENGINE_ROLES
    if len(tenants) != 1 or len(names) != 1 or not roles <= ROLES:
        raise UnauthenticatedError(
            "the certificate's subject must have one O, the tenant, one CN, and for OU only roles"
        )
    try:
        return beside_certificate(Principal(f"cert:{names[0]}", tenants[0], roles), pem)
    except InvalidRequestError as error:
        raise UnauthenticatedError(f"the certificate's subject is invalid: {error}") from None


@lru_cache(REMEMBERED)
def beside_certificate(principal: Principal, pem: bytes) -> Principal:
    """Return *principal*, valid as long as certificate *pem* is too."""
    from cryptography import x509

    until = x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    until = min(until, principal.expires_at)
    return replace(principal, expires_at=until, certificate=proof_of_certificate(pem))


def _named(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> list[str]:
    return [str(one.value) for one in certificate.subject.get_attributes_for_oid(oid)]
