"""A Principal: who calls, for which tenant, and in which roles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.values import TENANT_FIX, TENANT_NAME
from kvstore.tiers.base import DEFAULT_TENANT

ROLES = frozenset({"read", "write", "admin", "peer"})
"""read: look up and get; write: put, pin and forget what is one's tenant's; admin: the server;
peer: another server, which reads chunks of any tenant whose keys it can name."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Proven by a key, a token or a certificate. ``expires_at`` is in seconds of the wall clock.

    ``name`` says by what: ``key:ID``, ``jwt:SUBJECT``, ``cert:NAME``; ``proof`` names the JWT's
    signing key or the certificate, either of which may be taken back. Raises InvalidRequestError
    for a tenant or role that there cannot be.
    """

    name: str
    tenant: str
    roles: frozenset[str]
    expires_at: float = math.inf
    proof: bytes = b""

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        if not self.roles or not self.roles <= ROLES:
            raise InvalidRequestError(
                "roles", sorted(self.roles), "name some of read, write, admin, peer"
            )

    def is_admin(self) -> bool:
        """Whether what is no tenant's is its to see and change."""
        return "admin" in self.roles


def check_tenant(tenant: str) -> str:
    """Return *tenant*. Raises InvalidRequestError when it cannot be one's name."""
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequestError("tenant", tenant, TENANT_FIX)
    return tenant


ANYBODY = Principal("anybody", DEFAULT_TENANT, ROLES)
"""Whoever calls a server that asks nobody who they are."""
