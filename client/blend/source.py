"""Where a blend's stored KV comes from: layer by layer, in the order of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

LayerKV: TypeAlias = "tuple[Tensor, Tensor]"
"""K and V of one layer: (kv_heads, tokens, head_dim) each, in the engine's dtype."""


class LayerSource(Protocol):
    """Gives what is stored of a plan's segments.

    One thread asks for layers, in rising order; ``narrow`` may come before or meanwhile from
    another.
    """

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every ``exact`` and ``approx`` segment, by the segment's index.

        Blocks until it is here, at most to a deadline of its own. May raise any KVStoreError:
        the prompt is then computed. A segment left out is a layer that is not there.
        """

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Take note that *rows* (positions) are computed from layer *from_layer* on.

        They need not be brought any more; what stands in their place is never read.
        """


class MemorySource:
    """KV that is at hand. *stored*: layers of K and V, by the segment's index."""

    def __init__(self, stored: Mapping[int, Sequence[LayerKV]]) -> None:
        self._stored = stored

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every segment."""
        return {index: layers[i] for index, layers in self._stored.items()}

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Nothing to leave out: it is here."""
