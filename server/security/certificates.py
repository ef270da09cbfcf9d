"""Certificates: the server's own, which may be replaced while it runs, and its callers'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError
from kvstore.server.security.principal import ROLES, Principal
from kvstore.server.security.revocations import proof_of_certificate
from kvstore.server.security.watched_file import WatchedFile

if TYPE_CHECKING:
    from cryptography import x509

ENGINE_ROLES = frozenset({"read", "write"})
"""Of a certificate that names no roles."""


class ServerTls:
    """What gRPC proves the server with, and whom it lets in. Read again when it is replaced.

    *client_ca* None: callers need no certificate. Raises InvalidRequestError for files that do
    not go together.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._asks_callers = client_ca is not None
        paths = (cert, key) if client_ca is None else (cert, key, client_ca)
        self._files = WatchedFile(paths, checked_pair)

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that take what the files hold at each handshake."""
        fetch: Any = self._news  # its stubs do not know that it may return None
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,
            require_client_authentication=self._asks_callers,
        )
        return credentials

    def _news(self) -> grpc.ServerCertificateConfiguration | None:
        return self._configuration() if self._files.refresh() else None

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, client_ca = self._files.value
        configuration: grpc.ServerCertificateConfiguration = (
            grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
        )
        return configuration


def checked_pair(cert: bytes, key: bytes, client_ca: bytes | None = None) -> tuple[bytes, ...]:
    """Return the three if they will do. Raises InvalidRequestError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    field = "tls_cert"
    try:
        own = x509.load_pem_x509_certificates(cert)[0].public_key()
        field = "tls_key"
        other = serialization.load_pem_private_key(key, None).public_key()
        if client_ca is not None:
            field = "tls_client_ca"
            x509.load_pem_x509_certificates(client_ca)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(field, "...", f"is no PEM that can be read: {error}") from None
    if own != other:
        raise InvalidRequestError("tls_key", "...", "is not the key of tls_cert")
    return cert, key, client_ca  # type: ignore[return-value] # None where nobody is asked


def principal_of_certificate(pem: bytes) -> Principal:
    """Return whom a certificate that TLS has verified stands for.

    Its subject's organization is the tenant, the common name who it is, organizational units are
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
    until = certificate.not_valid_after_utc.timestamp()
    try:
        proof = proof_of_certificate(pem)
        return Principal(f"cert:{names[0]}", tenants[0], roles, until, proof)
    except InvalidRequestError as error:
        raise UnauthenticatedError(f"the certificate's subject cannot be: {error}") from None


def _named(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> list[str]:
    return [str(one.value) for one in certificate.subject.get_attributes_for_oid(oid)]
