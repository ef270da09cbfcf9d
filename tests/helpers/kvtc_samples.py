"""KV that varies in few directions, assets of kvtc made from it, and single layers coded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from contracts.codec import template
from helpers.cachegen_samples import MODEL

from kvstore.codecs.asset_codec import AssetCodec
from kvstore.codecs.assets import Asset, AssetKind, AssetShelf, pack_asset, parse_asset
from kvstore.codecs.base import EncodedLayer, LayerTerms, Part
from kvstore.codecs.floats import from_float32, to_float32
from kvstore.codecs.kvtc import KvtcCodec
from kvstore.codecs.profiles import KvtcProfile
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Component, DType, KVLayout, LayerKind, RopeParameters

ROPE = RopeParameters(10000.0, 32)
KV = Component(LayerKind.attention, DType.bfloat16, 2, 3, 32, 64)
LATENT = Component(LayerKind.mla, DType.float32, 1, 1, 72, 64)
POSITION = 512
"""Where the codec suites' chunks stand."""


def low_rank(component: Component, seed: int, position: int = POSITION) -> list[list[Part]]:
    """Layers that vary in a dozen directions over all heads, keys rotated to *position*."""
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
            bits = np.empty(values.shape, f"<u{c.dtype.item_bytes}")
            from_float32(values, c.dtype, bits)
            parts.append(bits)
        layers.append(parts)
    return layers


def chunk(
    *components: Component, seed: int = 99, position: int = POSITION
) -> list[list[list[Part]]]:
    return [low_rank(component, seed, position) for component in components]


@lru_cache(maxsize=8)
def calibrated(
    *components: Component, model: bytes = MODEL, rope: RopeParameters | None = ROPE
) -> Asset:
    profile = KvtcProfile(components, rope)
    for seed in range(8):
        profile.add(chunk(*components, seed=seed), POSITION)
    return parse_asset(pack_asset(AssetKind.kvtc, model, 1, profile.tables()))


def shelf_of(*components: Component, **options: Any) -> AssetShelf:
    shelf = AssetShelf()
    shelf.add(calibrated(*components, **options))
    return shelf


def bound(quality: int = 1, *components: Component) -> KvtcCodec:
    components = components or (KV, LATENT)
    return KvtcCodec(quality, shelf_of(*components), calibrated(*components))


def framed(codec: AssetCodec, *components: Component, **fields: Any) -> tuple[FrameHeader, Bytes]:
    layout = KVLayout(components)
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    position = fields.get("position", POSITION)
    tensors = chunk(*components, position=position)
    header = codec.encode(template(layout, **fields), tensors, out)
    return header, out[: header.frame_bytes]


def encode(
    codec: AssetCodec, parts: list[Part], component: Component, position: int = POSITION
) -> tuple[Bytes, EncodedLayer]:
    out = np.empty(codec.max_segment_bytes(component), np.uint8)
    encoded = codec.encode_layer(parts, LayerTerms(component, 0, 1, position), out)
    return out[: encoded.stored_bytes], encoded


def decode(
    codec: AssetCodec, data: Bytes, component: Component, position: int | None = None
) -> list[Part]:
    out = [
        np.zeros(component.shape, f"<u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    codec.decode_layer([data], component, out, position)
    return out


def noise_of(found: list[Part], wanted: list[Part], dtype: DType) -> list[float]:
    """Return each part's squared error over its variance about the channels' means."""
    ratios = []
    for one, other in zip(found, wanted, strict=True):
        values, numbers = to_float32(other, dtype), to_float32(one, dtype)
        spread = np.square(values - values.mean(1, keepdims=True)).sum()
        ratios.append(float(np.square(numbers - values).sum() / spread))
    return ratios
