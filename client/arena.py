"""The Arena: the server's device memory, mapped into this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.client.session import SessionTerms
from kvstore.client.slabs import Slabs
from kvstore.proto.buffers import Bytes
from kvstore.proto.cuda import HANDLE_BYTES, import_cupy
from kvstore.proto.device import tensor_over
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.shm import ARENA_SLAB


@dataclass(frozen=True, slots=True)
class Arena:
    """``memory`` (uint8) lies on the device. Nobody may write to it; CUDA cannot forbid it.

    ``mapping`` is what keeps it alive, where the device is the CPU.
    """

    memory: torch.Tensor
    close: Callable[[], None]
    mapping: Bytes | None = None


def open_arena(terms: SessionTerms, slabs: Slabs) -> Arena:
    """Map the memory of the server's gpu tier.

    Raises TierUnavailableError when it has none, or this process does not see its device.
    """
    if not terms.arena_device:
        raise TierUnavailableError("cuda", "the server shares no GPU memory: start it with gpu")
    data = slabs.slab(ARENA_SLAB).data
    if terms.arena_device == "cpu":  # a test's stand-in for a device
        if len(data) != terms.arena_bytes:
            raise TierUnavailableError("cuda", f"the arena has {len(data)} bytes")
        return Arena(tensor_over(data), lambda: None, data)
    if len(data) != HANDLE_BYTES:
        raise TierUnavailableError("cuda", f"a handle has {HANDLE_BYTES} bytes, not {len(data)}")
    return _open_cuda(_index_of(terms.arena_device), bytes(data), terms.arena_bytes)


def _index_of(identity: str) -> int:
    seen = [
        f"cuda:{torch.cuda.get_device_properties(at).uuid}"
        for at in range(torch.cuda.device_count())
    ]
    if identity not in seen:
        raise TierUnavailableError(
            "cuda", f"the server's device {identity} is not among {seen or 'none'}:"
            " run on it, or use another transport",
        )  # fmt: skip
    return seen.index(identity)


def _open_cuda(index: int, handle: bytes, size_bytes: int) -> Arena:
    cupy = import_cupy("cuda")
    runtime: Any = cupy.cuda.runtime
    try:
        with cupy.cuda.Device(index):
            pointer = runtime.ipcOpenMemHandle(handle)
            owned = cupy.cuda.UnownedMemory(pointer, size_bytes, None, index)
            array = cupy.ndarray((size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(owned, 0))
    except RuntimeError as error:  # cupy's own derive from it
        raise TierUnavailableError("cuda", f"cannot map the server's memory: {error}") from None

    def close() -> None:
        with suppress(RuntimeError), cupy.cuda.Device(index):
            runtime.ipcCloseMemHandle(pointer)

    return Arena(torch.as_tensor(array, device=torch.device("cuda", index)), close)
