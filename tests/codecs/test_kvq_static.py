from __future__ import annotations

import numpy as np
import pytest
from helpers.kvq_static_samples import KV, LATENT, bound, calibrated, shelf_of
from helpers.kvtc_samples import POSITION, ROPE, chunk, decode, encode, framed

from kvstore.codecs.base import LayerTerms, Part, empty_tensors
from kvstore.codecs.floats import to_float32
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_static import StaticKvqCodec, shifts_of
from kvstore.proto.types import Accuracy, Component, DType


def largest_error(found: list[Part], wanted: list[Part], dtype: DType) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(to_float32(a, dtype) - to_float32(b, dtype)).max()) for a, b in pairs)


@pytest.mark.parametrize("component", [KV, LATENT], ids=["kv", "latent"])
def test_finer_qualities_have_smaller_errors_and_their_bounds_hold(component: Component) -> None:
    sizes, errors = [], []
    for quality in range(4):
        codec = StaticKvqCodec(quality, shelf_of(component))
        header, frame = framed(codec, component)
        assert header.accuracy is Accuracy.bounded
        assert header.asset == calibrated(component).digest
        out = empty_tensors(header.layout)
        codec.decode_into(header, frame, out)
        error = max(
            largest_error(found, wanted, component.dtype)
            for found, wanted in zip(out[0], chunk(component)[0], strict=True)
        )
        assert 0 < error <= header.error_bound
        sizes.append(len(frame))
        errors.append(error)
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)


def test_a_chunk_of_32_tokens_takes_a_sixth_less_than_kvq_static_at_nearly_its_error() -> None:
    parts = chunk(KV)[0][0]
    data, encoded = encode(bound(1, KV), parts, KV)
    kvq = KvqCodec(1)
    room = np.empty(kvq.max_segment_bytes(KV), np.uint8)
    theirs = kvq.encode_layer(parts, LayerTerms(KV, 0, 1, POSITION, ROPE), room)
    assert len(data) < theirs.stored_bytes * 5 / 6
    assert encoded.error_bound < 1.25 * theirs.error_bound


def test_keys_are_turned_to_where_the_caller_wants_them() -> None:
    codec = bound(3, KV)
    data, encoded = encode(codec, chunk(KV)[0][0], KV)
    for position in (0, 511, 9000):
        elsewhere = chunk(KV, position=position)[0][0]
        found = decode(codec, data, KV, position)
        assert largest_error(found, elsewhere, KV.dtype) < 2 * encoded.error_bound
    assert all(map(np.array_equal, decode(codec, data, KV, POSITION), decode(codec, data, KV)))


def test_numbers_of_another_size_than_the_models_shift_the_models() -> None:
    parts = [part + np.uint16(0x0080) for part in chunk(KV)[0][0]]  # twice as large
    data, encoded = encode(bound(2, KV), parts, KV)
    assert encoded.accuracy is Accuracy.bounded
    assert largest_error(decode(bound(2, KV), data, KV), parts, KV.dtype) <= encoded.error_bound


def test_shifts_are_quarters_of_octaves_from_scale_ten() -> None:
    quarters = np.arange(-40, 41)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4)), 10 + quarters)
    assert np.array_equal(shifts_of(2.0 ** (quarters / 4 + 0.12)), 10 + quarters)
    assert np.array_equal(shifts_of(np.array([1e-60, 1e60])), [-117, 127])
