"""A Chunk, which a client puts, and a Shard, what one rank of a parallel engine has of chunks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors import LayerTensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkKey,
    ChunkShard,
    Extent,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
)

Span: TypeAlias = tuple[int, int]
"""The first number, and the one after the last."""

_WHOLE_KINDS = (LayerKind.mla, LayerKind.state)
"""Kinds that a single span of heads says nothing of: a latent or state has one row for all."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tensors under the key that names them.

    ``tensors``: components, then layers, then parts (K and V), each (kv_heads, tokens,
    head_dim), numpy or torch on the CPU, any strides, or in blocks (``PagedCache``).
    ``parent`` is the chain digest of the chunk before this one. ``position`` is the index of
    the first token in its prompt. ``layout`` says what there is of the end of a chunk of a model
    with window or state layers (``KVLayout.of``); None says all of it, which is told by attention.
    ``importance``, f32 (tokens,), finite and not negative, says which tokens matter most: codecs
    that spend more bits on those (``kvq:N,importance``) are told their order.
    """

    key: ChunkKey
    tensors: LayerTensors
    parent: ChainDigest = ROOT
    position: int = 0
    prefill_flops: float = 0.0
    content: bytes = bytes(DIGEST_BYTES)
    layout: KVLayout | None = None
    importance: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        check_naming(self)

    def weights(self, tokens: int) -> bytes:
        """Return the rank of each token's importance, 1 to 255, or 0 for none; empty for no word.

        Raises InvalidRequestError unless there is a right number for each of *tokens*.
        """
        given = self.importance
        if given is None:
            return b""
        if given.shape != (tokens,) or given.dtype != np.float32:
            fix = f"give float32 ({tokens},), a number for each token of the chunk"
            raise InvalidRequestError("importance", (given.shape, str(given.dtype)), fix)
        if not (np.isfinite(given) & (given >= 0)).all():
            raise InvalidRequestError("importance", float(given.min()), "finite, not negative")
        order = np.empty(tokens, np.intp)
        # Of equal ones the first is to be the more important, as codecs rank them.
        order[np.argsort(-given, kind="stable")] = np.arange(tokens)
        ranks = 255 - order * 254 // max(1, tokens - 1)
        return np.where(given > 0, ranks, 0).astype(np.uint8).tobytes()


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk whose tensors are not computed yet: a Chunk without them."""

    key: ChunkKey
    tokens: int
    parent: ChainDigest = ROOT
    position: int = 0
    prefill_flops: float = 0.0
    content: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        check_naming(self)


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """A chunk whose raw frame begins at byte ``offset`` of a ring, a multiple of 64.

    Its segments lie where a raw frame of ``layout`` has them. The header's bytes are not read: the
    server is told a header that is made of what is said here, as of a ``Chunk``.
    """

    key: ChunkKey
    offset: int
    layout: KVLayout
    parent: ChainDigest = ROOT
    position: int = 0
    prefill_flops: float = 0.0
    content: bytes = bytes(DIGEST_BYTES)

    def __post_init__(self) -> None:
        check_naming(self)


def parents(keys: Sequence[ChunkKey]) -> Sequence[ChainDigest]:
    """Return the parent digest of each key of a chain."""
    return [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys[:-1])][: len(keys)]


def check_naming(chunk: Chunk | PlannedChunk | DeviceChunk) -> None:
    """Raise InvalidRequestError for what no chunk can have."""
    for name in ("parent", "content"):
        if len(getattr(chunk, name)) != DIGEST_BYTES:
            raise InvalidRequestError(name, getattr(chunk, name), f"give {DIGEST_BYTES} bytes")
    if not 0 <= chunk.position < 1 << 32:
        raise InvalidRequestError("position", chunk.position, "a token index is in 0..2^32-1")
    if not 0 <= chunk.prefill_flops < math.inf:
        raise InvalidRequestError(
            "prefill_flops", chunk.prefill_flops, "must be finite, not negative"
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank of a parallel engine has of a model, in its own numbers; the default is all.

    ``layers``: a span of the model's layer numbers. ``kv_heads``: a span for each layer group, or
    one for all groups with heads. A client's Model stays the whole one: chunks that any ranks put
    are read by any others.
    """

    layers: Span | None = None
    kv_heads: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for name, span in (("layers", self.layers), *(("kv_heads", one) for one in self.kv_heads)):
            if span is not None and not 0 <= span[0] < span[1]:
                raise InvalidRequestError(name, span, "give the first, and one after the last")
        if self.layers is not None:  # tuples, as it is looked up by them
            object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "kv_heads", tuple(map(tuple, self.kv_heads)))

    @classmethod
    def of_rank(cls, model: Model, rank: int, ranks: int, layers: Span | None = None) -> Shard:
        """Return what tensor-parallel *rank* of *ranks* has, of the pipeline stage of *layers*.

        Heads are split as evenly as they go; with more ranks than heads several have the same.
        """
        if not 0 <= rank < ranks:
            raise InvalidRequestError("rank", rank, f"0 to {ranks - 1}")
        spans = []
        for group in model.layer_groups:
            first = rank * group.kv_heads // ranks
            spans.append((first, max(first + 1, (rank + 1) * group.kv_heads // ranks)))
        return cls(layers, tuple(spans))

    def part_of(self, model: Model) -> Model:
        """Return *model* with the layers and heads of the shard alone: what the rank's KV is of.

        Raises LayoutMismatchError, ModelError when it has nothing of the model.
        """
        groups = []
        for group, (first, stop) in zip(model.layer_groups, self.heads_of(model), strict=True):
            ids = group.layer_ids
            if self.layers is not None:
                ids = tuple(one for one in ids if self.layers[0] <= one < self.layers[1])
            if ids:
                groups.append(replace(group, layer_ids=ids, kv_heads=stop - first))
        return replace(model, layer_groups=tuple(groups))

    def heads_of(self, model: Model) -> list[Span]:
        """Return which KV heads it has of each layer group. Raises LayoutMismatchError."""
        groups, spans = model.layer_groups, self.kv_heads
        if len(spans) > 1 and len(spans) != len(groups):
            fix = f"give one span, or {len(groups)}"
            raise LayoutMismatchError("kv_heads", len(spans), fix)
        if len(spans) > 1:
            return list(spans)
        return [
            spans[0] if spans and group.kind not in _WHOLE_KINDS else (0, group.kv_heads)
            for group in groups
        ]

    def has_any(self, model: Model, layout: KVLayout) -> bool:
        """Whether it has any layer of a chunk of *layout*: of one without windows a stage of
        windows alone has none.
        """
        groups = [group for group in model.layer_groups if layout.has(group.kind)]
        return self.layers is None or any(has_any(group, self.layers) for group in groups)

    def in_chunk(self, model: Model, layout: KVLayout) -> ChunkShard:
        """Return which layers and heads it is of a chunk of *layout*.

        Raises LayoutMismatchError when it reaches outside the model, or has nothing of it.
        """
        return _in_chunk(self, model, layout)


@lru_cache(maxsize=64)
def _in_chunk(shard: Shard, model: Model, layout: KVLayout) -> ChunkShard:
    extents: list[Extent | None] = []
    for group, heads in zip(model.layer_groups, shard.heads_of(model), strict=True):
        if not layout.has(group.kind):
            continue
        first, stop = 0, len(group.layer_ids)
        if shard.layers is not None:
            first, stop = (bisect_left(group.layer_ids, at) for at in shard.layers)
        extents.append(None if first == stop else Extent(first, stop, *heads))
    return ChunkShard(layout, tuple(extents))


def has_any(group: LayerGroup, layers: Span) -> bool:
    """Whether any layer of *group* is among *layers*."""
    return any(layers[0] <= layer < layers[1] for layer in group.layer_ids)
