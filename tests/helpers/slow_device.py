"""A device whose work waits until the test runs it; a CUDA stream with a delay."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import RLock

import torch
from typing_extensions import override

from kvstore.proto.device import CudaDevice, CudaStream, Event, HostDevice, Stream
from kvstore.proto.errors import TierUnavailableError


class SlowDevice(HostDevice):
    """Copies are queued; ``synchronize`` of an event runs the work before it.

    ``fails`` makes all further work fail, as on a lost device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.lock = RLock()
        """Serialises work: streams wait for each other."""
        self.streams: list[SlowStream] = []
        self.compute = SlowStream(self)
        """The engine's stream, for every thread."""

    @override
    def stream(self) -> Stream:
        self.streams.append(SlowStream(self))
        return self.streams[-1]

    @override
    def current_stream(self) -> Stream:
        return self.compute

    def check(self) -> None:
        if self.fails:
            raise TierUnavailableError("gpu", "fails on purpose")


class LateDevice(HostDevice):
    """Imported events are done once ``is_over`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()
        self.is_over.set()

    @override
    def import_event(self, handle: bytes) -> Event:
        return LateEvent(self.is_over)


class LateEvent:
    def __init__(self, is_over: threading.Event) -> None:
        self._is_over = is_over

    def query(self) -> bool:
        return self._is_over.is_set()

    def synchronize(self) -> None:
        assert self._is_over.wait(60)

    def handle(self) -> bytes:
        return b""


class SlowEvent:
    def __init__(self, stream: SlowStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def query(self) -> bool:
        self._stream.check()
        return self._stream.done >= self._position

    def synchronize(self) -> None:
        self._stream.run(self._position)

    def handle(self) -> bytes:
        return b""


class SlowStream(Stream):
    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._queue: deque[Callable[[], object]] = deque()
        self.done = 0
        """Number of completed pieces of work."""
        self.copied: list[int] = []
        """Bytes of each queued copy."""
        self.fails = False
        """As SlowDevice.fails, for this stream alone."""

    def check(self) -> None:
        self._device.check()
        if self.fails:
            raise TierUnavailableError("gpu", "fails on purpose")

    def _add(self, work: Callable[[], object]) -> None:
        self._device.check()
        self._queue.append(work)

    def run(self, position: int | None = None) -> None:
        """Run queued work up to *position*, or all."""
        with self._device.lock:
            while self._queue and (position is None or self.done < position):
                self._device.check()
                work = self._queue.popleft()
                work()
                self.done += 1

    @override
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self.copied.append(len(out))
        super().copy(out, data)

    @override
    def record(self, *, shared: bool = False) -> Event:
        with self._device.lock:
            return SlowEvent(self, self.done + len(self._queue))

    @override
    def wait(self, event: Event) -> None:
        self._add(event.synchronize)

    @override
    def launch(self, work: Callable[[], object]) -> None:
        self._add(work)


_CYCLES_A_MS = 2_000_000
"""At 2 GHz."""


class DelayedStream(CudaStream):
    """Launched work starts ``late_ms`` after all earlier work."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.late_ms = 8

    @override
    def launch(self, work: Callable[[], object]) -> None:
        def late() -> None:
            torch.cuda._sleep(self.late_ms * _CYCLES_A_MS)
            work()

        super().launch(late)

    def run(self) -> None:
        """Wait for all queued work."""
        self._stream.synchronize()


class DelayedDevice(CudaDevice):
    """``engine_stream`` must be torch's current stream while an engine runs."""

    def __init__(self) -> None:
        super().__init__(0)
        self.engine_stream = torch.cuda.Stream(0)
        self.compute = DelayedStream(self.engine_stream)
