"""What the kvqs codec knows of a model: each channel's mean, and how it is distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.assets import Asset
from kvstore.codecs.floats import Floats
from kvstore.codecs.kvq_models import PADDING_MODEL, SCALES, SHAPES
from kvstore.codecs.kvq_tiles import TILE_CHANNELS
from kvstore.codecs.kvt_tables import LARGEST_NUMBER
from kvstore.codecs.rope import MAX_PAIRS
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Component

MIDDLE = 64
"""The scale of a channel that varies as much as the part does."""
SCALES_AN_OCTAVE = 4
_MAX_SHIFT = 127
_UNIT_SCALE = 10
"""kvq's scale whose deviation is one step."""
_ROOTS = (1.189207115002721, 1.681792830507429)  # 2^(1/4), 2^(3/4)
_EDGES = np.array([_ROOTS[k % 2] * 2.0 ** (k // 2) for k in range(-_MAX_SHIFT, _MAX_SHIFT)])
"""Squares of what lies halfway between one quarter of an octave and the next."""

_Component: TypeAlias = tuple[NDArray[np.float16], NDArray[np.uint8], Floats, "Floats | None"]


@dataclass(frozen=True, slots=True, eq=False)
class PartStatistics:
    """One part of one layer, its heads' channels end to end in columns of 128, the last filled up.

    ``means`` f16 (columns, 128), ``scales`` u8 (columns, 128): twice the channel's deviation, in
    quarters of octaves from that of the part, plus MIDDLE, plus 1 for the sharper of two shapes.
    ``deviation`` is that of the part's numbers about the means; ``frequencies`` f32 (pairs,) is
    what the keys are turned back by, None for what is not turned.
    """

    means: NDArray[np.float16]
    scales: NDArray[np.uint8]
    is_real: NDArray[np.bool_]
    deviation: float
    frequencies: Floats | None

    def models(self, shifts: NDArray[np.int8]) -> NDArray[np.uint8]:
        """Return kvq's model of each channel, u8 (columns, 128), for the shift of each column."""
        scale = self.scales.astype(np.int16) // SHAPES - MIDDLE + shifts[:, None]
        found = np.clip(scale, 0, SCALES - 1) * SHAPES + self.scales % SHAPES
        return np.where(self.is_real, found, PADDING_MODEL).astype(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class KvqsTables:
    """An asset of this codec, checked. Per component of the chunk: means f16 and scales u8
    (layers, parts, channels), deviations f32 (layers, parts), frequencies f32 (pairs,) or None.
    """

    components: tuple[_Component, ...]

    @classmethod
    def of(cls, asset: Asset) -> KvqsTables:
        """Check *asset*. Raises InvalidRequestError that names the table at fault."""
        components: list[_Component] = []
        while f"{len(components)}.means" in asset.tables:
            components.append(_component(asset, len(components)))
        if not components:
            raise InvalidRequestError("asset", "0.means", "kvqs needs this table")
        return cls(tuple(components))

    @property
    def layers(self) -> int:
        """How many layers there are tables for."""
        return sum(len(means) for means, *_ in self.components)

    def layer(self, index: int, component: Component) -> list[PartStatistics] | None:
        """Return the statistics of the parts of the chunk's layer *index*, over all components.

        None unless the asset was made for such a layer.
        """
        channels = component.kv_heads * component.head_dim
        for means, scales, deviations, frequencies in self.components:
            if index < len(means):
                if means.shape[1:] != (component.parts, channels):
                    return None
                if frequencies is not None and 2 * len(frequencies) > component.head_dim:
                    return None
                turned = [frequencies if component.parts == 2 else None, None]
                is_real = _columns(np.ones(channels, np.bool_))
                return [
                    PartStatistics(
                        _columns(means[index, part]), _columns(scales[index, part]), is_real,
                        float(deviations[index, part]), turned[part],
                    )
                    for part in range(component.parts)
                ]  # fmt: skip
            index -= len(means)
        return None


def shifts_of(ratios: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the shift of each tile, by how many times its step the part's deviation is.

    Without logarithms, so that all machines find the same.
    """
    found = np.searchsorted(_EDGES, ratios**2) - _MAX_SHIFT + _UNIT_SCALE
    return np.clip(found, -_MAX_SHIFT, _MAX_SHIFT).astype(np.int8)


def _columns(channels: NDArray[Any]) -> NDArray[Any]:
    padded = np.pad(channels, (0, -len(channels) % TILE_CHANNELS))
    return padded.reshape(-1, TILE_CHANNELS)


def _component(asset: Asset, number: int) -> _Component:
    means = asset.table(f"{number}.means", "<f2", (-1, -1, -1))
    if means.shape[1] > 2:
        raise InvalidRequestError(f"asset table {number}.means", means.shape, "one part or two")
    scales = asset.table(f"{number}.scales", "<u1", means.shape)
    deviations = asset.table(f"{number}.deviations", "<f4", means.shape[:2])
    frequencies: Floats | None = None
    if f"{number}.rope" in asset.tables:
        frequencies = asset.table(f"{number}.rope", "<f4", (-1,))
    if not np.isfinite(means).all():
        raise InvalidRequestError(f"asset table {number}.means", "NaN", "must be numbers")
    if not ((deviations > 0) & (deviations < LARGEST_NUMBER)).all():
        raise InvalidRequestError(f"asset table {number}.deviations", "not positive", "are > 0")
    if frequencies is not None and (
        len(frequencies) > MAX_PAIRS or not np.isfinite(frequencies).all()
    ):
        raise InvalidRequestError(f"asset table {number}.rope", len(frequencies), "too many")
    return means, scales, deviations, frequencies
