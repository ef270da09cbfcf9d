"""Chunks that ranks put shard by shard: their parts, and frames of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from contracts.chunks import make_representation
from helpers.prompts import tensors_of

from kvstore.client import Chunk
from kvstore.codecs.base import ChunkTensors
from kvstore.codecs.slices import encode_shard, shard_frame_bytes
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import ChunkShard, DType, Extent, KVLayout, LayerGroup, LayerKind, Model

WIDE = make_representation(layers=3, kv_heads=4, head_dim=8)
"""Three layers of four heads: a frame of 16 tokens has 6.4 KB."""

TWO_GROUPS = replace(
    WIDE,
    layer_groups=(
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 2, 5), 4, 8),
        LayerGroup(LayerKind.mla, DType.float16, (1, 3, 4), 1, 24),
    ),
)
"""Alternating layers of two kinds; all ranks share the latent one."""


def shard_of(
    layout: KVLayout, layers: tuple[int, int], heads: tuple[int, int] | None = None
) -> ChunkShard:
    """Return the same layers and heads of each component of *layout*."""
    extents = [Extent(*layers, *(heads or (0, c.kv_heads))) for c in layout.components]
    return ChunkShard(layout, tuple(extents))


def slices(tensors: ChunkTensors, shard: ChunkShard) -> ChunkTensors:
    """Return the part of a chunk's tensors that *shard* covers."""
    return [
        [
            [part[one.first_head : one.head_stop] for part in parts]
            for parts in tensors[number][one.first_layer : one.layer_stop]
        ]
        for number, one in shard.numbered
    ]


def part_of(chunk: Chunk, shard: ChunkShard) -> Chunk:
    """Return the part of *chunk* that a rank with *shard* puts."""
    return replace(chunk, tensors=slices(chunk.tensors, shard))  # type: ignore[arg-type]


def shard_frame(template: FrameTemplate, representation: Model, shard: ChunkShard) -> Bytes:
    """Return the frame of *shard* of the chunk from ``tensors_of``."""
    tensors = tensors_of(template.key, representation, shard.whole.tokens)
    frame = np.zeros(shard_frame_bytes(shard), np.uint8)
    encode_shard(template, shard, slices(tensors, shard), frame)
    return frame
