"""The suite of lossy codecs over those that need an asset: one is made for each layout it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count
from typing import ClassVar

import numpy as np
import pytest
from contracts.codec import SMALL, decoded, layouts, template
from contracts.lossy_codec import LossyCodecContract, Numbers, numbers
from golden.samples import template_of
from typing_extensions import override

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.asset_shelf import ASSETS
from kvstore.codecs.assets import Asset, AssetKind, pack_asset, parse_asset
from kvstore.codecs.base import Part
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.cachegen_profile import CachegenProfile
from kvstore.codecs.floats import FLOAT_TYPES
from kvstore.codecs.kvqs import KvqsCodec
from kvstore.codecs.kvqs_profile import KvqsProfile
from kvstore.codecs.kvt import KvtCodec
from kvstore.codecs.kvt_profile import KvtProfile
from kvstore.codecs.terms import EncodeTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FrameHeader, FrameTemplate, FrameWriter, check_frame
from kvstore.proto.types import Accuracy, DType, KVLayout, LayerKind

EDITIONS = count(100)
MODEL = template(SMALL).representation
POSITION = template(SMALL).position


@lru_cache(maxsize=64)
def asset_for(kind: AssetKind, layout: KVLayout) -> Asset:
    """Return an asset for chunks of *layout*, on the shelf of the process."""
    if layout.components[0].dtype not in FLOAT_TYPES:
        layout = SMALL  # such layers are kept as they are
    codable = [c for c in layout.components if c.kind is not LayerKind.state]
    layout = KVLayout(tuple(codable)) if codable else SMALL
    samples = [numbers(layout, seed=seed) for seed in range(3)]
    if kind is not AssetKind.cachegen:
        maker = KvtProfile if kind is AssetKind.kvt else KvqsProfile
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
    asset = parse_asset(pack_asset(kind, MODEL, next(EDITIONS), tables))
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


class CalibratingKvt(Calibrating, KvtCodec):
    pass


class CalibratingKvqs(Calibrating, KvqsCodec):
    pass


class AssetCodecContract(LossyCodecContract):
    codec: ClassVar[AssetCodec]

    @pytest.mark.parametrize("name", layouts(DType.uint8))
    @pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
    def test_header_says_what_was_encoded(self, dtype: DType, name: str) -> None:
        layout = layouts(dtype)[name]
        out = np.empty(self.codec.max_frame_bytes(layout), np.uint8)
        given_back = self.codec.encode(template(layout), numbers(layout), out)
        header = check_frame(out[: given_back.frame_bytes])
        assert template_of(header) == template(layout)
        self.codec.check_header(header)
        assert (header.levels, header.asset) == (0, asset_for(self.codec.kind, layout).digest)

    @pytest.mark.parametrize("fill", [None], ids=str)
    @pytest.mark.parametrize("dtype", sorted(FLOAT_TYPES), ids=lambda dtype: dtype.name)
    def test_bounds_hold_and_such_rooms_are_enough(
        self, dtype: DType, fill: Numbers | None
    ) -> None:
        layer = numbers(SMALL)[0][0]
        with pytest.raises(UnknownCodecError, match="encode whole frames"):
            self.codec.encode_segment(layer, SMALL.components[0], np.empty(1 << 16, np.uint8))

    @pytest.mark.parametrize("body", [b"", b"\xff" * 99, bytes(99)], ids=["none", "ones", "zeros"])
    def test_a_body_of_rubbish_in_a_right_frame_is_refused(self, body: bytes) -> None:
        out, digest = np.zeros(1 << 16, np.uint8), asset_for(self.codec.kind, SMALL).digest
        writer = FrameWriter(template(SMALL), out)
        for _ in range(SMALL.segment_count):
            writer.reserve(len(body))[:] = np.frombuffer(body, np.uint8)
            writer.commit(len(body))
        codec_id, revision = self.codec.codec_id, self.codec.revision
        header = writer.finish(codec_id, revision, Accuracy.approximate, asset=digest)
        with pytest.raises(InvalidFrameError):
            decoded(out[: header.frame_bytes])


class TestCachegenCodec(AssetCodecContract):
    codec = CalibratingCachegen(3)


class TestKvtCodec(AssetCodecContract):
    codec = CalibratingKvt(3)


class TestKvqsCodec(AssetCodecContract):
    codec = CalibratingKvqs(3)
