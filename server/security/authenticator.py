"""The Authenticator: maps the credentials of a call to its Principal.

The operator, not the token, sets the algorithm, audience and issuer of JSON Web Tokens (RFC 7519).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError, check_text
from kvstore.server.security.certificates import (
    Revocations,
    beside_certificate,
    principal_of_certificate,
    proof_of_certificate,
)
from kvstore.server.security.key_files import ApiKeys, WatchedFile
from kvstore.server.security.sessions import ANYBODY, Principal

HEADER = "authorization"
SCHEME = "Bearer "
CERTIFICATE = "x509_pem_cert"

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]

LEEWAY_S = 5
MIN_HMAC_BYTES = 32
MAX_TOKEN_CHARS = 8192
MAX_KEYS = 8
REMEMBERED = 1024
"""Cached tokens whose signature was verified."""
MAX_LIFE_S = 366 * 86_400
"""A token that is valid for longer from now is refused, as only revoking its key revokes it."""
MAX_SUBJECT_CHARS = 256

_PEM_END = b"-----END PUBLIC KEY-----"
_REFUSED = "the token is not valid on this server"


class JwtVerifier:
    """Verifies tokens with claims ``sub``, ``tenant``, ``roles``, ``exp`` and ``aud``.

    *keys* may be several public keys in PEM; without it no token is valid. Without *issuer* any
    issuer is accepted. Raises InvalidRequestError for a key that does not fit the algorithm.
    """

    def __init__(self, keys: bytes | None, algorithm: str, audience: str, issuer: str = "") -> None:
        self._algorithm = algorithm
        required = ["exp", "aud", "sub", *(["iss"] if issuer else [])]
        self._options: Any = {"require": required}
        self._bounds: Any = {"audience": audience, "issuer": issuer or None, "leeway": LEEWAY_S}
        self.keys: dict[bytes, Any] = {}
        """Keys by the ``proof`` of their principals."""
        self.principal_of: Callable[[str], Principal] = lru_cache(REMEMBERED)(self._verified)
        """Returns a token's principal. Raises UnauthenticatedError, which never contains it."""
        if keys is None:
            return
        pieces = keys.split(_PEM_END)
        is_pem = not algorithm.startswith("HS") and len(pieces) > 1
        found = [piece.lstrip() + _PEM_END for piece in pieces[:-1]] if is_pem else [keys]
        if len(found) > MAX_KEYS or (is_pem and pieces[-1].strip()):
            fix = f"give at most {MAX_KEYS} public keys in PEM and nothing else"
            raise InvalidRequestError("jwt_key", len(found), fix)
        self.keys = {hashlib.sha256(key).digest()[:16]: _prepared(key, algorithm) for key in found}

    def _verified(self, token: str) -> Principal:
        import jwt

        if len(token) > MAX_TOKEN_CHARS:
            raise UnauthenticatedError(_REFUSED)
        for proof, key in self.keys.items():
            try:
                claims = jwt.decode(token, key, [self._algorithm], self._options, **self._bounds)
            except jwt.InvalidSignatureError:
                continue
            except jwt.ExpiredSignatureError:
                raise UnauthenticatedError("the token has expired; get another") from None
            except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
                raise UnauthenticatedError(_REFUSED) from None
            roles, tenant = claims.get("roles"), claims.get("tenant")
            roles = roles.split() if isinstance(roles, str) else roles
            if not isinstance(roles, list) or not isinstance(tenant, str):
                raise UnauthenticatedError("the token has no claims tenant and roles")
            try:
                name = f"jwt:{check_text('sub', claims['sub'], MAX_SUBJECT_CHARS)}"
                until = float(claims["exp"]) + LEEWAY_S
                return Principal(name, tenant, frozenset(map(str, roles)), until, proof)
            except (InvalidRequestError, OverflowError) as error:
                raise UnauthenticatedError(f"the token's claims are invalid: {error}") from None
        raise UnauthenticatedError(_REFUSED)


def _prepared(key: bytes, algorithm: str) -> Any:
    import jwt

    if algorithm.startswith("HS") and len(key) < MIN_HMAC_BYTES:
        fix = f"put at least {MIN_HMAC_BYTES} random bytes into it"
        raise InvalidRequestError("jwt_key", len(key), fix)
    try:
        prepared = jwt.get_algorithm_by_name(algorithm).prepare_key(key)
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:
        fix = f"no key for {algorithm}: {error}"
        raise InvalidRequestError("jwt_key", algorithm, fix) from None
    if hasattr(prepared, "private_bytes"):
        fix = "give the public key only; the private one signs, and is not for servers"
        raise InvalidRequestError("jwt_key", algorithm, fix)
    return prepared


class Authenticator:
    """Authenticates calls. Thread-safe. *wall_clock* returns seconds since 1970.

    A token takes precedence over a certificate. Without any of *keys*, *verifier* and
    *takes_certificates* every caller is ``ANYBODY``. *revocations* apply with both.
    """

    def __init__(
        self,
        keys: WatchedFile[ApiKeys] | None,
        verifier: WatchedFile[JwtVerifier] | None,
        revocations: WatchedFile[Revocations] | None = None,
        wall_clock: Callable[[], float] = time.time,
        *,
        takes_certificates: bool,
    ) -> None:
        self._keys = keys
        self._verifier = verifier
        self._takes_certificates = takes_certificates
        self._revocations = revocations
        self._wall_clock = wall_clock
        self.is_open = keys is None and verifier is None and not takes_certificates

    def principal_of(self, metadata: Metadata, auth_context: AuthContext) -> Principal:
        """Return the caller's principal. Raises UnauthenticatedError, which contains no secret."""
        if self.is_open:
            return ANYBODY
        pem = next(iter(auth_context.get(CERTIFICATE, ())), None)
        revoked = self._revocations.value if self._revocations is not None else None
        if revoked is not None and pem and proof_of_certificate(pem) in revoked.proofs:
            raise UnauthenticatedError("the certificate was revoked; get another")
        values = [value for name, value in metadata if name == HEADER]
        if len(values) > 1:
            raise UnauthenticatedError("send only one token")
        if values:
            found = self._of_token(str(values[0]))
            found = beside_certificate(found, pem) if pem else found
        elif pem is None or not self._takes_certificates:
            raise UnauthenticatedError("authentication required: send a token, an API key or a JWT")
        else:
            found = principal_of_certificate(pem)
        if found.expires_at <= self._wall_clock():
            raise UnauthenticatedError("the credentials have expired; get new ones")
        return found

    def _of_token(self, value: str) -> Principal:
        if not value.startswith(SCHEME):
            raise UnauthenticatedError("send the token as: Bearer TOKEN")
        token = value.removeprefix(SCHEME)
        if self._keys is not None and token.startswith("kvs_"):
            found = self._keys.value.principal_of(token)
            if found is None:
                raise UnauthenticatedError("the API key is unknown or was revoked")
            return found
        if self._verifier is None:
            raise UnauthenticatedError("this server accepts no such token")
        known = self._verifier.value.principal_of(token)
        if known.expires_at > self._wall_clock() + MAX_LIFE_S:
            raise UnauthenticatedError("the token is valid for over a year; get a shorter one")
        return known

    def refresh(self) -> bool:
        """Reload changed key files. Return whether any changed."""
        files = (self._keys, self._revocations, self._verifier)
        return sum(file.refresh() for file in files if file is not None) > 0  # refreshes all

    def holds(self, principal: Principal) -> bool:
        """Whether *principal* is still valid: neither revoked nor expired."""
        revoked = self._revocations.value.proofs if self._revocations is not None else ()
        if principal.expires_at <= self._wall_clock() or principal.certificate in revoked:
            return False
        kind = principal.name.partition(":")[0]
        if kind == "key" and self._keys is not None:
            return self._keys.value.holds(principal)
        if kind == "jwt" and self._verifier is not None:
            return principal.proof in self._verifier.value.keys
        return True
