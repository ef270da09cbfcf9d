"""Small valid chunks for tests: real frames, and infos with any payload."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, FrameWriter, raw_frame_bytes
from kvstore.proto.keys import chain_digest, chunk_key, content_digest, namespace, tokens_le32
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    Namespace,
    RopeParameters,
)

SALT = b"salt of the tests' tenant"
_TOKEN_IDS = 32_000


ENDS = (
    LayerGroup(LayerKind.window, DType.int8, (10, 12), 2, 8, window_tokens=13),
    LayerGroup(LayerKind.state, DType.uint8, (11,), 1, 301),
)
"""Layers that a chunk has the end of."""


def make_representation(
    layers: int = 2, kv_heads: int = 2, head_dim: int = 8, dtype: DType = DType.bfloat16
) -> Model:
    """Return the identity of a small model of attention layers.

    A frame of 16 tokens has 2.3 KB; ``make_representation(1, 1, 4)`` makes it 0.6 KB, and
    256 tokens of ``make_representation(4, 2, 16)`` 130 KB.
    """
    group = LayerGroup(LayerKind.attention, dtype, tuple(range(layers)), kv_heads, head_dim)
    return Model(
        model_id="tests/small",
        model_revision="0" * 40,
        adapter_digest="none",
        quantization="none",
        layer_groups=(group,),
        rope=RopeParameters(10_000.0, head_dim),
        tokenizer_digest="1" * 64,
    )


def make_namespace(representation: Model | None = None) -> Namespace:
    """Return the namespace that ``make_frame`` puts its keys into."""
    return namespace(SALT, representation or make_representation())


def payload(seed: int, size_bytes: int) -> Bytes:
    """Return *size_bytes* bytes that differ from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def make_info(seed: int, size_bytes: int, parent: ChainDigest = ROOT) -> ChunkInfo:
    """Return an info whose fields all depend on *seed*; ``payload`` makes bytes to go with it."""
    draw = random.Random(seed)
    representation = make_representation(1 + seed % 3)
    if seed % 5 == 4:
        representation = replace(representation, layer_groups=(*representation.layer_groups, *ENDS))
    digest = chain_digest(parent, tokens_le32([seed, seed + 1]))
    return ChunkInfo(
        key=chunk_key(make_namespace(representation), digest),
        parent=parent,
        layout=KVLayout.of(representation, MIN_CHUNK_TOKENS + seed % 7),
        codec_id=seed % 2,
        size_bytes=size_bytes,
        accuracy=tuple(Accuracy)[seed % 3],
        prefill_flops=draw.random() * 1e15,
    )


def make_frame(
    seed: int,
    tokens: int = MIN_CHUNK_TOKENS,
    parent: ChainDigest = ROOT,
    representation: Model | None = None,
    position: int = 0,
) -> tuple[ChunkInfo, Bytes]:
    """Return a frame of random tensors under the raw codec, as ``check_frame`` accepts it."""
    representation = representation or make_representation()
    token_bytes = tokens_le32([(seed + at) % _TOKEN_IDS for at in range(tokens)])
    digest = chain_digest(parent, token_bytes)
    layout = KVLayout.of(representation, tokens)
    template = FrameTemplate(
        key=chunk_key(make_namespace(representation), digest),
        parent=parent,
        representation=namespace(b"", representation),
        content=content_digest(token_bytes),
        layout=layout,
        position=position,
        prefill_flops=1e9 * tokens,
    )
    frame = np.zeros(raw_frame_bytes(layout), dtype=np.uint8)
    writer = FrameWriter(template, frame)
    draw = np.random.default_rng(seed)
    for component in layout.components:
        for _ in range(component.layers):
            room = writer.reserve(component.layer_bytes)
            room[:] = draw.integers(0, 256, len(room), dtype=np.uint8)
            writer.commit(len(room))
    header = writer.finish(codec_id=0, revision=1, accuracy=Accuracy.exact)
    return header.info(), frame
