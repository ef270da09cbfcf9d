"""Finds the principal components of a model's KV for the kvt codec. Runs offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors, check_tensors
from kvstore.codecs.cachegen_profile import layout_like
from kvstore.codecs.floats import FLOAT_TYPES, Floats, is_finite, to_float32
from kvstore.codecs.kvt import SINK_TOKENS
from kvstore.codecs.kvt_tables import MAX_CHANNELS, RATIOS
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Component, LayerKind, RopeParameters

_LEAST_DEVIATION = 1e-6


class KvtProfile:
    """Means and covariances over samples of one model's KV. Not thread-safe.

    *rope* is the rotary embedding that the keys carry, None when they are to be taken as they
    are. Holds channels^2 float64 numbers for each part of each layer: 540 MB for a model of 32
    layers with 8 heads of 128.
    """

    def __init__(self, components: Sequence[Component], rope: RopeParameters | None) -> None:
        for c in components:
            if c.dtype not in FLOAT_TYPES or c.kind is LayerKind.state:
                raise InvalidRequestError("component", c.kind.name, "kvt codes float KV only")
            if c.kv_heads * c.head_dim > MAX_CHANNELS:
                raise InvalidRequestError("channels", c.kv_heads * c.head_dim, "too many for kvt")
        self._components = tuple(components)
        self._frequencies = [calibrated_frequencies(c, rope) for c in components]
        shapes = [(c.layers, c.parts, c.kv_heads * c.head_dim) for c in components]
        self._tokens = [0] * len(components)
        self._sums = [np.zeros(shape) for shape in shapes]
        self._products = [np.zeros((*shape, shape[-1])) for shape in shapes]

    def add(self, tensors: ChunkTensors, position: int) -> None:
        """Add a chunk whose first token stands at *position*; first tokens of a prompt aside.

        Raises LayoutMismatchError for another model's, InvalidRequestError for NaN.
        """
        for one in turned_samples(self._components, self._frequencies, tensors, position):
            rows = one.rows.astype(np.float64)
            self._sums[one.component][one.layer, one.part] += rows.sum(0)
            self._products[one.component][one.layer, one.part] += rows.T @ rows
            self._tokens[one.component] += len(rows) if one.is_first else 0

    def tables(self) -> dict[str, NDArray[Any]]:
        """Return the tables of an asset."""
        if min(self._tokens) < 2:
            raise InvalidRequestError("samples", min(self._tokens), "add chunks first")
        tables: dict[str, NDArray[Any]] = {}
        for number in range(len(self._components)):
            tables |= self._component(number)
        return tables

    def _component(self, number: int) -> dict[str, NDArray[Any]]:
        means = self._sums[number] / self._tokens[number]
        layers, parts, channels = means.shape
        bases = np.empty((layers, parts, channels, channels), np.float32)
        variances = np.empty((layers, parts, channels), np.float32)
        deviations = np.empty((layers, parts), np.float32)
        for at in np.ndindex(layers, parts):
            products = self._products[number][at] / self._tokens[number]
            covariance = products - np.outer(means[at], means[at])
            values, vectors = np.linalg.eigh(covariance)
            values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
            vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(channels)])
            bases[at], variances[at] = vectors, values
            deviations[at] = max(np.sqrt(values.mean()), _LEAST_DEVIATION)
        # What the finest step cannot see is never coded.
        least = (deviations[..., None] * min(RATIOS) / 4) ** 2
        kept = max(1, int((variances >= least).sum(-1).max()))
        tables: dict[str, NDArray[Any]] = {
            f"{number}.means": means.astype("<f4"),
            f"{number}.basis": bases[..., :kept],
            f"{number}.variances": variances[..., :kept],
            f"{number}.deviations": deviations,
        }
        frequencies = self._frequencies[number]
        if frequencies is not None:
            tables[f"{number}.rope"] = frequencies
        return tables


def calibrated_frequencies(component: Component, rope: RopeParameters | None) -> Floats | None:
    """Return what a component's keys are turned back by; None where they are not. Raises."""
    if rope is None or rope.scaling == "none" or component.parts != 2:
        return None
    found = inverse_frequencies(rope, component.head_dim)
    if found is None:
        raise InvalidRequestError("rope", rope.scaling, "such keys cannot be turned back")
    return found


class TurnedSample(NamedTuple):
    """One part of one layer of a component: *rows* (tokens, channels), as floats turned back."""

    component: int
    layer: int
    part: int
    rows: NDArray[Any]

    @property
    def is_first(self) -> bool:
        """Whether it is the component's first: its tokens are counted once."""
        return not self.layer and not self.part


def turned_samples(
    components: Sequence[Component],
    frequencies: Sequence[NDArray[np.float32] | None],
    tensors: ChunkTensors,
    position: int,
) -> Iterator[TurnedSample]:
    """Yield the parts of a chunk whose first token stands at *position*, without a prompt's sinks.

    Raises LayoutMismatchError for another model's, InvalidRequestError for NaN.
    """
    layout = layout_like(components, tensors)
    check_tensors(layout, tensors)
    skipped = SINK_TOKENS if position == 0 else 0
    for number, (component, layers) in enumerate(zip(layout.components, tensors, strict=True)):
        for layer, parts in enumerate(layers):
            for index, part in enumerate(parts):
                turned = frequencies[number] if index == 0 else None
                rows = turned_rows(part, component, turned, position)[skipped:]
                yield TurnedSample(number, layer, index, rows)


def turned_rows(
    part: NDArray[Any], component: Component, turned: Floats | None, position: int
) -> Floats:
    """Return the part as (tokens, channels of all heads), turned back."""
    bits = part.view(f"<u{part.dtype.itemsize}")
    if not is_finite(bits, component.dtype):
        raise InvalidRequestError("samples", "NaN or infinity", "leave this one out")
    values = to_float32(bits, component.dtype)
    if turned is not None:
        cosine, sine = rotation(turned, position, component.tokens)
        rotate(values, cosine, -sine)
    rows: Floats = values.transpose(1, 0, 2).reshape(component.tokens, -1)
    return rows
