"""Chunks whose bytes are derived from their keys, so that any reader can check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from contracts.chunks import make_representation

from kvstore.client import Chunk, Client
from kvstore.client.chunk import parents
from kvstore.codecs.base import ChunkTensors, Part, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes
from kvstore.proto.keys import representation_digest
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, KVLayout, Model, PutOutcome

SMALL = make_representation()
"""A frame of 16 tokens has 2.3 KB."""
MEDIUM = make_representation(layers=4, kv_heads=4, head_dim=64)
"""A frame of 64 tokens has 256 KiB and a header."""
LARGE = make_representation(layers=4, kv_heads=8, head_dim=64)
"""A frame of 128 tokens has 1 MiB and a header."""

_TOKEN_IDS = 32_000


def tokens(seed: int, count: int) -> list[int]:
    """Return the token ids of a prompt that shares no chunk with that of another seed."""
    ids = np.random.default_rng(seed).integers(0, _TOKEN_IDS, count)
    return [seed % _TOKEN_IDS, *map(int, ids[1:])]


def keys_of(client: Client, seed: int, chunks: int) -> list[ChunkKey]:
    """Return the keys of a prompt of *chunks* whole chunks."""
    return client.keys(tokens(seed, chunks * client.options.chunk_tokens))


def tensors_of(
    key: ChunkKey, representation: Model, chunk_tokens: int, version: int = 0
) -> ChunkTensors:
    """Return the tensors of the chunk called *key*; another *version* has other bytes."""
    out = empty_tensors(KVLayout.of(representation, chunk_tokens))
    draw = np.random.default_rng([int.from_bytes(key[-8:], "little"), version])
    for layers in out:
        for parts in layers:
            for part in parts:
                part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return out


def steady_tensors(key: ChunkKey, representation: Model, chunk_tokens: int) -> ChunkTensors:
    """Return bfloat16 tensors like those of a model: each channel has its own mean."""
    out = empty_tensors(KVLayout.of(representation, chunk_tokens))
    draw = np.random.default_rng(int.from_bytes(key[-8:], "little"))
    for part in parts_of(out):
        heads, _, channels = part.shape
        mean = draw.normal(0, 3, (heads, 1, channels))
        values = (mean + draw.normal(0, 1, part.shape)).astype(np.float32)
        part[...] = values.view(np.uint32) >> 16
    return out


def chunks_of(client: Client, keys: Sequence[ChunkKey], version: int = 0) -> list[Chunk]:
    """Return a chain of chunks with tensors of ``tensors_of``."""
    size = client.options.chunk_tokens
    return [
        Chunk(key, tensors_of(key, client.model, size, version), parent=parent, position=size * i)
        for i, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]


def parts_of(tensors: ChunkTensors) -> list[Part]:
    """Return all parts of a chunk, in order."""
    return [part for layers in tensors for parts in layers for part in parts]


def equal(one: ChunkTensors, other: ChunkTensors) -> bool:
    ones, others = parts_of(one), parts_of(other)
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


def is_right(client: Client, key: ChunkKey, found: ChunkTensors, version: int = 0) -> bool:
    """Whether *found* is what ``tensors_of`` makes for *key*."""
    size = client.options.chunk_tokens
    return equal(found, tensors_of(key, client.model, size, version))


def frame_of(
    key: ChunkKey, representation: Model, chunk_tokens: int = 16, version: int = 0
) -> Bytes:
    """Return the raw frame of a chunk at the start of a chain, as a client would send it."""
    template = FrameTemplate(
        key=key,
        parent=parents([key])[0],
        representation=representation_digest(representation),
        content=bytes(DIGEST_BYTES),
        layout=KVLayout.of(representation, chunk_tokens),
    )
    frame = np.zeros(raw_frame_bytes(template.layout), np.uint8)
    RawCodec().encode(template, tensors_of(key, representation, chunk_tokens, version), frame)
    return frame


def other_revision(representation: Model) -> Model:
    """Return the same model with other weights."""
    return replace(representation, model_revision="f" * 40)


def outcomes(client: Client, chunks: list[Chunk], hints: Hints = NO_HINTS) -> list[PutOutcome]:
    """Put chunks and return the outcome of each."""
    return [put.outcome for put in client.put_chunks(chunks, hints=hints)]


def store(client: Client, seed: int, count: int, hints: Hints = NO_HINTS) -> list[ChunkKey]:
    """Put a prompt of *count* chunks, all of which must be stored; return its keys."""
    keys = keys_of(client, seed, count)
    assert outcomes(client, chunks_of(client, keys), hints) == [PutOutcome.stored] * count
    return keys


def assert_reads(client: Client, keys: list[ChunkKey]) -> None:
    """Fail unless all chunks are read, correct and in order."""
    found = client.get_chunks(keys)
    assert len(found) == len(keys)
    assert all(is_right(client, key, one) for key, one in zip(keys, found, strict=True))
