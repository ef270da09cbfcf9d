"""Between a model's device and the host: one copy for all layers of a chunk.

Chunks go through a ring of host memory and one piece of device memory, both allocated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from threading import RLock
from typing import Any

import torch
from transformers import PreTrainedModel

from kvstore.client.client import Client
from kvstore.client.engines.transformers.cache import CacheShape, Nested, PrefixBuffers, flat
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.codecs.base import AnyTensors
from kvstore.proto.device import Device, HostDevice, open_device
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Stated

RING_BYTES = 128 << 20
"""Host memory of a ring: as many chunks as fit, or one that is larger."""

ALIGN_BYTES = 64
"""Each tensor of a chunk begins at a multiple of it."""


class Staging:
    """Memory that chunks of *shape*, *tokens* each at most, pass through to and from *where*.

    All is queued on the stream that the engine computes on: a store reads what was computed
    before it, and what is computed after a load sees what it brought. Hold ``lock`` for as long
    as places of the ring are in use.
    """

    def __init__(self, device: Device, where: torch.device, shape: CacheShape, tokens: int) -> None:
        self.lock = RLock()
        self._device = device
        self._where = where
        self._slot_bytes = chunk_bytes(shape, tokens)
        self.slots = max(1, RING_BYTES // self._slot_bytes)
        self._last = 0

    @cached_property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ring's memory, uint8 (slots, slot bytes), and the device's, uint8 (slot bytes,)."""
        with torch.inference_mode(False):  # the next to use them may be outside of it
            ring = self._device.staging(self.slots * self._slot_bytes)
            room = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._where)
        return ring.view(self.slots, -1), room

    def to_host(self, tensors: LayerTensors) -> Nested:
        """Return what *tensors* hold, in the ring's next place, when it is there.

        Tensors that are on the host already are returned as they are.
        """
        ring, room = self._memory
        self._last = (self._last + 1) % self.slots
        gathered, size = self._placed(room, tensors)
        found, _ = self._placed(ring[self._last], tensors)
        stream = self._device.current_stream()
        stream.launch(lambda: _copy(gathered, tensors))
        stream.copy(ring[self._last, :size], room[:size])
        stream.record().synchronize()
        return found

    def read(
        self,
        client: Client,
        keys: Sequence[ChunkKey],
        buffers: PrefixBuffers,
        first: int,
        least: Accuracy,
    ) -> list[Stated]:
        """Read the longest run of *keys* from number *first* on into *buffers*, which have all of
        them, on the device; return what each states, none less so than *least*.

        They come a ring's worth at a time, each in one copy; the last of them is awaited.
        """
        ring, room = self._memory
        found: list[Stated] = []
        for start in range(first, len(keys), self.slots):
            some, wanted = keys[start : start + self.slots], dict[int, Nested]()

            def place(
                index: int, layout: KVLayout, start: int = start, wanted: dict[int, Nested] = wanted
            ) -> AnyTensors:
                wanted[index] = buffers.chunk(start + index, layout)
                return to_arrays(self._placed(ring[index], wanted[index])[0])

            stated: list[Stated] = []
            client.get_chunks(some, place, accuracy=least, stated=stated)
            stream = self._device.current_stream()
            for index in range(len(stated)):
                arrived, size = self._placed(room, wanted[index])
                stream.copy(room[:size], ring[index, :size])
                stream.launch(partial(_copy, wanted[index], arrived))
            stream.record().synchronize()
            found += stated
            if len(stated) < len(some):
                break
        return found

    def _placed(self, memory: torch.Tensor, tensors: LayerTensors) -> tuple[Nested, int]:
        """Return views of *memory*, uint8 (bytes,), like *tensors*, and the bytes they take."""
        end = 0

        def place(like: Any) -> torch.Tensor:
            nonlocal end
            if like.device != self._where:
                return like  # type: ignore[no-any-return]
            start, end = end, end + _aligned(like.nbytes)
            return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

        nested = [[[place(part) for part in parts] for parts in layers] for layers in tensors]
        return nested, end


def _copy(out: LayerTensors, data: LayerTensors) -> None:
    with torch.no_grad():
        for to, part in zip(flat(out), flat(data), strict=True):
            if to is not part:
                to.copy_(part)


def chunk_bytes(shape: CacheShape, tokens: int) -> int:
    """Return what a chunk of so many tokens takes at most, with its windows and states."""
    sizes = [state.size_bytes for state in shape.states]
    for layer in shape.tokens:
        row_bytes = layer.held(tokens) * layer.kv_heads * layer.dtype.itemsize
        sizes += [row_bytes * dim for dim in layer.dims]
    return sum(map(_aligned, sizes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def device_of(model: PreTrainedModel) -> Device | None:
    """Return the model's device; None for the CPU, between which and itself nothing is copied."""
    if model.device.type == "cpu":
        return None
    # Copies of torch's own wait for other devices than CUDA's.
    return open_device(model.device) if model.device.type == "cuda" else HostDevice()
