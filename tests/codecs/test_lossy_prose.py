"""Segments of cachegen, kvtc and kvq_static, read by the prose of the format page."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from contracts.lossy_codec import bits_of
from helpers.asset_samples import ODD, SAMPLES, Samples, decode, encode, noise_of
from numpy.typing import NDArray

from kvstore.codecs.assets import Asset
from kvstore.codecs.base import Part
from kvstore.codecs.kvq_models import PADDING_MODEL, kvq_models
from kvstore.codecs.rans import ModelTable, native_backend
from kvstore.codecs.rope import rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.types import Component


class Reader:
    """Takes one field after another."""

    def __init__(self, data: Bytes) -> None:
        self._data = data.tobytes()
        self.at = 0

    def take(self, kind: str, *shape: int) -> NDArray[Any]:
        dtype, count = np.dtype(kind), int(np.prod(shape))
        found = np.frombuffer(self._data, dtype, count, self.at).reshape(shape)
        self.at += found.nbytes
        return found

    @property
    def is_at_end(self) -> bool:
        return self.at == len(self._data)


def with_padding(rows: NDArray[Any], zero: int) -> ModelTable:
    last = np.zeros((1, rows.shape[1]), np.uint16)
    last[0, zero], last[0, zero + 1] = 4095, 1
    return ModelTable(np.concatenate([rows, last]).astype(np.uint16))


def cachegen_tiles(picks: NDArray[Any], padding: int) -> list[NDArray[Any]]:
    """Return the models of each tile of (parts, heads, head_dim)."""
    if picks.shape[2] % 64 == 0:
        return [head for part in picks for head in part]
    flat = [part.reshape(-1) for part in picks]
    return [np.append(row, np.full(-len(row) % 64, padding)).astype(np.uint8) for row in flat]


def decode_tile(
    states: Any, words: Any, models: Any, table: ModelTable, out: NDArray[np.uint8]
) -> None:
    counts = np.array([len(words)], np.uint32)
    native_backend().decode_tiles(states[None], counts, words, models[None], table, out[None])


def cachegen_symbols(
    reader: Reader, states: Any, counts: Any, models: list[Any], table: ModelTable, tokens: int
) -> list[NDArray[Any]]:
    found = []
    for state, count, row in zip(states, counts, models, strict=True):
        tile = np.empty((tokens, len(row)), np.uint8)
        decode_tile(state, reader.take("<u2", int(count)), row, table, tile)
        found.append(tile)
    return found


def read_cachegen(data: Bytes, component: Component, asset: Asset) -> list[Part]:
    heads, tokens, dim = component.shape
    parts, reader, tables = component.parts, Reader(data), asset.tables
    method, quality, layer, escapes = struct.unpack("<BBHI", reader.take("u1", 8).tobytes())
    assert (method, reader.take("u1", 16).tobytes()) == (1, asset.digest)
    anchors = -(-tokens // 10)
    deltas = tokens - anchors
    anchor_models = cachegen_tiles(tables["0.anchors"][layer], len(tables["anchors"]))
    row = quality * component.layers + layer
    delta_models = cachegen_tiles(tables["0.deltas"][row], len(tables["deltas"]))
    tiles = len(anchor_models)
    scales = reader.take("<f2", parts, heads, anchors).astype(np.float32)
    anchor_states, anchor_counts = reader.take("<u4", tiles, 32), reader.take("<u4", tiles)
    delta_states, delta_counts = reader.take("<u4", tiles, 32), reader.take("<u4", tiles)
    places, steps = reader.take("<u4", escapes), reader.take("<i2", escapes)
    lead = cachegen_symbols(
        reader, anchor_states, anchor_counts, anchor_models,
        with_padding(tables["anchors"], 128), anchors,
    )  # fmt: skip
    rest = cachegen_symbols(
        reader, delta_states, delta_counts, delta_models, with_padding(tables["deltas"], 64), deltas
    )
    assert reader.is_at_end
    out = []
    for part in range(parts):
        values = np.zeros(component.shape, np.float32)
        for head, token, channel in np.ndindex(*component.shape):
            tile = part * heads + head if tiles == parts * heads else part
            column = channel if tiles == parts * heads else head * dim + channel
            anchor = np.float32(int(lead[tile][token // 10, column]) - 128)
            value = anchor * scales[part, head, token // 10]
            if token % 10:
                delta = token - token // 10 - 1
                place = ((part * heads + head) * deltas + delta) * dim + channel
                step = int(rest[tile][delta, column]) - 64
                if step == -64:
                    step = int(steps[list(places).index(place)])
                width = tables["0.widths"][layer, part, head]
                width = width * np.float32([2, 1, 0.5, 0.25][quality])
                value = np.float32(step) * width + value
            values[head, token, channel] = value
        out.append(bits_of(values, component.dtype))
    return out


def read_kvtc(data: Bytes, component: Component, asset: Asset) -> list[Part]:
    heads, tokens, dim = component.shape
    reader, tables, out = Reader(data), asset.tables, []
    method, quality, layer, position = struct.unpack("<BBHI", reader.take("u1", 8).tobytes())
    assert (method, reader.take("u1", 16).tobytes()) == (1, asset.digest)
    for part in range(component.parts):
        kept, sinks, escapes, words = struct.unpack("<HHII", reader.take("u1", 12).tobytes())
        exact = reader.take(f"<u{component.dtype.item_bytes}", heads, sinks, dim)
        models = np.full(kept + -kept % 64, PADDING_MODEL, np.uint8)
        models[:kept] = reader.take("u1", kept)
        states, places = reader.take("<u4", 32), reader.take("<u4", escapes)
        steps = reader.take("<i2", escapes)
        tile = np.empty((tokens, len(models)), np.uint8)
        decode_tile(states, reader.take("<u2", words), models, kvq_models().table, tile)
        numbers = tile[:, :kept].astype(np.float64) - 64
        numbers.reshape(-1)[places] = steps
        numbers *= float(tables["0.deviations"][layer, part]) / 2**quality
        basis = tables["0.basis"][layer, part][:, :kept].astype(np.float64)
        rows = numbers @ basis.T + tables["0.means"][layer, part]
        values = rows.reshape(tokens, heads, dim).transpose(1, 0, 2).astype(np.float32)
        values = np.ascontiguousarray(values)
        if part == 0 and "0.rope" in tables:
            rotate(values, *rotation(tables["0.rope"], position, tokens))
        bits = bits_of(values, component.dtype)
        bits[:, :sinks] = exact
        out.append(bits)
    assert reader.is_at_end
    return out


def read_kvq_static(data: Bytes, component: Component, asset: Asset) -> list[Part]:
    heads, tokens, dim = component.shape
    columns, reader, tables = -(-heads * dim // 128), Reader(data), asset.tables
    method, _, layer, position = struct.unpack("<BBHI", reader.take("u1", 8).tobytes())
    assert (method, reader.take("u1", 16).tobytes()) == (1, asset.digest)
    words, escapes, _, zero = struct.unpack("<IIfI", reader.take("u1", 16).tobytes())
    assert zero == 0
    tiles = component.parts * columns  # one block: chunks here are short
    steps, states = reader.take("<f4", tiles), reader.take("<u4", tiles, 32)
    counts, escaped = reader.take("<u2", tiles), reader.take("<u2", tiles)
    streams = np.split(reader.take("<u2", words), np.cumsum(counts)[:-1])
    steps_of_escapes = iter(reader.take("<i2", escapes).tolist())
    shifts = reader.take("<i1", tiles)
    assert reader.is_at_end
    out = []
    for part in range(component.parts):
        values = np.zeros((tokens, columns * 128), np.float32)
        for column in range(columns):
            tile, models = part * columns + column, np.full(128, PADDING_MODEL, np.uint8)
            symbols, found = np.empty((tokens, 128), np.uint8), 0
            for channel in range(min(128, heads * dim - 128 * column)):
                scale = int(tables["0.scales"][layer, part, 128 * column + channel])
                shifted = min(max(scale // 2 - 64 + int(shifts[tile]), 0), 31)
                models[channel] = 2 * shifted + scale % 2
            decode_tile(states[tile], streams[tile], models, kvq_models().table, symbols)
            for token, channel in np.ndindex(tokens, 128):
                quotient = int(symbols[token, channel]) - 64
                if quotient == -64:
                    quotient, found = next(steps_of_escapes), found + 1
                if 128 * column + channel < heads * dim:
                    mean = np.float32(tables["0.means"][layer, part, 128 * column + channel])
                    value = np.float32(quotient) * steps[tile] + mean
                    values[token, 128 * column + channel] = value
            assert found == escaped[tile]
        rows = values[:, : heads * dim].reshape(tokens, heads, dim).transpose(1, 0, 2)
        rows = np.ascontiguousarray(rows)
        if part == 0 and "0.rope" in tables:
            rotate(rows, *rotation(tables["0.rope"], position, tokens))
        out.append(bits_of(rows, component.dtype))
    return out


CACHEGEN, KVTC, KVQ = SAMPLES["cachegen"], SAMPLES["kvtc"], SAMPLES["kvq"]


def coded(samples: Samples, parts: list[Part], component: Component) -> tuple[Bytes, list[Part]]:
    """Return a segment of *parts*, and what the codec makes of it."""
    codec = samples.bound(2, component)
    data, _ = encode(codec, parts, component)
    return data, decode(codec, data, component)


@pytest.mark.parametrize(
    "component", [CACHEGEN.one, ODD, CACHEGEN.latent], ids=["gqa", "odd", "mla"]
)
def test_a_segment_of_cachegen_is_what_the_format_page_says(component: Component) -> None:
    parts = CACHEGEN.parts(component)
    parts[0][0, 33, 7] = bits_of(np.array([100.0]), component.dtype)[0]
    data, expected = coded(CACHEGEN, parts, component)
    assert struct.unpack("<I", data[4:8].tobytes())[0] > 0  # escapes are in it
    found = read_cachegen(data, component, CACHEGEN.calibrated(component))
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("component", [KVTC.one, KVTC.latent], ids=["kv", "latent"])
@pytest.mark.parametrize("position", [0, 300])
def test_a_segment_of_kvtc_is_what_the_format_page_says(
    component: Component, position: int
) -> None:
    codec, parts = KVTC.bound(3, component), KVTC.parts(component, position)
    parts[-1][:, 9] += parts[-1].dtype.type(5 << (8 * component.dtype.item_bytes - 9))
    data, _ = encode(codec, parts, component, position)
    found = read_kvtc(data, component, KVTC.calibrated(component))
    # Sums in another order and precision: the same but for a last bit here and there.
    for one, other, part in zip(found, decode(codec, data, component), parts, strict=True):
        assert noise_of([one], [other], component.dtype) < 1e-5
        sinks = 4 if position == 0 else 0
        assert np.array_equal(one[:, :sinks], part[:, :sinks])


@pytest.mark.parametrize("component", [KVQ.one, KVQ.latent], ids=["kv", "latent"])
def test_a_segment_of_kvq_static_is_what_the_format_page_says(component: Component) -> None:
    parts = KVQ.parts(component)
    parts[-1][0, 9, 3] = bits_of(np.array([1000.0]), component.dtype)[0]
    data, expected = coded(KVQ, parts, component)
    assert struct.unpack("<I", data[28:32].tobytes())[0] > 0  # escapes are in it
    found = read_kvq_static(data, component, KVQ.calibrated(component))
    assert all(map(np.array_equal, found, expected))
