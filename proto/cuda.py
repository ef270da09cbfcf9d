"""CUDA's runtime as clients, tiers and codecs use it: by way of cupy, loaded when asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierUnavailableError

HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t (CUDA runtime API, "Memory Management")."""
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8

logger = structlog.get_logger(__name__)


def import_cupy(who: str) -> Any:
    """Return cupy. Raises TierUnavailableError in the name of *who* when it cannot be loaded."""
    try:
        import cupy
    except ImportError as error:
        raise TierUnavailableError(
            who, f"needs cupy ({error}): install kvstore-server[gpu] or kvstore-server[gpu-cuda12]"
        ) from None
    except OSError as error:  # it makes the folder of what it compiled as soon as it is loaded
        raise TierUnavailableError(
            who, f"cupy cannot be loaded ({error}): set CUPY_CACHE_DIR to a folder to write to"
        ) from None
    return cupy


def as_handle(exported: Bytes) -> bytes:
    """Return the handle that a memfd holds. Raises TierUnavailableError for anything else."""
    if len(exported) != HANDLE_BYTES:
        raise TierUnavailableError("gpu", f"a handle has {HANDLE_BYTES} bytes, not {len(exported)}")
    return bytes(exported)


def allocated_bytes(pointer: int) -> int:
    """Return how many bytes are allocated from *pointer* on, by what CUDA's driver knows.

    Raises TierUnavailableError.
    """
    start, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        found = ask(ctypes.byref(start), ctypes.byref(size_bytes), ctypes.c_uint64(pointer))
    except (OSError, AttributeError) as error:
        raise TierUnavailableError("gpu", f"CUDA's driver cannot be asked: {error}") from None
    if found:
        raise TierUnavailableError("gpu", f"cuMemGetAddressRange: error {found}")
    return start.value + size_bytes.value - pointer


def register_host(
    cupy: Any, index: int, memory: Bytes, flags: int = HOST_REGISTER_PORTABLE
) -> Callable[[], None] | None:
    """Have the device number *index* copy straight to and from *memory*; return how to end that.

    None, after a warning, where it cannot. Not by way of torch: that leaves a refusal behind as
    the last error of its runtime, and the next kernel of anybody on the thread seems to fail.
    """
    runtime = cupy.cuda.runtime
    start = memory.ctypes.data
    try:
        with cupy.cuda.Device(index):
            runtime.hostRegister(start, len(memory), flags)
    except RuntimeError as error:  # cupy's own derive from it
        logger.warning("cudaHostRegister refused; copies are slower", error=str(error))
        return None

    def unregister(kept: Bytes = memory) -> None:
        with suppress(RuntimeError), cupy.cuda.Device(index):
            runtime.hostUnregister(kept.ctypes.data)

    return unregister
