"""``kvq:N,static``: kvq with the statistics of the model instead of each tile's own.

A tile of kvq has 128 means and 128 models, 24 bits per channel: a tenth of a bit per number at 256
tokens, three quarters at 32. Here an asset of the model has them, and each tile only one shift, so
that short chunks cost as much as long ones. Error bound, steps, key rotation and streams are kvq's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import AssetCodec, Coded, CodedLayer, TurnedTables, moved_to
from kvstore.codecs.assets import Asset, AssetKind, Table
from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import ByteCutter, Floats, to_float32
from kvstore.codecs.kvq import ratios_of
from kvstore.codecs.kvq_layer import (
    NO_FREQUENCIES,
    Body,
    Decoding,
    Encoding,
    angles_of,
    check_body,
    tile_count,
)
from kvstore.codecs.kvq_models import (
    ESCAPE,
    PADDING_MODEL,
    RATIOS,
    SCALES,
    SHAPES,
    ZERO,
    kvq_models,
)
from kvstore.codecs.kvq_tiles import (
    ESCAPE_SHARE,
    LARGEST,
    TILE_CHANNELS,
    Angles,
    Cut,
    KvqLoops,
    Tiles,
    as_tiles,
    errors_of,
    steps_of,
)
from kvstore.codecs.rans import LANES, Stream
from kvstore.codecs.rope import rotate
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component, DType

MIDDLE = 64
"""The scale of a channel whose deviation equals the part's."""
SCALES_AN_OCTAVE = 4
_MAX_SHIFT = 127
_UNIT_SCALE = 10
"""kvq's scale whose deviation is one step."""
_ROOTS = (1.189207115002721, 1.681792830507429)  # 2^(1/4), 2^(3/4)
_EDGES = np.array([_ROOTS[k % 2] * 2.0 ** (k // 2) for k in range(-_MAX_SHIFT, _MAX_SHIFT)])
"""Squares of the midpoints between quarters of an octave."""

_COUNTS = struct.Struct("<IIfI")


@dataclass(frozen=True, slots=True, eq=False)
class PartStatistics:
    """One part of one layer, its heads' channels end to end in columns of 128, the last padded.

    ``means`` f16 (columns, 128), ``scales`` u8 (columns, 128): twice the channel's deviation, in
    quarters of octaves from that of the part, plus MIDDLE, plus 1 for the sharper of two shapes.
    ``deviation`` is that of the part's numbers about the means; ``frequencies`` f32 (pairs,) are of
    the rotation to undo, None for none.
    """

    means: NDArray[np.float16]
    scales: NDArray[np.uint8]
    is_real: NDArray[np.bool_]
    deviation: float
    frequencies: Floats | None

    @classmethod
    def of(
        cls, means: NDArray[Any], scales: NDArray[Any], deviation: float, turned: Floats | None
    ) -> PartStatistics:
        """Return the statistics of a part from those of its channels."""
        is_real = _columns(np.ones(len(means), np.bool_))
        return cls(_columns(means), _columns(scales), is_real, deviation, turned)

    def models(self, shifts: NDArray[np.int8]) -> NDArray[np.uint8]:
        """Return kvq's model of each channel, u8 (columns, 128), by each column's shift."""
        scale = self.scales.astype(np.int16) // SHAPES - MIDDLE + shifts[:, None]
        found = np.clip(scale, 0, SCALES - 1) * SHAPES + self.scales % SHAPES
        return np.where(self.is_real, found, PADDING_MODEL).astype(np.uint8)


class KvqStatistics(TurnedTables):
    """Per component of the chunk: means f16 and scales u8 (layers, parts, channels)."""

    needed = "means"
    part = PartStatistics.of

    @override
    def component(self, asset: Asset, prefix: str) -> tuple[Any, ...]:
        means = asset.table(f"{prefix}means", "<f2", (-1, -1, -1))
        if means.shape[1] > 2:
            raise InvalidRequestError(f"asset table {prefix}means", means.shape, "one or two parts")
        scales = asset.table(f"{prefix}scales", "<u1", means.shape)
        if not np.isfinite(means).all():
            raise InvalidRequestError(f"asset table {prefix}means", "NaN", "must be numbers")
        return means, scales, *self.scales_of(asset, prefix, means.shape[:2])


def shifts_of(ratios: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the shift of each tile from *ratios*, the part's deviation in steps of the tile.

    Without logarithms, so that all machines agree.
    """
    found = np.searchsorted(_EDGES, ratios**2) - _MAX_SHIFT + _UNIT_SCALE
    return np.clip(found, -_MAX_SHIFT, _MAX_SHIFT).astype(np.int8)


def _columns(channels: NDArray[Any]) -> NDArray[Any]:
    padded = np.pad(channels, (0, -len(channels) % TILE_CHANNELS))
    return padded.reshape(-1, TILE_CHANNELS)


class StaticKvqCodec(AssetCodec):
    """Best for chunks of less than 128 tokens. Needs an asset of its model."""

    name = "kvq:static"
    codec_id = 13
    revision = 1
    accuracy = Accuracy.bounded
    kind = AssetKind.kvq
    tables = KvqStatistics

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, tables: Sequence[PartStatistics]
    ) -> CodedLayer | None:
        dtype = layer.component.dtype
        encoding = Encoding(layer, 0, KvqLoops())
        encoding.frequencies = _frequencies(tables)
        shifts: list[NDArray[np.int8]] = []
        ratios = ratios_of(layer.component, RATIOS[self.quality])
        for block in Cut.of(layer.component).blocks:
            angles = angles_of(encoding.frequencies, layer.position, block)
            for part, mine, turned, ratio in zip(
                bits, tables, (angles, None), ratios, strict=False
            ):
                found = _quantise(part[:, block], dtype, turned, ratio, mine)
                if found is None:
                    return None
                shifts.append(found[1])
                encoding.add(found[0], [], turned)
            encoding.end_block()
        body = encoding.body()
        stream = body.stream
        fields: list[Table | bytes] = [
            _COUNTS.pack(len(stream.words), len(body.values), body.error_bound, 0),
            body.steps, stream.states, stream.counts.astype("<u2"), body.escapes.astype("<u2"),
            stream.words, body.values, *shifts,
        ]  # fmt: skip
        return layer.position, fields, body.error_bound

    @override
    def decode_coded(
        self, cut: ByteCutter, component: Component, out: Sequence[Part], head: Coded,
        position: int | None,
    ) -> None:  # fmt: skip
        place = moved_to(position, head.number, head.tables[0].frequencies)
        decoding = Decoding(_parsed(cut, component, head.tables), component)
        decoding.write(out, _frequencies(head.tables), place)


def _frequencies(statistics: Sequence[PartStatistics]) -> Floats:
    found = statistics[0].frequencies
    return NO_FREQUENCIES if found is None else found


def _quantise(
    bits: Part, dtype: DType, angles: Angles | None, ratio: float, mine: PartStatistics
) -> tuple[Tiles, NDArray[np.int8]] | None:
    """Return the tiles of a block's part and their shifts; None if the bound cannot be kept."""
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
    quotients = np.rint(difference * (np.float32(1) / steps)[:, None, None])
    errors = errors_of(x, mine.means, steps, quotients)
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


def _parsed(cut: ByteCutter, component: Component, statistics: Sequence[PartStatistics]) -> Body:
    """Return the body of a layer, checking sizes before use. Raises InvalidFrameError."""
    words, escaped, error_bound, zero = _COUNTS.unpack(cut.take("<u1", _COUNTS.size).tobytes())
    if zero or not 0 <= error_bound < np.inf:
        raise InvalidFrameError("head", (zero, error_bound), "zero, and a finite bound")
    tiles, columns = tile_count(component), Cut.of(component).columns
    steps = cut.take("<f4", tiles)
    states = cut.take("<u4", tiles * LANES).reshape(tiles, LANES)
    counts, escapes = (cut.take("<u2", tiles).astype(np.uint32) for _ in range(2))
    stream = Stream(states, counts, cut.take("<u2", words))
    values, shifts = cut.take("<i2", escaped), cut.take("<i1", tiles)
    cut.end()
    mine = [statistics[at // columns % len(statistics)] for at in range(0, tiles, columns)]
    means = np.concatenate([one.means for one in mine])
    models = [one.models(each) for one, each in zip(mine, shifts.reshape(-1, columns), strict=True)]
    body = Body(
        0, error_bound, NO_FREQUENCIES, steps, escapes, means, np.concatenate(models), stream,
        values,
    )  # fmt: skip
    check_body(body)
    return body
