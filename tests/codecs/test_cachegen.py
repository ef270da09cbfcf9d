from __future__ import annotations

import struct

import numpy as np
from helpers.cachegen_samples import (
    ALL,
    GQA,
    bound,
    calibrated,
    chunk,
    decode,
    encode,
    framed,
    shelf_of,
)

from kvstore.codecs.base import empty_tensors
from kvstore.codecs.cachegen import GROUP_TOKENS, QUALITIES, CachegenCodec
from kvstore.codecs.floats import to_float32
from kvstore.codecs.profiles import THIRDS, cachegen_widths
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Accuracy, Component, DType, LayerKind


def largest(
    codec: CachegenCodec, header: FrameHeader, frame: Bytes, *components: Component
) -> float:
    out = empty_tensors(header.layout)
    codec.decode_into(header, frame, out)
    errors = []
    for component, layers, wanted in zip(components, out, chunk(components), strict=True):
        for parts, originals in zip(layers, wanted, strict=True):
            for found, part in zip(parts, originals, strict=True):
                values = to_float32(found, component.dtype) - to_float32(part, component.dtype)
                errors.append(float(np.abs(values).max()))
    return max(errors)


def test_finer_qualities_have_larger_frames_and_smaller_bounds_which_hold_and_are_met() -> None:
    sizes, bounds = [], []
    for quality in range(len(QUALITIES)):
        codec = CachegenCodec(quality, shelf_of(*ALL))
        header, frame = framed(codec, *ALL)
        assert (header.accuracy, header.asset) == (Accuracy.bounded, calibrated(*ALL).digest)
        error = largest(codec, header, frame, *ALL)
        assert error <= header.error_bound <= error * (1 + 2**-20)
        sizes.append(header.frame_bytes)
        bounds.append(header.error_bound)
    assert sizes == sorted(sizes)
    assert bounds == sorted(bounds, reverse=True)
    assert sizes[0] < header.layout.raw_bytes / 2


def test_bins_are_halves_of_their_width_in_exact_arithmetic() -> None:
    codec = bound(1, GQA)
    widths = calibrated(GQA).tables["0.widths"]
    for layer, parts in enumerate(chunk((GQA,))[0]):
        data, _ = encode(codec, parts, GQA, layer)
        for part, found, width in zip(parts, decode(codec, data, GQA), widths[layer], strict=True):
            numbers, values = to_float32(found, GQA.dtype), to_float32(part, GQA.dtype)
            error = np.abs(numbers - values)
            anchors = np.abs(values[:, ::GROUP_TOKENS]).max(2, keepdims=True) / 127
            rounding = np.abs(numbers) * 2.0**-8
            assert (error <= width[:, None, None] * 0.501 + rounding)[:, 1:GROUP_TOKENS].all()
            assert (error[:, ::GROUP_TOKENS] <= anchors * 0.51 + rounding[:, ::GROUP_TOKENS]).all()


def test_bins_widen_by_thirds_of_the_depth() -> None:
    flat = Component(LayerKind.attention, DType.float32, 6, 1, 64, 40)
    one = chunk((flat,), 1)[0][0]
    widths = cachegen_widths([flat], [[[one] * 6]])[0]
    assert np.allclose(widths / widths[2], np.repeat(THIRDS, 2)[:, None, None])


def test_a_few_outliers_are_escaped_and_many_keep_the_layer_as_it_is() -> None:
    codec, few = bound(1, GQA), chunk((GQA,))[0][0]
    few[0][1, 3, 7] ^= 0x0380  # an exponent larger by seven
    data, encoded = encode(codec, few, GQA)
    assert encoded.accuracy is Accuracy.bounded
    assert struct.unpack("<I", data[4:8].tobytes())[0] >= 1
    values = to_float32(few[0], GQA.dtype)
    found = to_float32(decode(codec, data, GQA)[0], GQA.dtype)
    assert abs(values[1, 3, 7] - found[1, 3, 7]) <= encoded.error_bound
    many = [
        part + np.where(np.arange(64) % 4 == 0, np.uint16(0x0400), np.uint16(0)) for part in few
    ]
    data, encoded = encode(codec, many, GQA)
    assert (encoded.accuracy, data[0]) == (Accuracy.exact, 0)
    assert all(map(np.array_equal, decode(codec, data, GQA), many))
