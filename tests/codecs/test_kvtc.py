from __future__ import annotations

import numpy as np
import pytest
from helpers.kvtc_samples import (
    KV,
    LATENT,
    POSITION,
    ROPE,
    bound,
    calibrated,
    chunk,
    decode,
    encode,
    framed,
    noise_of,
    shelf_of,
)

from kvstore.codecs.base import LayerTerms, empty_tensors
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvtc import SINK_TOKENS, KvtcCodec
from kvstore.proto.types import Accuracy


def test_finer_qualities_have_smaller_errors_and_larger_frames() -> None:
    sizes, noises = [], []
    for quality in range(4):
        codec = KvtcCodec(quality, shelf_of(KV, LATENT))
        header, frame = framed(codec, KV, LATENT)
        assert (header.accuracy, header.error_bound) == (Accuracy.approximate, 0)
        assert header.asset == calibrated(KV, LATENT).digest
        out = empty_tensors(header.layout)
        codec.decode_into(header, frame, out)
        sizes.append(len(frame))
        noises.append(max(noise_of(out[0][1], chunk(KV)[0][1], KV.dtype)))
    assert sizes == sorted(sizes)
    assert noises == sorted(noises, reverse=True)
    assert noises[3] < 0.002
    assert noises[0] < 0.2


def test_what_varies_in_few_directions_takes_less_than_half_of_kvq_at_no_more_noise() -> None:
    parts = chunk(KV)[0][0]
    codec = bound(2, KV)
    data, _ = encode(codec, parts, KV)
    kvq = KvqCodec(2)
    room = np.empty(kvq.max_segment_bytes(KV), np.uint8)
    used = kvq.encode_layer(parts, LayerTerms(KV, 0, 1, POSITION, ROPE), room).stored_bytes
    back = [np.zeros_like(part) for part in parts]
    kvq.decode_layer([room[:used]], KV, back, None)
    assert len(data) < used / 2
    ours, theirs = (noise_of(found, parts, KV.dtype) for found in (decode(codec, data, KV), back))
    assert max(ours) < 2 * max(theirs)


def test_keys_are_turned_to_where_the_caller_wants_them() -> None:
    codec = bound(3, KV)
    data, _ = encode(codec, chunk(KV)[0][0], KV)
    for position in (0, 511, 9000):
        elsewhere = chunk(KV, position=position)[0][0]
        assert max(noise_of(decode(codec, data, KV, position), elsewhere, KV.dtype)) < 0.002
    assert all(map(np.array_equal, decode(codec, data, KV, POSITION), decode(codec, data, KV)))


@pytest.mark.parametrize("position", [0, 1])
def test_the_first_tokens_of_a_prompt_and_only_those_come_back_exactly(position: int) -> None:
    codec, parts = bound(0, KV), chunk(KV, position=position)[0][0]
    for part in parts:
        part[:, :SINK_TOKENS] ^= 0x0080  # twice or half as large
    data, encoded = encode(codec, parts, KV, position)
    assert encoded.accuracy is Accuracy.approximate
    back = decode(codec, data, KV)
    same = [
        np.array_equal(a[:, :SINK_TOKENS], b[:, :SINK_TOKENS])
        for a, b in zip(back, parts, strict=True)
    ]
    assert same == [position == 0] * 2
    assert not np.array_equal(back[0][:, SINK_TOKENS:], parts[0][:, SINK_TOKENS:])


def test_the_first_tokens_move_with_the_others() -> None:
    codec = bound(3, KV)
    data, _ = encode(codec, chunk(KV, position=0)[0][0], KV, 0)
    moved = decode(codec, data, KV, 700)
    assert max(noise_of(moved, chunk(KV, position=700)[0][0], KV.dtype)) < 0.002
    assert (
        max(noise_of([moved[0][:, :4]], [chunk(KV, position=700)[0][0][0][:, :4]], KV.dtype))
        < 0.002
    )


def test_what_lies_far_outside_of_the_calibration_is_kept_exactly() -> None:
    parts = [part + np.uint16(0x0500) for part in chunk(KV)[0][0]]
    data, encoded = encode(bound(1, KV), parts, KV)
    assert encoded.accuracy is Accuracy.exact
    assert all(map(np.array_equal, decode(bound(1, KV), data, KV), parts))


def test_a_few_outliers_are_escaped() -> None:
    parts = chunk(KV)[0][0]
    parts[1][:, 9] += np.uint16(0x0280)
    data, encoded = encode(bound(3, KV), parts, KV)
    assert encoded.accuracy is Accuracy.approximate
    plain, _ = encode(bound(3, KV), chunk(KV)[0][0], KV)
    assert len(data) > len(plain)
    # What is left is the part of the outlier that lies outside of the components.
    assert max(noise_of(decode(bound(3, KV), data, KV), parts, KV.dtype)) < 0.03


def test_bases_are_orthonormal_and_sorted_by_variance() -> None:
    tables = calibrated(KV).tables
    for at in np.ndindex(2, 2):
        basis, variances = tables["0.basis"][at], tables["0.variances"][at]
        assert np.allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-5)
        assert (np.diff(variances) <= 0).all()
    assert tables["0.basis"].shape[3] < 30  # of 96 channels
