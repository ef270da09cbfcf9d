"""Settings of admission: which states are kept, how much is written a day, for whom we adapt."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kvstore.server.policy.state_admission import StateRule
from kvstore.server.settings.policy_config import MAX_QUOTAS
from kvstore.server.settings.rule_list import check_tenant_name
from kvstore.server.settings.units import MIB, Size


def _enough(size_bytes: int) -> int:
    if 0 < size_bytes < MIB:
        raise ValueError("give at least 1MiB a day, or 0 for no limit")
    return size_bytes


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _tenants(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > MAX_QUOTAS or len(set(names)) < len(names):
        raise ValueError(f"name at most {MAX_QUOTAS} tenants, each once")
    for name in names:
        check_tenant_name(name)
    return names


TenantNames = Annotated[
    tuple[str, ...], BeforeValidator(_names), AfterValidator(_tenants), "TENANTS"
]
DailyBytes = Annotated[Size, AfterValidator(_enough), "SIZE"]


class AdmissionSettings(BaseModel):
    """The part of a server's configuration that is about what is worth storing."""

    state_admission: StateRule = Field(
        default="all",
        description="which recurrent states are kept of those that engines put: all, or those"
        " where a put ends, prompts part, or that come a second time",
    )
    adapt_tenants: TenantNames = Field(
        default=(),
        description="tenants for each of which the policy adaptive chooses apart, with commas"
        " between them",
    )
    disk_write_budget: DailyBytes = Field(
        default=0,
        description="bytes a day to write to disk; beyond them only durable puts and what leaves"
        " memory and is likely to be asked for again; 0: no limit",
    )
    redis_write_budget: DailyBytes = Field(default=0, description="the same for Redis")

    @property
    def write_budgets(self) -> dict[str, int]:
        """The bytes a day of each tier that has a budget."""
        budgets = {"disk": self.disk_write_budget, "redis": self.redis_write_budget}
        return {tier: size for tier, size in budgets.items() if size}
