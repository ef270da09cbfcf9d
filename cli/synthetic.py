"""Chunks of synthetic bytes, of a model that does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.cli.app import given_access
from kvstore.client.chunk import Chunk, parents
from kvstore.client.client import Client
from kvstore.client.options import ClientOptions, TransportName
from kvstore.codecs.base import ChunkTensors, Part, empty_tensors
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)

_HEAD_DIM = 8
MIN_CHUNK_BYTES = MIN_CHUNK_TOKENS * 2 * 2 * _HEAD_DIM
"""Keys and values in bfloat16 of one layer and one head."""
MAX_CHUNK_BYTES = 64 << 20


def synthetic_client(
    address: str, chunk_bytes: int, name: str, deadline_ms: int, transport: TransportName = "auto"
) -> Client:
    """Return a client of a model whose chunks of 16 tokens have about *chunk_bytes*.

    Raises InvalidRequestError.
    """
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        fix = f"give {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise InvalidRequestError("chunk_bytes", chunk_bytes, fix)
    heads = max(1, round(chunk_bytes / MIN_CHUNK_BYTES))
    group = LayerGroup(LayerKind.attention, DType.bfloat16, (0,), heads, _HEAD_DIM)
    rope = RopeParameters(10_000.0, _HEAD_DIM)
    model = Model(f"kvstore/{name}", "1", "none", "none", (group,), rope, "none")
    options = ClientOptions(
        transport, MIN_CHUNK_TOKENS, deadline_ms, name=name, access=given_access()
    )
    return Client(address, model, options)


def noise(model: Model, seed: int = 0) -> ChunkTensors:
    """Return the tensors of a chunk: bytes that do not compress, the same for the same *seed*."""
    tensors = empty_tensors(KVLayout.of(model, MIN_CHUNK_TOKENS))
    draw = np.random.default_rng(seed)
    for part in parts_of(tensors):
        part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return tensors


def parts_of(tensors: ChunkTensors) -> list[Part]:
    """Return the arrays of a chunk."""
    return [part for component in tensors for layer in component for part in layer]


def chunks_of(keys: Sequence[ChunkKey], tensors: Sequence[ChunkTensors]) -> list[Chunk]:
    """Return the chunks of a prompt, with *tensors* in turn."""
    return [
        Chunk(key, tensors[at % len(tensors)], parent, MIN_CHUNK_TOKENS * at)
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]
