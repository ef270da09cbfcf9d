"""The setting of what tenants may have besides bytes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import override

from kvstore.server.security.rate_limits import BUCKETS, EVERY_OTHER, MAX_LIMIT, Limits
from kvstore.server.security.sessions import check_tenant
from kvstore.server.settings.rule_list import RuleList

Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT)]


class TenantLimit(BaseModel):
    """Of one tenant, or of each that is not named. 0: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tenant: str
    chunks: Limit = 0
    requests_per_s: Limit = 0
    leases: Limit = 0

    @model_validator(mode="after")
    def _check(self) -> TenantLimit:
        if self.tenant != EVERY_OTHER:
            check_tenant(self.tenant)
        elif self.chunks:
            raise ValueError("chunks are counted for tenants that are named; give *=0:RATE:LEASES")
        return self

    def __str__(self) -> str:
        return f"{self.tenant}={self.chunks}:{self.requests_per_s}:{self.leases}"


class TenantLimitRules(RuleList):
    """All of them. Also given as ``acme=100000:500:64,*=0:2000:0``."""

    rules: tuple[TenantLimit, ...] = ()

    @classmethod
    @override
    def parsed(cls, text: str) -> dict[str, Any]:
        return _parsed(text)

    @model_validator(mode="after")
    def _check(self) -> TenantLimitRules:
        if len({rule.tenant for rule in self.rules}) < len(self.rules):
            raise ValueError("name each tenant once")
        if len(self.rules) > BUCKETS:
            raise ValueError(f"give at most {BUCKETS} tenants")
        return self

    @property
    def limits(self) -> dict[str, Limits]:
        """The limits by tenant; ``*`` is each that is not named."""
        return {
            rule.tenant: Limits(rule.chunks, rule.requests_per_s, rule.leases)
            for rule in self.rules
        }


def _parsed(text: str) -> dict[str, object]:
    tenant, equals, numbers = text.partition("=")
    parts = numbers.split(":")
    if not (equals and tenant) or len(parts) != 3:
        raise ValueError("give TENANT=CHUNKS:REQUESTS_PER_S:LEASES, 0 for no limit")
    names = ("chunks", "requests_per_s", "leases")
    found: dict[str, object] = {"tenant": tenant}
    return found | {name: part or "0" for name, part in zip(names, parts, strict=True)}
