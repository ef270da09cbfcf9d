"""Assets of kvq_static made from the KV of ``kvtc_samples``, cut into short chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from helpers import kvtc_samples
from helpers.cachegen_samples import MODEL

from kvstore.codecs.assets import Asset, AssetKind, AssetShelf, pack_asset, parse_asset
from kvstore.codecs.kvq_static import StaticKvqCodec
from kvstore.codecs.profiles import StaticKvqProfile
from kvstore.proto.types import Component, RopeParameters

KV = replace(kvtc_samples.KV, tokens=32)
LATENT = replace(kvtc_samples.LATENT, tokens=32, head_dim=200)


@lru_cache(maxsize=8)
def calibrated(
    *components: Component, model: bytes = MODEL, rope: RopeParameters | None = kvtc_samples.ROPE
) -> Asset:
    profile = StaticKvqProfile(components, rope)
    for seed in range(8):
        profile.add(kvtc_samples.chunk(*components, seed=seed), kvtc_samples.POSITION)
    return parse_asset(pack_asset(AssetKind.kvq, model, 1, profile.tables()))


def shelf_of(*components: Component, model: bytes = MODEL) -> AssetShelf:
    shelf = AssetShelf()
    shelf.add(calibrated(*components, model=model))
    return shelf


def bound(quality: int, *components: Component) -> StaticKvqCodec:
    return StaticKvqCodec(quality, shelf_of(*components), calibrated(*components))
