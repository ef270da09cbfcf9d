from __future__ import annotations

import dataclasses
import struct
from functools import partial
from typing import Any

import numpy as np
import pytest
from contracts.codec import SCRATCH_BYTES, filled, layouts, peak_bytes, template
from helpers.cachegen_samples import MODEL, smooth
from helpers.kvt_samples import (
    KV,
    LATENT,
    POSITION,
    ROPE,
    bound,
    calibrated,
    chunk,
    decode,
    encode,
    framed,
    low_rank,
    noise_of,
    shelf_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.asset_codec import HEAD_BYTES
from kvstore.codecs.asset_shelf import ASSETS, AssetShelf
from kvstore.codecs.assets import AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.floats import FLOAT_TYPES, to_float32
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvt import SINK_TOKENS, KvtCodec
from kvstore.codecs.kvt_profile import KvtProfile
from kvstore.codecs.kvt_tables import KvtTables
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.terms import EncodeTerms, LayerTerms
from kvstore.codecs.transcode import transcode
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

# --- frames


def test_finer_qualities_have_smaller_errors_and_larger_frames() -> None:
    sizes, noises = [], []
    for quality in range(4):
        codec = KvtCodec(quality, shelf_of(KV, LATENT))
        header, frame = framed(codec, KV, LATENT)
        assert (header.accuracy, header.error_bound) == (Accuracy.approximate, 0)
        assert header.asset == calibrated(KV, LATENT).digest
        out = empty_tensors(header.layout)
        codec.decode_into(header, frame, out)
        sizes.append(len(frame))
        noises.append(max(noise_of(out[0][1], chunk(KV)[0][1], KV.dtype)))
    assert sizes == sorted(sizes)
    assert noises == sorted(noises, reverse=True)
    assert noises[3] < 0.002
    assert noises[0] < 0.2


def test_what_varies_in_few_directions_takes_less_than_half_of_kvq_at_no_more_noise() -> None:
    parts = chunk(KV)[0][0]
    codec = bound(2, KV)
    data, _ = encode(codec, parts, KV)
    kvq = KvqCodec(2)
    room = np.empty(kvq.max_segment_bytes(KV), np.uint8)
    used = kvq.encode_layer(parts, LayerTerms(KV, 0, 1, POSITION, ROPE), room).stored_bytes
    back = [np.zeros_like(part) for part in parts]
    kvq.decode_layer([room[:used]], KV, back, None)
    assert len(data) < used / 2
    ours, theirs = (noise_of(found, parts, KV.dtype) for found in (decode(codec, data, KV), back))
    assert max(ours) < 2 * max(theirs)


def test_keys_are_turned_to_where_the_caller_wants_them() -> None:
    codec = bound(3, KV)
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    for position in (0, 511, 9000):
        elsewhere = chunk(KV, position=position)[0][0]
        assert max(noise_of(decode(codec, data, KV, position), elsewhere, KV.dtype)) < 0.002
    assert all(map(np.array_equal, decode(codec, data, KV, POSITION), decode(codec, data, KV)))


@pytest.mark.parametrize("position", [0, 1])
def test_the_first_tokens_of_a_prompt_and_only_those_come_back_exactly(position: int) -> None:
    codec, parts = bound(0, KV), chunk(KV, position=position)[0][0]
    for part in parts:
        part[:, :SINK_TOKENS] ^= 0x0080  # twice or half as large
    data, encoded = encode(codec, parts, KV, position)
    assert encoded.accuracy is Accuracy.approximate
    back = decode(codec, data, KV)
    same = [
        np.array_equal(a[:, :SINK_TOKENS], b[:, :SINK_TOKENS])
        for a, b in zip(back, parts, strict=True)
    ]
    assert same == [position == 0] * 2
    assert not np.array_equal(back[0][:, SINK_TOKENS:], parts[0][:, SINK_TOKENS:])


def test_the_first_tokens_move_with_the_others() -> None:
    codec = bound(3, KV)
    data, _ = encode(codec, chunk(KV, position=0)[0][0], KV, 0)
    moved = decode(codec, data, KV, 700)
    assert max(noise_of(moved, chunk(KV, position=700)[0][0], KV.dtype)) < 0.002
    assert (
        max(noise_of([moved[0][:, :4]], [chunk(KV, position=700)[0][0][0][:, :4]], KV.dtype))
        < 0.002
    )


def test_without_a_rotary_embedding_keys_stay_where_they_are() -> None:
    asset = calibrated(KV, rope=None)
    codec = KvtCodec(1, AssetShelf(), asset)
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    decode(codec, data, KV, POSITION)
    with pytest.raises(InvalidRequestError, match="no rotary embedding"):
        decode(codec, data, KV, POSITION + 1)


def test_terms_of_the_engine_change_nothing_and_another_layouts_are_refused() -> None:
    codec, layout = KvtCodec(1, shelf_of(KV)), KVLayout((KV,))
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    terms = EncodeTerms(ROPE, (3, 8), 9)
    header = codec.encode(template(layout), chunk(KV), out, terms)
    assert np.array_equal(out[: header.frame_bytes], framed(codec, KV)[1])
    with pytest.raises(InvalidRequestError, match="layer_ids"):
        codec.encode(template(layout), chunk(KV), out, EncodeTerms(layer_ids=(1, 2, 3)))


def test_demotion_and_promotion_go_by_the_shelf_of_the_process() -> None:
    ASSETS.add(calibrated(KV, LATENT))
    layout = KVLayout((KV, LATENT))
    raw = np.empty(RawCodec().max_frame_bytes(layout), np.uint8)
    RawCodec().encode(template(layout), chunk(KV, LATENT), raw)
    codec = codec_by_name("kvt:2")
    room = np.empty(codec.max_frame_bytes(layout), np.uint8)
    header = transcode(raw, codec, room)
    assert np.array_equal(
        room[: header.frame_bytes], framed(KvtCodec(2, shelf_of(KV, LATENT)), KV, LATENT)[1]
    )
    back = np.empty_like(raw)
    assert transcode(room[: header.frame_bytes], RawCodec(), back).accuracy is Accuracy.approximate


# --- what cannot be coded


@pytest.mark.parametrize("bad", [0x7F80, 0xFFC1, 0x7F7F])
def test_nan_infinity_and_the_largest_numbers_are_kept_exactly(bad: int) -> None:
    parts = chunk(KV)[0][0]
    parts[1][0, 9, 5] = bad
    data, encoded = encode(bound(1, KV), parts, KV)
    assert (encoded.accuracy, data[0]) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(bound(1, KV), data, KV), parts))


def test_what_lies_far_outside_of_the_calibration_is_kept_exactly() -> None:
    parts = [part + np.uint16(0x0500) for part in chunk(KV)[0][0]]
    data, encoded = encode(bound(1, KV), parts, KV)
    assert encoded.accuracy is Accuracy.exact
    assert all(map(np.array_equal, decode(bound(1, KV), data, KV), parts))


def test_a_few_outliers_are_escaped() -> None:
    parts = chunk(KV)[0][0]
    parts[1][:, 9] += np.uint16(0x0280)
    data, encoded = encode(bound(3, KV), parts, KV)
    assert encoded.accuracy is Accuracy.approximate
    plain, _ = encode(bound(3, KV), chunk(KV)[0][0], KV)
    assert len(data) > len(plain)
    # What is left is the part of the outlier that lies outside of the components.
    assert max(noise_of(decode(bound(3, KV), data, KV), parts, KV.dtype)) < 0.03


@pytest.mark.parametrize("dtype", sorted(set(DType) - FLOAT_TYPES), ids=lambda dtype: dtype.name)
def test_types_that_are_no_floats_are_kept_exactly(dtype: DType) -> None:
    for layout in layouts(dtype).values():
        for component, layers in zip(layout.components, filled(layout), strict=True):
            data, encoded = encode(bound(), layers[0], component)
            assert encoded.accuracy is Accuracy.exact
            assert all(map(np.array_equal, decode(bound(), data, component), layers[0]))


def test_states_are_kept_as_they_are() -> None:
    state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1)
    parts = [np.arange(700, dtype="<u4").reshape(state.shape)]
    room = np.zeros(bound().max_segment_bytes(state), np.uint8)
    layer = bound().encode_layer(parts, LayerTerms(state), room)
    assert (layer.accuracy, layer.stored_bytes) == (Accuracy.exact, 24 + state.layer_bytes)
    out = [np.zeros(state.shape, "<u4")]
    bound().decode_layer([room[: layer.stored_bytes]], state, out, None)
    assert np.array_equal(out[0], parts[0])


# --- assets


def test_without_the_models_asset_nothing_is_encoded_or_decoded() -> None:
    header, frame = framed(KvtCodec(1, shelf_of(KV)), KV)
    layout, out = KVLayout((KV,)), chunk(KV, seed=1)
    empty = KvtCodec(1, AssetShelf())
    with pytest.raises(UnknownCodecError, match=f"kvt for model {MODEL.hex()}"):
        empty.encode(template(layout), chunk(KV), np.empty(1 << 20, np.uint8))
    with pytest.raises(UnknownCodecError, match=f"asset {header.asset.hex()}"):
        empty.decode_into(header, frame, out)
    foreign = KvtCodec(1, shelf_of(KV, model=bytes(16)))
    room = np.empty(foreign.max_frame_bytes(layout), np.uint8)
    foreign.encode(template(layout, representation=bytes(16)), chunk(KV), room)
    forged = parse_header(room)
    fields = {one.name: getattr(forged, one.name) for one in dataclasses.fields(forged)}
    with pytest.raises(ModelError, match=r"asset\.representation"):
        foreign.decode_into(FrameHeader(**fields | {"representation": MODEL}), room, out)
    assert all(map(np.array_equal, out[0][0], chunk(KV, seed=1)[0][0]))


def test_a_chunk_of_another_shape_than_the_assets_is_refused_by_name() -> None:
    wide = Component(LayerKind.attention, DType.bfloat16, 2, 3, 64, 64)
    with pytest.raises(LayoutMismatchError, match="calibrate for this model"):
        framed(KvtCodec(1, shelf_of(KV)), wide)


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("0.basis", lambda t: t * np.float32(np.nan)),
        ("0.basis", lambda t: t * np.float32(9)),
        ("0.basis", lambda t: t.astype("<f2")),
        ("0.means", lambda t: t[..., 1:]),
        ("0.means", lambda t: t * np.float32(np.inf)),
        ("0.means", lambda t: t + np.float32(1e30)),
        ("0.deviations", lambda t: t * 0),
        ("0.deviations", lambda t: t * np.float32(1e30)),
        ("0.variances", lambda t: t[..., 1:]),
        ("0.rope", lambda t: t * np.float32(np.nan)),
        ("0.basis", None),
        ("0.deviations", None),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_asset_whose_tables_are_wrong_is_refused_by_name(table: str, change: Any) -> None:
    tables = dict(calibrated(KV).tables)
    if change is None:
        del tables[table]
    else:
        tables[table] = change(tables[table])
    asset = parse_asset(pack_asset(AssetKind.kvt, MODEL, 1, tables))
    with pytest.raises(InvalidRequestError, match="asset"):
        KvtTables.of(asset)


def test_bases_are_orthonormal_and_sorted_by_variance() -> None:
    tables = calibrated(KV).tables
    for at in np.ndindex(2, 2):
        basis, variances = tables["0.basis"][at], tables["0.variances"][at]
        assert np.allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-5)
        assert (np.diff(variances) <= 0).all()
    assert tables["0.basis"].shape[3] < 30  # of 96 channels


def test_a_profile_refuses_what_it_cannot_describe() -> None:
    dynamic = RopeParameters(10000.0, 32, "dynamic", (("factor", 2.0),))
    with pytest.raises(InvalidRequestError, match="rope='dynamic'"):
        KvtProfile([KV], dynamic)
    with pytest.raises(InvalidRequestError, match="samples=0"):
        KvtProfile([KV], ROPE).tables()
    with pytest.raises(InvalidRequestError, match="component='attention'"):
        KvtProfile([Component(LayerKind.attention, DType.int8, 1, 1, 8, 16)], None)
    bad = chunk(KV)
    bad[0][1][0][0, 0, 0] = 0x7FC0
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        KvtProfile([KV], ROPE).add(bad, POSITION)


# --- bodies that nobody wrote


@pytest.mark.parametrize("component", [KV, LATENT], ids=lambda component: component.kind.name)
def test_every_other_length_is_refused(component: Component) -> None:
    codec = bound(1, component)
    data, _ = encode(codec, chunk(component)[0][0], component)
    for size in range(0, len(data), 5):
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
        (2, b"\2\0"),
        (HEAD_BYTES, b"\0\0"),
        (HEAD_BYTES, b"\xff\xff"),
        (HEAD_BYTES + 2, b"\5\0"),
        (HEAD_BYTES + 4, struct.pack("<I", 0xFFFFFFFF)),
        (HEAD_BYTES + 8, struct.pack("<I", 0xFFFFFFFF)),
        (HEAD_BYTES + 12, b"\x40"),
    ],
)
def test_heads_and_counts_that_cannot_be_are_refused(at: int, value: bytes) -> None:
    codec = bound(1, KV)
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    data[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(InvalidFrameError):
        decode(codec, data, KV)


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_any_changed_bytes_are_refused_or_finite_numbers(seed: int) -> None:
    codec, rng = bound(1, KV), np.random.default_rng(seed)
    parts = chunk(KV)[0][0]
    parts[1][:, 9] += np.uint16(0x0280 * (seed % 2))
    right, _ = encode(codec, parts, KV)
    for _ in range(12):  # cases an example: drawing and encoding cost more than decoding
        data = right.copy()
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(0, len(data) if rng.random() < 0.6 else 48)] = rng.integers(0, 256)
        data = data[: rng.integers(1, len(data))] if rng.random() < 0.2 else data
        try:
            back = decode(codec, data, KV)
        except (InvalidFrameError, UnknownCodecError):
            continue
        assert all(np.isfinite(to_float32(part, KV.dtype)).all() for part in back)


def test_decoding_holds_no_more_than_a_layer_and_a_fixed_scratch() -> None:
    large = Component(LayerKind.attention, DType.bfloat16, 1, 4, 64, 2047)
    codec, parts = bound(3, large), smooth(large, 1)[0]
    data, _ = encode(codec, low_rank(large, 5)[0], large)
    decode_ = partial(codec.decode_layer, [data], large, parts, None)
    decode_()
    assert peak_bytes(decode_) <= large.layer_bytes + SCRATCH_BYTES
