"""Settings of admission: which states are kept, and how much is written a day."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from kvstore.server.settings.values import MIB, Size
from kvstore.server.tiering.state_admission import StateRule


def _enough(size_bytes: int) -> int:
    if 0 < size_bytes < MIB:
        raise ValueError("give at least 1MiB a day, or 0 for no limit")
    return size_bytes


DailyBytes = Annotated[Size, AfterValidator(_enough), "SIZE"]


class AdmissionSettings(BaseModel):
    """The part of a server's configuration that is about what is worth storing."""

    state_admission: StateRule = Field(
        default="all",
        description="which recurrent states are kept of those that engines put: all, or those"
        " where a put ends, prompts part, or that come a second time",
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
