"""A device: memory, streams, events. One class for CUDA, one for the CPU.

The two differ here and nowhere else. torch is imported here, so only who uses a device imports
this file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import structlog
import torch
from typing_extensions import override

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierUnavailableError

logger = structlog.get_logger(__name__)


class Event(Protocol):
    """A point in a stream's work. torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def synchronize(self) -> None:
        """Block until it is."""


class SharedEvent(Event, Protocol):
    """An event that another process can wait for, while this one keeps it."""

    def handle(self) -> bytes:
        """Return what ``Device.import_event`` of the other process takes."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Memory of another process. It is only read; CUDA cannot forbid the rest.

    Nothing uses it after ``close``. ``mapping`` is what keeps it alive, where it is host memory.
    """

    memory: torch.Tensor
    close: Callable[[], None]
    mapping: Bytes | None = None


class Stream(ABC):
    """Work that a device does in order, while the host goes on. Thread-safe.

    Raises TierUnavailableError when the device fails.
    """

    @abstractmethod
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        """Queue a copy of *data* to *out*: uint8, one-dimensional, of one length.

        Either may be host memory; both stay alive and unchanged until it is done.
        """

    @abstractmethod
    def upload(self, out: torch.Tensor, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Queue copies of host bytes to *out*, uint8: each from the byte on that stands before it.

        They stay alive and unchanged until it is done.
        """

    @abstractmethod
    def fill(self, out: torch.Tensor, value: int) -> None:
        """Queue writing *value* to all of *out*, a device tensor of any integer type."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event behind everything queued so far."""

    @abstractmethod
    def record_shared(self) -> SharedEvent:
        """Return the same for another process."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Have what is queued from now on wait for *event*; the host does not."""

    @abstractmethod
    def launch(self, work: Callable[[], object]) -> None:
        """Queue what *work* launches on torch's current stream.

        What the launches read and write stays alive and unchanged until they are done.
        """


class Device(ABC):
    """Where an arena lies. ``identity`` names the physical device in every process alike."""

    identity: str

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return device memory (uint8), not cleared. Raises TierUnavailableError."""

    @abstractmethod
    def release(self, arena: torch.Tensor) -> None:
        """Give back what ``allocate`` returned; nobody looks at it any more."""

    @abstractmethod
    def staging(self, size_bytes: int) -> torch.Tensor:
        """Return host memory (uint8) that copies to and from run through at full speed.

        Raises TierUnavailableError.
        """

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that torch's work goes to in this thread: an engine's own."""

    @abstractmethod
    def export(self, arena: torch.Tensor) -> int:
        """Return a descriptor of a memfd that lets another process map *arena*.

        It is the caller's to close. docs/format.md says what it holds.
        Raises TierUnavailableError.
        """

    @abstractmethod
    def import_memory(self, exported: Bytes, size_bytes: int) -> Imported:
        """Map *size_bytes* that another process exported; *exported* is the mapped memfd.

        Raises TierUnavailableError.
        """

    @abstractmethod
    def import_event(self, handle: bytes) -> Event:
        """Return the event of another process that *handle* is of. Raises TierUnavailableError."""

    @abstractmethod
    def register(self, memory: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        """Have copies go straight to and from *memory*; return how to end that.

        *read_only*: it is mapped so, and only copied from.

        None, after a warning, where the device cannot: copies are then staged.
        """

    @abstractmethod
    def is_registered(self, memory: Bytes) -> bool:
        """Whether all of *memory* lies in one registered piece."""


def tensor_over(memory: Bytes) -> torch.Tensor:
    """Return a tensor over *memory*, read-only or not; it does not keep *memory* alive."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    pointer = (ctypes.c_uint8 * len(memory)).from_address(memory.ctypes.data)
    return torch.frombuffer(pointer, dtype=torch.uint8)


class RegisteredRanges:
    """Address ranges that a device knows. Thread-safe."""

    def __init__(self) -> None:
        self._stops: dict[int, int] = {}
        self._lock = Lock()

    def add(self, memory: Bytes) -> Callable[[], None]:
        """Take note of *memory*; return how to forget it."""
        start = memory.ctypes.data
        with self._lock:
            self._stops[start] = start + len(memory)

        def forget() -> None:
            with self._lock:
                self._stops.pop(start, None)

        return forget

    def has(self, memory: Bytes) -> bool:
        """Whether all of *memory* lies in one range."""
        first = memory.ctypes.data
        with self._lock:
            ranges = list(self._stops.items())
        return any(start <= first and first + len(memory) <= stop for start, stop in ranges)


class HostDevice(Device):
    """The CPU as a device: every copy is done when it is queued, every event is over.

    For tests on machines without a GPU. Its arena is a memfd, so that another process can map
    it as it would a CUDA arena.
    """

    identity = "cpu"

    def __init__(self) -> None:
        self._ranges = RegisteredRanges()
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
        return _HostStream()

    @override
    def current_stream(self) -> Stream:
        return _HostStream()

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
        return _Over()

    @override
    def register(self, memory: Bytes, *, read_only: bool = False) -> Callable[[], None] | None:
        return self._ranges.add(memory)

    @override
    def is_registered(self, memory: Bytes) -> bool:
        return self._ranges.has(memory)


class _Over:
    """An event of work that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def handle(self) -> bytes:
        return b""


class _HostStream(Stream):
    @override
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        out.copy_(data)

    @override
    def upload(self, out: torch.Tensor, pieces: Sequence[tuple[int, Bytes]]) -> None:
        for start, data in pieces:
            out.numpy()[start : start + len(data)] = data

    @override
    def fill(self, out: torch.Tensor, value: int) -> None:
        out.fill_(value)

    @override
    def record(self) -> Event:
        return _Over()

    @override
    def record_shared(self) -> SharedEvent:
        return _Over()

    @override
    def wait(self, event: Event) -> None:
        event.synchronize()

    @override
    def launch(self, work: Callable[[], object]) -> None:
        work()


def open_device(device: torch.device) -> Device:
    """Return the device called *device*. Raises TierUnavailableError with the fix."""
    if device.type == "cpu":
        return HostDevice()
    from kvstore.proto.cuda import CudaDevice

    return CudaDevice(device.index or 0)
