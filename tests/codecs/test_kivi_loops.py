"""The loops of kivi: the reference's bits by every path."""

from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import pairwise
from contracts.lossy_codec import FLOATS, NUMBERS, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.kivi import NUMPY

from kvstore.codecs.base import LayerTerms
from kvstore.codecs.floats import Floats
from kvstore.codecs.kivi import IDS_BY_BITS, KiviCodec, Loops
from kvstore.proto import native
from kvstore.proto.types import Component, KVLayout, LayerKind

each_path = pytest.mark.parametrize("path", native.paths())


ROWS = pairwise(list(IDS_BY_BITS), FLOATS, NUMBERS)


@each_path
def test_both_write_and_read_the_same_bytes(path: str) -> None:
    for bits, dtype, fill in ROWS:
        component = Component(LayerKind.attention, dtype, 1, 2, 150, 131)
        parts = numbers(KVLayout((component,)), fill)[0][0]
        codecs = [KiviCodec(bits, NUMPY), KiviCodec(bits, Loops(path))]
        segments, outs = [], []
        for codec in codecs:
            room = np.zeros(codec.max_segment_bytes(component), np.uint8)
            encoded = codec.encode_layer(parts, LayerTerms(component), room)
            segments.append((room[: encoded.stored_bytes].tobytes(), encoded.error_bound))
            outs.append([np.empty_like(part) for part in parts])
        assert segments[0] == segments[1]
        for codec, out in zip(codecs, outs, strict=True):
            codec.decode_segment(np.frombuffer(segments[0][0], np.uint8), component, out)
        assert all(map(np.array_equal, *outs))


@each_path
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 32), by_token=st.booleans(), is_signed=st.booleans())
def test_both_expand_codes_and_scales_that_nobody_wrote_alike(
    seed: int, by_token: bool, is_signed: bool, path: str
) -> None:
    rng = np.random.default_rng(seed)
    shape = (1, 64 * int(rng.integers(1, 3)), 40) if by_token else (2, 3, int(rng.integers(1, 140)))
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    groups = NUMPY.bounds(codes.astype(np.float32), by_token)[0].shape
    some = rng.integers(0, 2, groups).astype(np.float32)
    scale: Floats = np.abs(rng.standard_normal(groups, np.float32)) * some
    base = None if is_signed else rng.standard_normal(groups, np.float32)
    one, other = (loops.expand(codes, scale, base, by_token) for loops in (NUMPY, Loops(path)))
    assert one.tobytes() == other.tobytes()


@each_path
@pytest.mark.parametrize("by_token", [True, False])
def test_numbers_too_far_from_their_codes_are_refused_alike(path: str, by_token: bool) -> None:
    values = np.random.default_rng(0).standard_normal((2, 128, 150), np.float32)
    low, high = NUMPY.bounds(values, by_token)
    for levels in (15, 3):
        scale: Floats = ((high - low) / np.float32(levels)).astype(np.float32)
        for loops in (NUMPY, Loops(path)):
            assert loops.quantise(values, scale, low, levels, by_token) is not None
            assert loops.quantise(values, scale / np.float32(2), low, levels, by_token) is None
