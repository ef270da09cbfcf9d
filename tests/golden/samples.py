"""The chunk that docs/format.md takes as its example, and the vectors written down there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np

from kvstore.codecs.base import Part, empty_tensors
from kvstore.proto.frame import FrameHeader, FrameTemplate
from kvstore.proto.keys import (
    chain_digests,
    chunk_key,
    content_digest,
    namespace,
    representation_digest,
    tokens_le32,
)
from kvstore.proto.types import (
    ChunkShard,
    DType,
    Extent,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)

FOLDER = Path(__file__).parent
FORMAT_PAGE = FOLDER.parents[1] / "docs" / "format.md"

SALT = bytes(range(32))
TOKENS = range(1000, 1040)
CHUNK_TOKENS = 16
EXTRA = (b"image:7", b"")

REPRESENTATION = Model(
    model_id="example/llama",
    model_revision="8f2c1d",
    adapter_digest="none",
    quantization="none",
    layer_groups=(LayerGroup(LayerKind.attention, DType.bfloat16, (0, 1), 2, 8),),
    rope=RopeParameters(500000.0, 8, "llama3", (("factor", 8.0), ("low_freq_factor", 1.0))),
    tokenizer_digest="sha256:77aa",
)


def vectors() -> dict[str, str]:
    """Return the name = value lines of the page's ``vectors`` blocks."""
    found: dict[str, str] = {}
    for block in re.findall(r"^```vectors\n(.*?)^```", FORMAT_PAGE.read_text(), re.M | re.S):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            name, _, value = line.partition("=")
            if name.strip() in found:
                raise ValueError(f"{name.strip()} stands twice in {FORMAT_PAGE.name}")
            found[name.strip()] = value.strip()
    return found


def template_of(header: FrameHeader) -> FrameTemplate:
    """Return the part of *header* that its writer knew before the payload."""
    return FrameTemplate(*(getattr(header, one.name) for one in fields(FrameTemplate)))


def template() -> FrameTemplate:
    """Return the second chunk of the example prompt."""
    parent, digest = chain_digests(TOKENS, CHUNK_TOKENS)
    return FrameTemplate(
        key=chunk_key(namespace(SALT, REPRESENTATION), digest),
        parent=parent,
        representation=representation_digest(REPRESENTATION),
        content=content_digest(tokens_le32(TOKENS[16:32])),
        layout=KVLayout.of(REPRESENTATION, CHUNK_TOKENS),
        position=16,
        prefill_flops=1.5e9,
    )


def tensors() -> list[list[list[Part]]]:
    """Return the example's bfloat16 words: word i of the chunk as docs/format.md counts them."""
    out = empty_tensors(template().layout)
    start = 0
    for parts in out[0]:
        for part in parts:
            i = np.arange(start, start + part.size).reshape(part.shape)
            part[...] = 0x8000 * (i % 2) + 0x3F80 + 0x80 * (i % 5) + 37 * i % 128
            start += part.size
    return out


def shard() -> ChunkShard:
    """Return the rectangle of the example's second layer and second head."""
    return ChunkShard(template().layout, (Extent(1, 2, 1, 2),))


def shard_tensors() -> list[list[list[Part]]]:
    """Return the words of that rectangle."""
    return [[[part[1:2] for part in tensors()[0][1]]]]
