"""A device: memory, streams, events. One class for CUDA, one for the CPU.

The two differ here and nowhere else. CUDA uses torch for streams, events and copies, and cupy for
the arena, its handle and the runtime. This file imports torch, so only users of a device import
it; cupy is imported at first use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
import torch
from typing_extensions import override

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierUnavailableError

HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t (CUDA runtime API, "Memory Management")."""
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8
ARENA_GRANULE_BYTES = 2 << 20
"""An IPC handle exposes the whole CUDA block that memory was cut from: we allocate whole blocks."""

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether the work before it is done."""

    def synchronize(self) -> None:
        """Block until the work before it is done."""

    def handle(self) -> bytes:
        """Return a shared event's handle, for ``Device.import_event`` of another process."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Memory of another process. It is only read, though CUDA cannot enforce that.

    It is not used after ``close``. ``mapping`` keeps it alive if it is host memory.
    """

    memory: torch.Tensor
    close: Callable[[], None]
    mapping: Bytes | None = None


class Stream(ABC):
    """A queue of work that a device executes in order, asynchronously. Thread-safe.

    Memory that queued work uses must stay alive and unchanged until the work is done. Raises
    TierUnavailableError when the device fails.
    """

    @abstractmethod
    def launch(self, work: Callable[[], object]) -> None:
        """Queue what *work* launches on torch's current stream."""

    def launched(self, work: Callable[[], T]) -> list[T]:
        """Launch *work*; return a list that gets its result."""
        found: list[T] = []
        self.launch(lambda: found.append(work()))
        return found

    @abstractmethod
    def record(self, *, shared: bool = False) -> Event:
        """Return an event after everything queued so far.

        *shared*: another process can wait for it while this process keeps it.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make work queued from now on wait for *event*; the host does not wait."""

    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        """Queue a copy of *data* to *out*: uint8, one-dimensional, of equal length.

        Either may be host memory.
        """
        self.launch(lambda: out.copy_(data, non_blocking=True))

    def upload(self, out: torch.Tensor, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Queue copies of host bytes to *out*, uint8; each piece has its byte offset in *out*."""
        for start, data in pieces:
            self.copy(out[start : start + len(data)], tensor_over(data))

    def fill(self, out: torch.Tensor, value: int) -> None:
        """Queue writing *value* to all of *out*, a device tensor of any integer type."""

        def work() -> None:
            # A copy: fill_ would be a kernel, which waits for a gap between the engine's kernels.
            values = torch.full(out.shape, value, dtype=out.dtype, pin_memory=out.is_cuda)
            out.copy_(values, non_blocking=True)

        self.launch(work)


class Device(ABC):
    """Where an arena lies. ``identity`` names the physical device equally in every process.

    All methods raise TierUnavailableError when the device fails.
    """

    identity: str

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        """Start and stop address of each piece of registered memory."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return device memory (uint8), not cleared."""

    @abstractmethod
    def release(self, arena: torch.Tensor) -> None:
        """Free memory returned by ``allocate``; it is no longer in use."""

    @abstractmethod
    def staging(self, size_bytes: int) -> torch.Tensor:
        """Return host memory (uint8) for copies to and from the device at full speed."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return torch's current stream of this thread: the engine's own."""

    @abstractmethod
    def export(self, arena: torch.Tensor) -> int:
        """Return a memfd that lets another process map *arena*; the caller closes it.

        docs/format.md specifies its content.
        """

    @abstractmethod
    def import_memory(self, exported: Bytes, size_bytes: int) -> Imported:
        """Map *size_bytes* of another process's arena; *exported* is its mapped memfd."""

    @abstractmethod
    def import_event(self, handle: bytes) -> Event:
        """Return the event of another process with *handle*."""

    def register(self, memory: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        """Register *memory* for direct copies; return the function that unregisters it.

        *read_only*: it is mapped read-only and only copied from. Returns None after a warning when
        the device cannot register it: copies are then staged.
        """
        start = memory.ctypes.data
        self._registered[start] = start + len(memory)

        def unregister() -> None:
            self._registered.pop(start, None)

        return unregister

    def is_registered(self, memory: Bytes) -> bool:
        """Return whether all of *memory* lies in one registered piece."""
        first = memory.ctypes.data
        ranges = self._registered.copy().items()  # other threads register
        return any(start <= first and first + len(memory) <= stop for start, stop in ranges)


def tensor_over(memory: Bytes) -> torch.Tensor:
    """Return a tensor over *memory*, which may be read-only; it does not keep *memory* alive."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    pointer = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
    return torch.frombuffer(pointer, dtype=torch.uint8)


class HostDevice(Device):
    """The CPU as a device: copies are synchronous, events are always complete.

    For models on the CPU, and for tests. Its arena is a memfd, so that another process can map
    it as it would a CUDA arena.
    """

    identity = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[int, int] = {}

    @override
    def allocate(self, size_bytes: int) -> torch.Tensor:
        descriptor = unix_socket.create_memfd("kvstore-arena", size_bytes)
        memory = mmap.mmap(descriptor, size_bytes)
        unix_socket.add_seals(descriptor, unix_socket.SIZE_SEALS | unix_socket.SEAL_FUTURE_WRITE)
        arena = torch.from_numpy(np.frombuffer(memory, np.uint8))
        self._files[arena.data_ptr()] = descriptor
        return arena

    @override
    def release(self, arena: torch.Tensor) -> None:
        os.close(self._files.pop(arena.data_ptr()))

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    @override
    def stream(self) -> Stream:
        return HostStream()

    current_stream = stream

    @override
    def export(self, arena: torch.Tensor) -> int:
        return os.dup(self._files[arena.data_ptr()])

    @override
    def import_memory(self, exported: Bytes, size_bytes: int) -> Imported:
        if len(exported) != size_bytes:
            reason = f"the memory has {len(exported)} bytes, not {size_bytes}"
            raise TierUnavailableError("gpu", reason)
        return Imported(tensor_over(exported), lambda: None, exported)

    @override
    def import_event(self, handle: bytes) -> Event:
        return _CompletedEvent()


class _CompletedEvent:
    """A completed event."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def handle(self) -> bytes:
        return b""


class HostStream(Stream):
    """Executes everything synchronously."""

    @override
    def launch(self, work: Callable[[], object]) -> None:
        work()

    @override
    def record(self, *, shared: bool = False) -> Event:
        return _CompletedEvent()

    @override
    def wait(self, event: Event) -> None:
        event.synchronize()


class CudaDevice(Device):
    """The CUDA device number *index* of this process.

    Raises TierUnavailableError when there is none, or a package for it is missing.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        count = torch.cuda.device_count()
        if index >= count:
            raise TierUnavailableError(
                "gpu", f"torch {torch.__version__} has {count} CUDA devices, no number {index};"
                " install a CUDA build of torch, name another device, or start without gpu",
            )  # fmt: skip
        self._device = torch.device("cuda", index)
        with device_errors():
            self.identity = f"cuda:{torch.cuda.get_device_properties(index).uuid}"

    @cached_property
    def _cupy(self) -> Any:
        """cupy, needed for an arena and for registration only."""
        return import_cupy()

    @contextmanager
    def _runtime(self) -> Iterator[Any]:
        """Yield cupy's CUDA runtime for calls to this device."""
        with device_errors(), self._cupy.cuda.Device(self._index):
            yield self._cupy.cuda.runtime

    @override
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return memory of a separate cudaMalloc, so that its IPC handle exposes nothing else."""
        granules = -(-size_bytes // ARENA_GRANULE_BYTES)
        with self._runtime() as runtime:
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
        owned = self._cupy.cuda.UnownedMemory(pointer, size_bytes, self, self._index)
        memory = self._cupy.cuda.MemoryPointer(owned, 0)
        array = self._cupy.ndarray((size_bytes,), self._cupy.uint8, memory)
        return torch.as_tensor(array, device=self._device)

    @override
    def release(self, arena: torch.Tensor) -> None:
        with self._runtime() as runtime:
            runtime.free(arena.data_ptr())

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        with device_errors():
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    @override
    def stream(self) -> Stream:
        with device_errors():
            return CudaStream(torch.cuda.Stream(self._device))

    @override
    def current_stream(self) -> Stream:
        with device_errors():
            return CudaStream(torch.cuda.current_stream(self._device))

    @override
    def export(self, arena: torch.Tensor) -> int:
        with self._runtime() as runtime:
            handle: bytes = runtime.ipcGetMemHandle(arena.data_ptr())
        descriptor = unix_socket.create_memfd("kvstore-arena", HANDLE_BYTES)
        os.pwrite(descriptor, handle, 0)
        unix_socket.add_seals(descriptor, unix_socket.SIZE_SEALS | unix_socket.SEAL_FUTURE_WRITE)
        return descriptor

    @override
    def import_memory(self, exported: Bytes, size_bytes: int) -> Imported:
        if len(exported) != HANDLE_BYTES:
            reason = f"a handle has {HANDLE_BYTES} bytes, not {len(exported)}"
            raise TierUnavailableError("gpu", reason)
        with self._runtime() as runtime:
            pointer = runtime.ipcOpenMemHandle(bytes(exported))

        def close() -> None:
            with suppress(TierUnavailableError), self._runtime() as runtime:
                runtime.ipcCloseMemHandle(pointer)

        try:
            # A kernel that reads past the end destroys the process's whole CUDA context.
            found = allocated_bytes(pointer)
            if not 0 < size_bytes <= found:
                raise TierUnavailableError("gpu", f"it has {found} bytes, not {size_bytes}")
            with self._runtime():
                return Imported(self._tensor(pointer, size_bytes), close)
        except TierUnavailableError:
            close()
            raise

    @override
    def import_event(self, handle: bytes) -> Event:
        with device_errors():
            return _CudaEvent(torch.cuda.Event.from_ipc_handle(self._device, handle))

    @override
    def register(self, memory: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        # Not through torch: a refusal stays the last error of its runtime, and the next kernel on
        # the thread appears to fail.
        flags = HOST_REGISTER_READ_ONLY if read_only else HOST_REGISTER_PORTABLE
        start = memory.ctypes.data
        try:
            with self._runtime() as runtime:
                runtime.hostRegister(start, len(memory), flags)
        except TierUnavailableError as error:
            logger.warning("cudaHostRegister refused; copies are slower", error=str(error))
            return None
        self._registered[start] = start + len(memory)

        def unregister(kept: Bytes = memory) -> None:
            self._registered.pop(start, None)
            with suppress(TierUnavailableError), self._runtime() as runtime:
                runtime.hostUnregister(kept.ctypes.data)

        return unregister


class CudaStream(Stream):
    """One torch.cuda.Stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @override
    def launch(self, work: Callable[[], object]) -> None:
        with device_errors(), torch.cuda.stream(self._stream):
            work()

    @override
    def record(self, *, shared: bool = False) -> Event:
        with device_errors():
            event = torch.cuda.Event(blocking=True, interprocess=shared)
            event.record(self._stream)
            return _CudaEvent(event)

    @override
    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with device_errors():
            self._stream.wait_event(event.event)

    @override
    def upload(self, out: torch.Tensor, pieces: Sequence[tuple[int, Bytes]]) -> None:
        # A torch call takes longer than the copy of a small chunk.
        with device_errors():
            runtime = import_cupy().cuda.runtime
            first, pointer = out.data_ptr(), self._stream.cuda_stream
            for start, data in pieces:
                if start < 0 or start + len(data) > len(out):
                    raise TierUnavailableError("gpu", f"{start} + {len(data)} > {len(out)} bytes")
                runtime.memcpyAsync(
                    first + start, data.ctypes.data, len(data), runtime.memcpyHostToDevice, pointer
                )


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        with device_errors():
            return bool(self.event.query())

    def synchronize(self) -> None:
        with device_errors():
            self.event.synchronize()

    def handle(self) -> bytes:
        with device_errors():
            return bytes(self.event.ipc_handle())


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors of torch and cupy (both RuntimeError) into TierUnavailableError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TierUnavailableError("gpu", f"{type(error).__name__}: {reason}") from error


def import_cupy() -> Any:
    """Return cupy. Raises TierUnavailableError without it."""
    try:
        import cupy
    except ImportError as error:
        fix = "install kvstore-server[gpu] or kvstore-server[gpu-cuda12]"
        raise TierUnavailableError("gpu", f"needs cupy ({error}): {fix}") from None
    except OSError as error:  # importing cupy creates the folder of its kernel cache
        reason = f"cupy cannot be loaded ({error}): set CUPY_CACHE_DIR to a writable folder"
        raise TierUnavailableError("gpu", reason) from None
    return cupy


def allocated_bytes(pointer: int) -> int:
    """Return how many bytes CUDA's driver has allocated from *pointer* on.

    Raises TierUnavailableError.
    """
    start, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        found = query(ctypes.byref(start), ctypes.byref(size_bytes), ctypes.c_uint64(pointer))
    except (OSError, AttributeError) as error:
        raise TierUnavailableError("gpu", f"CUDA's driver cannot be queried: {error}") from None
    if found:
        raise TierUnavailableError("gpu", f"cuMemGetAddressRange: error {found}")
    return start.value + size_bytes.value - pointer


def open_device(device: torch.device) -> Device:
    """Return the Device for *device*. Raises TierUnavailableError with the fix."""
    return HostDevice() if device.type == "cpu" else CudaDevice(device.index or 0)
