"""The kvtc codec: kvq's steps and models on the principal components of a model's KV.

After KVTC (NVIDIA, ICLR 2026): keys' rotation is undone, the channels of all heads are projected
onto calibrated principal components, and one step for all of them spends bits where the variance
is; components far below the step are dropped. Departures: kvq's distributions and rANS in place of
DEFLATE, a common step in place of an allocation by dynamic programming, and of the tokens that the
paper keeps exactly only the first four of a prompt, as the recent tokens of a stored chunk are
unknown.

Opt-in and without an error bound: values unlike the calibration's lie outside the components.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import (
    LARGEST_NUMBER,
    LARGEST_STEP,
    AssetCodec,
    Coded,
    CodedLayer,
    Escapes,
    TurnedTables,
    moved_to,
)
from kvstore.codecs.assets import Asset, AssetKind
from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import ByteCutter, Floats, from_float32, to_float32
from kvstore.codecs.kvq_models import (
    ESCAPE,
    MAX_QUOTIENT,
    MODELS,
    PADDING_MODEL,
    RATIOS,
    ZERO,
    kvq_models,
)
from kvstore.codecs.rans import GROUP_CHANNELS, LANES, native_backend
from kvstore.codecs.rope import rotate, rotation
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component, DType

MAX_CHANNELS = 1 << 13
"""Channels of all heads of a part, the rows of its basis."""


@dataclass(frozen=True, slots=True, eq=False)
class PartTables:
    """One part of one layer. Channels are those of all heads, end to end; components are in order
    of falling variance.

    ``mean`` f32 (channels,), ``basis`` f32 (channels, components), ``variances`` f32
    (components,); ``deviation`` is that of all numbers about their means; ``frequencies`` f32
    (pairs,) are of the rotation to undo, None for none.
    """

    mean: Floats
    basis: Floats
    variances: Floats
    deviation: float
    frequencies: Floats | None

    def kept(self, step: float) -> int:
        """Return how many components to code: deviations of at least a quarter of *step*."""
        return max(1, int((self.variances >= (step / 4) ** 2).sum()))


class KvtcTables(TurnedTables):
    """Per component of the chunk: means f32 (layers, parts, channels), bases f32 (layers, parts,
    channels, components), variances f32 (layers, parts, components).
    """

    needed = "basis"
    part = PartTables

    @override
    def component(self, asset: Asset, prefix: str) -> tuple[Any, ...]:
        bases = asset.table(f"{prefix}basis", "<f4", (-1, -1, -1, -1))
        layers, parts, channels, kept = bases.shape
        if parts > 2 or not kept <= channels <= MAX_CHANNELS:
            raise InvalidRequestError(f"asset table {prefix}basis", bases.shape, "too large")
        means = asset.table(f"{prefix}means", "<f4", (layers, parts, channels))
        variances = asset.table(f"{prefix}variances", "<f4", (layers, parts, kept))
        if not (np.abs(bases) <= 2).all():
            raise InvalidRequestError(f"asset table {prefix}basis", "not unit", "columns are unit")
        if not (np.abs(means) < LARGEST_NUMBER).all() or not (variances >= 0).all():
            raise InvalidRequestError(f"asset table {prefix}means", "NaN", "must be numbers")
        return means, bases, variances, *self.scales_of(asset, prefix, (layers, parts))


SINK_TOKENS = 4
"""First tokens of a prompt, its attention sinks, whose values are outliers."""

_PART = struct.Struct("<HHII")
_BOX_ITEMS = 1 << 16


class KvtcCodec(AssetCodec):
    """A part of a layer is one stream over its components. Needs an asset of its model."""

    name = "kvtc"
    codec_id = 12
    revision = 1
    accuracy = Accuracy.approximate
    kind = AssetKind.kvtc
    tables = KvtcTables

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, tables: Sequence[PartTables]
    ) -> CodedLayer | None:
        fields = []
        for part, mine in zip(bits, tables, strict=True):
            coded = _encode(part, layer, mine, mine.deviation * RATIOS[self.quality])
            if coded is None:
                return None
            fields.append(coded)
        return layer.position, fields, 0.0

    @override
    def decode_coded(
        self, cut: ByteCutter, component: Component, out: Sequence[Part], head: Coded,
        position: int | None,
    ) -> None:  # fmt: skip
        place = moved_to(position, head.number, head.tables[0].frequencies)
        parts = [_parse(cut, component, mine) for mine in head.tables]
        cut.end()
        for parsed, mine, part in zip(parts, head.tables, out, strict=True):
            _decode(parsed, mine, mine.deviation * RATIOS[head.quality], (head.number, place), part)


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """One part: ``exact``, its first tokens uncoded, (kv_heads, sinks, head_dim); ``models`` u8,
    one for each coded component; the stream; escapes in (tokens, components).
    """

    exact: Part
    models: NDArray[np.uint8]
    states: NDArray[np.uint32]
    escapes: Escapes
    words: NDArray[np.uint16]
    dtype: DType


def _encode(bits: Part, layer: LayerTerms, tables: PartTables, step: float) -> bytes | None:
    component, kept = layer.component, tables.kept(step)
    sinks = min(SINK_TOKENS, component.tokens) if layer.position == 0 else 0
    values = to_float32(bits, component.dtype)
    if np.abs(values).max() >= LARGEST_NUMBER:
        return None
    if tables.frequencies is not None:
        cosine, sine = rotation(tables.frequencies, layer.position, component.tokens)
        rotate(values, cosine, -sine)
    flat = values.transpose(1, 0, 2).reshape(component.tokens, -1)
    flat -= tables.mean
    flat[:sinks] = 0
    steps = np.rint((flat @ tables.basis[:, :kept]) / np.float32(step))
    if not np.abs(steps).max() <= LARGEST_STEP:
        return None
    quotients = steps.astype(np.int16)
    models = _pick(quotients)
    is_escaped = np.abs(quotients) > kvq_models().reach[models]
    escapes = Escapes.of(quotients, is_escaped)
    if escapes is None:
        return None
    symbols = np.where(is_escaped, ESCAPE, quotients + ZERO).astype(np.uint8)
    padded = np.full((component.tokens, kept + -kept % GROUP_CHANNELS), ZERO, np.uint8)
    padded[:, :kept] = symbols
    table, rows = kvq_models().table, _padded(models)[None]
    (states,), _, words = native_backend().encode_tiles(padded[None], rows, table)
    head = _PART.pack(kept, sinks, len(escapes.places), len(words))
    fields = (bits[:, :sinks], models, states, *escapes, words)
    return head + b"".join(np.ascontiguousarray(field).tobytes() for field in fields)


def _pick(quotients: NDArray[np.int16]) -> NDArray[np.uint8]:
    """Return the cheapest model of each column."""
    symbols = np.where(np.abs(quotients) <= MAX_QUOTIENT, quotients + ZERO, ESCAPE)
    kinds, columns = kvq_models().costs.shape[1], quotients.shape[1]
    places = np.arange(columns) * kinds + symbols
    counts = np.bincount(places.reshape(-1), minlength=columns * kinds).reshape(columns, kinds)
    costs = counts.astype(np.float64) @ kvq_models().costs.T.astype(np.float64)
    picked: NDArray[np.uint8] = costs.argmin(1).astype(np.uint8)
    return picked


def _padded(models: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.pad(models, (0, -len(models) % GROUP_CHANNELS), constant_values=PADDING_MODEL)


def _parse(cut: ByteCutter, component: Component, tables: PartTables) -> _Coded:
    """Return the next part, checking sizes before use."""
    kept, sinks, count, words = _PART.unpack(cut.take("<u1", _PART.size).tobytes())
    heads, tokens, dim = component.shape
    if not 1 <= kept <= tables.basis.shape[1] or sinks > min(SINK_TOKENS, tokens):
        raise InvalidFrameError("components", (kept, sinks), f"1 to {tables.basis.shape[1]}")
    exact = cut.take(f"<u{component.dtype.item_bytes}", heads * sinks * dim)
    models, states = cut.take("<u1", kept), cut.take("<u4", LANES)
    escapes = Escapes.take(cut, count, tokens * kept)
    if models.max() >= MODELS:
        raise InvalidFrameError("models", int(models.max()), f"there are {MODELS}")
    exact = exact.reshape(heads, sinks, dim)
    return _Coded(exact, models, states, escapes, cut.take("<u2", words), component.dtype)


def _decode(
    coded: _Coded, tables: PartTables, step: float, places: tuple[int, int], out: Part
) -> None:
    heads, tokens, dim = out.shape
    kept = len(coded.models)
    symbols = np.empty((tokens, kept + -kept % GROUP_CHANNELS), np.uint8)
    native_backend().decode_tiles(
        coded.states[None], np.array([len(coded.words)], np.uint32), coded.words,
        _padded(coded.models)[None], kvq_models().table, symbols[None],
    )  # fmt: skip
    basis = tables.basis[:, :kept].T
    rows = max(1, _BOX_ITEMS // (heads * dim))
    for start in range(0, tokens, rows):
        piece = symbols[start : start + rows, :kept].astype(np.float32)
        piece -= np.float32(ZERO)
        coded.escapes.put(piece, start * kept)
        piece *= np.float32(step)
        flat = piece @ basis
        flat += tables.mean
        block = np.ascontiguousarray(flat.reshape(-1, heads, dim).transpose(1, 0, 2))
        if tables.frequencies is not None:
            rotate(block, *rotation(tables.frequencies, places[1] + start, block.shape[1]))
        from_float32(block, coded.dtype, out[:, start : start + rows])
    out[:, : coded.exact.shape[1]] = _moved(coded, tables.frequencies, places)


def _moved(coded: _Coded, frequencies: Floats | None, places: tuple[int, int]) -> Part:
    """Return the exact tokens, rotated from the first to the second of *places*."""
    if frequencies is None or places[0] == places[1]:
        return coded.exact
    values, tokens = to_float32(coded.exact, coded.dtype), coded.exact.shape[1]
    cosine, sine = rotation(frequencies, places[0], tokens)
    rotate(values, cosine, -sine)
    rotate(values, *rotation(frequencies, places[1], tokens))
    moved = np.empty_like(coded.exact)
    with np.errstate(over="ignore"):
        from_float32(values, coded.dtype, moved)
    return moved
