from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from contracts.codec import template
from helpers.cachegen_samples import MODEL
from helpers.kvqs_samples import KV, LATENT, bound, calibrated, shelf_of
from helpers.kvt_samples import POSITION, ROPE, chunk, decode, encode, framed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.asset_codec import HEAD_BYTES
from kvstore.codecs.asset_shelf import AssetShelf
from kvstore.codecs.assets import AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import Part, empty_tensors
from kvstore.codecs.floats import to_float32
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvqs import KvqsCodec
from kvstore.codecs.kvqs_profile import KvqsProfile
from kvstore.codecs.kvqs_tables import KvqsTables, shifts_of
from kvstore.codecs.terms import LayerTerms
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind


def largest_error(found: list[Part], wanted: list[Part], dtype: DType) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(to_float32(a, dtype) - to_float32(b, dtype)).max()) for a, b in pairs)


@pytest.mark.parametrize("component", [KV, LATENT], ids=["kv", "latent"])
def test_finer_qualities_have_smaller_errors_and_their_bounds_hold(component: Component) -> None:
    sizes, errors = [], []
    for quality in range(4):
        codec = KvqsCodec(quality, shelf_of(component))
        header, frame = framed(codec, component)
        assert header.accuracy is Accuracy.bounded
        assert header.asset == calibrated(component).digest
        out = empty_tensors(header.layout)
        codec.decode_into(header, frame, out)
        error = max(
            largest_error(found, wanted, component.dtype)
            for found, wanted in zip(out[0], chunk(component)[0], strict=True)
        )
        assert 0 < error <= header.error_bound
        sizes.append(len(frame))
        errors.append(error)
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)


def test_a_chunk_of_32_tokens_takes_a_sixth_less_than_kvqs_at_nearly_its_error() -> None:
    parts = chunk(KV)[0][0]
    data, encoded = encode(bound(1, KV), parts, KV)
    kvq = KvqCodec(1)
    room = np.empty(kvq.max_segment_bytes(KV), np.uint8)
    theirs = kvq.encode_layer(parts, LayerTerms(KV, 0, 1, POSITION, ROPE), room)
    assert len(data) < theirs.stored_bytes * 5 / 6
    assert encoded.error_bound < 1.25 * theirs.error_bound


def test_keys_are_turned_to_where_the_caller_wants_them() -> None:
    codec = bound(3, KV)
    data, encoded = encode(codec, chunk(KV)[0][0], KV)
    for position in (0, 511, 9000):
        elsewhere = chunk(KV, position=position)[0][0]
        found = decode(codec, data, KV, position)
        assert largest_error(found, elsewhere, KV.dtype) < 2 * encoded.error_bound
    assert all(map(np.array_equal, decode(codec, data, KV, POSITION), decode(codec, data, KV)))


def test_without_a_rotary_embedding_keys_stay_where_they_are() -> None:
    codec = KvqsCodec(1, AssetShelf(), calibrated(KV, rope=None))
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    decode(codec, data, KV, POSITION)
    with pytest.raises(InvalidRequestError, match="no rotary embedding"):
        decode(codec, data, KV, POSITION + 1)


@pytest.mark.parametrize("bad", [0x7F80, 0xFFC1, 0x7F7F])
def test_nan_infinity_and_the_largest_numbers_are_kept_exactly(bad: int) -> None:
    parts = chunk(KV)[0][0]
    parts[1][0, 9, 5] = bad
    data, encoded = encode(bound(1, KV), parts, KV)
    assert (encoded.accuracy, data[0]) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(bound(1, KV), data, KV), parts))


def test_numbers_of_another_size_than_the_models_shift_the_models() -> None:
    parts = [part + np.uint16(0x0080) for part in chunk(KV)[0][0]]  # twice as large
    data, encoded = encode(bound(2, KV), parts, KV)
    assert encoded.accuracy is Accuracy.bounded
    assert largest_error(decode(bound(2, KV), data, KV), parts, KV.dtype) <= encoded.error_bound


def test_shifts_are_quarters_of_octaves_from_scale_ten() -> None:
    quarters = np.arange(-40, 41)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4)), 10 + quarters)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4 + 0.12)), 10 + quarters)
    assert np.array_equal(shifts_of(np.array([1e-60, 1e60])), [-117, 127])


# --- assets


def test_without_the_models_asset_nothing_is_encoded_or_decoded() -> None:
    header, frame = framed(KvqsCodec(1, shelf_of(KV)), KV)
    layout, out = KVLayout((KV,)), chunk(KV, seed=1)
    empty = KvqsCodec(1, AssetShelf())
    with pytest.raises(UnknownCodecError, match=f"kvqs for model {MODEL.hex()}"):
        empty.encode(template(layout), chunk(KV), np.empty(1 << 20, np.uint8))
    with pytest.raises(UnknownCodecError, match=f"asset {header.asset.hex()}"):
        empty.decode_into(header, frame, out)
    foreign = KvqsCodec(1, shelf_of(KV, model=bytes(16)))
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
        framed(KvqsCodec(1, shelf_of(KV)), wide)


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("0.means", lambda t: t * np.float16(np.nan)),
        ("0.means", lambda t: t.astype("<f4")),
        ("0.means", lambda t: np.repeat(t, 2, axis=1)),
        ("0.means", None),
        ("0.scales", lambda t: t[..., 1:]),
        ("0.scales", None),
        ("0.deviations", lambda t: t * 0),
        ("0.deviations", lambda t: t * np.float32(np.nan)),
        ("0.rope", lambda t: t * np.float32(np.nan)),
    ],
)
def test_an_asset_whose_tables_are_wrong_is_refused_by_name(table: str, change: Any) -> None:
    tables = dict(calibrated(KV).tables)
    if change is None:
        del tables[table]
    else:
        tables[table] = change(tables[table])
    asset = parse_asset(pack_asset(AssetKind.kvqs, MODEL, 1, tables))
    with pytest.raises(InvalidRequestError, match="asset"):
        KvqsTables.of(asset)


def test_a_profile_refuses_what_it_cannot_describe() -> None:
    with pytest.raises(InvalidRequestError, match="samples=0"):
        KvqsProfile([KV], ROPE).tables()
    with pytest.raises(InvalidRequestError, match="component='attention'"):
        KvqsProfile([Component(LayerKind.attention, DType.int8, 1, 1, 8, 16)], None)
    bad = chunk(KV)
    bad[0][1][0][0, 0, 0] = 0x7FC0
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        KvqsProfile([KV], ROPE).add(bad, POSITION)


# --- bodies that nobody wrote


@pytest.mark.parametrize("component", [KV, LATENT], ids=["kv", "latent"])
def test_every_other_length_is_refused(component: Component) -> None:
    codec = bound(1, component)
    data, _ = encode(codec, chunk(component)[0][0], component)
    for size in range(0, len(data), 11):
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
        (HEAD_BYTES, struct.pack("<I", 0xFFFFFFFF)),
        (HEAD_BYTES + 4, struct.pack("<I", 0xFFFFFFFF)),
        (HEAD_BYTES + 8, struct.pack("<f", float("nan"))),
        (HEAD_BYTES + 8, struct.pack("<f", -1.0)),
        (HEAD_BYTES + 12, b"\1"),
        (HEAD_BYTES + 16, struct.pack("<f", float("inf"))),
        (HEAD_BYTES + 16, struct.pack("<f", 0.0)),
    ],
)
def test_heads_and_steps_that_cannot_be_are_refused(at: int, value: bytes) -> None:
    codec = bound(1, KV)
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    data[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(InvalidFrameError):
        decode(codec, data, KV)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_any_changed_bytes_are_refused_or_numbers(seed: int) -> None:
    codec, rng = bound(1, KV), np.random.default_rng(seed)
    right, _ = encode(codec, chunk(KV)[0][0], KV)
    for _ in range(12):  # cases an example: drawing and encoding cost more than decoding
        data = right.copy()
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(0, len(data))] = rng.integers(0, 256)
        try:
            found = decode(codec, data, KV)
        except (InvalidFrameError, UnknownCodecError):
            continue
        assert [part.shape for part in found] == [KV.shape] * 2
