"""The chunk and the assets of the golden frames of kivi, cachegen and kvtc.

Whole numbers make both, so that no library's random numbers or logarithms are in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.assets import AssetKind, AssetRegistry, pack_asset, parse_asset
from kvstore.codecs.base import LossyCodec, Part, codec_name
from kvstore.codecs.cachegen import CachegenCodec
from kvstore.codecs.kivi import KiviCodec
from kvstore.codecs.kvq_static import MIDDLE, StaticKvqCodec
from kvstore.codecs.kvtc import KvtcCodec
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import ChainDigest, ChunkKey, Component, DType, KVLayout, LayerKind

MODEL = bytes(range(1, 17))
COMPONENT = Component(LayerKind.attention, DType.bfloat16, 1, 2, 20, 71)
"""A group of 64 tokens and seven over; seven groups of ten and one over."""


def template() -> FrameTemplate:
    """Return what the frames' headers say."""
    return FrameTemplate(
        key=ChunkKey(bytes(range(32))),
        parent=ChainDigest(bytes(range(100, 116))),
        representation=MODEL,
        content=bytes(range(200, 216)),
        layout=KVLayout((COMPONENT,)),
        position=256,
        prefill_flops=1.5e9,
    )


def tensors() -> list[list[list[Part]]]:
    """Return K and V: saw teeth of small exact numbers over the tokens, one outlier each."""
    head, token, channel = np.indices(COMPONENT.shape)
    parts = []
    for index in range(2):
        tooth = (7 * token + 3 * channel + 11 * head + 5 * index) % 23 - 11
        centre = 16 * ((channel + index) % 5 - 2)
        numbers = ((tooth + centre) / 8).astype(np.float32)
        numbers[1, 33, 7] = 300
        parts.append((numbers.view(np.uint32) >> 16).astype("<u2"))
    return [[parts]]


def rows(symbols: int, zero: int, widths: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return a triangular distribution of each width about *zero*, of sum 4096."""
    away = np.abs(np.arange(symbols) - zero)
    found = []
    for width in widths:
        weight = np.maximum(width - away, 0)
        row = 1 + weight * (4096 - symbols) // weight.sum()
        row[zero] += 4096 - row.sum()
        found.append(row)
    return np.array(found, np.uint16)


def cachegen_asset() -> bytes:
    """Return an asset of cachegen for this chunk."""
    part, head, channel = np.indices((2, 2, 20))
    picks = ((part + head + channel) % 3).astype(np.uint8)
    tables = {
        "anchors": rows(256, 128, (40, 90, 128)),
        "deltas": rows(128, 64, (8, 24, 60)),
        "0.widths": np.full((1, 2, 2), 0.25, "<f4"),
        "0.anchors": picks[None],
        "0.deltas": np.repeat(picks[None], 4, axis=0),
    }
    return pack_asset(AssetKind.cachegen, MODEL, 1, tables)


def kvtc_asset() -> bytes:
    """Return an asset of kvtc whose products are exact, in whatever order they are summed."""
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    basis = np.kron(np.eye(10), signs / 2).astype("<f4")
    tables = {
        "0.basis": np.stack([basis, basis[::-1]])[None],
        "0.means": np.full((1, 2, 40), 0.5, "<f4"),
        "0.variances": np.repeat(np.arange(40, 0, -1, dtype="<f4")[None, None], 2, axis=1) / 8,
        "0.deviations": np.full((1, 2), 4, "<f4"),
    }
    return pack_asset(AssetKind.kvtc, MODEL, 1, tables)


def kvq_static_asset() -> bytes:
    """Return an asset of kvq:static for this chunk."""
    scales = np.arange(80, dtype=np.uint8).reshape(1, 2, 40) % 24 + 2 * MIDDLE - 12
    tables = {
        "0.means": np.linspace(-1, 1, 80).astype("<f2").reshape(1, 2, 40),
        "0.scales": scales,
        "0.deviations": np.full((1, 2), 4, "<f4"),
    }
    return pack_asset(AssetKind.kvq, MODEL, 1, tables)


ASSET_FILES = {
    "cachegen-v1.kvasset": cachegen_asset,
    "kvtc-v1.kvasset": kvtc_asset,
    "kvq-static-v1.kvasset": kvq_static_asset,
}


def codecs() -> Iterator[tuple[str, LossyCodec]]:
    """Yield the name of each golden file and the codec that wrote it."""
    registry = AssetRegistry()
    for make in ASSET_FILES.values():
        registry.add(parse_asset(make()))
    own = (KiviCodec(8), KiviCodec(4), KiviCodec(2))
    for codec in (
        *own,
        CachegenCodec(1, registry),
        KvtcCodec(1, registry),
        StaticKvqCodec(1, registry),
    ):
        yield f"{codec_name(codec.codec_id).replace(':', '-')}-r{codec.revision}.frame", codec
