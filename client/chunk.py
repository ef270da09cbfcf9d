"""A Chunk: what a client puts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors import LayerTensors, TensorLike, to_arrays
from kvstore.codecs.base import AnyTensors, check_tensors, different
from kvstore.codecs.block_part import BlockPart
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import (
    DIGEST_BYTES,
    END_KINDS,
    ROOT,
    ChainDigest,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    Model,
)


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

    def arrays(self, representation: Model) -> tuple[KVLayout, AnyTensors]:
        """Return the chunk's layout and its tensors as arrays.

        Raises LayoutMismatchError when they are not what *representation* states.
        """
        layout = self.layout or self._whole(representation)
        if not layout.is_of(representation):
            fix = "make it with KVLayout.of this client's Model"
            raise LayoutMismatchError("layout", layout, fix)
        arrays = to_arrays(self.tensors)
        self._check_dtypes(layout)
        check_tensors(layout, arrays)
        return layout, arrays

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

    def _whole(self, representation: Model) -> KVLayout:
        """Return the layout of a chunk that has everything, by its attention's tokens."""
        kinds = [group.kind for group in representation.layer_groups]
        plain = [index for index, kind in enumerate(kinds) if kind not in END_KINDS]
        if not plain:
            fix = "say which: without attention the tensors do not tell"
            raise LayoutMismatchError("layout", None, fix)
        try:
            tokens = int(self.tensors[plain[0]][0][0].shape[1])
        except (AttributeError, IndexError, TypeError):
            raise LayoutMismatchError(
                "tensors", type(self.tensors).__name__,
                "give components, layers, parts of (kv_heads, tokens, head_dim)",
            ) from None  # fmt: skip
        return KVLayout.of(representation, tokens)

    def _check_dtypes(self, layout: KVLayout) -> None:
        for component, layers in zip(layout.components, self.tensors, strict=False):
            for parts in different(layers):
                check_dtypes(component, parts)


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


def check_keys(keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
    """Return *keys*. Raises InvalidRequestError for what is no list."""
    if not isinstance(keys, Sequence):
        raise InvalidRequestError("keys", keys, "give a list of what keys() returns")
    return keys


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


def check_dtypes(component: Component, parts: Sequence[TensorLike | BlockPart]) -> None:
    """Raise LayoutMismatchError when a tensor states another element type than *component*."""
    for part in parts:
        if not hasattr(part, "dtype"):
            raise LayoutMismatchError("tensors", type(part).__name__, "give numpy or torch tensors")
        stated = stated_dtype(part.dtype)
        if stated is not None and stated is not component.dtype:
            raise LayoutMismatchError("dtype", stated.name, f"give {component.dtype.name}")


@lru_cache(maxsize=64)
def stated_dtype(dtype: Hashable) -> DType | None:
    """Return the element type that numpy's or torch's *dtype* names, if it names one of ours.

    Unsigned integers name none: they stand for the types that numpy lacks.
    """
    name = str(dtype).removeprefix("torch.")
    return DType.__members__.get(name) if name != "uint8" else None
