"""The Authenticator: from what a call brought along to the Principal behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvstore.proto.errors import UnauthenticatedError
from kvstore.server.security.certificates import (
    Revocations,
    principal_of_certificate,
    proof_of_certificate,
)
from kvstore.server.security.jwt_tokens import MAX_LIFE_S, JwtVerifier
from kvstore.server.security.key_files import ApiKeys
from kvstore.server.security.sessions import ANYBODY, Principal
from kvstore.server.security.watched_file import WatchedFile

HEADER = "authorization"
SCHEME = "Bearer "
CERTIFICATE = "x509_pem_cert"

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


class Authenticator:
    """From proofs to the Principal of a call. Thread-safe. *wall_clock* gives seconds since 1970.

    A token decides where there is one, else the certificate. Without any of *keys*, *verifier*
    and *takes_certificates* every caller is ``ANYBODY``. A certificate that *revocations* name is
    refused, with a token or without.
    """

    def __init__(
        self,
        keys: WatchedFile[ApiKeys] | None,
        verifier: WatchedFile[JwtVerifier] | None,
        *,
        takes_certificates: bool,
        wall_clock: Callable[[], float],
        revocations: WatchedFile[Revocations] | None = None,
    ) -> None:
        self._keys = keys
        self._verifier = verifier
        self._takes_certificates = takes_certificates
        self._revocations = revocations
        self._wall_clock = wall_clock
        self.is_open = keys is None and verifier is None and not takes_certificates

    def principal_of(self, metadata: Metadata, auth_context: AuthContext) -> Principal:
        """Return who calls. Raises UnauthenticatedError, which repeats nothing of a secret."""
        if self.is_open:
            return ANYBODY
        pem = next(iter(auth_context.get(CERTIFICATE, ())), None)
        revoked = self._revocations.value if self._revocations is not None else None
        if revoked is not None and pem and proof_of_certificate(pem) in revoked.proofs:
            raise UnauthenticatedError("the certificate was revoked; get another")
        values = [value for name, value in metadata if name == HEADER]
        if len(values) > 1:
            raise UnauthenticatedError("bring one token")
        if values:
            return self._live(self._of_token(str(values[0])))
        if pem is None or not self._takes_certificates:
            raise UnauthenticatedError("bring a token: an API key or a JWT")
        return self._live(principal_of_certificate(pem))

    def _of_token(self, value: str) -> Principal:
        if not value.startswith(SCHEME):
            raise UnauthenticatedError("bring the token as: Bearer TOKEN")
        token = value.removeprefix(SCHEME)
        if self._keys is not None and token.startswith("kvs_"):
            found = self._keys.value.principal_of(token)
            if found is None:
                raise UnauthenticatedError("the API key is unknown or was revoked")
            return found
        if self._verifier is None:
            raise UnauthenticatedError("the token is not one that this server takes")
        known = self._verifier.value.principal_of(token)
        if known.expires_at > self._wall_clock() + MAX_LIFE_S:
            raise UnauthenticatedError("the token is good for over a year; get a shorter one")
        return known

    def _live(self, principal: Principal) -> Principal:
        if principal.expires_at <= self._wall_clock():
            raise UnauthenticatedError("what you bring has expired; get another")
        return principal

    def refresh(self) -> bool:
        """Read keys again that were replaced. Return whether any were."""
        files = (self._keys, self._revocations, self._verifier)
        return sum(file.refresh() for file in files if file is not None) > 0  # each of them

    def holds(self, principal: Principal) -> bool:
        """Whether *principal* is still good: nothing revoked or expired."""
        if principal.expires_at <= self._wall_clock():
            return False
        kind = principal.name.partition(":")[0]
        if kind == "key" and self._keys is not None:
            return self._keys.value.holds(principal)
        if kind == "jwt" and self._verifier is not None:
            return principal.proof in self._verifier.value.keys
        if kind == "cert" and self._revocations is not None:
            return principal.proof not in self._revocations.value.proofs
        return True
