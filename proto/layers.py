"""The order in which a model uses its layers, and so in which they travel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvstore.proto.types import Representation


class LayerPlace(NamedTuple):
    """A layer by the model's own number, and which segment of a frame holds it."""

    layer_id: int
    segment: int


@lru_cache(maxsize=64)
def layer_order(representation: Representation) -> tuple[LayerPlace, ...]:
    """Return the layers by number. Segments lie group by group, and groups may alternate."""
    ids = [layer for group in representation.layer_groups for layer in group.layer_ids]
    return tuple(sorted(LayerPlace(layer, segment) for segment, layer in enumerate(ids)))
