"""What an encoder may be told of a chunk beside its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy, Component, KVLayout, Model, RopeParameters

Importance: TypeAlias = NDArray[np.float32]
"""A weight for each token of the chunk, not negative; larger tokens are kept more exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTerms:
    """Facts and wishes that a lossy codec may use, and none has to have.

    ``rope`` is the rotary embedding that the keys carry; None leaves them as they are.
    ``layer_ids`` are the model's numbers of the chunk's layers, component by component, and
    ``model_layers`` how many the model has. ``importance`` is f32 (tokens,).
    """

    rope: RopeParameters | None = None
    layer_ids: tuple[int, ...] = ()
    model_layers: int = 0
    importance: Importance | None = None

    @classmethod
    def of(
        cls,
        representation: Model,
        importance: Importance | None = None,
        layout: KVLayout | None = None,
    ) -> EncodeTerms:
        """Return what *representation* says of its model's chunks, of those of *layout* if given.

        Without one they are chunks that have all that a chunk can have of its end.
        """
        groups = representation.layer_groups
        last = max(layer for group in groups for layer in group.layer_ids)
        ids = tuple(
            layer
            for group in groups
            if layout is None or layout.has(group.kind)
            for layer in group.layer_ids
        )
        return cls(representation.rope, ids, 1 + last, importance)

    def layers(self, layout: KVLayout, position: int) -> Iterator[LayerTerms]:
        """Yield the terms of each layer of *layout*, in the order of its segments.

        Raises InvalidRequestError when the terms are another layout's.
        """
        self._check(layout)
        ids = self.layer_ids or tuple(range(layout.segment_count))
        layer_count = max(self.model_layers, 1 + max(ids))
        layer_ids = iter(ids)
        for component in layout.components:
            first = component.first_token
            weights = self.importance
            if weights is not None:
                weights = weights[first : first + component.tokens]
            for _ in range(component.layers):
                yield LayerTerms(
                    component, next(layer_ids), layer_count, position + first, self.rope, weights
                )

    def _check(self, layout: KVLayout) -> None:
        if self.layer_ids and len(self.layer_ids) != layout.segment_count:
            raise InvalidRequestError(
                "layer_ids", len(self.layer_ids), f"the chunk has {layout.segment_count} layers"
            )
        weights = self.importance
        if weights is None:
            return
        if weights.shape != (layout.tokens,) or weights.dtype != np.float32:
            fix = f"give float32 ({layout.tokens},)"
            raise InvalidRequestError("importance", (weights.shape, str(weights.dtype)), fix)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise InvalidRequestError("importance", float(weights.min()), "finite, not negative")


@dataclass(frozen=True, slots=True, eq=False)
class LayerTerms:
    """The same for one layer: the model calls it ``layer_id`` and has ``model_layers``.

    ``position`` is the index in the prompt of the first token that the layer keeps.
    """

    component: Component
    layer_id: int = 0
    model_layers: int = 1
    position: int = 0
    rope: RopeParameters | None = None
    importance: Importance | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLayer:
    """One layer's base took ``stored_bytes`` of the caller's room; refinements come along.

    ``error_bound`` is the largest absolute error of any element once everything is decoded,
    0 unless ``accuracy`` is ``bounded``.
    """

    stored_bytes: int
    accuracy: Accuracy
    error_bound: float = 0.0
    refinements: tuple[NDArray[np.uint8], ...] = ()
