"""Shared pools: chunks that several tenants may read, kept as those of a tenant of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.proto.errors import PermissionDeniedError
from kvstore.server.security.sessions import Principal
from kvstore.server.settings.rules import Pool

PREFIX = "pool:"
"""Of the name that a pool has as a tenant; no tenant's own name has a colon."""


@dataclass(frozen=True, slots=True)
class Standing:
    """For which tenant a session is, and what it may do there."""

    tenant: str
    roles: frozenset[str]


@dataclass(frozen=True, slots=True)
class Standings:
    """Decides whose chunks a session is about: the caller's own, or those of a pool."""

    pools: Sequence[Pool] = ()

    def of(self, principal: Principal, asked: str) -> Standing:
        """Return where *principal* stands in what it *asked* for: nothing, its tenant or a pool.

        Raises PermissionDeniedError for anything else: who the tenant is says the identity.
        """
        if asked in ("", principal.tenant):
            return Standing(principal.tenant, principal.roles)
        for pool in self.pools:
            if asked == PREFIX + pool.name:
                roles = pool.roles(principal.tenant) & principal.roles
                if roles:
                    return Standing(asked, roles)
        raise PermissionDeniedError(f"tenant={asked[:160]!r}: not {principal.name}'s")
