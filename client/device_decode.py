"""Frames of other codecs than raw on their way into an engine's pages: kvq's are decoded on the
device, of which torch's current stream is used; all others on the host, and uploaded as raw ones.

torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_kernels import KvqKernels, open_kvq_kernels
from kvstore.codecs.paged import RAW, SKIPPED_BLOCK, FrameAt, FrameKernels, Paged, Sums
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import tensor_over


@dataclass(frozen=True, slots=True)
class Begun:
    """A frame that the device works on, and its ``memory``, kept until it is done.

    ``confirm``, after ``sums``, raises LeaseExpiredError for memory that was reused, and
    InvalidFrameError for contents that are not the codec's.
    """

    frame: FrameAt
    memory: torch.Tensor
    sums: Sums
    confirm: Callable[[], None]


class DeviceDecoder:
    """*kernels* are those of raw frames on *device*. Thread-safe."""

    def __init__(self, kernels: FrameKernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    @cached_property
    def kvq(self) -> KvqKernels | None:
        """The kernels of kvq, compiled when first asked for. A CPU in place of a device has none.

        Raises TierUnavailableError when they cannot be compiled.
        """
        return None if self._device.type == "cpu" else open_kvq_kernels(self._device)

    def begin(
        self, frame: FrameAt, data: Bytes, confirm: Callable[[], None], paged: Paged
    ) -> Begun:
        """Begin to decode *data*, a frame in host memory, into the pages. *confirm* is called when
        it was read: it raises LeaseExpiredError for memory that was reused.

        Raises that before all that *data* would be blamed for: ChunkCorruptError,
        InvalidFrameError, ModelError, UnknownCodecError. LayoutMismatchError and
        InvalidRequestError for pages that are not the chunk's.
        """
        header = frame.header
        try:
            if header.codec_id == KvqCodec.codec_id and _has_kernels(frame, paged) and self.kvq:
                return self._on_device(self.kvq, frame, data, confirm, paged)
            return self._on_host(frame, data, confirm, paged)
        finally:
            confirm()

    def _on_device(
        self,
        kvq: KvqKernels,
        frame: FrameAt,
        data: Bytes,
        confirm: Callable[[], None],
        paged: Paged,
    ) -> Begun:
        host = tensor_over(data)
        memory = self._upload(host)
        sums = self._kernels.sums(memory, [frame])
        decoded = kvq.decode(memory, [frame], paged, host=host)

        def confirm_all() -> None:
            confirm()
            decoded()

        return Begun(frame, memory, sums, confirm_all)

    def _on_host(
        self, frame: FrameAt, data: Bytes, confirm: Callable[[], None], paged: Paged
    ) -> Begun:
        size = max_transcoded_bytes(frame.header.layout, RAW)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        raw = FrameAt(0, transcode(data, RAW, host.numpy()), frame.first_token)
        memory = self._upload(host)
        return Begun(raw, memory, self._kernels.scatter(memory, [raw], paged), confirm)

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        return memory.copy_(host, non_blocking=True)


def _has_kernels(frame: FrameAt, paged: Paged) -> bool:
    """Whether there are kernels for a kvq frame: not for refinements, parts of a chunk, or several
    block tables.
    """
    components = frame.header.layout.components
    is_whole = not any(component.first_token for component in components)
    is_plain = len(paged.tables) == 1 and SKIPPED_BLOCK not in paged.tables[0]
    return not frame.header.levels and is_whole and is_plain and paged.shard is None
