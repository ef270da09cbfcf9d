"""Shared pools: chunks that several tenants may read, kept as those of a tenant of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import override

from kvstore.proto.errors import PermissionDeniedError
from kvstore.server.security.principal import Principal, check_tenant
from kvstore.server.settings.rule_list import RuleList

PREFIX = "pool:"
"""Of the name that a pool has as a tenant; no tenant's own name has a colon."""
MAX_POOLS = 256
EVERYBODY = "*"


class Pool(BaseModel):
    """Who may read a pool, and who may also put into it; ``*`` is every tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Pool:
        for name in (self.name, *self.readers, *self.writers):
            if name != EVERYBODY or name == self.name:
                check_tenant(name)
        return self

    def roles(self, tenant: str) -> frozenset[str]:
        """Return what *tenant* may do here."""
        if tenant in self.writers or EVERYBODY in self.writers:
            return frozenset({"read", "write"})
        if tenant in self.readers or EVERYBODY in self.readers:
            return frozenset({"read"})
        return frozenset()

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.readers)}:{'+'.join(self.writers)}"


class SharedPools(RuleList):
    """All of them. Also given as ``library=*:curator,team=acme+zeta:acme``."""

    rules: tuple[Pool, ...] = ()

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _parsed(text)

    @model_validator(mode="after")
    def _check(self) -> SharedPools:
        if len({rule.name for rule in self.rules}) < len(self.rules):
            raise ValueError("name each pool once")
        if len(self.rules) > MAX_POOLS:
            raise ValueError(f"give at most {MAX_POOLS} pools")
        return self


def _parsed(text: str) -> dict[str, object]:
    name, equals, who = text.partition("=")
    readers, _, writers = who.partition(":")
    if not (equals and name and who.strip(":")):
        raise ValueError("give POOL=READER+READER:WRITER, such as library=*:curator")
    return {
        "name": name,
        "readers": [reader for reader in readers.split("+") if reader],
        "writers": [writer for writer in writers.split("+") if writer],
    }


@dataclass(frozen=True, slots=True)
class Standing:
    """For which tenant a session is, and what it may do there."""

    tenant: str
    roles: frozenset[str]


@dataclass(frozen=True, slots=True)
class Standings:
    """Decides whose chunks a session is about: the caller's own, or those of a pool."""

    pools: SharedPools = field(default_factory=SharedPools)

    def of(self, principal: Principal, asked: str) -> Standing:
        """Return where *principal* stands in what it *asked* for: nothing, its tenant or a pool.

        Raises PermissionDeniedError for anything else: who the tenant is says the identity.
        """
        if asked in ("", principal.tenant):
            return Standing(principal.tenant, principal.roles)
        for pool in self.pools.rules:
            if asked == PREFIX + pool.name:
                roles = pool.roles(principal.tenant) & principal.roles
                if roles:
                    return Standing(asked, roles)
        raise PermissionDeniedError(f"tenant={asked[:160]!r}: not {principal.name}'s")
