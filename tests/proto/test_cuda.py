"""cupy, asked for where there may be none, and host memory that its device copies straight."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kvstore.proto.cuda import (
    HOST_REGISTER_READ_ONLY,
    allocated_bytes,
    import_cupy,
    register_host,
)
from kvstore.proto.errors import TierUnavailableError


def test_cupy_that_is_missing_is_said_so_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TierUnavailableError, match=r"gpu.*install kvstore-server\[gpu\]"):
        import_cupy("gpu")


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
        import_cupy("cuda")


def test_without_cudas_driver_nobody_says_how_large_an_allocation_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TierUnavailableError, match=r"libcuda\.so\.1: cannot open"):
        allocated_bytes(4096)


class _Runtime:
    """What cupy has of CUDA's runtime, for memory that a device is told of."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.known: dict[int, tuple[int, int]] = {}

    def hostRegister(self, start: int, size_bytes: int, flags: int) -> None:
        if self.refuses:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")
        self.known[start] = (size_bytes, flags)

    def hostUnregister(self, start: int) -> None:
        del self.known[start]


def _cupy(runtime: _Runtime, entered: list[int]) -> SimpleNamespace:
    def device(index: int) -> nullcontext[None]:
        entered.append(index)
        return nullcontext()

    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device))


def test_memory_is_known_to_the_device_that_was_meant_until_that_is_ended() -> None:
    memory, runtime, entered = np.zeros(4096, np.uint8), _Runtime(refuses=False), list[int]()
    end = register_host(_cupy(runtime, entered), 3, memory, HOST_REGISTER_READ_ONLY)
    assert end is not None
    assert runtime.known == {memory.ctypes.data: (4096, HOST_REGISTER_READ_ONLY)}
    end()
    assert runtime.known == {}
    assert entered == [3, 3]


def test_a_device_that_refuses_memory_is_no_failure() -> None:
    runtime = _Runtime(refuses=True)
    assert register_host(_cupy(runtime, []), 0, np.zeros(64, np.uint8)) is None
