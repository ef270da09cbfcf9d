"""``kvq:N,static``: kvq by the statistics of the model instead of each tile's own.

A tile of kvq has 128 means and 128 models of its own, 24 bits a channel: at 256 tokens a tenth of
a bit a number, at 32 tokens three quarters. Here they are those of an asset of the model, shifted
by one number for each tile, so that short chunks cost what long ones do. Guarantee, steps,
turned keys and streams are kvq's.
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
from kvstore.codecs.floats import Floats, to_float32
from kvstore.codecs.kvq import RATIOS, ratios_of
from kvstore.codecs.kvq_body import (
    Body,
    ByteCutter,
    Stream,
    check_body,
    pack_arrays,
    tile_count,
)
from kvstore.codecs.kvq_layer import Decoding, Encoding, angles_of
from kvstore.codecs.kvq_models import ESCAPE, PADDING_MODEL, SCALES, SHAPES, ZERO, kvq_models
from kvstore.codecs.kvq_native import tile_backend
from kvstore.codecs.kvq_tiles import (
    ESCAPE_SHARE,
    LARGEST,
    TILE_CHANNELS,
    Angles,
    Centred,
    Cut,
    Tiles,
    as_tiles,
    steps_of,
)
from kvstore.codecs.kvtc import LARGEST_NUMBER
from kvstore.codecs.rans import LANES, native_backend
from kvstore.codecs.rope import MAX_PAIRS, rotate
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Component, DType

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
class KvqStatistics:
    """An asset of this codec, checked. Per component of the chunk: means f16 and scales u8
    (layers, parts, channels), deviations f32 (layers, parts), frequencies f32 (pairs,) or None.
    """

    components: tuple[_Component, ...]

    @classmethod
    def of(cls, asset: Asset) -> KvqStatistics:
        """Check *asset*. Raises InvalidRequestError that names the table at fault."""
        components: list[_Component] = []
        while f"{len(components)}.means" in asset.tables:
            components.append(_component(asset, len(components)))
        if not components:
            raise InvalidRequestError("asset", "0.means", "kvq:static needs this table")
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


_HEAD = struct.Struct(f"<BBHI{DIGEST_BYTES}s")
_COUNTS = struct.Struct("<IIfI")
_TILE_BYTES = 4 + 2 + 2 + 1 + 4 * LANES
_NO_FREQUENCIES = np.zeros(0, np.float32)

assert _HEAD.size == HEAD_BYTES
assert len(RATIOS) == QUALITY_COUNT


class StaticKvqCodec(AssetCodec):
    """For chunks of less than 128 tokens. Needs an asset of its model."""

    name = "kvq:static"
    codec_id = 13
    revision = 1
    accuracy = Accuracy.bounded
    kind = AssetKind.kvq
    default_quality = 1

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, asset: Asset
    ) -> tuple[Bytes, float] | None:
        """Return a layer's bytes and its bound; None where it would not hold."""
        statistics = _tables(asset).layer(layer.layer_id, layer.component)
        if statistics is None:
            raise self.another_model(layer)
        dtype = layer.component.dtype
        encoding = Encoding(layer, 0, native_backend())
        encoding.frequencies = _frequencies(statistics)
        shifts: list[NDArray[np.int8]] = []
        ratios = ratios_of(layer.component, RATIOS[self.quality])
        for block in Cut.of(layer.component).blocks:
            angles = angles_of(encoding.frequencies, layer.position, block)
            for part, mine, turned, ratio in zip(
                bits, statistics, (angles, None), ratios, strict=False
            ):
                found = _quantise(part[:, block], dtype, turned, ratio, mine)
                if found is None:
                    return None
                shifts.append(found[1])
                encoding.add(found[0], [], turned)
            encoding.end_block()
        body = encoding.body()
        head = _HEAD.pack(CODED, self.quality, layer.layer_id, layer.position, asset.digest)
        return _packed(head, body, np.concatenate(shifts)), body.error_bound

    @override
    def decode_coded(
        self, data: Bytes, component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one coded layer, its keys rotated to *position*, or as they were for None."""
        _, quality, index, stored, digest = _HEAD.unpack(data[:HEAD_BYTES].tobytes())
        if quality >= QUALITY_COUNT:
            raise InvalidFrameError("quality", quality, f"0 to {QUALITY_COUNT - 1}")
        statistics = _tables(self.asset_of(digest)).layer(index, component)
        if statistics is None:
            raise InvalidFrameError("layer", index, "the asset has no such layer")
        place = stored if position is None else position
        frequencies = _frequencies(statistics)
        if place != stored and not len(frequencies):
            raise InvalidRequestError("position", position, "the asset knows no rotary embedding")
        body = _parsed(data, component, statistics)
        decoding = Decoding(body, component, native_backend())
        dequantise = tile_backend().dequantise
        for block, tiles, _ in decoding.blocks():
            turned = (angles_of(frequencies, place, block), None)
            for number, part in enumerate(out):
                if not dequantise(tiles[number], component.dtype, turned[number], part[:, block]):
                    raise InvalidFrameError("escapes", len(tiles[number].values), "not as coded")

    @override
    def layer_count(self, asset: Asset) -> int:
        return _tables(asset).layers


@lru_cache(maxsize=8)
def _tables(asset: Asset) -> KvqStatistics:
    return KvqStatistics.of(asset)


def _frequencies(statistics: Sequence[PartStatistics]) -> Floats:
    found = statistics[0].frequencies
    return _NO_FREQUENCIES if found is None else found


def _quantise(
    bits: Part, dtype: DType, angles: Angles | None, ratio: float, mine: PartStatistics
) -> tuple[Tiles, NDArray[np.int8]] | None:
    """Return the tiles of a block's part and their shifts; None where the bound would not hold."""
    values = to_float32(bits, dtype)
    magnitudes = np.abs(as_tiles(values)).max((1, 2))
    if magnitudes.max() >= LARGEST:
        return None
    if angles is not None:
        rotate(values, angles[0], -angles[1])
    x = as_tiles(values)
    difference = x - mine.means.astype(np.float32)[:, None]
    squares = np.square(difference, dtype=np.float64).sum(1)
    squares[~mine.is_real] = 0
    steps = steps_of(squares, mine.is_real, x.shape[1], ratio)
    tiles = Centred(x, difference, mine.means, squares, steps, mine.is_real)
    quotients = np.rint(difference * (np.float32(1) / steps)[:, None, None])
    errors = tiles.errors(quotients)
    if errors is None:
        return None
    shifts = shifts_of(mine.deviation / steps.astype(np.float64))
    models = mine.models(shifts)
    q = quotients.astype(np.int16)
    is_near = np.abs(q) <= kvq_models().reach[models][:, None]
    values16 = q[~is_near]
    if len(values16) * ESCAPE_SHARE > q.size:
        return None
    symbols = np.where(is_near, q + ZERO, ESCAPE).astype(np.uint8)
    escapes = (~is_near).sum((1, 2), dtype=np.uint32)
    found = Tiles(steps, mine.means, models, symbols, escapes, values16, errors, magnitudes)
    return found, shifts


def _packed(head: bytes, body: Body, shifts: NDArray[np.int8]) -> Bytes:
    stream = body.stream
    arrays: list[NDArray[np.generic]] = [
        np.frombuffer(head, np.uint8),
        np.frombuffer(
            _COUNTS.pack(len(stream.words), len(body.values), body.error_bound, 0), np.uint8
        ),
        body.steps, stream.states, stream.counts.astype("<u2"), body.escapes.astype("<u2"),
        stream.words, body.values, shifts,
    ]  # fmt: skip
    out = np.empty(sum(array.nbytes for array in arrays), np.uint8)
    pack_arrays(arrays, out, 0)
    return out


def _parsed(data: Bytes, component: Component, statistics: Sequence[PartStatistics]) -> Body:
    """Return the body of a layer, sizes checked before use. Raises InvalidFrameError."""
    at = HEAD_BYTES + _COUNTS.size
    if len(data) < at:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {at}")
    words, escaped, error_bound, zero = _COUNTS.unpack(data[HEAD_BYTES:at].tobytes())
    if zero or not 0 <= error_bound < np.inf:
        raise InvalidFrameError("head", (zero, error_bound), "zero, and a finite bound")
    tiles = tile_count(component)
    size = at + tiles * _TILE_BYTES + 2 * words + 2 * escaped
    if len(data) != size:
        raise InvalidFrameError("stored_bytes", len(data), f"its counts make {size}")
    cut = ByteCutter(data, at)
    steps = cut.take("<f4", tiles)
    states = cut.take("<u4", tiles * LANES).reshape(tiles, LANES)
    counts, escapes = (cut.take("<u2", tiles).astype(np.uint32) for _ in range(2))
    stream = Stream(states, counts, cut.take("<u2", words))
    values, shifts = cut.take("<i2", escaped), cut.take("<i1", tiles)
    columns = Cut.of(component).columns
    each = range(0, tiles, columns)
    mine = [statistics[number % len(statistics)] for number in range(len(each))]
    models = [one.models(shifts[at : at + columns]) for one, at in zip(mine, each, strict=True)]
    means = np.concatenate([one.means for one in mine])
    body = Body(
        0, error_bound, _NO_FREQUENCIES, steps, escapes, means, np.concatenate(models), stream,
        values,
    )  # fmt: skip
    check_body(body)
    return body
