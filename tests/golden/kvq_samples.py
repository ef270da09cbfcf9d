"""The chunk of golden kvq: whole numbers make it, no library's random numbers or logarithms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from golden import lossy_samples

from kvstore.codecs.base import EncodeTerms, Importance, LossyCodec, Part, codec_by_name
from kvstore.codecs.floats import from_float32
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import Component, DType, KVLayout, LayerKind, RopeParameters

LAYOUT = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, 3, 64, 72),))
"""One column of two heads, one of a head and what fills it up."""
TERMS = EncodeTerms(rope=RopeParameters(10000.0, 48))


POSITIONS = {"kvq-r2": 0, "kvq-turned-r2": 1, "kvq-layered-r2": 256, "kvq-importance-r2": 0}
"""Where in its prompt the chunk of each golden file begins: with exact tokens and without."""


def codecs() -> dict[str, tuple[LossyCodec, EncodeTerms | None]]:
    """Return what wrote each golden file."""
    settings = {
        "kvq-r2": ("kvq:2", None),
        "kvq-turned-r2": ("kvq:3,sinks=4", TERMS),
        "kvq-layered-r2": ("kvq:layered", None),
        "kvq-importance-r2": ("kvq:2,importance", EncodeTerms(importance=importance())),
    }
    found: dict[str, tuple[LossyCodec, EncodeTerms | None]] = {}
    for name, (setting, terms) in settings.items():
        codec = codec_by_name(setting)
        assert isinstance(codec, LossyCodec)
        found[name] = (codec, terms)
    return found


def importance(tokens: int = 72) -> Importance:
    """Return weights that put tokens into every class."""
    return (np.arange(tokens) * 29 % tokens // 8).astype(np.float32)


def template(name: str) -> FrameTemplate:
    """Return what the header of the golden file *name* says."""
    return replace(lossy_samples.template(), layout=LAYOUT, position=POSITIONS[name])


def tensors(layout: KVLayout = LAYOUT) -> list[list[list[Part]]]:
    """Return a hilly sum of saw teeth about each channel's mean, a few numbers far out."""
    component = layout.components[0]
    head, token, channel = np.indices(component.shape)
    layers = []
    for index in range(4):
        tooth = (7 * token + 13 * channel + 29 * head + 5 * index) % 23 - 11
        other = (11 * token * (1 + channel % 7) + 3 * index) % 17 - 8
        centre = 16 * ((5 * channel + head + index) % 9 - 4)
        numbers = ((tooth + other) / 4 + centre / 8).astype(np.float32)
        if layout != LAYOUT:
            numbers /= np.float32(3)
        numbers[component.kv_heads // 2, component.tokens // 2 - 3, 7] = 300
        layers.append(np.empty(component.shape, f"<u{component.dtype.item_bytes}"))
        from_float32(numbers, component.dtype, layers[-1])
    return [[layers[:2], layers[2:]]]
