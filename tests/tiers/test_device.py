"""Devices: memory that they know, and what they say when they cannot be had."""

from __future__ import annotations

import pytest
import torch
from contracts.chunks import make_info, payload
from contracts.shelf import assert_holds, bytes_of, put

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.device import Device, HostDevice, open_device
from kvstore.tiers.gpu import GpuTier

SLAB_BYTES = 64 << 10


def test_only_whole_pieces_of_registered_memory_are_copied_straight() -> None:
    device = HostDevice()
    memory = payload(1, 100)
    end = device.register(memory[10:90])
    assert end is not None
    known = [device.is_registered(memory[a:b]) for a, b in [(10, 90), (20, 30), (9, 20), (80, 91)]]
    assert known == [True, True, False, False]
    end()
    assert not device.is_registered(memory[20:30])


def test_slabs_of_cpu_memory_are_told_to_the_device_while_they_live() -> None:
    device = HostDevice()
    cpu = CpuTier(2 * SLAB_BYTES, SLAB_BYTES, device.register)
    info = make_info(1, 1000)
    red, blue = cpu.reserve(info, "red"), cpu.reserve(make_info(2, 1000), "blue")
    views = [cpu.view(red), cpu.view(blue)]
    assert [device.is_registered(view) for view in views] == [True, True]
    cpu.abort(blue)
    green = cpu.reserve(make_info(3, 1000), "green")
    assert device.is_registered(cpu.view(green)), "the new owner's slab"
    assert [device.is_registered(view) for view in views] == [True, False], "the old one is gone"
    cpu.close()
    assert not device.is_registered(views[0])


def test_slabs_that_the_device_refuses_are_used_all_the_same() -> None:
    cpu = CpuTier(SLAB_BYTES, SLAB_BYTES, lambda memory: None)
    _put_cpu(cpu, make_info(1, 1000))
    cpu.close()


def _put_cpu(tier: CpuTier, info: ChunkInfo) -> None:
    assert put(tier, info, bytes_of(info))
    assert_holds(tier, info, bytes_of(info))


def test_without_cuda_a_cuda_device_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TierUnavailableError, match=r"sees 0 CUDA devices.*start without gpu"):
        open_device(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_memory_than_the_device_has_is_refused_with_the_fix() -> None:
    device: Device = open_device(torch.device("cuda", 0))
    with pytest.raises(TierUnavailableError, match="give a smaller --gpu"):
        GpuTier(1 << 50, device)
