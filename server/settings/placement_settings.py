"""Settings of placement: what lower tiers are given, and what comes up from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

WriteRule = Literal["through", "evict", "selective", "auto"]
OtherWriteRule = Annotated[WriteRule | None, "RULE"]
DiskCopies = Literal["inclusive", "exclusive"]

DISK_WRITE: Any = Field(
    default="through",
    description="copy to disk when a chunk is stored, when it is evicted, when it is asked for"
    " a second time, or when it is evicted and likely to be asked for again",
)
REDIS_WRITE: Any = Field(default=None, description="the same for Redis; default: as --disk-write")
DISK_COPIES: Any = Field(
    default="inclusive",
    description="whether the copy on disk stays when a chunk comes up to memory; exclusive"
    " holds more and writes more, and takes no durable puts",
)
PREFETCH_BYTES: Any = Field(
    default=64 << 20,
    description="most that is loaded ahead of gets at once, for chains that were just found;"
    " 0: nothing",
)


def write_rules(disk: str, redis: str | None) -> dict[str, str]:
    """Return the name of the admission of each lower tier, of these settings."""
    return {"disk": disk, "redis": redis or disk}
