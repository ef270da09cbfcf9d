"""PagedCache: an engine's paged cache in the engine's layout, read and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.chunk import (
    LayerTensors,
    TensorLike,
    check_apart,
    group_array,
    is_on_device,
    tensors_in,
    twin,
)
from kvstore.codecs.base import Part
from kvstore.codecs.block_part import BlockPart, BlockSpan, check_block_ids
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import KVLayout, LayerGroup, LayerKind, Model

_AXES = ("layer", "block", "kv", "token", "head", "dim")
_CANONICAL = ("block", "head", "token", "dim")

PageTensors: TypeAlias = "TensorLike | Sequence[TensorLike | Sequence[TensorLike]]"
"""One tensor with a ``layer`` axis, or one entry a layer: a tensor, or one for each part."""


def page_axes(names: str) -> tuple[str, ...]:
    """Return the axes of a page tensor, in order, from their space-separated *names*.

    ``block``: block ids. ``token``: slots of one block. ``kv``: K and V. ``head``: KV heads.
    ``dim``: elements of a head. ``layer``: for one tensor with all layers. Axes of length 1 may be
    left out, except ``block`` and ``dim``; so may ``kv`` if K and V are separate tensors. Raises
    LayoutMismatchError.

    vLLM's (2, blocks, block_tokens, kv_heads, head_dim) is ``kv block token head dim``,
    its HND layout (blocks, 2, kv_heads, block_tokens, head_dim) ``block kv head token dim``.
    """
    if not isinstance(names, str):
        raise LayoutMismatchError(
            "axes", names, "give one string, such as 'block kv token head dim'"
        )
    axes = tuple(names.split())
    if not set(axes) <= set(_AXES) or len(set(axes)) < len(axes):
        raise _mismatch(axes, f"use each of {' '.join(_AXES)} once at most")
    if not {"block", "dim"} <= set(axes):
        raise _mismatch(axes, "name block and dim at least")
    return axes


def _mismatch(axes: tuple[str, ...], fix: str) -> LayoutMismatchError:
    return LayoutMismatchError("axes", " ".join(axes), fix)


class PagedCache:
    """Page tensors of every layer, numpy or torch, checked by the constructor.

    ``pages``: see PageTensors; layers in the order of the Model's groups; ``axes``: see page_axes.
    ``cache[block_ids]`` is a request's KV: token t is in slot ``t % block_tokens`` of block
    ``block_ids[t // block_tokens]``, in every layer. Raises LayoutMismatchError for anything that
    is not the Model's KV, InvalidRequestError for writable pages that overlap. Blocks of CUDA
    tensors are copied through host memory.
    """

    def __init__(self, model: Model, pages: PageTensors, axes: str) -> None:
        self.model = model
        for group in model.layer_groups:
            if group.kind is LayerKind.state:
                fix = "pages hold tokens: use separate tensors for states"
                raise LayoutMismatchError("kind", group.kind.name, fix)
        order = page_axes(axes)
        layers = _layers(pages, order)
        count = sum(len(group.layer_ids) for group in model.layer_groups)
        if len(layers) != count:
            raise LayoutMismatchError("layers", len(layers), f"give pages of {count} layers")
        self.axes = tuple(name for name in order if name != "layer")
        if "kv" in order and any(isinstance(entry, Sequence) for entry in layers):
            raise _mismatch(self.axes, "leave kv out if K and V are separate tensors")
        self.far: list[list[Any]] = []
        """The tensors of each layer of CUDA pages, by ``axes``; ``groups`` has their shapes."""
        everything = [list(one) if isinstance(one, Sequence) else [one] for one in layers]
        on_device = [is_on_device(one) for some in everything for one in some]
        if any(on_device):
            if not all(on_device):
                fix = "give CUDA tensors only, or none"
                raise LayoutMismatchError("pages", "some on the host", fix)
            self.far, everything = everything, twin(everything)
        entries = iter(everything)
        self.groups: list[list[list[Part]]] = [
            [_parts(next(entries), self.axes, group) for _ in group.layer_ids]
            for group in model.layer_groups
        ]
        every = [part for group in self.groups for parts in group for part in parts]
        shapes: set[tuple[int, int]] = {(part.shape[0], part.shape[2]) for part in every}
        if len(shapes) != 1:
            raise LayoutMismatchError(
                "pages", sorted(shapes), "all layers need the same number of blocks, of one size"
            )
        self.blocks, self.block_tokens = shapes.pop()
        self.is_writable = all(part.flags.writeable for part in every)
        """Whether all pages may be written to."""
        if self.is_writable:
            check_apart("pages", tensors_in(pages))

    def __getitem__(self, block_ids: Sequence[int]) -> Blocks:
        """Return the KV of a request. Raises InvalidRequestError for unknown or repeated ids."""
        return Blocks(self, check_block_ids(block_ids, self.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The KV of one request, in blocks of a PagedCache."""

    cache: PagedCache
    block_ids: NDArray[np.intp]

    @property
    def tokens(self) -> int:
        """How many tokens the blocks can hold."""
        return len(self.block_ids) * self.cache.block_tokens

    @property
    def is_writable(self) -> bool:
        """Whether all pages may be written to."""
        return self.cache.is_writable

    def chunk(self, start: int, stop: int, layout: KVLayout | None = None) -> LayerTensors:
        """Return tokens *start* to *stop* as they lie, of the layers that *layout* has.

        Raises LayoutMismatchError for CUDA pages, which the host cannot read.
        """
        if self.cache.far:
            fix = "move blocks of CUDA tensors by get, put and get_layers"
            raise LayoutMismatchError("device", "cuda", fix)
        whole = BlockSpan.of(self.block_ids, self.cache.block_tokens, start, stop)
        found = []
        for group, layers in zip(self.cache.model.layer_groups, self.cache.groups, strict=True):
            if layout is not None and not layout.has(group.kind):
                continue
            span = whole
            if (first := kept_from(group, start, stop)) != start:
                span = BlockSpan.of(self.block_ids, self.cache.block_tokens, first, stop)
            found.append([[BlockPart(pages, span) for pages in parts] for parts in layers])
        return found


def kept_from(group: LayerGroup, start: int, stop: int) -> int:
    """Return the first token of a chunk, *start* to *stop*, that layers of *group* keep."""
    if group.kind is not LayerKind.window:
        return start
    return max(start, stop - max(1, group.window_tokens - 1))


def _layers(
    tensors: PageTensors, axes: tuple[str, ...]
) -> Sequence[TensorLike | Sequence[TensorLike]]:
    if isinstance(tensors, Sequence):
        if "layer" in axes:
            raise _mismatch(axes, "leave layer out if each layer has its own tensor")
        return tensors
    if "layer" not in axes:
        raise _mismatch(axes, "name the layer axis, or give one tensor for each layer")
    _check_rank(tensors, axes)
    whole: Any = tensors
    cut = (slice(None),) * axes.index("layer")
    return [whole[(*cut, layer)] for layer in range(tensors.shape[len(cut)])]


def _parts(tensors: Sequence[TensorLike], axes: tuple[str, ...], group: LayerGroup) -> list[Part]:
    """Return the pages of each part of one layer, (blocks, kv_heads, block_tokens, head_dim)."""
    arrays = []
    for tensor in tensors:
        _check_rank(tensor, axes)
        array = group_array("pages", tensor, group)
        arrays.append(array.view(f"u{array.dtype.itemsize}"))
    if "kv" in axes:
        arrays = list(np.moveaxis(arrays[0], axes.index("kv"), 0))
        axes = tuple(name for name in axes if name != "kv")
    if len(arrays) != group.parts:
        raise LayoutMismatchError("kv", len(arrays), f"give {group.parts} parts a layer")
    return [_ordered(array, axes, group) for array in arrays]


def _check_rank(tensor: TensorLike, axes: tuple[str, ...]) -> None:
    shape = tuple(getattr(tensor, "shape", ()))
    if len(shape) != len(axes):
        raise _mismatch(axes, f"does not name the axes of {shape}")


def _ordered(array: Part, axes: tuple[str, ...], group: LayerGroup) -> Part:
    order = [axes.index(name) for name in _CANONICAL if name in axes]
    missing = tuple(at for at, name in enumerate(_CANONICAL) if name not in axes)
    pages = np.expand_dims(array.transpose(order), missing)
    found = (pages.shape[1], pages.shape[3])
    if found != (group.kv_heads, group.head_dim) or not pages.size:
        fix = f"as {' '.join(axes)} they need {group.kv_heads} heads of {group.head_dim}"
        raise LayoutMismatchError("pages", array.shape, fix)
    return pages
