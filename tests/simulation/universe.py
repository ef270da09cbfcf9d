"""The chunks that schedules put: two tenants, a small tree each, versions of every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from contracts.chunks import make_representation

from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FLAG_RESTORED, FrameTemplate, FrameWriter, raw_frame_bytes
from kvstore.proto.keys import (
    chain_digest,
    chunk_key,
    content_digest,
    namespace,
    representation_digest,
    tokens_le32,
)
from kvstore.proto.types import ROOT, Accuracy, ChainDigest, ChunkInfo, ChunkKey, KVLayout

TENANTS = ("red", "blue")
VERSIONS = 3
REPRESENTATION = make_representation(1, 1, 4)
TOKENS = (16, 40, 120)
"""Frames of 0.6, 1.0 and 2.2 KB: room in a slab of 4 KB scatters soon."""

_BRANCHES = ((-1, 6), (1, 4), (-1, 3))
"""Chains by where they branch off (-1: nowhere) and how long they are."""


@dataclass(frozen=True, slots=True)
class Version:
    """One writer's bytes for a chunk, raw and compressed, and spoilt in ways that must show."""

    info: ChunkInfo
    frame: Bytes
    packed_info: ChunkInfo
    packed: Bytes
    restored: Bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that may be put, in each of its versions."""

    key: ChunkKey
    tenant: str
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Universe:
    """Every chunk, and the chains of keys that prompts ask for."""

    chunks: dict[ChunkKey, Chunk]
    chains: dict[str, tuple[tuple[ChunkKey, ...], ...]]


def salt(tenant: str) -> bytes:
    return b"salt of " + tenant.encode()


def make_template(tenant: str, parent: ChainDigest, tokens: bytes, flags: int = 0) -> FrameTemplate:
    return FrameTemplate(
        key=chunk_key(namespace(salt(tenant), REPRESENTATION), chain_digest(parent, tokens)),
        parent=parent,
        representation=representation_digest(REPRESENTATION),
        content=content_digest(tokens),
        layout=KVLayout.of(REPRESENTATION, len(tokens) // 4),
        flags=flags,
    )


def write_frame(template: FrameTemplate, seed: int) -> Bytes:
    frame = np.zeros(raw_frame_bytes(template.layout), np.uint8)
    writer = FrameWriter(template, frame)
    draw = np.random.default_rng(seed)
    for component in template.layout.components:
        for _ in range(component.layers):
            # Few values, so that lossless has something to do.
            writer.reserve(component.layer_bytes)[:] = draw.integers(0, 5, component.layer_bytes)
            writer.commit(component.layer_bytes)
    writer.finish(codec_id=0, revision=1, accuracy=Accuracy.exact)
    return frame


@lru_cache(maxsize=2048)
def make_version(tenant: str, parent: ChainDigest, tokens: bytes, seed: int) -> Version:
    template = make_template(tenant, parent, tokens)
    frame = write_frame(template, seed)
    codec = LosslessCodec()
    packed = np.zeros(max_transcoded_bytes(template.layout, codec), np.uint8)
    header = transcode(frame, codec, packed)
    info = ChunkInfo(template.key, parent, template.layout, 0, len(frame))
    restored = write_frame(make_template(tenant, parent, tokens, FLAG_RESTORED), seed)
    return Version(info, frame, header.info(), packed[: header.frame_bytes].copy(), restored)


@lru_cache(maxsize=1)
def universe() -> Universe:
    chunks: dict[ChunkKey, Chunk] = {}
    chains: dict[str, tuple[tuple[ChunkKey, ...], ...]] = {}
    for tenant in TENANTS:
        made: list[tuple[ChunkKey, ...]] = []
        for number, (branch, length) in enumerate(_BRANCHES):
            chain = [] if branch < 0 else list(made[0][: branch + 1])
            for at in range(length):
                seed = 100 * number + at
                tokens = tokens_le32([seed] * TOKENS[seed % len(TOKENS)])
                parent = ChainDigest(chain[-1][16:]) if chain else ROOT
                versions = tuple(
                    make_version(tenant, parent, tokens, VERSIONS * seed + v)
                    for v in range(VERSIONS)
                )
                key = versions[0].info.key
                chunks[key] = Chunk(key, tenant, versions)
                chain.append(key)
            made.append(tuple(chain))
        chains[tenant] = tuple(made)
    return Universe(chunks, chains)
