"""JSON Web Tokens (RFC 7519): the algorithm, audience and issuer are the operator's, not theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError, check_text
from kvstore.server.security.sessions import Principal

LEEWAY_S = 5
MIN_HMAC_BYTES = 32
MAX_TOKEN_CHARS = 8192
MAX_KEYS = 8
REMEMBERED = 1024
"""Tokens whose signature was verified."""
MAX_LIFE_S = 366 * 86_400
"""From now on: a token that is good for longer is refused, as it can be taken back with its key
alone."""
MAX_SUBJECT_CHARS = 256

_PEM_END = b"-----END PUBLIC KEY-----"
_REFUSED = "the token is not one of this server's callers"


@dataclass(frozen=True, slots=True)
class JwtTerms:
    """What a token must say. ``issuer`` empty: any. ``algorithm`` is the one that is taken."""

    algorithm: str
    audience: str
    issuer: str = ""


class JwtVerifier:
    """Verifies tokens under a key; they say ``sub``, ``tenant``, ``roles``, ``exp``, ``aud``.

    There may be several public keys in PEM, one after another, while one follows the other; with
    None no token is good.
    """

    def __init__(self, keys: bytes | None, terms: JwtTerms) -> None:
        """Raises InvalidRequestError for a key that does not go with the algorithm."""
        self._terms = terms
        self.keys: dict[bytes, Any] = {}
        """By what principals' ``proof`` names them by."""
        self.principal_of: Callable[[str], Principal] = lru_cache(REMEMBERED)(self._verified)
        """Returns whose a token is. Raises UnauthenticatedError that does not repeat it."""
        if keys is None:
            return
        pieces = keys.split(_PEM_END)
        is_pem = not terms.algorithm.startswith("HS") and len(pieces) > 1
        found = [piece.lstrip() + _PEM_END for piece in pieces[:-1]] if is_pem else [keys]
        if len(found) > MAX_KEYS or (is_pem and pieces[-1].strip()):
            fix = f"give at most {MAX_KEYS} public keys in PEM and nothing else"
            raise InvalidRequestError("jwt_key", len(found), fix)
        self.keys = {hashlib.sha256(key).digest()[:16]: _prepared(key, terms) for key in found}

    def _verified(self, token: str) -> Principal:
        import jwt

        if len(token) > MAX_TOKEN_CHARS:
            raise UnauthenticatedError(_REFUSED)
        for proof, key in self.keys.items():
            try:
                return replace(self._principal_under(key, token), proof=proof)
            except jwt.InvalidSignatureError:
                continue
        raise UnauthenticatedError(_REFUSED)

    def _principal_under(self, key: Any, token: str) -> Principal:
        import jwt

        terms, issuer = self._terms, self._terms.issuer or None
        options: Any = {"require": ["exp", "aud", "sub", *(["iss"] if issuer else [])]}
        bounds: Any = {"audience": terms.audience, "issuer": issuer, "leeway": LEEWAY_S}
        try:
            claims = jwt.decode(token, key, [terms.algorithm], options, **bounds)
        except jwt.InvalidSignatureError:
            raise
        except jwt.ExpiredSignatureError:
            raise UnauthenticatedError("the token has expired; get another") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
            raise UnauthenticatedError(_REFUSED) from None
        return _principal(claims)


def _prepared(key: bytes, terms: JwtTerms) -> Any:
    import jwt

    if terms.algorithm.startswith("HS") and len(key) < MIN_HMAC_BYTES:
        fix = f"put at least {MIN_HMAC_BYTES} random bytes into it"
        raise InvalidRequestError("jwt_key", len(key), fix)
    try:
        prepared = jwt.get_algorithm_by_name(terms.algorithm).prepare_key(key)
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:
        fix = f"no key for {terms.algorithm}: {error}"
        raise InvalidRequestError("jwt_key", terms.algorithm, fix) from None
    if hasattr(prepared, "private_bytes"):
        fix = "give the public key alone; the private one signs, and is not for servers"
        raise InvalidRequestError("jwt_key", terms.algorithm, fix)
    return prepared


def _principal(claims: dict[str, Any]) -> Principal:
    roles = claims.get("roles")
    roles = roles.split() if isinstance(roles, str) else roles
    tenant = claims.get("tenant")
    if not isinstance(roles, list) or not isinstance(tenant, str):
        raise UnauthenticatedError("the token does not say tenant and roles")
    try:
        subject = check_text("sub", claims["sub"], MAX_SUBJECT_CHARS)
        until = float(claims["exp"]) + LEEWAY_S
        return Principal(f"jwt:{subject}", tenant, frozenset(map(str, roles)), until)
    except (InvalidRequestError, OverflowError) as error:
        raise UnauthenticatedError(f"the token's claims cannot be: {error}") from None
