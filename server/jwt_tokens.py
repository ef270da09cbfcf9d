"""JSON Web Tokens (RFC 7519): the algorithm, audience and issuer are the operator's, not theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError
from kvstore.server.principal import Principal

LEEWAY_S = 5
MIN_HMAC_BYTES = 32
MAX_TOKEN_CHARS = 8192

_REFUSED = "the token is not one of this server's callers"


@dataclass(frozen=True, slots=True)
class JwtTerms:
    """What a token must say. ``issuer`` empty: any. ``algorithm`` is the one that is taken."""

    algorithm: str
    audience: str
    issuer: str = ""


class JwtVerifier:
    """Verifies tokens under one key; they say ``sub``, ``tenant``, ``roles``, ``exp``, ``aud``."""

    def __init__(self, key: bytes, terms: JwtTerms) -> None:
        """Raises InvalidRequestError for a key that does not go with the algorithm."""
        import jwt

        self._terms = terms
        if terms.algorithm.startswith("HS") and len(key) < MIN_HMAC_BYTES:
            fix = f"put at least {MIN_HMAC_BYTES} random bytes into it"
            raise InvalidRequestError("jwt_key", len(key), fix)
        try:
            self._key: Any = jwt.get_algorithm_by_name(terms.algorithm).prepare_key(key)
        except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:
            fix = f"no key for {terms.algorithm}: {error}"
            raise InvalidRequestError("jwt_key", terms.algorithm, fix) from None
        if hasattr(self._key, "private_bytes"):
            fix = "give the public key alone; the private one signs, and is not for servers"
            raise InvalidRequestError("jwt_key", terms.algorithm, fix)

    def principal_of(self, token: str) -> Principal:
        """Return whom *token* stands for. Raises UnauthenticatedError that does not repeat it."""
        import jwt

        if len(token) > MAX_TOKEN_CHARS:
            raise UnauthenticatedError(_REFUSED)
        try:
            claims = jwt.decode(
                token,
                self._key,
                algorithms=[self._terms.algorithm],
                audience=self._terms.audience,
                issuer=self._terms.issuer or None,
                leeway=LEEWAY_S,
                options={
                    "require": ["exp", "aud", "sub", *(["iss"] if self._terms.issuer else [])]
                },
            )
        except jwt.ExpiredSignatureError:
            raise UnauthenticatedError("the token has expired; get another") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise UnauthenticatedError(_REFUSED) from None
        return _principal(claims)


def _principal(claims: dict[str, Any]) -> Principal:
    roles = claims.get("roles")
    roles = roles.split() if isinstance(roles, str) else roles
    tenant = claims.get("tenant")
    if not isinstance(roles, list) or not isinstance(tenant, str):
        raise UnauthenticatedError("the token does not say tenant and roles")
    try:
        return Principal(
            f"jwt:{str(claims['sub'])[:128]}",
            tenant,
            frozenset(map(str, roles)),
            float(claims["exp"]) + LEEWAY_S,
        )
    except InvalidRequestError as error:
        raise UnauthenticatedError(f"the token's claims cannot be: {error}") from None
