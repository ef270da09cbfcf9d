"""Servers whose gpu tier has a device of this process, in place of a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstore.proto.device import Device
from kvstore.proto.types import ChunkKey
from kvstore.server import wiring
from kvstore.server.settings import settings as config_module
from kvstore.server.settings.rules import GpuConfig
from kvstore.tiers.gpu import GpuTier


def use_device(
    monkeypatch: pytest.MonkeyPatch, folder: Path, device: Device, capacity_bytes: int = 0
) -> None:
    """Have servers that start from now on put their gpu tier on *device*.

    With *capacity_bytes* it is smaller than settings allow.
    """

    def open_tier(config: GpuConfig) -> GpuTier:
        return GpuTier(capacity_bytes or config.capacity_bytes, device, 4096)

    monkeypatch.setattr(config_module, "_CUDA_CONTROL", folder)
    monkeypatch.setattr(wiring, "open_gpu_tier", open_tier)


def frame_on_device(gpu: GpuTier, key: ChunkKey) -> torch.Tensor:
    """Return the bytes of a sealed frame where they lie, to look at or to damage."""
    place = gpu.locate(key)
    assert place is not None
    return gpu.memory[place.offset : place.offset + place.size_bytes]
