"""KV that suits each codec with assets, assets calibrated on it, and encoded layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from contracts.codec import Tensors, template
from contracts.lossy_codec import bits_of, largest_error

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.assets import Asset, AssetKind, AssetRegistry, pack_asset, parse_asset
from kvstore.codecs.base import EncodedLayer, LayerTerms, LossyCodec, Part
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.calibration import learn
from kvstore.codecs.floats import to_float32
from kvstore.codecs.kvq_static import StaticKvqCodec
from kvstore.codecs.kvtc import KvtcCodec
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Component, DType, KVLayout, LayerKind, RopeParameters

MODEL = bytes(range(50, 66))
"""The representation digest of the codec suites' frames."""
POSITION = 512
"""Position of the codec suites' chunks."""
ROPE = RopeParameters(10000.0, 32)

GQA = Component(LayerKind.attention, DType.bfloat16, 3, 2, 64, 47)
ODD = Component(LayerKind.attention, DType.float16, 1, 3, 20, 47)
MLA = Component(LayerKind.mla, DType.float32, 2, 1, 72, 47)
KV = Component(LayerKind.attention, DType.bfloat16, 2, 3, 32, 64)
LATENT = Component(LayerKind.mla, DType.float32, 1, 1, 72, 64)


def smooth(component: Component, seed: int, position: int = POSITION) -> list[list[Part]]:
    """Return layers with different channels, in which each token resembles the one before."""
    c, fixed, rng = component, np.random.default_rng(7), np.random.default_rng(seed)
    shape = (c.layers, c.parts, c.kv_heads, 1, c.head_dim)
    centre, size = 2 * fixed.standard_normal(shape), np.exp(0.4 * fixed.standard_normal(shape))
    walk = rng.standard_normal((c.layers, c.parts, *c.shape))
    for token in range(1, c.tokens):
        walk[..., token, :] = 0.8 * walk[..., token - 1, :] + 0.6 * walk[..., token, :]
    values = (walk * size + centre).astype(np.float32)
    return [list(layer) for layer in bits_of(values, c.dtype)]


def low_rank(component: Component, seed: int, position: int = POSITION) -> list[list[Part]]:
    """Return layers of rank 12 over all heads plus noise, keys rotated to *position*."""
    c, fixed, rng = component, np.random.default_rng(3), np.random.default_rng(seed)
    channels = c.kv_heads * c.head_dim
    layers = []
    for _ in range(c.layers):
        parts = []
        for index in range(c.parts):
            mix = fixed.standard_normal((12, channels)) * np.exp2(-np.arange(12))[:, None] * 4
            centre = fixed.standard_normal(channels)
            noise = 0.01 * rng.standard_normal((c.tokens, channels))
            rows = rng.standard_normal((c.tokens, 12)) @ mix + centre + noise
            by_head = rows.reshape(c.tokens, c.kv_heads, c.head_dim).transpose(1, 0, 2)
            values = np.ascontiguousarray(by_head.astype(np.float32))
            if index == 0 and c.parts == 2:
                frequencies = inverse_frequencies(ROPE, c.head_dim)
                assert frequencies is not None
                rotate(values, *rotation(frequencies, position, c.tokens))
            parts.append(bits_of(values, c.dtype))
        layers.append(parts)
    return layers


@dataclass(frozen=True)
class Samples:
    """A codec, a component of keys and values, a latent one, and a function that makes layers."""

    codec: type[AssetCodec]
    one: Component
    latent: Component
    layers: Callable[[Component, int, int], list[list[Part]]]

    @property
    def kind(self) -> AssetKind:
        return self.codec.kind

    def chunk(self, *components: Component, seed: int = 99, position: int = POSITION) -> Tensors:
        return [self.layers(component, seed, position) for component in components]

    def parts(self, component: Component | None = None, position: int = POSITION) -> list[Part]:
        return self.chunk(component or self.one, position=position)[0][0]

    @lru_cache(maxsize=32)  # noqa: B019
    def calibrated(
        self, *components: Component, model: bytes = MODEL, rope: RopeParameters | None = ROPE
    ) -> Asset:
        """Return an asset calibrated on eight chunks of *components*."""
        samples = [(self.chunk(*components, seed=seed), POSITION) for seed in range(8)]
        tables = learn(self.kind, components, samples, rope)
        return parse_asset(pack_asset(self.kind, model, 1, tables))

    def shelved(self, *assets: Asset, quality: int = 1) -> AssetCodec:
        """Return a codec with *assets*; it encodes single layers by the first."""
        registry = AssetRegistry()
        for asset in assets:
            registry.add(asset)
        return self.codec(quality, registry, assets[0] if assets else None)

    def bound(self, quality: int = 1, *components: Component) -> AssetCodec:
        return self.shelved(self.calibrated(*components or (self.one,)), quality=quality)

    def framed(self, quality: int, *components: Component) -> tuple[FrameHeader, Bytes]:
        codec, layout = self.bound(quality, *components), KVLayout(components)
        out = np.empty(codec.max_frame_bytes(layout), np.uint8)
        header = codec.encode(template(layout), self.chunk(*components), out)
        return header, out[: header.frame_bytes]


SAMPLES = {
    "cachegen": Samples(CachegenCodec, GQA, MLA, smooth),
    "kvtc": Samples(KvtcCodec, KV, LATENT, low_rank),
    "kvq": Samples(
        StaticKvqCodec, replace(KV, tokens=32), replace(LATENT, tokens=32, head_dim=200), low_rank
    ),
}


def encode(
    codec: LossyCodec, parts: list[Part], component: Component, position: int = POSITION,
    layer: int = 0,
) -> tuple[Bytes, EncodedLayer]:  # fmt: skip
    """Return the stored bytes of a layer, and its EncodedLayer."""
    out = np.empty(codec.max_segment_bytes(component), np.uint8)
    encoded = codec.encode_layer(parts, LayerTerms(component, layer, 1, position), out)
    return out[: encoded.stored_bytes], encoded


def decode(
    codec: LossyCodec, data: Bytes, component: Component, position: int | None = None
) -> list[Part]:
    dtype = f"<u{component.dtype.item_bytes}"
    out = [np.zeros(component.shape, dtype) for _ in range(component.parts)]
    codec.decode_layer([data], component, out, position)
    return out


def error_of(found: list[Part], wanted: list[Part], component: Component) -> float:
    """Return the largest error of the parts of a layer."""
    return largest_error(KVLayout((replace(component, layers=1),)), [[found]], [[wanted]])


def noise_of(found: list[Part], wanted: list[Part], dtype: DType = DType.bfloat16) -> float:
    """Return the squared error over the variance about channel means, of the worse part."""
    ratios = []
    for one, other in zip(found, wanted, strict=True):
        values, numbers = to_float32(other, dtype), to_float32(one, dtype)
        spread = np.square(values - values.mean(1, keepdims=True)).sum()
        ratios.append(float(np.square(numbers - values).sum() / spread))
    return max(ratios)
