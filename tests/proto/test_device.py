"""Devices: memory that they know, and what they say when they cannot be had."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from contracts.chunks import make_info, payload
from contracts.shelf import assert_holds, bytes_of, open_files, put

from kvstore.proto import device as devices
from kvstore.proto.device import (
    HOST_REGISTER_READ_ONLY,
    CudaDevice,
    Device,
    HostDevice,
    allocated_bytes,
    import_cupy,
    open_device,
)
from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.cpu import CpuTier
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
    info = make_info(1, 1000)
    assert put(cpu, info, bytes_of(info))
    assert_holds(cpu, info, bytes_of(info))
    cpu.close()


def test_without_cuda_a_cuda_device_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TierUnavailableError, match=r"has 0 CUDA devices.*start without gpu"):
        open_device(torch.device("cuda", 0))


@pytest.fixture
def runtime() -> MagicMock:
    """CUDA's runtime on a device of whose memory ten bytes are left."""
    runtime = MagicMock()
    runtime.CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
    runtime.memGetInfo.return_value = (10, 100)
    runtime.malloc.side_effect = runtime.CUDARuntimeError("cudaErrorMemoryAllocation")
    runtime.ipcOpenMemHandle.return_value = 4096
    return runtime


@pytest.fixture
def full_device(runtime: MagicMock) -> CudaDevice:
    """A CUDA device without memory, its twin on machines without one."""
    device = object.__new__(CudaDevice)
    Device.__init__(device)
    device._index, device._device = 3, torch.device("cuda", 3)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=runtime.enter))
    return device


def test_an_arena_that_the_device_has_no_room_for_is_refused_with_the_fix(
    full_device: CudaDevice,
) -> None:
    before = open_files()
    with pytest.raises(
        TierUnavailableError, match=r"512 bytes on cuda:3, where 10 are free.*--gpu"
    ):
        GpuTier(512, full_device, 256)
    assert open_files() == before


@pytest.mark.parametrize("make", [lambda one: one.staging(8), lambda one: one.stream()])
def test_a_device_out_of_memory_is_an_error_of_the_tier_alone(
    full_device: CudaDevice, make: Callable[[CudaDevice], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*words: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    monkeypatch.setattr(torch.cuda, "Stream", out_of_memory)
    with pytest.raises(TierUnavailableError, match="CUDA out of memory"):
        make(full_device)


def test_memory_of_one_device_is_read_through_what_it_exported() -> None:
    device = HostDevice()
    memory = device.allocate(4096)
    file = device.export(memory)
    mapped = np.frombuffer(mmap.mmap(file, 4096, prot=mmap.PROT_READ), np.uint8)
    os.close(file)
    imported = HostDevice().import_memory(mapped, 4096)
    memory[4095] = 7
    assert imported.memory[4095] == 7
    with pytest.raises(TierUnavailableError, match="has 4096 bytes, not 8192"):
        HostDevice().import_memory(mapped, 8192)
    device.release(memory)


def test_device_memory_of_no_handle_or_another_size_is_refused_and_not_kept_mapped(
    full_device: CudaDevice, runtime: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size_bytes in (0, 63, 65):
        with pytest.raises(TierUnavailableError, match="a handle has 64 bytes"):
            full_device.import_memory(payload(1, size_bytes), 1)
    monkeypatch.setattr(devices, "allocated_bytes", lambda pointer: 100)
    for count, size_bytes in enumerate((0, 101), 1):
        with pytest.raises(TierUnavailableError, match=f"it has 100 bytes, not {size_bytes}"):
            full_device.import_memory(payload(1, 64), size_bytes)
        assert runtime.ipcCloseMemHandle.call_count == count


def test_cupy_that_is_missing_is_said_so_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TierUnavailableError, match=r"gpu.*install kvstore-server\[gpu\]"):
        import_cupy()


def test_cupy_that_has_no_folder_to_compile_into_is_said_so_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Finder:
        """Finds a cupy whose import makes a folder where it may not."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleType | None:
            if name == "cupy":
                raise PermissionError(13, "Permission denied", "/nonexistent/.cupy/kernel_cache")
            return None

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(TierUnavailableError, match="set CUPY_CACHE_DIR"):
        import_cupy()


def test_without_cudas_driver_nobody_says_how_large_an_allocation_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TierUnavailableError, match=r"libcuda\.so\.1: cannot open"):
        allocated_bytes(4096)


def test_memory_is_known_to_the_device_that_was_meant_until_that_is_ended(
    full_device: CudaDevice, runtime: MagicMock
) -> None:
    memory = np.zeros(4096, np.uint8)
    end = full_device.register(memory, read_only=True)
    assert end is not None
    assert full_device.is_registered(memory)
    place = memory.ctypes.data
    runtime.hostRegister.assert_called_once_with(place, 4096, HOST_REGISTER_READ_ONLY)
    runtime.hostUnregister.assert_not_called()
    end()
    assert not full_device.is_registered(memory)
    runtime.hostUnregister.assert_called_once_with(place)
    assert runtime.enter.call_args_list == [call(3), call(3)]
    runtime.hostRegister.side_effect = RuntimeError("cudaErrorNotSupported")
    assert full_device.register(memory) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_memory_than_the_device_has_is_refused_with_the_fix() -> None:
    device: Device = open_device(torch.device("cuda", 0))
    with pytest.raises(TierUnavailableError, match="give a smaller --gpu"):
        GpuTier(1 << 50, device)
