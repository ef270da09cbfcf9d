"""An engine's pages on the CPU in place of a device, and reads into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from helpers.prompts import tensors_of

from kvstore.client.chunk import to_torch
from kvstore.client.cuda import CudaClient
from kvstore.client.device_reads import DeviceReader
from kvstore.codecs.base import ChunkTensors
from kvstore.codecs.paged import Paged, Pages
from kvstore.proto.device import open_device
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Model

CHUNK_TOKENS, BLOCK_TOKENS = 16, 8


class Engine:
    """Pages of an engine with *blocks* blocks, full of sevens."""

    def __init__(self, representation: Model, blocks: int) -> None:
        (group,) = representation.layer_groups
        dtype = getattr(torch, group.dtype.name)
        layers = len(group.layer_ids)
        shape = (layers, 2, blocks, BLOCK_TOKENS, group.kv_heads, group.head_dim)
        self.tensor = torch.full(shape, 7.0).to(dtype)
        self.dtype = group.dtype
        self.block_ids = list(reversed(range(blocks)))

    def paged(self, block_ids: Sequence[int] | None = None) -> Paged:
        """Return the request's pages, with *block_ids* or its own blocks."""
        return paged_in(self.tensor, self.block_ids if block_ids is None else block_ids)

    def slots(self, layer: int, part: int) -> torch.Tensor:
        """Return (kv_heads, slots, head_dim) in the order of the request's tokens."""
        ordered = self.tensor[layer, part, self.block_ids]
        return ordered.flatten(0, 1).transpose(0, 1)

    def has(self, key: ChunkKey, index: int, representation: Model, size: int) -> bool:
        return self.holds(tensors_of(key, representation, size), index)

    def holds(self, expected: ChunkTensors, index: int) -> bool:
        """Whether the pages have the chunk's tensors at chunk *index* of the request."""
        start, size = index * CHUNK_TOKENS, expected[0][0][0].shape[1]
        for layer, parts in enumerate(expected[0]):
            for part, data in enumerate(parts):
                found = self.slots(layer, part)[:, start : start + size]
                if not torch.equal(raw_bytes(found), raw_bytes(to_torch(data, self.dtype))):
                    return False
        return True


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def blocks_for(chunks: int) -> int:
    return chunks * CHUNK_TOKENS // BLOCK_TOKENS


def paged_in(tensor: torch.Tensor, block_ids: Sequence[int]) -> Paged:
    """Return blocks of pages (layers, 2, blocks, block_tokens, kv_heads, head_dim)."""
    views = tensor.transpose(3, 4)
    return Paged((Pages(tuple((layer[0], layer[1]) for layer in views)),), [block_ids])


def read_pages(
    client: CudaClient,
    keys: Sequence[ChunkKey],
    paged: Paged,
    accuracy: Accuracy = Accuracy.exact,
    reader: DeviceReader | None = None,
) -> int:
    """Read chunks into pages after torch's current stream; without *reader* by a new one."""
    layout = KVLayout.of(client.model, client.options.chunk_tokens)
    device = open_device(paged.pages[0].first.device)
    used = reader or DeviceReader(device, raw_frame_bytes(layout))
    try:
        after = used.device.current_stream().record()
        return client.read_on_device(keys, paged, used, after, accuracy=accuracy)
    finally:
        if reader is None:
            used.close()
