"""Settings of scrubbing: what is verified in the background, and how fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kvstore.server.settings.values import Size

TierName = Literal["gpu", "cpu", "disk", "redis"]


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


class ScrubSettings(BaseModel):
    """The part of a server's configuration that is about scrubbing."""

    scrub_bytes_per_s: Size = Field(
        default=0, ge=0, description="verify what tiers hold, so much a second; 0: only when asked"
    )
    scrub_tiers: Annotated[tuple[TierName, ...], BeforeValidator(_names), "NAMES"] = Field(
        default=("disk",), description="which tiers, out of cpu, disk, redis, gpu"
    )
