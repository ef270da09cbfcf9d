"""An engine's pages on the CPU in place of a device, and a server whose gpu tier is there."""

from __future__ import annotations

import torch
from prompts import tensors_of

from kvstore.client.device_pages import DevicePages
from kvstore.client.paged_cache import PageAxes
from kvstore.client.tensors import to_torch
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.types import ChunkKey, Model

CHUNK_TOKENS, BLOCK_TOKENS = 16, 8
NHD = PageAxes.parse("layer kv block token head dim")


class Engine:
    """Pages of an engine with *blocks* blocks, full of sevens."""

    def __init__(self, representation: Model, blocks: int) -> None:
        (group,) = representation.layer_groups
        dtype = getattr(torch, group.dtype.name)
        layers = len(group.layer_ids)
        shape = (layers, 2, blocks, BLOCK_TOKENS, group.kv_heads, group.head_dim)
        self.tensor = torch.full(shape, 7.0).to(dtype)
        self.dtype = group.dtype
        self.pages = DevicePages(representation, self.tensor, NHD)
        self.block_ids = list(reversed(range(blocks)))

    def slots(self, layer: int, part: int) -> torch.Tensor:
        """(kv_heads, slots, head_dim) in the order of the request's tokens."""
        ordered = self.tensor[layer, part, self.block_ids]
        return ordered.flatten(0, 1).transpose(0, 1)

    def has(self, key: ChunkKey, index: int, representation: Model, size: int) -> bool:
        """Whether the chunk's tokens are where chunk *index* of the request belongs."""
        return self.holds(tensors_of(key, representation, size), index)

    def holds(self, right: ChunkTensors, index: int) -> bool:
        """Whether the chunk's tensors are where chunk *index* of the request belongs."""
        start, size = index * CHUNK_TOKENS, right[0][0][0].shape[1]
        for layer, parts in enumerate(right[0]):
            for part, wanted in enumerate(parts):
                there = self.slots(layer, part)[:, start : start + size]
                if not torch.equal(raw_bytes(there), raw_bytes(to_torch(wanted, self.dtype))):
                    return False
        return True


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, which compare as they are."""
    return tensor.contiguous().view(torch.uint8)


def blocks_for(chunks: int) -> int:
    """Return how many blocks so many chunks fill."""
    return chunks * CHUNK_TOKENS // BLOCK_TOKENS
