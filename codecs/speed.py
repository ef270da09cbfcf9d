"""Measures codecs on a small synthetic KV sample, in bounded time.

The sample has the structure that codecs exploit: channels with individual mean and spread, a few
outlier channels (KIVI, arXiv 2402.02750, section 3), similar adjacent tokens. Ratios of a model's
KV may differ; speeds are those of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors, Codec, EncodeTerms, empty_tensors
from kvstore.codecs.floats import from_float32
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto import native
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import (
    KEY_BYTES,
    ROOT,
    Accuracy,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    RopeParameters,
)


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """A codec, measured on one thread. Speeds count decoded bytes.

    ``ratio`` is decoded over stored bytes, headers included. The constructor raises
    InvalidRequestError for figures that are not positive.
    """

    name: str
    backend: str
    accuracy: Accuracy
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise InvalidRequestError(field, value, "measure a positive number")

    @property
    def break_even_bytes_per_s(self) -> float:
        """Link speed from which on raw frames are faster, if load and decode do not overlap.

        Loading S bytes takes S / B raw and S / (B ratio) + S / decode coded.
        """
        return max(0.0, self.decode_bytes_per_s * (1 - 1 / self.ratio))

    @property
    def full_gain_bytes_per_s(self) -> float:
        """Link speed up to which decoding keeps up, if it overlaps the next load."""
        return self.decode_bytes_per_s / self.ratio

    def load_bytes_per_s(self, link_bytes_per_s: float) -> float:
        """Return decoded bytes per second over a link, if decoding overlaps the next load."""
        return min(link_bytes_per_s * self.ratio, self.decode_bytes_per_s)


LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 2, 8, 256, 128
_OUTLIERS = 4
_KEEP = 0.5
_ROPE = RopeParameters(500_000.0, HEAD_DIM)
_NAMED = bytes(16)


@dataclass(frozen=True, slots=True)
class Sample:
    """A chunk of bfloat16 as bits; ``tensors[0][layer]`` are K and V of (heads, tokens, dim)."""

    template: FrameTemplate
    tensors: ChunkTensors
    terms: EncodeTerms


def make_sample(seed: int = 0) -> Sample:
    """Return 2 MiB of KV generated from *seed*."""
    draw = np.random.default_rng(seed)
    component = Component(LayerKind.attention, DType.bfloat16, LAYERS, KV_HEADS, HEAD_DIM, TOKENS)
    layers = [[_part(draw, outliers=True), _part(draw, outliers=False)] for _ in range(LAYERS)]
    template = FrameTemplate(
        ChunkKey(bytes(KEY_BYTES)), ROOT, _NAMED, _NAMED, KVLayout((component,))
    )
    return Sample(template, [layers], EncodeTerms(_ROPE, tuple(range(LAYERS)), LAYERS))


def _part(draw: np.random.Generator, *, outliers: bool) -> NDArray[np.uint16]:
    shape = (KV_HEADS, TOKENS, HEAD_DIM)
    numbers = draw.standard_normal(shape, np.float32)
    for token in range(1, TOKENS):
        fresh = math.sqrt(1 - _KEEP * _KEEP) * numbers[:, token]
        numbers[:, token] = _KEEP * numbers[:, token - 1] + fresh
    numbers *= np.exp(0.4 * draw.standard_normal((KV_HEADS, 1, HEAD_DIM), np.float32))
    if outliers:
        numbers += 0.5 * draw.standard_normal((KV_HEADS, 1, HEAD_DIM), np.float32)
        numbers[:, :, draw.permutation(HEAD_DIM)[:_OUTLIERS]] += draw.uniform(4, 12, _OUTLIERS)
        frequencies = inverse_frequencies(_ROPE, HEAD_DIM)
        assert frequencies is not None
        rotate(numbers, *rotation(frequencies, 0, TOKENS))
    bits = np.empty(shape, np.uint16)
    from_float32(numbers, DType.bfloat16, bits)
    return bits


def backend_of(codec: Codec) -> str:
    """Return the backend of *codec*: ``numpy``, or the path of the compiled loops."""
    return "numpy" if codec.codec_id == RawCodec.codec_id else native.paths()[0]


def measure(
    name: str, codec: Codec, sample: Sample, clock: Callable[[], float], budget_s: float
) -> CodecSpeed:
    """Measure *codec* on *sample*: the best of the rounds within *budget_s*, at least one.

    A first warm-up round is excluded. *clock* returns seconds. Raises UnknownCodecError or
    LayoutMismatchError if the codec cannot code the sample.
    """
    layout = sample.template.layout
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    back = empty_tensors(layout)
    codec.decode_into(codec.encode(sample.template, sample.tensors, out, sample.terms), out, back)
    encode_s = decode_s = math.inf
    end = clock() + budget_s
    while True:
        begin = clock()
        header = codec.encode(sample.template, sample.tensors, out, sample.terms)
        between = clock()
        codec.decode_into(header, out[: header.frame_bytes], back)
        now = clock()
        encode_s, decode_s = min(encode_s, between - begin), min(decode_s, now - between)
        if now >= end:
            break
    least_s = 1e-9  # for a coarse clock
    return CodecSpeed(
        name,
        backend_of(codec),
        header.accuracy,
        layout.raw_bytes / header.frame_bytes,
        layout.raw_bytes / max(encode_s, least_s),
        layout.raw_bytes / max(decode_s, least_s),
    )
