"""The two backends of the grouped codecs: the same bits from both, and what does not agree is
not used.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.lossy_codec import NUMBERS, Numbers, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.floats import Floats
from kvstore.codecs.grouped import Gq2Codec, Gq4Codec, Gq8Codec
from kvstore.codecs.grouped_loops import NUMPY, Codes, Loops, Quantised, agrees, best_loops
from kvstore.codecs.terms import LayerTerms
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

NUMBA = pytest.importorskip("kvstore.codecs.grouped_numba").NUMBA


def test_the_compiled_loops_are_used_and_agree() -> None:
    assert agrees(NUMPY)
    assert agrees(NUMBA)
    assert best_loops() is NUMBA


@pytest.mark.parametrize("kind", [Gq8Codec, Gq4Codec, Gq2Codec], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16, DType.float32])
@pytest.mark.parametrize("fill", NUMBERS, ids=lambda fill: fill.__name__)
def test_both_write_and_read_the_same_bytes(
    kind: type[Gq8Codec], dtype: DType, fill: Numbers
) -> None:
    component = Component(LayerKind.attention, dtype, 1, 2, 150, 131)
    parts = numbers(KVLayout((component,)), fill)[0][0]
    codecs = [kind(NUMPY), kind(NUMBA)]
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


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 32), by_token=st.booleans(), is_signed=st.booleans())
def test_both_expand_codes_and_scales_that_nobody_wrote_alike(
    seed: int, by_token: bool, is_signed: bool
) -> None:
    rng = np.random.default_rng(seed)
    shape = (1, 64 * int(rng.integers(1, 3)), 40) if by_token else (2, 3, int(rng.integers(1, 140)))
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    groups = NUMPY.bounds(codes.astype(np.float32), by_token)[0].shape
    some = rng.integers(0, 2, groups).astype(np.float32)
    scale: Floats = np.abs(rng.standard_normal(groups, np.float32)) * some
    base = None if is_signed else rng.standard_normal(groups, np.float32)
    one, other = (loops.expand(codes, scale, base, by_token) for loops in (NUMPY, NUMBA))
    assert one.tobytes() == other.tobytes()


def test_loops_that_differ_in_a_bit_are_not_used() -> None:
    def other_bounds(values: Floats, by_token: bool) -> tuple[Floats, Floats]:
        low, high = NUMPY.bounds(values, by_token)
        return np.nextafter(low, np.float32(-9)), high

    def other_quantise(
        values: Floats, scale: Floats, base: Floats | None, levels: int, by_token: bool
    ) -> Quantised | None:
        found = NUMPY.quantise(values, scale, base, levels, by_token)
        return None if found is None else (found[0] ^ np.uint8(1), found[1])

    def lax_quantise(
        values: Floats, scale: Floats, base: Floats | None, levels: int, by_token: bool
    ) -> Quantised:
        found = NUMPY.quantise(values, scale, base, levels, by_token)
        return found or (np.zeros(values.shape, np.uint8), values)

    def other_expand(codes: Codes, scale: Floats, base: Floats | None, by_token: bool) -> Floats:
        return NUMPY.expand(codes, scale, base, by_token) * np.float32(1 + 2**-23)

    wrong: list[Loops] = [
        replace(NUMPY, bounds=other_bounds),
        replace(NUMPY, quantise=other_quantise),
        replace(NUMPY, quantise=lax_quantise),
        replace(NUMPY, expand=other_expand),
    ]
    assert [agrees(loops) for loops in wrong] == [False] * 4
