"""The setting of the gpu tier: how much of which CUDA device."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvstore.server.settings.values import GIB, TierSize, format_size


class GpuConfig(BaseModel):
    """How much memory the gpu tier takes, and on which device; also given as ``8GiB:1``.

    ``device`` counts as CUDA does, among the devices that CUDA_VISIBLE_DEVICES leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    capacity_bytes: TierSize = 4 * GIB
    device: Annotated[int, Field(ge=0, lt=64)] = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        size, colon, device = value.partition(":")
        if not size or (colon and not (device.isascii() and device.isdecimal())):
            raise ValueError("give SIZE or SIZE:DEVICE, such as 8GiB:1")
        return {"capacity_bytes": size} | ({"device": device} if colon else {})

    def __str__(self) -> str:
        return f"{format_size(self.capacity_bytes)}:{self.device}"
