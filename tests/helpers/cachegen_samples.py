"""KV with the traits that cachegen lives on, and assets made from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from contracts.codec import template

from kvstore.codecs.assets import Asset, AssetKind, AssetShelf, pack_asset, parse_asset
from kvstore.codecs.base import EncodedLayer, LayerTerms, Part
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.floats import from_float32
from kvstore.codecs.profiles import cachegen_tables
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

MODEL = bytes(range(50, 66))
"""The representation digest of the codec suites' frames."""

GQA = Component(LayerKind.attention, DType.bfloat16, 3, 2, 64, 47)
ODD = Component(LayerKind.attention, DType.float16, 1, 3, 20, 47)
MLA = Component(LayerKind.mla, DType.float32, 2, 1, 72, 47)


def smooth(component: Component, seed: int) -> list[list[Part]]:
    """Layers whose channels differ and whose tokens resemble the one before."""
    c, fixed, rng = component, np.random.default_rng(7), np.random.default_rng(seed)
    shape = (c.layers, c.parts, c.kv_heads, 1, c.head_dim)
    centre, size = 2 * fixed.standard_normal(shape), np.exp(0.4 * fixed.standard_normal(shape))
    walk = rng.standard_normal((c.layers, c.parts, *c.shape))
    for token in range(1, c.tokens):
        walk[..., token, :] = 0.8 * walk[..., token - 1, :] + 0.6 * walk[..., token, :]
    values = (walk * size + centre).astype(np.float32)
    bits = np.empty(values.shape, f"<u{c.dtype.item_bytes}")
    from_float32(values, c.dtype, bits)
    return [list(layer) for layer in bits]


def chunk(components: Sequence[Component], seed: int = 99) -> list[list[list[Part]]]:
    """Return the tensors of a chunk of *components*."""
    return [smooth(component, seed) for component in components]


def layout_of(*components: Component) -> KVLayout:
    return KVLayout(components)


@lru_cache(maxsize=8)
def calibrated(*components: Component, edition: int = 1, model: bytes = MODEL) -> Asset:
    """Return an asset for chunks of *components*, profiled on six of them."""
    tables = cachegen_tables(components, [chunk(components, seed) for seed in range(6)])
    return parse_asset(pack_asset(AssetKind.cachegen, model, edition, tables))


ALL = (GQA, ODD, MLA)


def shelf_of(*components: Component) -> AssetShelf:
    shelf = AssetShelf()
    shelf.add(calibrated(*components))
    return shelf


def bound(quality: int = 1, *components: Component) -> CachegenCodec:
    """Return a codec that encodes single layers."""
    components = components or ALL
    return CachegenCodec(quality, shelf_of(*components), calibrated(*components))


def framed(
    codec: CachegenCodec, *components: Component, seed: int = 99
) -> tuple[FrameHeader, Bytes]:
    layout = layout_of(*components)
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    header = codec.encode(template(layout), chunk(components, seed), out)
    return header, out[: header.frame_bytes]


def encode(
    codec: CachegenCodec, parts: list[Part], component: Component, layer: int = 0
) -> tuple[Bytes, EncodedLayer]:
    out = np.empty(codec.max_segment_bytes(component), np.uint8)
    encoded = codec.encode_layer(parts, LayerTerms(component, layer), out)
    return out[: encoded.stored_bytes], encoded


def decode(codec: CachegenCodec, data: Bytes, component: Component) -> list[Part]:
    out = [
        np.zeros(component.shape, f"<u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    codec.decode_layer([data], component, out, None)
    return out
