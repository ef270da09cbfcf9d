"""Assets of kvqs made from the KV of ``kvt_samples``, cut into short chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from helpers import kvt_samples
from helpers.cachegen_samples import MODEL

from kvstore.codecs.asset_shelf import AssetShelf
from kvstore.codecs.assets import Asset, AssetKind, pack_asset, parse_asset
from kvstore.codecs.kvqs import KvqsCodec
from kvstore.codecs.kvqs_profile import KvqsProfile
from kvstore.proto.types import Component, RopeParameters

KV = replace(kvt_samples.KV, tokens=32)
LATENT = replace(kvt_samples.LATENT, tokens=32, head_dim=200)


@lru_cache(maxsize=8)
def calibrated(
    *components: Component, model: bytes = MODEL, rope: RopeParameters | None = kvt_samples.ROPE
) -> Asset:
    profile = KvqsProfile(components, rope)
    for seed in range(8):
        profile.add(kvt_samples.chunk(*components, seed=seed), kvt_samples.POSITION)
    return parse_asset(pack_asset(AssetKind.kvqs, model, 1, profile.tables()))


def shelf_of(*components: Component, model: bytes = MODEL) -> AssetShelf:
    shelf = AssetShelf()
    shelf.add(calibrated(*components, model=model))
    return shelf


def bound(quality: int, *components: Component) -> KvqsCodec:
    return KvqsCodec(quality, shelf_of(*components), calibrated(*components))
