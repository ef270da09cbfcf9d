"""cachegen, kvtc and kvq:static: their promise, their assets, and bodies that nobody wrote."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
from contracts.codec import SMALL, encoded, template
from contracts.lossy_codec import SMALL as CODED
from contracts.lossy_codec import LossyCodecContract, largest_error, numbers
from helpers.asset_samples import (
    GQA,
    KV,
    MODEL,
    ODD,
    POSITION,
    ROPE,
    SAMPLES,
    Samples,
    decode,
    encode,
    error_of,
    noise_of,
)
from typing_extensions import override

from kvstore.codecs.asset_codec import HEAD_BYTES, AssetCodec
from kvstore.codecs.assets import ASSETS, Asset, AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import EncodeTerms, Part, codec_by_name, empty_tensors
from kvstore.codecs.cachegen import GROUP_TOKENS, CachegenCodec, CachegenTables
from kvstore.codecs.calibration import THIRDS, cachegen_widths, learn
from kvstore.codecs.floats import FLOAT_TYPES, to_float32
from kvstore.codecs.kvq_static import KvqStatistics, StaticKvqCodec, shifts_of
from kvstore.codecs.kvtc import SINK_TOKENS, KvtcCodec, KvtcTables
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, FrameTemplate, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

EDITIONS = count(100)
CACHEGEN, KVTC, KVQ = SAMPLES["cachegen"], SAMPLES["kvtc"], SAMPLES["kvq"]


@lru_cache(maxsize=64)
def asset_for(kind: AssetKind, layout: KVLayout) -> Asset:
    """Return an asset for chunks of *layout*, on the registry of the process."""
    if layout.components[0].dtype not in FLOAT_TYPES:
        layout = SMALL  # such layers are kept as they are
    codable = [c for c in layout.components if c.kind is not LayerKind.state]
    layout = KVLayout(tuple(codable)) if codable else SMALL
    samples = [(numbers(layout, seed=seed), POSITION) for seed in range(3)]
    tables = learn(kind, layout.components, samples, None)
    asset = parse_asset(pack_asset(kind, template(layout).representation, next(EDITIONS), tables))
    ASSETS.add(asset)
    return asset


class Calibrating(AssetCodec):
    """Encodes every layout by an asset of its own."""

    @override
    def encode_layers(
        self,
        template: FrameTemplate,
        layers: Iterable[Sequence[Part]],
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        if self._bound is not None:
            return super().encode_layers(template, layers, out, terms)
        asset = asset_for(self.kind, template.layout)
        return type(self)(self.quality, ASSETS, asset).encode_layers(template, layers, out, terms)


class CalibratingCachegen(Calibrating, CachegenCodec):
    pass


class CalibratingKvtc(Calibrating, KvtcCodec):
    pass


class CalibratingStaticKvq(Calibrating, StaticKvqCodec):
    pass


@lru_cache(maxsize=4)
def body_with_outliers(codec: AssetCodec) -> bytes:
    """Return a layer that has escapes."""
    tensors = numbers(CODED)
    tensors[0][0][1][:, 9] += np.uint16(0x0180)
    frame = encoded(codec, tensors, CODED)
    return parse_header(frame).segment(frame, 0).tobytes()


class AssetCodecContract(LossyCodecContract):
    codec: ClassVar[AssetCodec]
    is_always_finite = True
    names: ClassVar[str]

    @override
    def asset_of(self, layout: KVLayout) -> bytes:
        return asset_for(self.codec.kind, layout).digest

    @override
    def test_bounds_hold_and_such_rooms_are_enough(self) -> None:
        with pytest.raises(UnknownCodecError, match="encode whole frames"):
            self.codec.encode_segment(numbers(SMALL)[0][0], SMALL.components[0], np.empty(9, "u1"))

    @override
    def _body(self) -> bytes:
        return body_with_outliers(self.codec)

    def test_terms_of_the_engine_change_nothing(self) -> None:
        terms = EncodeTerms(ROPE, layer_ids=(4, 9), model_layers=31)
        plain = encoded(self.codec, numbers(CODED), CODED)
        assert np.array_equal(plain, encoded(self.codec, numbers(CODED), CODED, terms))

    def test_a_name_has_a_quality_of_zero_to_three(self) -> None:
        for quality in range(4):
            found = codec_by_name(self.names.format(quality))
            assert isinstance(found, AssetCodec)
            assert isinstance(self.codec, type(found))
            assert found.quality == quality
        for terms in ("4", "-1", "", "fine"):
            with pytest.raises(UnknownCodecError, match=r"0(,static)? to .*3"):
                codec_by_name(self.names.format(terms))


class TestCachegenCodec(AssetCodecContract):
    codec = CalibratingCachegen(3)
    names = "cachegen:{}"


class TestKvtcCodec(AssetCodecContract):
    codec = CalibratingKvtc(3)
    names = "kvtc:{}"


class TestStaticKvqCodec(AssetCodecContract):
    codec = CalibratingStaticKvq(3)
    names = "kvq:{},static"
    is_always_finite = False


# --- one model's assets


@pytest.fixture(params=SAMPLES)
def samples(request: pytest.FixtureRequest) -> Samples:
    return SAMPLES[request.param]


def test_finer_qualities_have_larger_frames_and_smaller_errors_and_their_bounds_hold(
    samples: Samples,
) -> None:
    sizes, errors, bounds = [], [], []
    components = (samples.one, samples.latent, *((ODD,) if samples is CACHEGEN else ()))
    for quality in range(4):
        header, frame = samples.framed(quality, *components)
        out = empty_tensors(header.layout)
        samples.bound(quality, *components).decode_into(header, frame, out)
        assert header.asset == samples.calibrated(*components).digest
        sizes.append(len(frame))
        if samples is KVTC:
            assert (header.accuracy, header.error_bound) == (Accuracy.approximate, 0)
            errors.append(noise_of(out[0][1], samples.chunk(*components)[0][1]))
            continue
        assert header.accuracy is Accuracy.bounded
        error = largest_error(header.layout, samples.chunk(*components), out)
        assert 0 < error <= header.error_bound
        assert samples is KVQ or header.error_bound <= error * (1 + 2**-20)
        errors.append(error)
        bounds.append(header.error_bound)
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert sizes[0] < header.layout.raw_bytes / 2
    assert samples is not KVTC or (errors[3] < 0.002 and errors[0] < 0.2)


def test_keys_are_turned_to_where_the_caller_wants_them() -> None:
    for samples in (KVTC, KVQ):
        codec, one = samples.bound(3), samples.one
        data, layer = encode(codec, samples.parts(), one)
        for position in (0, 511, 9000):
            elsewhere = samples.parts(position=position)
            found = decode(codec, data, one, position)
            if samples is KVTC:
                assert noise_of(found, elsewhere) < 0.002
            else:
                assert error_of(found, elsewhere, one) < 2 * layer.error_bound
        here = decode(codec, data, one, POSITION)
        assert all(map(np.array_equal, here, decode(codec, data, one)))


def test_nan_infinity_and_the_largest_numbers_are_kept_exactly(samples: Samples) -> None:
    for bad in (0x7F80, 0xFFC1, 0x7F7F):
        parts = samples.parts()
        parts[1][0, 9, 5] = bad
        data, layer = encode(samples.bound(), parts, samples.one)
        assert (layer.accuracy, layer.error_bound, data[0]) == (Accuracy.exact, 0, 0)
        assert all(map(np.array_equal, decode(samples.bound(), data, samples.one), parts))


def test_keys_without_a_rotation_stay_where_they_are(samples: Samples) -> None:
    codec, message = samples.bound(), "position=513"
    if samples is not CACHEGEN:
        codec = samples.shelved(samples.calibrated(samples.one, rope=None))
        message = "no rotary embedding"
    data, _ = encode(codec, samples.parts(), samples.one)
    if samples is not CACHEGEN:
        decode(codec, data, samples.one, POSITION)
    with pytest.raises(InvalidRequestError, match=message):
        decode(codec, data, samples.one, POSITION + 1)


def test_without_the_models_asset_nothing_is_encoded_or_decoded(samples: Samples) -> None:
    layout, tensors = KVLayout((samples.one,)), samples.chunk(samples.one)
    header, frame = samples.framed(1, samples.one)
    out, room = samples.chunk(samples.one), np.empty(1 << 20, np.uint8)
    empty, name = samples.shelved(), samples.kind.name
    with pytest.raises(UnknownCodecError, match=f"{name} for model {MODEL.hex()}"):
        empty.encode(template(layout), tensors, room)
    with pytest.raises(UnknownCodecError, match=f"{samples.codec.name} without an asset"):
        encode(empty, tensors[0][0], samples.one)
    with pytest.raises(UnknownCodecError, match=f"asset {header.asset.hex()}"):
        empty.decode_into(header, frame, out)
    foreign = samples.shelved(samples.calibrated(samples.one, model=bytes(16)))
    header = foreign.encode(template(layout, representation=bytes(16)), tensors, room)
    with pytest.raises(ModelError, match=r"asset\.representation"):
        foreign.decode_into(replace(header, representation=MODEL), room[: header.frame_bytes], out)
    assert all(map(np.array_equal, out[0][0], tensors[0][0]))
    wide = replace(samples.one, head_dim=2 * samples.one.head_dim)
    with pytest.raises(LayoutMismatchError, match="calibrate for this model"):
        samples.bound().encode(template(KVLayout((wide,))), samples.chunk(wide), room)


def test_tables_of_a_model_count_neither_states_nor_chunks_without_windows() -> None:
    window = Component(LayerKind.window, DType.bfloat16, 2, 2, 64, 64, 96)
    state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1, 96)
    codec, tensors = CACHEGEN.shelved(CACHEGEN.calibrated(window)), CACHEGEN.chunk(window)
    room = np.zeros(1 << 20, np.uint8)
    layout = KVLayout((state, window))
    header = codec.encode(template(layout), [*numbers(KVLayout((state,))), *tensors], room)
    assert header.accuracy is Accuracy.bounded
    assert len(header.segment(room, 0)) == HEAD_BYTES + state.layer_bytes
    one = KVLayout((replace(window, layers=1),))
    with pytest.raises(LayoutMismatchError, match=r"layers=1.*tables for 2"):
        codec.encode(template(one), [tensors[0][:1]], room)


# --- cachegen


def test_bins_are_halves_of_their_width_in_exact_arithmetic() -> None:
    codec = CACHEGEN.bound()
    widths = CACHEGEN.calibrated(GQA).tables["0.widths"]
    for layer, parts in enumerate(CACHEGEN.chunk(GQA)[0]):
        data, _ = encode(codec, parts, GQA, layer=layer)
        for part, found, width in zip(parts, decode(codec, data, GQA), widths[layer], strict=True):
            values, got = to_float32(part, GQA.dtype), to_float32(found, GQA.dtype)
            error = np.abs(got - values)
            anchors = np.abs(values[:, ::GROUP_TOKENS]).max(2, keepdims=True) / 127
            rounding = np.abs(got) * 2.0**-8
            assert (error <= width[:, None, None] * 0.501 + rounding)[:, 1:GROUP_TOKENS].all()
            assert (error[:, ::GROUP_TOKENS] <= anchors * 0.51 + rounding[:, ::GROUP_TOKENS]).all()


def test_bins_widen_by_thirds_of_the_depth() -> None:
    flat = Component(LayerKind.attention, DType.float32, 6, 1, 64, 40)
    widths = cachegen_widths([flat], [[[CACHEGEN.chunk(flat, seed=1)[0][0]] * 6]])[0]
    assert np.allclose(widths / widths[2], np.repeat(THIRDS, 2)[:, None, None])


def test_a_few_outliers_are_escaped_and_many_keep_the_layer_as_it_is() -> None:
    codec, few = CACHEGEN.bound(), CACHEGEN.parts()
    few[0][1, 3, 7] ^= 0x0380  # an exponent larger by seven
    data, layer = encode(codec, few, GQA)
    assert layer.accuracy is Accuracy.bounded
    assert struct.unpack("<I", data[4:8].tobytes())[0] >= 1
    assert error_of(decode(codec, data, GQA), few, GQA) <= layer.error_bound
    far = np.where(np.arange(64) % 4 == 0, np.uint16(0x0400), np.uint16(0))
    many = [part + far for part in few]
    data, layer = encode(codec, many, GQA)
    assert (layer.accuracy, data[0]) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(codec, data, GQA), many))


# --- kvtc


@pytest.mark.parametrize("position", [0, 1])
def test_the_first_tokens_of_a_prompt_and_only_those_come_back_exactly(position: int) -> None:
    codec, parts = KVTC.bound(0), KVTC.parts(position=position)
    for part in parts:
        part[:, :SINK_TOKENS] ^= 0x0080  # twice or half as large
    data, layer = encode(codec, parts, KV, position)
    assert layer.accuracy is Accuracy.approximate
    back = decode(codec, data, KV)
    for ours, theirs in zip(back, parts, strict=True):
        is_same = np.array_equal(ours[:, :SINK_TOKENS], theirs[:, :SINK_TOKENS])
        assert is_same == (position == 0)
    assert not np.array_equal(back[0][:, SINK_TOKENS:], parts[0][:, SINK_TOKENS:])


def test_what_lies_outside_of_the_calibration_is_escaped_or_kept_exactly() -> None:
    far = [part + np.uint16(0x0500) for part in KVTC.parts()]
    data, layer = encode(KVTC.bound(), far, KV)
    assert layer.accuracy is Accuracy.exact
    assert all(map(np.array_equal, decode(KVTC.bound(), data, KV), far))
    few, codec = KVTC.parts(), KVTC.bound(3)
    few[1][:, 9] += np.uint16(0x0280)
    data, layer = encode(codec, few, KV)
    assert layer.accuracy is Accuracy.approximate
    assert len(data) > len(encode(codec, KVTC.parts(), KV)[0])
    # What is left is the part of the outlier that lies outside of the components.
    assert noise_of(decode(codec, data, KV), few) < 0.03


# --- kvq:static


def test_numbers_of_another_size_than_the_models_shift_the_models() -> None:
    parts, codec = [part + np.uint16(0x0080) for part in KVQ.parts()], KVQ.bound(2)  # twice
    data, layer = encode(codec, parts, KVQ.one)
    assert layer.accuracy is Accuracy.bounded
    assert error_of(decode(codec, data, KVQ.one), parts, KVQ.one) <= layer.error_bound
    quarters = np.arange(-40, 41)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4)), 10 + quarters)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4 + 0.12)), 10 + quarters)
    assert np.array_equal(shifts_of(np.array([1e-60, 1e60])), [-117, 127])


# --- tables and bodies that nobody wrote

TABLES: dict[str, Callable[[Asset], object]] = {
    "cachegen": CachegenTables,
    "kvtc": KvtcTables,
    "kvq": KvqStatistics,
}
NAN = np.float32(np.nan)


@pytest.mark.parametrize(
    ("kind", "table", "change", "message"),
    [
        ("cachegen", "0.widths", lambda t: t * 0, "0.widths"),
        ("cachegen", "0.widths", lambda t: t * NAN, "0.widths"),
        ("cachegen", "0.widths", lambda t: -t, "0.widths"),
        ("cachegen", "0.widths", lambda t: t.astype("<f2"), "0.widths"),
        ("cachegen", "0.anchors", lambda t: t | np.uint8(0x40), "0.models"),
        ("cachegen", "0.deltas", lambda t: t | np.uint8(0x80), "0.models"),
        ("cachegen", "0.deltas", lambda t: t[1:], "0.deltas"),
        ("cachegen", "0.anchors", lambda t: t[..., 1:], "0.deltas"),
        ("cachegen", "anchors", lambda t: t[:, 1:], "anchors"),
        ("cachegen", "anchors", lambda t: np.concatenate([t, t]), "books"),
        ("cachegen", "deltas", lambda t: t + np.uint16(1), "books"),
        ("cachegen", "deltas", lambda t: np.where(t == 1, 0, t).astype("<u2"), "books"),
        ("cachegen", "0.widths", None, "0.widths"),
        ("cachegen", "deltas", None, "deltas"),
        ("kvtc", "0.basis", lambda t: t * NAN, "asset"),
        ("kvtc", "0.basis", lambda t: t * np.float32(9), "asset"),
        ("kvtc", "0.basis", lambda t: t.astype("<f2"), "asset"),
        ("kvtc", "0.means", lambda t: t[..., 1:], "asset"),
        ("kvtc", "0.means", lambda t: t * np.float32(np.inf), "asset"),
        ("kvtc", "0.means", lambda t: t + np.float32(1e30), "asset"),
        ("kvtc", "0.deviations", lambda t: t * 0, "asset"),
        ("kvtc", "0.deviations", lambda t: t * np.float32(1e30), "asset"),
        ("kvtc", "0.variances", lambda t: t[..., 1:], "asset"),
        ("kvtc", "0.rope", lambda t: t * NAN, "asset"),
        ("kvtc", "0.basis", None, "asset"),
        ("kvtc", "0.deviations", None, "asset"),
        ("kvq", "0.means", lambda t: t * np.float16(np.nan), "asset"),
        ("kvq", "0.means", lambda t: t.astype("<f4"), "asset"),
        ("kvq", "0.means", lambda t: np.repeat(t, 2, axis=1), "asset"),
        ("kvq", "0.means", None, "asset"),
        ("kvq", "0.scales", lambda t: t[..., 1:], "asset"),
        ("kvq", "0.scales", None, "asset"),
        ("kvq", "0.deviations", lambda t: t * 0, "asset"),
        ("kvq", "0.deviations", lambda t: t * NAN, "asset"),
        ("kvq", "0.rope", lambda t: t * NAN, "asset"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_asset_whose_tables_are_wrong_is_refused_by_name(
    kind: str, table: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    samples = SAMPLES[kind]
    tables = dict(samples.calibrated(samples.one).tables)
    if change is None:
        del tables[table]
    else:
        tables[table] = change(tables[table])
    asset = parse_asset(pack_asset(AssetKind[kind], MODEL, 1, tables))
    with pytest.raises(InvalidRequestError, match=message):
        TABLES[kind](asset)


def test_what_cannot_be_described_is_not_learned(samples: Samples) -> None:
    dynamic = RopeParameters(10000.0, 32, "dynamic", (("factor", 2.0),))
    bad = KVTC.chunk(KV)
    chunk = KVTC.chunk(KV)
    bad[0][1][0][0, 0, 0] = 0x7FC0
    for component, chunks, rope, message in [
        (KV, [], ROPE, "samples=0"),
        (replace(KV, dtype=DType.int8), [chunk], None, "component='attention'"),
        (KV, [bad], ROPE, "NaN or infinity"),
        (KV, [[[[p[:, :5] for p in ps] for ps in chunk[0]]]], ROPE, "samples=1: give more"),
        (KV, [chunk], dynamic, "rope='dynamic'"),
    ][: 3 if samples is CACHEGEN else None]:
        with pytest.raises(InvalidRequestError, match=message):
            learn(samples.kind, [component], [(each, 0) for each in chunks], rope)


def test_every_other_length_is_refused(samples: Samples) -> None:
    for component in (samples.one, samples.latent):
        codec = samples.bound(1, component)
        data, _ = encode(codec, samples.parts(component), component)
        for wrong in (*(data[:size] for size in range(0, len(data), 7)), np.append(data, data[:1])):
            with pytest.raises(InvalidFrameError, match=rf"stored_bytes={len(wrong)}\b"):
                decode(codec, wrong, component)


HUGE = struct.pack("<I", 0xFFFFFFFF)
EVERY_HEAD = [(0, b"\2"), (0, b"\0"), (1, b"\4")]
WRONG = {
    "cachegen": [
        (2, b"\3\0"), (2, b"\xff\xff"), (4, HUGE), (24, b"\0\x7e"),
        (24 + 2 * 2 * 2 * 5 + 4 * 32 * 4, HUGE),
    ],
    "kvtc": [
        (2, b"\2\0"), (HEAD_BYTES, b"\0\0"), (HEAD_BYTES, b"\xff\xff"), (HEAD_BYTES + 2, b"\5\0"),
        (HEAD_BYTES + 4, HUGE), (HEAD_BYTES + 8, HUGE), (HEAD_BYTES + 12, b"\x40"),
    ],
    "kvq": [
        (2, b"\2\0"), (HEAD_BYTES, HUGE), (HEAD_BYTES + 4, HUGE),
        (HEAD_BYTES + 8, struct.pack("<f", float("nan"))),
        (HEAD_BYTES + 8, struct.pack("<f", -1.0)), (HEAD_BYTES + 12, b"\1"),
        (HEAD_BYTES + 16, struct.pack("<f", float("inf"))),
        (HEAD_BYTES + 16, struct.pack("<f", 0.0)),
    ],
}  # fmt: skip


def test_heads_and_counts_that_cannot_be_are_refused(samples: Samples) -> None:
    codec, name = samples.bound(), samples.kind.name
    right, _ = encode(codec, samples.parts(), samples.one)
    for at, value in EVERY_HEAD + WRONG[name]:
        data = right.copy()
        data[at : at + len(value)] = np.frombuffer(value, np.uint8)
        with pytest.raises(InvalidFrameError):
            decode(codec, data, samples.one)
    right[8] ^= 1
    with pytest.raises(UnknownCodecError, match=f"{name} with asset"):
        decode(codec, right, samples.one)
