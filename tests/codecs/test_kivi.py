"""kivi: 8, 4 and 2 bits in groups of 64, and its loops by every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import pairwise
from contracts.lossy_codec import FLOATS, NUMBERS, LossyCodecContract, bits_of, numbers
from helpers.asset_samples import decode, encode, error_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats
from kvstore.codecs.kivi import HEAD_BYTES, IDS_BY_BITS, KiviCodec, Loops
from kvstore.proto import native
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind

CODECS: list[KiviCodec] = [KiviCodec(8), KiviCodec(4), KiviCodec(2)]
_every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
PLAIN = Loops("portable")
_each_path = pytest.mark.parametrize(
    "path", [path for path in native.paths() if path != "portable"]
)

GQA = Component(LayerKind.attention, DType.bfloat16, 1, 2, 96, 150)
"""Two groups of keys and 22 tokens left over; one group of 64 channels and one of 32."""
SMALL = Component(LayerKind.attention, DType.bfloat16, 1, 1, 5, 70)


class TestKivi8(LossyCodecContract):
    codec = KiviCodec(8)
    is_always_finite = True


class TestKivi4(LossyCodecContract):
    codec = KiviCodec(4)
    is_always_finite = True


class TestKivi2(LossyCodecContract):
    codec = KiviCodec(2)
    is_always_finite = True


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


@_each_path
def test_every_path_writes_and_reads_the_same_bytes(path: str) -> None:
    for bits, dtype, fill in pairwise(list(IDS_BY_BITS), FLOATS, NUMBERS):
        component = Component(LayerKind.attention, dtype, 1, 2, 150, 131)
        parts = numbers(KVLayout((component,)), fill)[0][0]
        codecs = [KiviCodec(bits, PLAIN), KiviCodec(bits, Loops(path))]
        (data, one), (other, two) = (encode(codec, parts, component) for codec in codecs)
        assert np.array_equal(data, other)
        assert one.error_bound == two.error_bound
        assert all(map(np.array_equal, *(decode(codec, data, component) for codec in codecs)))


@_each_path
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 32), by_token=st.booleans(), is_signed=st.booleans())
def test_every_path_expands_codes_and_scales_that_nobody_wrote_alike(
    seed: int, by_token: bool, is_signed: bool, path: str
) -> None:
    rng = np.random.default_rng(seed)
    shape = (1, 64 * int(rng.integers(1, 3)), 40) if by_token else (2, 3, int(rng.integers(1, 140)))
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    groups = PLAIN.bounds(codes.astype(np.float32), by_token)[0].shape
    some = rng.integers(0, 2, groups).astype(np.float32)
    scale: Floats = np.abs(rng.standard_normal(groups, np.float32)) * some
    base = None if is_signed else rng.standard_normal(groups, np.float32)
    one, other = (loops.expand(codes, scale, base, by_token) for loops in (PLAIN, Loops(path)))
    assert one.tobytes() == other.tobytes()


@_each_path
@pytest.mark.parametrize("by_token", [True, False])
def test_numbers_too_far_from_their_codes_are_refused_alike(path: str, by_token: bool) -> None:
    values = np.random.default_rng(0).standard_normal((2, 128, 150), np.float32)
    low, high = PLAIN.bounds(values, by_token)
    for levels in (15, 3):
        scale: Floats = ((high - low) / np.float32(levels)).astype(np.float32)
        for loops in (PLAIN, Loops(path)):
            assert loops.quantise(values, scale, low, levels, by_token) is not None
            assert loops.quantise(values, scale / np.float32(2), low, levels, by_token) is None


@pytest.mark.parametrize(("codec", "bits"), list(zip(CODECS, [8.25, 4.5, 2.5], strict=True)))
def test_it_takes_the_bits_it_is_named_for_and_half_a_bit_of_scales(
    codec: KiviCodec, bits: float
) -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 8, 128, 256)
    data, _ = encode(codec, realistic(component), component)
    assert 8 * (len(data) - HEAD_BYTES) / (component.layer_bytes // 2) == bits


@_every_codec
def test_the_error_bound_is_the_largest_error_of_the_layer(codec: KiviCodec) -> None:
    parts = realistic(GQA)
    data, encoded = encode(codec, parts, GQA)
    worst = error_of(decode(codec, data, GQA), parts, GQA)
    assert worst <= encoded.error_bound <= worst * (1 + 2**-20)


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
def test_numbers_at_the_ends_of_float16_and_beyond_are_coded_closely_or_kept(
    codec: KiviCodec,
) -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 1, 64, 64)
    values = np.linspace(-1, 1, 64 * 64).reshape(component.shape)
    parts = [bits_of(values * 1e30, DType.bfloat16), bits_of(values, DType.bfloat16)]
    data, encoded = encode(codec, parts, component)
    assert np.array_equal(decode(codec, data, component)[0], parts[0])
    assert encoded.error_bound < 1
    half = replace(component, dtype=DType.float16)
    values *= 65504
    parts = [bits_of(each, DType.float16) for each in (values, values.transpose(0, 2, 1))]
    data, encoded = encode(codec, parts, half)
    worst = error_of(decode(codec, data, half), parts, half)
    assert worst <= encoded.error_bound < 131008 / 3 / 2 * 1.01
    single = Component(LayerKind.mla, DType.float32, 1, 1, 64, 16)
    for value in (0.0, -0.0, 1.0, -3.140625, 65504.0, -65504.0, 2.0**-24, 1e-4):
        parts = [bits_of(np.full(single.shape, value), DType.float32)]
        data, _ = encode(codec, parts, single)
        found = error_of(decode(codec, data, single), parts, single)
        assert found <= abs(value) * 2**-10 + 2**-21


@_every_codec
def test_keys_are_not_rotated(codec: KiviCodec) -> None:
    data, _ = encode(codec, realistic(GQA), GQA)
    out = realistic(GQA, 1)
    with pytest.raises(InvalidRequestError, match="position=7"):
        codec.decode_layer([data], GQA, out, 7)
    assert all(map(np.array_equal, out, realistic(GQA, 1)))


@_every_codec
def test_heads_scales_and_lengths_that_cannot_be_are_refused(codec: KiviCodec) -> None:
    right, _ = encode(codec, realistic(SMALL), SMALL)
    wrong = [(HEAD_BYTES, bad, "scale") for bad in (0x7E00, 0x7C00, 0xFC00, 0xBC00)]
    if codec.bits < 8:
        wrong += [(HEAD_BYTES + 2 * 5, bad, "minimum") for bad in (0x7E00, 0x7C00, 0xFC00)]
    for start, bad, message in wrong:
        data = right.copy()
        data[start : start + 2] = np.array([bad], "<u2").view(np.uint8)
        with pytest.raises(InvalidFrameError, match=message):
            decode(codec, data, SMALL)
    for at in range(HEAD_BYTES):
        data = right.copy()
        data[at] = 2
        with pytest.raises(InvalidFrameError, match="methods"):
            decode(codec, data, SMALL)
    for data in (*(right[:size] for size in range(len(right))), np.append(right, np.uint8(0))):
        with pytest.raises(InvalidFrameError, match="stored_bytes"):
            decode(codec, data, SMALL)
