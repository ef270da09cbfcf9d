"""What the kvt codec knows of a model: the directions in which its KV varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.codecs.assets import Asset
from kvstore.codecs.floats import Floats
from kvstore.codecs.rope import MAX_PAIRS
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Component

RATIOS = (1.0, 0.5, 0.25, 0.125)
"""Step of each quality in standard deviations of the part's numbers."""
MAX_CHANNELS = 1 << 13
"""All heads' channels of a part: its basis has as many rows."""
LARGEST_NUMBER = np.float32(2.0**60)
"""Means and deviations are below, and so are the numbers that are coded."""

_Component: TypeAlias = tuple[Floats, Floats, Floats, Floats, "Floats | None"]


@dataclass(frozen=True, slots=True, eq=False)
class PartTables:
    """One part of one layer. Channels are those of all heads, end to end; components ascend
    from the direction of most variance.

    ``mean`` f32 (channels,), ``basis`` f32 (channels, components), ``variances`` f32
    (components,); ``deviation`` is that of all numbers about their means; ``frequencies`` f32
    (pairs,) is what the keys are turned back by, None for what is not turned.
    """

    mean: Floats
    basis: Floats
    variances: Floats
    deviation: float
    frequencies: Floats | None

    def kept(self, step: float) -> int:
        """Return how many components are worth coding: those that a *step* can see."""
        return max(1, int((self.variances >= (step / 4) ** 2).sum()))


@dataclass(frozen=True, slots=True, eq=False)
class KvtTables:
    """An asset of this codec, checked. Per component of the chunk: means f32 (layers, parts,
    channels), bases f32 (layers, parts, channels, components), variances f32 (layers, parts,
    components), deviations f32 (layers, parts), frequencies f32 (pairs,) or None.
    """

    components: tuple[_Component, ...]

    @classmethod
    def of(cls, asset: Asset) -> KvtTables:
        """Check *asset*. Raises InvalidRequestError that names the table at fault."""
        components: list[_Component] = []
        while f"{len(components)}.basis" in asset.tables:
            components.append(_component(asset, len(components)))
        if not components:
            raise InvalidRequestError("asset", "0.basis", "kvt needs this table")
        return cls(tuple(components))

    def layer(self, index: int, component: Component) -> list[PartTables] | None:
        """Return the tables of the parts of the chunk's layer *index*, over all components.

        None unless the asset was made for such a layer.
        """
        channels = component.kv_heads * component.head_dim
        for means, bases, variances, deviations, frequencies in self.components:
            if index < len(means):
                if means.shape[1:] != (component.parts, channels):
                    return None
                turned = [frequencies if component.parts == 2 else None, None]
                if frequencies is not None and 2 * len(frequencies) > component.head_dim:
                    return None
                return [
                    PartTables(
                        means[index, part], bases[index, part], variances[index, part],
                        float(deviations[index, part]), turned[part],
                    )
                    for part in range(component.parts)
                ]  # fmt: skip
            index -= len(means)
        return None


def _component(asset: Asset, number: int) -> _Component:
    bases = asset.table(f"{number}.basis", "<f4", (-1, -1, -1, -1))
    layers, parts, channels, kept = bases.shape
    if parts > 2 or not kept <= channels <= MAX_CHANNELS:
        raise InvalidRequestError(f"asset table {number}.basis", bases.shape, "too large")
    means = asset.table(f"{number}.means", "<f4", (layers, parts, channels))
    variances = asset.table(f"{number}.variances", "<f4", (layers, parts, kept))
    deviations = asset.table(f"{number}.deviations", "<f4", (layers, parts))
    frequencies: Floats | None = None
    if f"{number}.rope" in asset.tables:
        frequencies = asset.table(f"{number}.rope", "<f4", (-1,))
    if not (np.abs(bases) <= 2).all():
        raise InvalidRequestError(f"asset table {number}.basis", "not unit", "columns are unit")
    if not ((deviations > 0) & (deviations < LARGEST_NUMBER)).all():
        raise InvalidRequestError(f"asset table {number}.deviations", "not positive", "are > 0")
    if not (np.abs(means) < LARGEST_NUMBER).all() or not (variances >= 0).all():
        raise InvalidRequestError(f"asset table {number}.means", "NaN", "must be numbers")
    if frequencies is not None and (
        len(frequencies) > MAX_PAIRS or not np.isfinite(frequencies).all()
    ):
        raise InvalidRequestError(f"asset table {number}.rope", len(frequencies), "too many")
    return means, bases, variances, deviations, frequencies
