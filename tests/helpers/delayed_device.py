"""A CUDA device whose compute stream is late: it sleeps before all that an engine queues on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from kvstore.proto.device import CudaDevice, CudaStream

_CYCLES_A_MS = 2_000_000
"""Of a clock of 2 GHz."""


class DelayedStream(CudaStream):
    """What is launched begins ``late_ms`` after all that is before it."""

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
        """Wait for all that is queued."""
        self._stream.synchronize()


class DelayedDevice(CudaDevice):
    """``engine_stream`` has to be torch's current one where an engine runs."""

    def __init__(self) -> None:
        super().__init__(0)
        self.engine_stream = torch.cuda.Stream(0)
        self.compute = DelayedStream(self.engine_stream)
