"""Finds how each channel of a model's KV is distributed, for the kvqs codec. Runs offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors
from kvstore.codecs.floats import FLOAT_TYPES
from kvstore.codecs.kvq_models import SHAPES
from kvstore.codecs.kvq_tiles import LARGEST_MEAN
from kvstore.codecs.kvqs_tables import MIDDLE, SCALES_AN_OCTAVE
from kvstore.codecs.kvt_profile import calibrated_frequencies, turned_samples
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Component, LayerKind, RopeParameters

_LEAST_DEVIATION = 1e-6
_SHARP = 4.2
"""Fourth moment, in squares of the variance, from which on a channel is coded as a Laplace
distribution, which has 6; a normal one has 3."""


class KvqsProfile:
    """Moments over samples of one model's KV, four for each channel. Not thread-safe.

    *rope* is the rotary embedding that the keys carry, None when they are to be taken as they are.
    """

    def __init__(self, components: Sequence[Component], rope: RopeParameters | None) -> None:
        for c in components:
            if c.dtype not in FLOAT_TYPES or c.kind is LayerKind.state:
                raise InvalidRequestError("component", c.kind.name, "kvqs codes float KV only")
        self._components = tuple(components)
        self._frequencies = [calibrated_frequencies(c, rope) for c in components]
        self._tokens = [0] * len(components)
        self._moments = [
            np.zeros((4, c.layers, c.parts, c.kv_heads * c.head_dim)) for c in components
        ]

    def add(self, tensors: ChunkTensors, position: int) -> None:
        """Add a chunk whose first token stands at *position*; first tokens of a prompt aside.

        Raises LayoutMismatchError for another model's, InvalidRequestError for NaN.
        """
        for one in turned_samples(self._components, self._frequencies, tensors, position):
            power = np.ones(one.rows.shape)
            for moment in self._moments[one.component]:
                power *= one.rows
                moment[one.layer, one.part] += power.sum(0)
            self._tokens[one.component] += len(one.rows) if one.is_first else 0

    def tables(self) -> dict[str, NDArray[Any]]:
        """Return the tables of an asset."""
        if min(self._tokens) < 2:
            raise InvalidRequestError("samples", min(self._tokens), "add chunks first")
        tables: dict[str, NDArray[Any]] = {}
        for number, tokens in enumerate(self._tokens):
            tables |= _tables(number, self._moments[number] / tokens)
            frequencies = self._frequencies[number]
            if frequencies is not None:
                tables[f"{number}.rope"] = frequencies
        return tables


def _tables(number: int, moments: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return a component's tables from its channels' first four moments."""
    mean, second, third, fourth = moments
    variance = np.maximum(second - mean**2, _LEAST_DEVIATION**2)
    peak = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    deviation = np.sqrt(variance.mean(-1))
    octaves = np.log2(variance / deviation[..., None] ** 2) / 2
    scale = np.clip(np.rint(SCALES_AN_OCTAVE * octaves) + MIDDLE, 0, 2 * MIDDLE - 1)
    is_sharp = peak > _SHARP * variance**2
    limit = float(LARGEST_MEAN)
    return {
        f"{number}.means": np.clip(mean, -limit, limit).astype("<f2"),
        f"{number}.scales": (scale * SHAPES + is_sharp).astype(np.uint8),
        f"{number}.deviations": deviation.astype("<f4"),
    }
