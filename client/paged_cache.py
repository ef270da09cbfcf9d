"""PagedCache: an engine's paged cache as the engine has it, read and written where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors import LayerTensors, TensorLike, check_apart, group_array
from kvstore.codecs.base import Part
from kvstore.codecs.block_part import BlockPart, BlockSpan, check_block_ids
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import KVLayout, LayerGroup, LayerKind, Model

Axis: TypeAlias = Literal["layer", "block", "kv", "token", "head", "dim"]

_CANONICAL = ("block", "head", "token", "dim")

PageTensors: TypeAlias = "TensorLike | Sequence[TensorLike | Sequence[TensorLike]]"
"""One tensor with a ``layer`` axis, or one entry a layer: a tensor, or one for each part."""


@dataclass(frozen=True, slots=True)
class PageAxes:
    """The order of a page tensor's axes, by name.

    ``block``: block ids. ``token``: slots of one block. ``kv``: K and V. ``head``: KV heads.
    ``dim``: elements of a head. ``layer``: for one tensor that has all layers. What has one
    entry only may be left out, but for ``block`` and ``dim``; ``kv`` also where K and V are
    tensors of their own. Raises LayoutMismatchError at birth.

    vLLM's (2, blocks, block_tokens, kv_heads, head_dim) is ``kv block token head dim``,
    its HND layout (blocks, 2, kv_heads, block_tokens, head_dim) ``block kv head token dim``.
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


class PagedCache:
    """Page tensors of every layer, numpy or torch on the CPU, checked when it is made.

    ``pages``: see PageTensors; layers in the order of the Model's groups; ``axes``: see PageAxes.
    ``cache[block_ids]`` is a request's KV: token t is in slot ``t % block_tokens`` of block
    ``block_ids[t // block_tokens]``, in every layer. Raises LayoutMismatchError for anything that
    is not the Model's KV, InvalidRequestError for pages that overlap but could be written to.
    """

    def __init__(self, model: Model, pages: PageTensors, axes: str) -> None:
        self.model = model
        for group in model.layer_groups:
            if group.kind is LayerKind.state:
                fix = "pages hold tokens: move states through tensors of their own"
                raise LayoutMismatchError("kind", group.kind.name, fix)
        order = PageAxes.parse(axes)
        layers = _layers(pages, order)
        count = sum(len(group.layer_ids) for group in model.layer_groups)
        if len(layers) != count:
            raise LayoutMismatchError("layers", len(layers), f"give pages of {count} layers")
        rest = order.drop("layer")
        entries = iter(layers)
        self.groups: list[list[list[Part]]] = [
            [_views(next(entries), rest, group) for _ in group.layer_ids]
            for group in model.layer_groups
        ]
        shapes = {(p.shape[0], p.shape[2]) for g in self.groups for parts in g for p in parts}
        if len(shapes) != 1:
            raise LayoutMismatchError(
                "pages", sorted(shapes), "all layers need as many blocks, of as many tokens"
            )
        self.blocks: int
        self.block_tokens: int
        self.blocks, self.block_tokens = shapes.pop()
        if self.is_writable:
            given: Any = [pages] if "layer" in order.names else pages
            check_apart("pages", [t for one in given for t in _tensors_of(one)])

    @property
    def is_writable(self) -> bool:
        """Whether all pages may be written to."""
        return all(p.flags.writeable for g in self.groups for parts in g for p in parts)

    def __getitem__(self, block_ids: Sequence[int]) -> Blocks:
        """Return the KV of a request. Raises InvalidRequestError for blocks that are not there or
        named twice.
        """
        return Blocks(self, check_block_ids(block_ids, self.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The KV of one request, in blocks of a PagedCache; see there."""

    cache: PagedCache
    block_ids: NDArray[np.intp]

    @property
    def tokens(self) -> int:
        """How many tokens the blocks have room for."""
        return len(self.block_ids) * self.cache.block_tokens

    @property
    def is_writable(self) -> bool:
        """Whether all pages may be written to."""
        return self.cache.is_writable

    def chunk(self, start: int, stop: int, layout: KVLayout | None = None) -> LayerTensors:
        """Return tokens *start* to *stop* as they lie, of the layers that *layout* has."""
        whole = BlockSpan.of(self.block_ids, self.cache.block_tokens, start, stop)
        found = []
        for group, layers in zip(self.cache.model.layer_groups, self.cache.groups, strict=True):
            if layout is not None and not layout.has(group.kind):
                continue
            span, first = whole, kept_from(group, start, stop)
            if first != start:
                span = BlockSpan.of(self.block_ids, self.cache.block_tokens, first, stop)
            found.append([[BlockPart(pages, span) for pages in parts] for parts in layers])
        return found


def kept_from(group: LayerGroup, start: int, stop: int) -> int:
    """Return the first token of a chunk, *start* to *stop*, that layers of *group* keep."""
    if group.kind is not LayerKind.window:
        return start
    return max(start, stop - max(1, group.window_tokens - 1))


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
    elif "kv" in axes.names:
        whole, at = _array(entry, axes, group), axes.names.index("kv")
        pages = [_ordered(part, axes.drop("kv"), group) for part in np.moveaxis(whole, at, 0)]
    else:
        pages = [_view(entry, axes, group)]
    if len(pages) != group.parts:
        raise LayoutMismatchError("kv", len(pages), f"give {group.parts} parts of each layer")
    return pages


def _tensors_of(entry: TensorLike | Sequence[TensorLike]) -> Sequence[TensorLike]:
    return entry if isinstance(entry, Sequence) else [entry]


def _view(tensor: TensorLike, axes: PageAxes, group: LayerGroup) -> Part:
    if "kv" in axes.names:
        raise LayoutMismatchError(
            "axes", " ".join(axes.names), "leave kv out where K and V are tensors of their own"
        )
    return _ordered(_array(tensor, axes, group), axes, group)


def _array(tensor: TensorLike, axes: PageAxes, group: LayerGroup) -> Part:
    _check_rank(tensor, axes)
    array = group_array("pages", tensor, group)
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
