"""Chunks of a model that does not exist: bytes to store where nobody's KV is wanted."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)

_HEAD_DIM = 8
_TOKEN_BYTES = 2 * 2 * _HEAD_DIM  # keys and values in bfloat16 of one layer and one head
MIN_CHUNK_BYTES = MIN_CHUNK_TOKENS * _TOKEN_BYTES


def model_of(chunk_bytes: int, name: str = "trace-replay") -> Model:
    """Return a made-up model whose chunks of 16 tokens have about *chunk_bytes*."""
    heads = max(1, round(chunk_bytes / MIN_CHUNK_BYTES))
    group = LayerGroup(LayerKind.attention, DType.bfloat16, (0,), heads, _HEAD_DIM)
    return Model(
        model_id=f"kvstore/{name}",
        model_revision="1",
        adapter_digest="none",
        quantization="none",
        layer_groups=(group,),
        rope=RopeParameters(10_000.0, _HEAD_DIM),
        tokenizer_digest="none",
    )


def noise(model: Model, seed: int = 0) -> ChunkTensors:
    """Return the tensors of a chunk: bytes that do not compress, the same for the same *seed*."""
    tensors = empty_tensors(KVLayout.of(model, MIN_CHUNK_TOKENS))
    draw = np.random.default_rng(seed)
    for component in tensors:
        for layer in component:
            for part in layer:
                part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return tensors
