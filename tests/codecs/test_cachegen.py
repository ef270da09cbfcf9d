from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from contracts.codec import SCRATCH_BYTES, filled, layouts, peak_bytes, template
from helpers.cachegen_samples import (
    ALL,
    GQA,
    MODEL,
    bound,
    calibrated,
    chunk,
    decode,
    encode,
    framed,
    layout_of,
    shelf_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.asset_shelf import ASSETS, AssetShelf
from kvstore.codecs.assets import AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.cachegen_profile import THIRDS, CachegenProfile
from kvstore.codecs.cachegen_tables import GROUP_TOKENS, QUALITIES, CachegenTables
from kvstore.codecs.floats import FLOAT_TYPES, to_float32
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.terms import EncodeTerms
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, parse_header
from kvstore.proto.types import Accuracy, Component, DType, LayerKind


def largest(
    codec: CachegenCodec, header: FrameHeader, frame: Bytes, *components: Component
) -> float:
    out = empty_tensors(header.layout)
    codec.decode_into(header, frame, out)
    errors = []
    for component, layers, wanted in zip(components, out, chunk(components), strict=True):
        for parts, originals in zip(layers, wanted, strict=True):
            for found, part in zip(parts, originals, strict=True):
                values = to_float32(found, component.dtype) - to_float32(part, component.dtype)
                errors.append(float(np.abs(values).max()))
    return max(errors)


# --- frames


@pytest.mark.parametrize("quality", range(len(QUALITIES)))
def test_the_bound_in_the_frame_holds_and_is_met(quality: int) -> None:
    codec = CachegenCodec(quality, shelf_of(*ALL))
    header, frame = framed(codec, *ALL)
    check_frame(frame)
    assert (header.accuracy, header.asset) == (Accuracy.bounded, calibrated(*ALL).digest)
    error = largest(codec, header, frame, *ALL)
    assert error <= header.error_bound <= error * (1 + 2**-20)


def test_finer_qualities_have_smaller_errors_and_larger_frames() -> None:
    found = [framed(CachegenCodec(quality, shelf_of(GQA)), GQA)[0] for quality in range(4)]
    sizes = [header.frame_bytes for header in found]
    bounds = [header.error_bound for header in found]
    assert sizes == sorted(sizes)
    assert bounds == sorted(bounds, reverse=True)
    assert sizes[0] < GQA.layers * GQA.layer_bytes / 2


def test_bins_are_halves_of_their_width_in_exact_arithmetic() -> None:
    codec = bound(1, GQA)
    widths = calibrated(GQA).tables["0.widths"]
    for layer, parts in enumerate(chunk((GQA,))[0]):
        data, _ = encode(codec, parts, GQA, layer)
        for part, found, width in zip(parts, decode(codec, data, GQA), widths[layer], strict=True):
            numbers, values = to_float32(found, GQA.dtype), to_float32(part, GQA.dtype)
            error = np.abs(numbers - values)
            anchors = np.abs(values[:, ::GROUP_TOKENS]).max(2, keepdims=True) / 127
            rounding = np.abs(numbers) * 2.0**-8
            assert (error <= width[:, None, None] * 0.501 + rounding)[:, 1:GROUP_TOKENS].all()
            assert (error[:, ::GROUP_TOKENS] <= anchors * 0.51 + rounding[:, ::GROUP_TOKENS]).all()


def test_bins_widen_by_thirds_of_the_depth() -> None:
    flat = Component(LayerKind.attention, DType.float32, 6, 1, 64, 40)
    profile = CachegenProfile([flat], [layer / 6 for layer in range(6)])
    one = chunk((flat,), 1)[0][0]
    profile.measure([[one] * 6])
    widths = profile.widths()[0]
    assert np.allclose(widths / widths[2], np.repeat(THIRDS, 2)[:, None, None])


def test_any_codec_of_the_shelf_reads_the_frame_whatever_its_quality() -> None:
    header, frame = framed(CachegenCodec(3, shelf_of(*ALL)), *ALL)
    outs = []
    for quality in (0, 3):
        outs.append(empty_tensors(header.layout))
        CachegenCodec(quality, shelf_of(*ALL)).decode_into(header, frame, outs[-1])
    for first, second in zip(*outs, strict=True):
        for one, other in zip(first, second, strict=True):
            assert all(map(np.array_equal, one, other))


def test_terms_of_the_engine_change_nothing() -> None:
    codec, layout = CachegenCodec(1, shelf_of(GQA)), layout_of(GQA)
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    terms = EncodeTerms(layer_ids=(4, 9, 30), model_layers=31)
    header = codec.encode(template(layout), chunk((GQA,)), out, terms)
    assert np.array_equal(out[: header.frame_bytes], framed(codec, GQA)[1])


def test_old_editions_are_read_and_the_newest_writes() -> None:
    shelf = shelf_of(GQA)
    header, frame = framed(CachegenCodec(1, shelf), GQA)
    shelf.add(calibrated(GQA, edition=2))
    newer, _ = framed(CachegenCodec(1, shelf), GQA)
    assert newer.asset != header.asset
    codec = CachegenCodec(1, shelf)
    assert largest(codec, header, frame, GQA) <= header.error_bound


def test_tensors_of_any_strides_make_the_same_frame() -> None:
    codec = bound(2, GQA)
    parts = chunk((GQA,))[0][0]
    pages = [np.ascontiguousarray(part.transpose(1, 0, 2)).transpose(1, 0, 2) for part in parts]
    assert np.array_equal(encode(codec, parts, GQA)[0], encode(codec, pages, GQA)[0])


def test_frames_may_lie_at_odd_addresses() -> None:
    codec = CachegenCodec(1, shelf_of(*ALL))
    header, frame = framed(codec, *ALL)
    odd = np.empty(len(frame) + 1, np.uint8)[1:]
    odd[:] = frame
    outs = [empty_tensors(header.layout) for _ in range(2)]
    for each, out in zip((frame, odd), outs, strict=True):
        codec.decode_into(header, each, out)
    for one, other in zip(outs[0], outs[1], strict=True):
        for parts, others in zip(one, other, strict=True):
            assert all(map(np.array_equal, parts, others))


def test_threads_share_one_codec() -> None:
    codec, expected = CachegenCodec(1, shelf_of(GQA)), framed(CachegenCodec(1, shelf_of(GQA)), GQA)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: framed(codec, GQA)[1], range(8)))
    assert all(np.array_equal(frame, expected[1]) for frame in found)


def test_demotion_and_promotion_go_by_the_shelf_of_the_process() -> None:
    ASSETS.add(calibrated(*ALL))
    layout, tensors = layout_of(*ALL), chunk(ALL)
    raw = np.empty(RawCodec().max_frame_bytes(layout), np.uint8)
    RawCodec().encode(template(layout), tensors, raw)
    codec = codec_by_name("cachegen:2")
    room = np.empty(codec.max_frame_bytes(layout), np.uint8)
    header = transcode(raw, codec, room)
    there = room[: header.frame_bytes]
    assert np.array_equal(there, framed(CachegenCodec(2, shelf_of(*ALL)), *ALL)[1])
    assert np.array_equal(there, room[: transcode(there.copy(), codec, room).frame_bytes])
    back = np.empty_like(raw)
    promoted = transcode(there, RawCodec(), back)
    assert (promoted.accuracy, promoted.error_bound) == (Accuracy.bounded, header.error_bound)


# --- what cannot be coded


@pytest.mark.parametrize("bad", [0x7F80, 0xFFC1, 0x7F7F])
def test_nan_infinity_and_what_float16_cannot_scale_are_kept_exactly(bad: int) -> None:
    parts = chunk((GQA,))[0][0]
    parts[1][0, 0, 5] = bad
    data, encoded = encode(bound(1, GQA), parts, GQA)
    assert (encoded.accuracy, encoded.error_bound) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(bound(1, GQA), data, GQA), parts))


def test_a_few_outliers_are_escaped_and_many_keep_the_layer_as_it_is() -> None:
    codec, few = bound(1, GQA), chunk((GQA,))[0][0]
    few[0][1, 3, 7] ^= 0x0380  # an exponent larger by seven
    data, encoded = encode(codec, few, GQA)
    assert encoded.accuracy is Accuracy.bounded
    assert struct.unpack("<I", data[4:8].tobytes())[0] >= 1
    values = to_float32(few[0], GQA.dtype)
    found = to_float32(decode(codec, data, GQA)[0], GQA.dtype)
    assert abs(values[1, 3, 7] - found[1, 3, 7]) <= encoded.error_bound
    many = [
        part + np.where(np.arange(64) % 4 == 0, np.uint16(0x0400), np.uint16(0)) for part in few
    ]
    data, encoded = encode(codec, many, GQA)
    assert (encoded.accuracy, data[0]) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(codec, data, GQA), many))


@pytest.mark.parametrize("dtype", sorted(set(DType) - FLOAT_TYPES), ids=lambda dtype: dtype.name)
def test_types_that_are_no_floats_are_kept_exactly(dtype: DType) -> None:
    for layout in layouts(dtype).values():
        for component, layers in zip(layout.components, filled(layout), strict=True):
            data, encoded = encode(bound(), layers[0], component)
            assert encoded.accuracy is Accuracy.exact
            assert all(map(np.array_equal, decode(bound(), data, component), layers[0]))


def test_states_are_kept_as_they_are() -> None:
    state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1)
    parts = chunk((state,))[0][0]
    data, layer = encode(bound(), parts, state)
    assert (layer.accuracy, len(data)) == (Accuracy.exact, 24 + state.layer_bytes)
    out = [np.zeros(state.shape, "<u4")]
    bound().decode_layer([data], state, out, None)
    assert np.array_equal(out[0], parts[0])


def test_keys_are_not_rotated() -> None:
    codec, parts = bound(1, GQA), chunk((GQA,))[0][0]
    data, _ = encode(codec, parts, GQA)
    with pytest.raises(InvalidRequestError, match="position=3"):
        codec.decode_layer([data], GQA, parts, 3)


@pytest.mark.parametrize("terms", ["4", "-1", "", "fine"])
def test_a_quality_that_is_none_is_refused(terms: str) -> None:
    with pytest.raises(UnknownCodecError, match="0 to 3"):
        CachegenCodec.of(terms)


# --- assets


def test_without_an_asset_of_the_model_nothing_is_encoded() -> None:
    layout = layout_of(GQA)
    shelf = AssetShelf()
    shelf.add(calibrated(GQA, model=bytes(16)))
    out = np.empty(1 << 20, np.uint8)
    with pytest.raises(UnknownCodecError, match=f"cachegen for model {MODEL.hex()}"):
        CachegenCodec(1, shelf).encode(template(layout), chunk((GQA,)), out)
    with pytest.raises(UnknownCodecError, match="without an asset"):
        encode(CachegenCodec(1, shelf), chunk((GQA,))[0][0], GQA)


def test_frames_whose_asset_is_missing_or_anothers_are_refused_and_nothing_is_written() -> None:
    header, frame = framed(CachegenCodec(1, shelf_of(GQA)), GQA)
    out = chunk((GQA,), 3)
    with pytest.raises(UnknownCodecError, match=f"asset {header.asset.hex()}"):
        CachegenCodec(1, AssetShelf()).decode_into(header, frame, out)
    foreign = AssetShelf()
    foreign.add(calibrated(GQA, model=bytes(16)))
    layout = layout_of(GQA)
    room = np.empty(CachegenCodec(1, foreign).max_frame_bytes(layout), np.uint8)
    other = template(layout, representation=bytes(16))
    header = CachegenCodec(1, foreign).encode(other, chunk((GQA,)), room)
    forged = replace(parse_header(room[: header.frame_bytes]), representation=MODEL)
    with pytest.raises(ModelError, match=r"asset\.representation"):
        CachegenCodec(1, foreign).decode_into(forged, room[: header.frame_bytes], out)
    assert all(map(np.array_equal, out[0][0], chunk((GQA,), 3)[0][0]))


def test_a_chunk_of_another_shape_than_the_assets_is_refused_by_name() -> None:
    wide = Component(LayerKind.attention, DType.bfloat16, 3, 2, 128, 47)
    with pytest.raises(LayoutMismatchError, match="calibrate for this model"):
        framed(CachegenCodec(1, shelf_of(GQA)), wide)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("0.widths", lambda t: t * 0, "0.widths"),
        ("0.widths", lambda t: t * np.float32(np.nan), "0.widths"),
        ("0.widths", lambda t: -t, "0.widths"),
        ("0.widths", lambda t: t.astype("<f2"), "0.widths"),
        ("0.anchors", lambda t: t | np.uint8(0x40), "0.models"),
        ("0.deltas", lambda t: t | np.uint8(0x80), "0.models"),
        ("0.deltas", lambda t: t[1:], "0.deltas"),
        ("0.anchors", lambda t: t[..., 1:], "0.deltas"),
        ("anchors", lambda t: t[:, 1:], "anchors"),
        ("anchors", lambda t: np.concatenate([t, t]), "books"),
        ("deltas", lambda t: t + np.uint16(1), "books"),
        ("deltas", lambda t: np.where(t == 1, 0, t).astype("<u2"), "books"),
        ("0.widths", None, "0.widths"),
        ("deltas", None, "deltas"),
    ],
)
def test_an_asset_whose_tables_are_wrong_is_refused_by_name(
    table: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    tables = dict(calibrated(GQA).tables)
    if change is None:
        del tables[table]
    else:
        tables[table] = change(tables[table])
    asset = parse_asset(pack_asset(AssetKind.cachegen, MODEL, 1, tables))
    with pytest.raises(InvalidRequestError, match=message):
        CachegenTables.of(asset)


# --- bodies that nobody wrote


@pytest.mark.parametrize("component", ALL, ids=lambda component: component.kind.name)
def test_every_shorter_segment_is_refused(component: Component) -> None:
    codec = bound(1, component)
    data, _ = encode(codec, chunk((component,))[0][0], component)
    for size in range(0, len(data), 7):
        with pytest.raises(InvalidFrameError):
            decode(codec, data[:size], component)
    with pytest.raises(InvalidFrameError):
        decode(codec, np.append(data, np.uint8(0)), component)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"\2"),
        (0, b"\0"),
        (1, b"\4"),
        (2, b"\3\0"),
        (2, b"\xff\xff"),
        (4, b"\xff\xff\xff\xff"),
        (24, b"\0\x7e"),
        (24 + 2 * 2 * 2 * 5 + 4 * 32 * 4, b"\xff\xff\xff\xff"),
    ],
)
def test_heads_and_counts_that_cannot_be_are_refused(at: int, value: bytes) -> None:
    codec = bound(1, GQA)
    data, _ = encode(codec, chunk((GQA,))[0][0], GQA)
    data[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(InvalidFrameError):
        decode(codec, data, GQA)


def test_a_segment_of_another_asset_is_refused_by_name() -> None:
    codec = bound(1, GQA)
    data, _ = encode(codec, chunk((GQA,))[0][0], GQA)
    data[8] ^= 1
    with pytest.raises(UnknownCodecError, match="cachegen with asset"):
        decode(codec, data, GQA)


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_any_changed_bytes_are_refused_or_finite_numbers(seed: int) -> None:
    codec, rng = bound(1, GQA), np.random.default_rng(seed)
    parts = chunk((GQA,))[0][0]
    if seed % 2:
        parts[0][1, 3, 7] ^= 0x0380
    right, _ = encode(codec, parts, GQA)
    for _ in range(12):  # cases an example: drawing and encoding cost more than decoding
        data = right.copy()
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(0, len(data) if rng.random() < 0.6 else 64)] = rng.integers(0, 256)
        data = data[: rng.integers(1, len(data))] if rng.random() < 0.2 else data
        try:
            back = decode(codec, data, GQA)
        except (InvalidFrameError, UnknownCodecError):
            continue
        assert all(np.isfinite(to_float32(part, GQA.dtype)).all() for part in back)


def test_decoding_holds_no_more_than_a_layer_and_a_fixed_scratch() -> None:
    large = Component(LayerKind.attention, DType.bfloat16, 1, 4, 128, 2047)
    codec, parts = bound(3, large), chunk((large,))[0][0]
    data, _ = encode(codec, parts, large)
    out = [np.empty_like(part) for part in parts]
    peak = peak_bytes(partial(codec.decode_layer, [data], large, out, None))
    assert peak <= large.layer_bytes + SCRATCH_BYTES
