"""A Rectangle: the layers and KV heads that one rank of a parallel engine has of a model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.client.chunk import Chunk, check_dtypes
from kvstore.client.tensors import to_arrays
from kvstore.codecs.base import AnyTensors, check_tensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import (
    END_KINDS,
    Component,
    Extent,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    Shard,
)

Span: TypeAlias = tuple[int, int]
"""The first number, and the one after the last."""

_WHOLE_KINDS = (LayerKind.mla, LayerKind.state)
"""Kinds that a single span of heads says nothing of: a latent or state has one row for all."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a rank has, in the model's own numbers; the default is everything.

    ``layers``: a span of the model's layer numbers. ``kv_heads``: a span for each layer group, or
    one for all groups with heads. A client's representation stays that of the whole model:
    chunks that any ranks put are read by any others.
    """

    layers: Span | None = None
    kv_heads: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for name, span in (("layers", self.layers), *(("kv_heads", one) for one in self.kv_heads)):
            if span is not None and not 0 <= span[0] < span[1]:
                raise InvalidRequestError(name, span, "give the first, and one after the last")

    @classmethod
    def of_rank(
        cls, representation: Model, rank: int, ranks: int, layers: Span | None = None
    ) -> Rectangle:
        """Return what tensor-parallel *rank* of *ranks* has, of the pipeline stage of *layers*.

        Heads are split as evenly as they go; with more ranks than heads several have the same.
        """
        if not 0 <= rank < ranks:
            raise InvalidRequestError("rank", rank, f"0 to {ranks - 1}")
        return cls(
            layers, tuple(_share(g.kv_heads, rank, ranks) for g in representation.layer_groups)
        )

    def shard(self, representation: Model, layout: KVLayout) -> Shard:
        """Return which shard it is of a chunk of *layout*.

        Raises LayoutMismatchError when it reaches outside the model, or has nothing of it.
        """
        groups = representation.layer_groups
        if len(self.kv_heads) not in (0, 1, len(groups)):
            raise LayoutMismatchError(
                "kv_heads", len(self.kv_heads), f"give one span, or {len(groups)}"
            )
        there = [(number, group) for number, group in enumerate(groups) if layout.has(group.kind)]
        pairs = zip(there, layout.components, strict=True)
        return Shard(
            layout,
            tuple(self._extent(number, group, component) for (number, group), component in pairs),
        )

    def whole(self, representation: Model, chunk: Chunk) -> KVLayout:
        """Return the layout of the chunk that the rank's *chunk* is part of.

        Its own, where it states one; else by the tokens of the first layers that have all of a
        chunk's. Raises LayoutMismatchError.
        """
        if chunk.layout is not None:
            return chunk.layout
        number = 0
        for group in representation.layer_groups:
            if not any(map(self._has, group.layer_ids)):
                continue
            if group.kind not in END_KINDS:
                return KVLayout.of(representation, tokens_of(chunk, number))
            number += 1
        fix = "say which: without attention the tensors do not tell"
        raise LayoutMismatchError("layout", None, fix)

    def arrays(self, representation: Model, chunk: Chunk) -> tuple[Shard, AnyTensors]:
        """Return what of its chunk the rank's *chunk* is, and its tensors as arrays.

        Raises LayoutMismatchError when they are not what rectangle and *representation* state.
        """
        shard = self.shard(representation, self.whole(representation, chunk))
        arrays = to_arrays(chunk.tensors)
        for component, layers in zip(shard.layout.components, chunk.tensors, strict=False):
            for parts in layers:
                check_dtypes(component, parts)
        check_tensors(shard.layout, arrays)
        return shard, arrays

    def _has(self, layer: int) -> bool:
        return self.layers is None or self.layers[0] <= layer < self.layers[1]

    def _extent(self, number: int, group: LayerGroup, component: Component) -> Extent | None:
        first, stop = 0, len(group.layer_ids)
        if self.layers is not None:
            first, stop = (bisect_left(group.layer_ids, at) for at in self.layers)
        if first == stop:
            return None
        heads = (0, component.kv_heads)
        if len(self.kv_heads) > 1 or (self.kv_heads and group.kind not in _WHOLE_KINDS):
            heads = self.kv_heads[number if len(self.kv_heads) > 1 else 0]
        return Extent(first, stop, *heads)


def tokens_of(chunk: Chunk, component: int) -> int:
    """Return how many tokens the tensors of one component have. Raises LayoutMismatchError."""
    try:
        return int(chunk.tensors[component][0][0].shape[1])
    except (AttributeError, IndexError, TypeError):
        raise LayoutMismatchError(
            "tensors", type(chunk.tensors).__name__,
            "give components, layers, parts of (kv_heads, tokens, head_dim)",
        ) from None  # fmt: skip


def _share(count: int, rank: int, ranks: int) -> Span:
    first = rank * count // ranks
    return first, max(first + 1, (rank + 1) * count // ranks)


class RectangleRoom:
    """A Room for chunks of which only *rectangle* is read: *room* is asked for those layouts."""

    def __init__(
        self,
        room: Callable[[int, KVLayout], Any],
        rectangle: Rectangle,
        representation: Model,
    ) -> None:
        self._room = room
        self._rectangle = rectangle
        self._representation = representation

    def shard(self, layout: KVLayout) -> Shard:
        """Return what is read of a chunk of *layout*. Raises LayoutMismatchError."""
        return self._rectangle.shard(self._representation, layout)

    def behind(self, first: int) -> RectangleRoom:
        """Return the same for a get whose first chunk is number *first* here."""

        def room(index: int, layout: KVLayout) -> Any:
            return self._room(first + index, layout)

        return RectangleRoom(room, self._rectangle, self._representation)

    def __call__(self, index: int, layout: KVLayout) -> Any:
        """Return where the tensors of chunk number *index* go, which as a whole has *layout*."""
        return self._room(index, self.shard(layout).layout)
