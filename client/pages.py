"""PagedKV: an engine's paged cache as the engine has it, chunks of which are read and written
where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from kvstore.client.chunk import Chunk, stated_dtype
from kvstore.client.decode import Room
from kvstore.client.tensors import LayerTensors, TensorLike, to_array
from kvstore.codecs.base import Part
from kvstore.codecs.block_part import BlockPart, BlockSpan, check_block_ids
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.keys import chunk_spans
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkKey,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
)

Axis: TypeAlias = Literal["layer", "block", "part", "token", "head", "dim"]

_CANONICAL = ("block", "head", "token", "dim")

PageTensors: TypeAlias = "TensorLike | Sequence[TensorLike | Sequence[TensorLike]]"
"""One tensor with a ``layer`` axis, or one entry a layer: a tensor, or one for each part."""


@dataclass(frozen=True, slots=True)
class PageAxes:
    """The order of a page tensor's axes, by name.

    ``block``: block ids. ``token``: slots of one block. ``part``: K and V. ``head``: KV heads.
    ``dim``: elements of a head. ``layer``: for one tensor that has all layers. What has one
    entry only may be left out, but for ``block`` and ``dim``; ``part`` also where K and V are
    tensors of their own. Raises LayoutMismatchError at birth.

    vLLM's (2, blocks, block_tokens, kv_heads, head_dim) is ``part block token head dim``,
    its HND layout (blocks, 2, kv_heads, block_tokens, head_dim) ``block part head token dim``.
    """

    names: tuple[Axis, ...]

    def __post_init__(self) -> None:
        known = get_args(Axis)
        if any(name not in known for name in self.names) or len(set(self.names)) < len(self.names):
            raise LayoutMismatchError(
                "axes", " ".join(self.names), f"use each of {' '.join(known)} once at most"
            )
        if not {"block", "dim"} <= set(self.names):
            raise LayoutMismatchError("axes", " ".join(self.names), "name block and dim at least")

    @classmethod
    def parse(cls, names: str) -> PageAxes:
        """Return the axes named in *names*, separated by spaces."""
        return cls(tuple(names.split()))  # type: ignore[arg-type]

    def drop(self, name: Axis) -> PageAxes:
        """Return the axes that are left when one is indexed away."""
        return PageAxes(tuple(other for other in self.names if other != name))


class PagedKV:
    """Page tensors of every layer, numpy or torch on the CPU, checked at birth.

    ``tensors``: see PageTensors; layers in the order of the Model's groups. A token of
    a request is in slot ``t % block_tokens`` of block ``block_ids[t // block_tokens]``, in every
    layer. Raises LayoutMismatchError for anything that is not the Model's KV.
    """

    def __init__(self, representation: Model, tensors: PageTensors, axes: PageAxes) -> None:
        self.representation = representation
        for group in representation.layer_groups:
            if group.kind is LayerKind.state:
                fix = "pages hold tokens: move states through tensors of their own"
                raise LayoutMismatchError("kind", group.kind.name, fix)
        layers = _layers(tensors, axes)
        count = sum(len(group.layer_ids) for group in representation.layer_groups)
        if len(layers) != count:
            raise LayoutMismatchError("layers", len(layers), f"give pages of {count} layers")
        rest = axes.drop("layer")
        entries = iter(layers)
        self._groups: list[list[list[Part]]] = [
            [_views(next(entries), rest, group) for _ in group.layer_ids]
            for group in representation.layer_groups
        ]
        shapes = {(p.shape[0], p.shape[2]) for g in self._groups for parts in g for p in parts}
        if len(shapes) != 1:
            raise LayoutMismatchError(
                "pages", sorted(shapes), "all layers need as many blocks, of as many tokens"
            )
        self.blocks, self.block_tokens = shapes.pop()

    def tensors(self, block_ids: Sequence[int], start: int, stop: int) -> LayerTensors:
        """Return tokens *start* to *stop* of the request in *block_ids*, as they lie.

        They go wherever a chunk's tensors go: into a Chunk to be put, or as a get's ``out``.
        Raises InvalidRequestError for blocks that are not there, named twice or too few.
        """
        ids = check_block_ids(block_ids, self.blocks)
        return self._tensors(ids, start, stop)

    def _tensors(self, ids: NDArray[np.intp], start: int, stop: int) -> LayerTensors:
        whole = BlockSpan.of(ids, self.block_tokens, start, stop)
        found = []
        groups = self.representation.layer_groups
        for group, layers in zip(groups, self._groups, strict=True):
            span = whole
            if group.kind is LayerKind.window:
                first = max(start, stop - max(1, group.window_tokens - 1))
                span = BlockSpan.of(ids, self.block_tokens, first, stop)
            found.append([[BlockPart(pages, span) for pages in parts] for parts in layers])
        return found

    def room(
        self, block_ids: Sequence[int], token_count: int, chunk_tokens: int
    ) -> list[LayerTensors]:
        """Return where each chunk of a prompt of *token_count* tokens goes, as ``out`` of a get."""
        ids = check_block_ids(block_ids, self.blocks)
        return [
            self._tensors(ids, start, stop)
            for start, stop in chunk_spans(token_count, chunk_tokens)
        ]

    def room_of(self, block_ids: Sequence[int], chunks: int, chunk_tokens: int) -> Room:
        """Return room for that many chunks, the last of which may be short."""
        ids = check_block_ids(block_ids, self.blocks)

        def room(index: int, layout: KVLayout) -> LayerTensors:
            if index < chunks - 1 and layout.tokens != chunk_tokens:
                raise LayoutMismatchError("tokens", layout.tokens, f"give {chunk_tokens}")
            start = index * chunk_tokens
            return self._tensors(ids, start, start + layout.tokens)

        return room

    def chunks(
        self,
        keys: Sequence[ChunkKey],
        block_ids: Sequence[int],
        token_count: int,
        chunk_tokens: int,
    ) -> list[Chunk]:
        """Return the chunks of a prompt of *token_count* tokens, whose keys are *keys*."""
        room = self.room(block_ids, token_count, chunk_tokens)
        if len(room) != len(keys):
            raise InvalidRequestError(
                "token_count", token_count, f"has {len(room)} chunks, and you gave {len(keys)} keys"
            )
        before = [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys)]
        return [
            Chunk(key, tensors, parent, position=number * chunk_tokens)
            for number, (key, tensors, parent) in enumerate(
                zip(keys, room, before[: len(keys)], strict=True)
            )
        ]


def _layers(tensors: PageTensors, axes: PageAxes) -> Sequence[TensorLike | Sequence[TensorLike]]:
    if "layer" not in axes.names:
        if not isinstance(tensors, Sequence):
            raise LayoutMismatchError(
                "axes", " ".join(axes.names), "name the layer axis, or give a tensor a layer"
            )
        return tensors
    if isinstance(tensors, Sequence):
        raise LayoutMismatchError(
            "axes", " ".join(axes.names), "leave layer out where each layer has its own tensor"
        )
    _check_rank(tensors, axes)
    at = axes.names.index("layer")
    cut = (slice(None),) * at
    whole: Any = tensors
    return [whole[(*cut, layer)] for layer in range(tensors.shape[at])]


def _views(
    entry: TensorLike | Sequence[TensorLike], axes: PageAxes, group: LayerGroup
) -> list[Part]:
    """Return the pages of each part of one layer, (blocks, kv_heads, block_tokens, head_dim)."""
    if isinstance(entry, Sequence):
        pages = [_view(tensor, axes, group) for tensor in entry]
    elif "part" in axes.names:
        whole, at = _array(entry, axes, group), axes.names.index("part")
        pages = [_ordered(part, axes.drop("part"), group) for part in np.moveaxis(whole, at, 0)]
    else:
        pages = [_view(entry, axes, group)]
    if len(pages) != group.parts:
        raise LayoutMismatchError("part", len(pages), f"give {group.parts} parts of each layer")
    return pages


def _view(tensor: TensorLike, axes: PageAxes, group: LayerGroup) -> Part:
    if "part" in axes.names:
        raise LayoutMismatchError(
            "axes", " ".join(axes.names), "leave part out where K and V are tensors of their own"
        )
    return _ordered(_array(tensor, axes, group), axes, group)


def _array(tensor: TensorLike, axes: PageAxes, group: LayerGroup) -> Part:
    _check_rank(tensor, axes)
    stated = stated_dtype(tensor.dtype)
    if stated is not None and stated is not group.dtype:
        raise LayoutMismatchError("dtype", stated.name, f"give {group.dtype.name}")
    array = to_array(tensor)
    if array.dtype.itemsize != group.dtype.item_bytes:
        raise LayoutMismatchError("dtype", str(array.dtype), f"give {group.dtype.name}")
    return array.view(f"u{array.dtype.itemsize}")


def _check_rank(tensor: TensorLike, axes: PageAxes) -> None:
    if len(tensor.shape) != len(axes.names):
        raise LayoutMismatchError(
            "axes", " ".join(axes.names), f"does not name the axes of {tuple(tensor.shape)}"
        )


def _ordered(array: Part, axes: PageAxes, group: LayerGroup) -> Part:
    order = [axes.names.index(name) for name in _CANONICAL if name in axes.names]
    missing = tuple(at for at, name in enumerate(_CANONICAL) if name not in axes.names)
    pages = np.expand_dims(array.transpose(order), missing)
    found = (pages.shape[1], pages.shape[3])
    if found != (group.kv_heads, group.head_dim) or not pages.size:
        raise LayoutMismatchError(
            "pages", array.shape,
            f"as {' '.join(axes.names)} they need {group.kv_heads} heads of {group.head_dim}",
        )  # fmt: skip
    return pages
