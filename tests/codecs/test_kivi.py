from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from contracts.codec import filled, normal_values, special_values
from contracts.lossy_codec import LossyCodecContract
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import EncodedLayer, LayerTerms, Part
from kvstore.codecs.floats import FLOAT_TYPES, from_float32, to_float32
from kvstore.codecs.kivi import HEAD_BYTES, KiviCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind

CODECS: list[KiviCodec] = [KiviCodec(8), KiviCodec(4), KiviCodec(2)]
_every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

GQA = Component(LayerKind.attention, DType.bfloat16, 1, 2, 96, 150)
"""Two groups of keys and 22 tokens left over; one group of 64 channels and one of 32."""


class TestKivi8(LossyCodecContract):
    codec = KiviCodec(8)


class TestKivi4(LossyCodecContract):
    codec = KiviCodec(4)


class TestKivi2(LossyCodecContract):
    codec = KiviCodec(2)


def bits_of(values: Any, dtype: DType) -> Part:
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty(values.shape, f"<u{dtype.item_bytes}")
    from_float32(values, dtype, out)
    return out


def realistic(component: Component, seed: int = 0) -> list[Part]:
    """Parts whose channels differ in size and centre, as keys' do."""
    rng = np.random.default_rng(seed)
    heads, _, dim = component.shape
    parts = []
    for _ in range(component.parts):
        centre = 3 * rng.standard_normal((heads, 1, dim))
        size = np.exp(rng.standard_normal((heads, 1, dim)))
        values = rng.standard_normal(component.shape) * size + centre
        parts.append(bits_of(values, component.dtype))
    return parts


def encode(codec: KiviCodec, parts: list[Part], component: Component) -> tuple[Bytes, EncodedLayer]:
    out = np.empty(codec.max_segment_bytes(component), np.uint8)
    encoded = codec.encode_layer(parts, LayerTerms(component), out)
    return out[: encoded.stored_bytes], encoded


def decode(codec: KiviCodec, data: Bytes, component: Component) -> list[Part]:
    out = [
        np.zeros(component.shape, f"<u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    codec.decode_layer([data], component, out, None)
    return out


def fields_of(codec: KiviCodec, data: Bytes, component: Component) -> list[dict[str, Any]]:
    """Take a segment apart by the prose of the format page."""
    heads, tokens, dim = component.shape
    at, found = HEAD_BYTES, []
    for index in range(component.parts):
        is_keys = component.parts == 2 and index == 0
        grouped = tokens // 64 * 64 if is_keys else tokens
        shape = (heads, grouped // 64, dim) if is_keys else (heads, tokens, -(-dim // 64))
        count = 2 * int(np.prod(shape))
        scales = data[at : at + count].view("<f2").reshape(shape)
        at += count
        minima = None
        if codec.bits < 8:
            minima = data[at : at + count].view("<f2").reshape(shape)
            at += count
        row = -(-dim * codec.bits // 8)
        codes = data[at : at + heads * grouped * row].reshape(heads, grouped, row)
        at += codes.size
        size = heads * (tokens - grouped) * dim * component.dtype.item_bytes
        rest = data[at : at + size].view(f"<u{component.dtype.item_bytes}")
        at += size
        found.append({"is_keys": is_keys, "scales": scales, "minima": minima, "codes": codes,
                      "rest": rest.reshape(heads, tokens - grouped, dim)})  # fmt: skip
    assert at == len(data)
    return found


def exactly(
    codec: KiviCodec, fields: dict[str, Any], head: int, token: int, channel: int
) -> Fraction:
    """Return what one code stands for, in exact arithmetic."""
    at = (head, token // 64, channel) if fields["is_keys"] else (head, token, channel // 64)
    each = 8 // codec.bits
    byte = int(fields["codes"][head, token, channel // each])
    code = byte >> (channel % each * codec.bits) & ((1 << codec.bits) - 1)
    if codec.bits == 8:
        return Fraction(code - 256 if code > 127 else code) * Fraction(float(fields["scales"][at]))
    return code * Fraction(float(fields["scales"][at])) + Fraction(float(fields["minima"][at]))


@pytest.mark.parametrize(("codec", "dtype"), list(zip(CODECS, sorted(FLOAT_TYPES), strict=True)))
def test_each_number_is_within_half_its_scale_and_stored_as_the_format_page_says(
    codec: KiviCodec, dtype: DType
) -> None:
    component = Component(LayerKind.attention, dtype, 1, 2, 70, 66)
    parts = realistic(component)
    data, encoded = encode(codec, parts, component)
    assert encoded.accuracy is Accuracy.bounded
    back = decode(codec, data, component)
    for fields, part, found in zip(fields_of(codec, data, component), parts, back, strict=True):
        values, numbers = to_float32(part, dtype), to_float32(found, dtype)
        grouped = fields["codes"].shape[1]
        assert np.array_equal(fields["rest"], part[:, grouped:])
        assert np.array_equal(found[:, grouped:], part[:, grouped:])
        for head, token, channel in np.ndindex(2, grouped, 70):
            stands_for = exactly(codec, fields, head, token, channel)
            scale = fields["scales"][
                (head, token // 64, channel) if fields["is_keys"] else (head, token, channel // 64)
            ]
            value = float(values[head, token, channel])
            slack = 2.0**-20 * (abs(value) + float(scale))
            assert abs(stands_for - Fraction(value)) <= Fraction(float(scale) / 2 + slack)
            rounded = bits_of([float(stands_for)], dtype)
            nearest = float(to_float32(rounded, dtype)[0])
            ulp = abs(float(stands_for)) * 2.0**-7 + 2.0**-24
            assert abs(float(numbers[head, token, channel]) - nearest) <= ulp


@_every_codec
def test_the_error_bound_is_the_largest_error_of_the_layer(codec: KiviCodec) -> None:
    parts = realistic(GQA)
    data, encoded = encode(codec, parts, GQA)
    errors = [
        np.abs(to_float32(a, GQA.dtype) - to_float32(b, GQA.dtype)).max()
        for a, b in zip(parts, decode(codec, data, GQA), strict=True)
    ]
    assert max(errors) <= encoded.error_bound <= float(max(errors)) * (1 + 2**-20)


@pytest.mark.parametrize(("codec", "bits"), list(zip(CODECS, [8.25, 4.5, 2.5], strict=True)))
def test_it_takes_the_bits_it_is_named_for_and_half_a_bit_of_scales(
    codec: KiviCodec, bits: float
) -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 8, 128, 256)
    data, _ = encode(codec, realistic(component), component)
    values = component.layer_bytes // 2
    assert 8 * (len(data) - HEAD_BYTES) / values == bits


@_every_codec
def test_a_part_with_nan_or_infinity_is_kept_exactly_and_the_other_is_coded(
    codec: KiviCodec,
) -> None:
    for bad in (0x7F80, 0xFF80, 0x7FC1):
        parts = realistic(GQA)
        parts[1][1, 149, 95] = bad
        data, encoded = encode(codec, parts, GQA)
        back = decode(codec, data, GQA)
        assert data[:2].tolist() == [1, 0]
        assert np.array_equal(back[1], parts[1])
        assert not np.array_equal(back[0], parts[0])
        assert encoded.accuracy is Accuracy.bounded
        parts[0][0, 0, 0] = bad
        data, encoded = encode(codec, parts, GQA)
        assert (encoded.accuracy, encoded.error_bound) == (Accuracy.exact, 0)
        assert all(map(np.array_equal, decode(codec, data, GQA), parts))


@_every_codec
def test_numbers_whose_scale_float16_cannot_hold_are_kept_exactly(codec: KiviCodec) -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 1, 64, 64)
    values = np.linspace(-1, 1, 64 * 64).reshape(component.shape)
    parts = [bits_of(values * 1e30, DType.bfloat16), bits_of(values, DType.bfloat16)]
    data, encoded = encode(codec, parts, component)
    assert np.array_equal(decode(codec, data, component)[0], parts[0])
    assert encoded.error_bound < 1


@_every_codec
def test_a_group_of_one_value_comes_back_within_a_thousandth_of_it(codec: KiviCodec) -> None:
    component = Component(LayerKind.mla, DType.float32, 1, 1, 64, 16)
    for value in (0.0, -0.0, 1.0, -3.140625, 65504.0, -65504.0, 2.0**-24, 1e-4):
        parts = [bits_of(np.full(component.shape, value), DType.float32)]
        data, _ = encode(codec, parts, component)
        found = to_float32(decode(codec, data, component)[0], DType.float32)
        assert np.abs(found - np.float32(value)).max() <= abs(value) * 2**-10 + 2**-21


@_every_codec
def test_float16_never_overflows_at_its_ends(codec: KiviCodec) -> None:
    component = Component(LayerKind.attention, DType.float16, 1, 1, 64, 64)
    values = np.linspace(-65504, 65504, 64 * 64).reshape(component.shape)
    parts = [bits_of(values, DType.float16), bits_of(values.transpose(0, 2, 1), DType.float16)]
    data, encoded = encode(codec, parts, component)
    for part, found in zip(parts, decode(codec, data, component), strict=True):
        error = np.abs(to_float32(part, DType.float16) - to_float32(found, DType.float16))
        assert error.max() <= encoded.error_bound < 131008 / 3 / 2 * 1.01


@_every_codec
def test_coded_states_and_types_that_are_no_floats_are_refused(codec: KiviCodec) -> None:
    state = Component(LayerKind.state, DType.float32, 1, 4, 1, 160)
    for component in (state, *(replace(GQA, dtype=dtype) for dtype in set(DType) - FLOAT_TYPES)):
        data, layer = encode(codec, filled(KVLayout((component,)))[0][0], component)
        assert (layer.accuracy, len(data)) == (Accuracy.exact, 8 + component.layer_bytes)
        data[0] = 1
        with pytest.raises(InvalidFrameError, match="methods"):
            decode(codec, data, component)


@_every_codec
def test_keys_are_not_rotated(codec: KiviCodec) -> None:
    data, _ = encode(codec, realistic(GQA), GQA)
    out = realistic(GQA, 1)
    with pytest.raises(InvalidRequestError, match="position=7"):
        codec.decode_layer([data], GQA, out, 7)
    assert all(map(np.array_equal, out, realistic(GQA, 1)))


# --- bodies that nobody wrote


SMALL = Component(LayerKind.attention, DType.bfloat16, 1, 1, 5, 70)


@_every_codec
def test_scales_and_minima_that_are_no_numbers_are_refused(codec: KiviCodec) -> None:
    right, _ = encode(codec, realistic(SMALL), SMALL)
    wrong = [(HEAD_BYTES, bad, "scale") for bad in (0x7E00, 0x7C00, 0xFC00, 0xBC00)]
    if codec.bits < 8:
        wrong += [(HEAD_BYTES + 2 * 5, bad, "minimum") for bad in (0x7E00, 0x7C00, 0xFC00)]
    for start, bad, message in wrong:
        data = right.copy()
        data[start : start + 2] = np.array([bad], "<u2").view(np.uint8)
        with pytest.raises(InvalidFrameError, match=message):
            decode(codec, data, SMALL)


@_every_codec
def test_a_head_of_another_version_is_refused(codec: KiviCodec) -> None:
    right, _ = encode(codec, realistic(SMALL), SMALL)
    for at in range(HEAD_BYTES):
        data = right.copy()
        data[at] = 2
        with pytest.raises(InvalidFrameError, match="methods"):
            decode(codec, data, SMALL)


@_every_codec
def test_every_other_length_is_refused(codec: KiviCodec) -> None:
    data, _ = encode(codec, realistic(SMALL), SMALL)
    for size in range(len(data)):
        with pytest.raises(InvalidFrameError, match="stored_bytes"):
            decode(codec, data[:size], SMALL)
    with pytest.raises(InvalidFrameError, match="stored_bytes"):
        decode(codec, np.append(data, np.uint8(0)), SMALL)


@_every_codec
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), dtype=st.sampled_from(sorted(FLOAT_TYPES)))
def test_any_bytes_of_the_right_length_are_refused_or_finite(
    codec: KiviCodec, seed: int, dtype: DType
) -> None:
    component = Component(LayerKind.attention, dtype, 1, 1, 5, 70)
    rng = np.random.default_rng(seed)
    data, _ = encode(codec, realistic(component), component)
    for _ in range(rng.integers(1, 40)):
        data[rng.integers(0, len(data))] = rng.integers(0, 256)
    try:
        back = decode(codec, data, component)
    except InvalidFrameError:
        return
    if data[0] and data[1]:
        assert np.isfinite(to_float32(back[0][:, :64], dtype)).all()
        assert np.isfinite(to_float32(back[1], dtype)).all()


@_every_codec
def test_what_was_decoded_is_encoded_within_the_same_promise(codec: KiviCodec) -> None:
    for fill in (normal_values, special_values):
        parts = filled(KVLayout((GQA,)), fill)[0][0]
        data, first = encode(codec, parts, GQA)
        again, second = encode(codec, decode(codec, data, GQA), GQA)
        assert second.accuracy == first.accuracy
        assert len(again) == len(data)
