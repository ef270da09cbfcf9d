"""CUDA: torch for streams, events and copies, cupy for the arena, its handle and the runtime.

torch is imported here, cupy once it is used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import structlog
import torch
from typing_extensions import override

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, Imported, RegisteredRanges, SharedEvent, Stream
from kvstore.proto.errors import TierUnavailableError

HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t (CUDA runtime API, "Memory Management")."""
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8
ARENA_GRANULE_BYTES = 2 << 20
"""A handle lets others at all of the block that CUDA cut the memory from; one of these is ours."""

logger = structlog.get_logger(__name__)


class CudaDevice(Device):
    """The CUDA device number *index* of this process.

    Raises TierUnavailableError when there is none, or a package for it is missing.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        count = torch.cuda.device_count()
        if index >= count:
            raise TierUnavailableError(
                "gpu", f"torch {torch.__version__} sees {count} CUDA devices, not number {index};"
                " install a CUDA build of torch, name another device, or start without gpu",
            )  # fmt: skip
        self._device = torch.device("cuda", index)
        with _device_errors():
            self.identity = f"cuda:{torch.cuda.get_device_properties(index).uuid}"
        self._ranges = RegisteredRanges()

    @cached_property
    def _cupy(self) -> Any:
        """Needed for an arena and for registering; the rest is torch's."""
        return import_cupy("gpu")

    @override
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return memory of its own cudaMalloc: only such a one has an IPC handle of its own."""
        runtime = self._cupy.cuda.runtime
        granules = -(-size_bytes // ARENA_GRANULE_BYTES)
        with self._cupy.cuda.Device(self._index):
            free_bytes, _ = runtime.memGetInfo()
            try:
                pointer = runtime.malloc(granules * ARENA_GRANULE_BYTES)
            except runtime.CUDARuntimeError as error:
                raise TierUnavailableError(
                    "gpu", f"cannot allocate {size_bytes} bytes on {self._device}, where"
                    f" {free_bytes} are free: {error}; give a smaller --gpu or another device",
                ) from None  # fmt: skip
        return self._tensor(pointer, size_bytes)

    def _tensor(self, pointer: int, size_bytes: int) -> torch.Tensor:
        with self._cupy.cuda.Device(self._index):
            owned = self._cupy.cuda.UnownedMemory(pointer, size_bytes, self, self._index)
            memory = self._cupy.cuda.MemoryPointer(owned, 0)
            array = self._cupy.ndarray((size_bytes,), self._cupy.uint8, memory)
        return torch.as_tensor(array, device=self._device)

    @override
    def release(self, arena: torch.Tensor) -> None:
        with _device_errors(), self._cupy.cuda.Device(self._index):
            self._cupy.cuda.runtime.free(arena.data_ptr())

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        with _device_errors():
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    @override
    def stream(self) -> Stream:
        with _device_errors():
            return CudaStream(torch.cuda.Stream(self._device), lambda: self._cupy.cuda.runtime)

    @override
    def current_stream(self) -> Stream:
        with _device_errors():
            stream = torch.cuda.current_stream(self._device)
            return CudaStream(stream, lambda: self._cupy.cuda.runtime)

    @override
    def export(self, arena: torch.Tensor) -> int:
        with _device_errors(), self._cupy.cuda.Device(self._index):
            handle: bytes = self._cupy.cuda.runtime.ipcGetMemHandle(arena.data_ptr())
        descriptor = unix_socket.create_memfd("kvstore-arena", HANDLE_BYTES)
        os.pwrite(descriptor, handle, 0)
        unix_socket.add_seals(descriptor, unix_socket.SIZE_SEALS | unix_socket.SEAL_FUTURE_WRITE)
        return descriptor

    @override
    def import_memory(self, exported: Bytes, size_bytes: int) -> Imported:
        if len(exported) != HANDLE_BYTES:
            reason = f"a handle has {HANDLE_BYTES} bytes, not {len(exported)}"
            raise TierUnavailableError("gpu", reason)
        handle, runtime = bytes(exported), self._cupy.cuda.runtime
        with _device_errors(), self._cupy.cuda.Device(self._index):
            pointer = runtime.ipcOpenMemHandle(handle)

        def close() -> None:
            with suppress(RuntimeError), self._cupy.cuda.Device(self._index):
                runtime.ipcCloseMemHandle(pointer)

        try:
            # A kernel that reads past the end takes the whole process's context with it.
            found = allocated_bytes(pointer)
            if not 0 < size_bytes <= found:
                raise TierUnavailableError("gpu", f"it has {found} bytes, not {size_bytes}")
            with _device_errors():
                return Imported(self._tensor(pointer, size_bytes), close)
        except TierUnavailableError:
            close()
            raise

    @override
    def import_event(self, handle: bytes) -> Event:
        with _device_errors():
            return _CudaEvent(torch.cuda.Event.from_ipc_handle(self._device, handle))

    @override
    def register(self, memory: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        flags = HOST_REGISTER_READ_ONLY if read_only else HOST_REGISTER_PORTABLE
        end = register_host(self._cupy, self._index, memory, flags)
        if end is None:
            return None
        forget = self._ranges.add(memory)

        def unregister() -> None:
            forget()
            end()

        return unregister

    @override
    def is_registered(self, memory: Bytes) -> bool:
        return self._ranges.has(memory)


class CudaStream(Stream):
    """One torch.cuda.Stream. *runtime* returns CUDA's, as cupy has it."""

    def __init__(self, stream: torch.cuda.Stream, runtime: Callable[[], Any]) -> None:
        self._stream = stream
        self._runtime = runtime

    @override
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        with _device_errors(), torch.cuda.stream(self._stream):
            out.copy_(data, non_blocking=True)

    @override
    def upload(self, out: torch.Tensor, pieces: Sequence[tuple[int, Bytes]]) -> None:
        # A call of torch's takes longer than the copy of a small chunk.
        with _device_errors():
            runtime = self._runtime()
            first, pointer = out.data_ptr(), self._stream.cuda_stream
            for start, data in pieces:
                if start < 0 or start + len(data) > len(out):
                    raise TierUnavailableError("gpu", f"{start} + {len(data)} > {len(out)} bytes")
                runtime.memcpyAsync(
                    first + start, data.ctypes.data, len(data), runtime.memcpyHostToDevice, pointer
                )

    @override
    def fill(self, out: torch.Tensor, value: int) -> None:
        # A copy, where fill_ would be a kernel: that waits until the engine's have a pause.
        with _device_errors(), torch.cuda.stream(self._stream):
            values = torch.full(out.shape, value, dtype=out.dtype, pin_memory=True)
            out.copy_(values, non_blocking=True)

    @override
    def record(self) -> Event:
        with _device_errors():
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            return _CudaEvent(event)

    @override
    def record_shared(self) -> SharedEvent:
        with _device_errors():
            event = torch.cuda.Event(blocking=True, interprocess=True)
            event.record(self._stream)
            return _CudaEvent(event)

    @override
    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with _device_errors():
            self._stream.wait_event(event.event)

    @override
    def launch(self, work: Callable[[], object]) -> None:
        with _device_errors(), torch.cuda.stream(self._stream):
            work()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        with _device_errors():
            is_done: bool = self.event.query()
            return is_done

    def synchronize(self) -> None:
        with _device_errors():
            self.event.synchronize()

    def handle(self) -> bytes:
        with _device_errors():
            handle: bytes = self.event.ipc_handle()
            return handle


@contextmanager
def _device_errors() -> Iterator[None]:
    """Say what torch and cupy raise (both derive from RuntimeError) in the store's words."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TierUnavailableError("gpu", f"{type(error).__name__}: {reason}") from error


def import_cupy(who: str) -> Any:
    """Return cupy. Raises TierUnavailableError in the name of *who* without it."""
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


def allocated_bytes(pointer: int) -> int:
    """Return how many bytes are allocated from *pointer* on, by what CUDA's driver knows.

    Raises TierUnavailableError.
    """
    start, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        found = query(ctypes.byref(start), ctypes.byref(size_bytes), ctypes.c_uint64(pointer))
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
