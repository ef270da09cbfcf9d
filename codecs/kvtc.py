"""The kvtc codec: kvq's steps and models in the directions in which a model's KV varies.

After KVTC (NVIDIA, ICLR 2026): keys are turned back by their rotary embedding, the channels of
all heads are rotated onto calibrated principal components, and one step for all of them spends
bits where the variance is; components that the step cannot see are dropped. Departures: kvq's
distributions and rANS in place of DEFLATE, a common step in place of an allocation by dynamic
programming, and of the tokens that the paper keeps exactly only the first four of a prompt,
since a stored chunk does not know which tokens will be recent.

Opt-in and without a bound: what the calibration never saw lies outside of the components.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import CODED, HEAD_BYTES, QUALITY_COUNT, AssetCodec
from kvstore.codecs.assets import Asset, AssetKind
from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import Floats, from_float32, to_float32
from kvstore.codecs.kvq_models import ESCAPE, MAX_QUOTIENT, MODELS, PADDING_MODEL, ZERO, kvq_models
from kvstore.codecs.rans import GROUP_CHANNELS, LANES, native_backend
from kvstore.codecs.rope import MAX_PAIRS, rotate, rotation
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Component, DType

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
class KvtcTables:
    """An asset of this codec, checked. Per component of the chunk: means f32 (layers, parts,
    channels), bases f32 (layers, parts, channels, components), variances f32 (layers, parts,
    components), deviations f32 (layers, parts), frequencies f32 (pairs,) or None.
    """

    components: tuple[_Component, ...]

    @classmethod
    def of(cls, asset: Asset) -> KvtcTables:
        """Check *asset*. Raises InvalidRequestError that names the table at fault."""
        components: list[_Component] = []
        while f"{len(components)}.basis" in asset.tables:
            components.append(_component(asset, len(components)))
        if not components:
            raise InvalidRequestError("asset", "0.basis", "kvtc needs this table")
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


SINK_TOKENS = 4
"""First tokens of a prompt: attention leans on them, and they are like no others."""
MAX_ESCAPED = 8
"""A layer of which more than one number in so many has no bin is kept as it is."""

_HEAD = struct.Struct(f"<BBHI{DIGEST_BYTES}s")
_PART = struct.Struct("<HHII")
_LARGEST_STEP = 32767
_BOX_ITEMS = 1 << 16

assert _HEAD.size == HEAD_BYTES
assert len(RATIOS) == QUALITY_COUNT


class KvtcCodec(AssetCodec):
    """Each part of a layer is one stream over its components. Needs an asset of its model."""

    name = "kvtc"
    codec_id = 12
    revision = 1
    accuracy = Accuracy.approximate
    kind = AssetKind.kvtc
    default_quality = 1

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, asset: Asset
    ) -> tuple[Bytes, float] | None:
        """Return a layer's bytes; None where too many numbers are far outside of the asset's."""
        tables = _tables(asset).layer(layer.layer_id, layer.component)
        if tables is None:
            raise self.another_model(layer)
        fields = [_HEAD.pack(CODED, self.quality, layer.layer_id, layer.position, asset.digest)]
        for part, mine in zip(bits, tables, strict=True):
            coded = _encode(part, layer, mine, mine.deviation * RATIOS[self.quality])
            if coded is None:
                return None
            fields.append(coded)
        return as_bytes(b"".join(fields)), 0.0

    @override
    def decode_coded(
        self, data: Bytes, component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one coded layer, its keys rotated to *position*, or as they were for None."""
        _, quality, index, stored, digest = _HEAD.unpack(data[:HEAD_BYTES].tobytes())
        if quality >= QUALITY_COUNT:
            raise InvalidFrameError("quality", quality, f"0 to {QUALITY_COUNT - 1}")
        tables = _tables(self.asset_of(digest)).layer(index, component)
        if tables is None:
            raise InvalidFrameError("layer", index, "the asset has no such layer")
        place = stored if position is None else position
        if place != stored and tables[0].frequencies is None:
            raise InvalidRequestError("position", position, "the asset knows no rotary embedding")
        at, parts = HEAD_BYTES, []
        for mine in tables:
            parsed, at = _parse(data, at, component, mine)
            parts.append(parsed)
        if at != len(data):
            raise InvalidFrameError("stored_bytes", len(data), f"its parts end at {at}")
        for parsed, mine, part in zip(parts, tables, out, strict=True):
            _decode(parsed, mine, mine.deviation * RATIOS[quality], (stored, place), part)

    @override
    def layer_count(self, asset: Asset) -> int:
        return sum(len(component[0]) for component in _tables(asset).components)


@lru_cache(maxsize=8)
def _tables(asset: Asset) -> KvtcTables:
    return KvtcTables.of(asset)


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """One part: ``exact`` its first tokens as they are, (kv_heads, sinks, head_dim); ``models``
    u8, one for each component that was kept; the stream; steps of escaped numbers i16 by their
    ascending places u32 in (tokens, components).
    """

    exact: Part
    models: NDArray[np.uint8]
    states: NDArray[np.uint32]
    places: NDArray[np.uint32]
    steps: NDArray[np.int16]
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
    if not np.abs(steps).max() <= _LARGEST_STEP:
        return None
    quotients = steps.astype(np.int16)
    models = _pick(quotients)
    is_escaped = np.abs(quotients) > kvq_models().reach[models]
    places = np.flatnonzero(is_escaped).astype("<u4")
    if len(places) > quotients.size // MAX_ESCAPED:
        return None
    symbols = np.where(is_escaped, ESCAPE, quotients + ZERO).astype(np.uint8)
    padded = np.full((component.tokens, kept + -kept % GROUP_CHANNELS), ZERO, np.uint8)
    padded[:, :kept] = symbols
    table, rows = kvq_models().table, _padded(models)[None]
    (states,), _, words = native_backend().encode_tiles(padded[None], rows, table)
    escaped = quotients.reshape(-1)[places].astype("<i2")
    head = _PART.pack(kept, sinks, len(places), len(words))
    fields = (bits[:, :sinks], models, states, places, escaped, words)
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


def _parse(data: Bytes, at: int, component: Component, tables: PartTables) -> tuple[_Coded, int]:
    """Return the part that starts *at*, and where it ends; sizes are checked before use."""
    if len(data) - at < _PART.size:
        raise InvalidFrameError("stored_bytes", len(data), "cut short")
    kept, sinks, escapes, words = _PART.unpack(data[at : at + _PART.size].tobytes())
    heads, tokens, dim = component.shape
    if not 1 <= kept <= tables.basis.shape[1] or sinks > min(SINK_TOKENS, tokens):
        raise InvalidFrameError("components", (kept, sinks), f"1 to {tables.basis.shape[1]}")
    if escapes > tokens * kept // MAX_ESCAPED:
        raise InvalidFrameError("escapes", escapes, f"at most {tokens * kept // MAX_ESCAPED}")
    width = component.dtype.item_bytes
    sizes = [
        (f"<u{width}", heads * sinks * dim), ("<u1", kept), ("<u4", LANES), ("<u4", escapes),
        ("<i2", escapes), ("<u2", words),
    ]  # fmt: skip
    start = at + _PART.size
    stop = start + sum(int(kind[2:]) * count for kind, count in sizes)
    if stop > len(data):
        raise InvalidFrameError("stored_bytes", len(data), f"a part ends at {stop}")
    fields: list[NDArray[Any]] = []
    for kind, count in sizes:
        end = start + int(kind[2:]) * count
        fields.append(np.require(data[start:end].view(kind), requirements="A"))
        start = end
    exact, models, states, places, steps, stream = fields
    if models.max() >= MODELS:
        raise InvalidFrameError("models", int(models.max()), f"there are {MODELS}")
    if escapes and (int(places[-1]) >= tokens * kept or (places[1:] <= places[:-1]).any()):
        raise InvalidFrameError("escapes", int(places[-1]), "must ascend, within the part")
    exact = exact.reshape(heads, sinks, dim)
    return _Coded(exact, models, states, places, steps, stream, component.dtype), stop


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
        first = start * kept
        low, high = np.searchsorted(coded.places, (first, first + piece.size))
        piece.reshape(-1)[coded.places[low:high] - first] = coded.steps[low:high]
        piece *= np.float32(step)
        flat = piece @ basis
        flat += tables.mean
        block = np.ascontiguousarray(flat.reshape(-1, heads, dim).transpose(1, 0, 2))
        if tables.frequencies is not None:
            rotate(block, *rotation(tables.frequencies, places[1] + start, block.shape[1]))
        from_float32(block, coded.dtype, out[:, start : start + rows])
    out[:, : coded.exact.shape[1]] = _moved(coded, tables.frequencies, places)


def _moved(coded: _Coded, frequencies: Floats | None, places: tuple[int, int]) -> Part:
    """Return the exact tokens, rotated from where they were to where they are wanted."""
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
