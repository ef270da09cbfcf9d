"""What cachegen, kvtc and kvq:static share: the suite of lossy codecs, assets, hostile bodies."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
from contracts.codec import SMALL, template
from contracts.lossy_codec import SMALL as CODED
from contracts.lossy_codec import LossyCodecContract, encoded, numbers
from helpers import cachegen_samples, kvq_static_samples, kvtc_samples
from helpers.cachegen_samples import MODEL
from helpers.kvtc_samples import POSITION, ROPE, decode, encode
from typing_extensions import override

from kvstore.codecs.asset_codec import HEAD_BYTES, AssetCodec
from kvstore.codecs.assets import ASSETS, Asset, AssetKind, AssetShelf, pack_asset, parse_asset
from kvstore.codecs.base import EncodeTerms, Part, codec_by_name
from kvstore.codecs.cachegen import CachegenCodec, CachegenTables
from kvstore.codecs.floats import FLOAT_TYPES, to_float32
from kvstore.codecs.kvq_static import KvqStatistics, StaticKvqCodec
from kvstore.codecs.kvtc import KvtcCodec, KvtcTables
from kvstore.codecs.profiles import CachegenProfile, KvtcProfile, StaticKvqProfile
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


@lru_cache(maxsize=64)
def asset_for(kind: AssetKind, layout: KVLayout) -> Asset:
    """Return an asset for chunks of *layout*, on the shelf of the process."""
    if layout.components[0].dtype not in FLOAT_TYPES:
        layout = SMALL  # such layers are kept as they are
    codable = [c for c in layout.components if c.kind is not LayerKind.state]
    layout = KVLayout(tuple(codable)) if codable else SMALL
    samples = [numbers(layout, seed=seed) for seed in range(3)]
    if kind is not AssetKind.cachegen:
        maker = KvtcProfile if kind is AssetKind.kvtc else StaticKvqProfile
        profile = maker(layout.components, None)
        for sample in samples:
            profile.add(sample, POSITION)
        tables = profile.tables()
    else:
        depths = [layer / layout.segment_count for layer in range(layout.segment_count)]
        symbols = CachegenProfile(layout.components, depths)
        for sample in samples:
            symbols.measure(sample)
        for sample in samples:
            symbols.count(sample)
        tables = symbols.tables()
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
        if self._bound is None:
            asset = asset_for(self.kind, template.layout)
            return type(self)(self.quality, ASSETS, asset).encode_layers(
                template, layers, out, terms
            )
        return super().encode_layers(template, layers, out, terms)


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
    is_always_finite: ClassVar[bool] = True
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

    @override
    def _is_read_or_refused(self, body: bytes, component: Component, out: list[Part]) -> None:
        super()._is_read_or_refused(body, component, out)
        if self.is_always_finite:
            assert all(np.isfinite(to_float32(part, component.dtype)).all() for part in out)

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


@dataclass(frozen=True)
class Samples:
    """A codec, a component of keys and values and a latent one, and assets made for them."""

    kind: type[AssetCodec]
    components: tuple[Component, Component]
    calibrated: Callable[..., Asset]
    tensors: Callable[[Component], list[list[list[Part]]]]

    @property
    def one(self) -> Component:
        return self.components[0]

    def bound(self, component: Component) -> AssetCodec:
        """Return a codec that encodes single layers."""
        return self.codec(self.calibrated(component))

    def codec(self, *assets: Asset) -> AssetCodec:
        shelf = AssetShelf()
        for asset in assets:
            shelf.add(asset)
        return self.kind(1, shelf, assets[0] if assets else None)

    def encoded(self, component: Component) -> Bytes:
        return encode(self.bound(component), self.tensors(component)[0][0], component)[0]


SAMPLES = {
    "cachegen": Samples(
        CachegenCodec,
        (cachegen_samples.GQA, cachegen_samples.MLA),
        cachegen_samples.calibrated,
        lambda component: cachegen_samples.chunk((component,)),
    ),
    "kvtc": Samples(
        KvtcCodec,
        (kvtc_samples.KV, kvtc_samples.LATENT),
        kvtc_samples.calibrated,
        kvtc_samples.chunk,
    ),
    "kvq": Samples(
        StaticKvqCodec,
        (kvq_static_samples.KV, kvq_static_samples.LATENT),
        kvq_static_samples.calibrated,
        kvtc_samples.chunk,
    ),
}


@pytest.fixture(params=SAMPLES)
def samples(request: pytest.FixtureRequest) -> Samples:
    return SAMPLES[request.param]


def test_nan_infinity_and_the_largest_numbers_are_kept_exactly(samples: Samples) -> None:
    codec = samples.bound(samples.one)
    for bad in (0x7F80, 0xFFC1, 0x7F7F):
        parts = samples.tensors(samples.one)[0][0]
        parts[1][0, 9, 5] = bad
        data, layer = encode(codec, parts, samples.one)
        assert (layer.accuracy, layer.error_bound, data[0]) == (Accuracy.exact, 0, 0)
        assert all(map(np.array_equal, decode(codec, data, samples.one), parts))


def test_keys_without_a_rotation_stay_where_they_are(samples: Samples) -> None:
    one = samples.one
    if samples.kind is CachegenCodec:
        codec, message = samples.bound(one), "position=513"
    else:
        codec, message = samples.codec(samples.calibrated(one, rope=None)), "no rotary embedding"
        decode(codec, encode(codec, samples.tensors(one)[0][0], one)[0], one, POSITION)
    data, _ = encode(codec, samples.tensors(one)[0][0], one)
    with pytest.raises(InvalidRequestError, match=message):
        decode(codec, data, one, POSITION + 1)


def test_without_the_models_asset_nothing_is_encoded_or_decoded(samples: Samples) -> None:
    layout, tensors = KVLayout((samples.one,)), samples.tensors(samples.one)
    room = np.empty(1 << 20, np.uint8)
    header = samples.codec(samples.calibrated(samples.one)).encode(template(layout), tensors, room)
    out = samples.tensors(samples.one)
    empty, name = samples.codec(), samples.kind.kind.name
    with pytest.raises(UnknownCodecError, match=f"{name} for model {MODEL.hex()}"):
        empty.encode(template(layout), tensors, np.empty(1 << 20, np.uint8))
    with pytest.raises(UnknownCodecError, match=f"{samples.kind.name} without an asset"):
        encode(empty, tensors[0][0], samples.one)
    with pytest.raises(UnknownCodecError, match=f"asset {header.asset.hex()}"):
        empty.decode_into(header, room[: header.frame_bytes], out)
    foreign = samples.codec(samples.calibrated(samples.one, model=bytes(16)))
    header = foreign.encode(template(layout, representation=bytes(16)), tensors, room)
    with pytest.raises(ModelError, match=r"asset\.representation"):
        foreign.decode_into(replace(header, representation=MODEL), room[: header.frame_bytes], out)
    assert all(map(np.array_equal, out[0][0], tensors[0][0]))


def test_a_chunk_of_another_shape_than_the_assets_is_refused_by_name(samples: Samples) -> None:
    wide = replace(samples.one, head_dim=2 * samples.one.head_dim)
    codec = samples.codec(samples.calibrated(samples.one))
    layout = KVLayout((wide,))
    with pytest.raises(LayoutMismatchError, match="calibrate for this model"):
        codec.encode(template(layout), samples.tensors(wide), np.empty(1 << 20, np.uint8))


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
    tables = dict(SAMPLES[kind].calibrated(SAMPLES[kind].one).tables)
    if change is None:
        del tables[table]
    else:
        tables[table] = change(tables[table])
    asset = parse_asset(pack_asset(AssetKind[kind], MODEL, 1, tables))
    with pytest.raises(InvalidRequestError, match=message):
        TABLES[kind](asset)


@pytest.mark.parametrize("profile", [KvtcProfile, StaticKvqProfile])
def test_a_profile_refuses_what_it_cannot_describe(profile: Any) -> None:
    dynamic = RopeParameters(10000.0, 32, "dynamic", (("factor", 2.0),))
    with pytest.raises(InvalidRequestError, match="rope='dynamic'"):
        profile([kvtc_samples.KV], dynamic)
    with pytest.raises(InvalidRequestError, match="samples=0"):
        profile([kvtc_samples.KV], ROPE).tables()
    with pytest.raises(InvalidRequestError, match="component='attention'"):
        profile([Component(LayerKind.attention, DType.int8, 1, 1, 8, 16)], None)
    bad = kvtc_samples.chunk(kvtc_samples.KV)
    bad[0][1][0][0, 0, 0] = 0x7FC0
    with pytest.raises(InvalidRequestError, match="NaN or infinity"):
        profile([kvtc_samples.KV], ROPE).add(bad, POSITION)


# --- bodies that nobody wrote


def test_every_other_length_is_refused(samples: Samples) -> None:
    for component in samples.components:
        data, codec = samples.encoded(component), samples.bound(component)
        for size in range(0, len(data), 7):
            with pytest.raises(InvalidFrameError):
                decode(codec, data[:size], component)
        with pytest.raises(InvalidFrameError):
            decode(codec, np.append(data, np.uint8(0)), component)


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
    right, codec = samples.encoded(samples.one), samples.bound(samples.one)
    for at, value in EVERY_HEAD + WRONG[samples.kind.kind.name]:
        data = right.copy()
        data[at : at + len(value)] = np.frombuffer(value, np.uint8)
        with pytest.raises(InvalidFrameError):
            decode(codec, data, samples.one)
    other = right.copy()
    other[8] ^= 1
    with pytest.raises(UnknownCodecError, match=f"{samples.kind.kind.name} with asset"):
        decode(codec, other, samples.one)


def test_coded_states_and_codes_are_refused(samples: Samples) -> None:
    state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1)
    codes = Component(LayerKind.attention, DType.int8, 1, 1, 64, 47)
    codec = samples.bound(samples.one)
    for component in (state, codes):
        dtype = f"<u{component.dtype.item_bytes}"
        parts = [np.zeros(component.shape, dtype) for _ in range(component.parts)]
        data, layer = encode(codec, parts, component)
        assert (layer.accuracy, len(data)) == (Accuracy.exact, HEAD_BYTES + component.layer_bytes)
        data[0] = 1
        with pytest.raises(InvalidFrameError, match="method"):
            decode(codec, data, component)
