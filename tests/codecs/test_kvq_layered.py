from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import all_zero, decoded, filled, layouts, pairwise, same, special_values
from contracts.lossy_codec import (
    FLOATS,
    NUMBERS,
    SMALL,
    LossyCodecContract,
    centred,
    encoded,
    largest_error,
    numbers,
    outliers,
)
from oracles.kvq import bound_at
from oracles.kvq_numpy import NUMPY_KVQ

from kvstore.codecs.base import EncodeTerms, Part, codec_by_name
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_tiles import LEVELS
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import check_frame, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

TERMS = EncodeTerms(rope=RopeParameters(10000.0, 32))
LAYERED = KvqCodec(None)


class TestLayeredKvqCodec(LossyCodecContract):
    codec = LAYERED


def at_level(frame: Bytes, level: int, position: int | None = None) -> list[list[list[Part]]]:
    """Decode *frame* from no more of its bytes than *level* needs."""
    header = parse_header(frame)
    prefix = frame[: header.level_end(level)].copy()
    header = check_frame(prefix, level=level)
    out = filled(header.layout, all_zero)
    LAYERED.decode_prefix(header, prefix, level, out, position)
    return out


def test_the_name_says_that_it_is_layered() -> None:
    codec = codec_by_name("kvq:layered")
    assert isinstance(codec, KvqCodec)
    assert (codec.levels, codec.max_levels) == (LEVELS, LEVELS)
    layout = layouts(DType.bfloat16)["gqa"]
    assert np.array_equal(
        encoded(LAYERED, numbers(layout), layout), encoded(codec, numbers(layout), layout)
    )


def test_each_level_is_within_its_own_bound() -> None:
    for dtype, fill, terms in pairwise(FLOATS, NUMBERS, [None, TERMS]):
        layout = layouts(dtype)["several"]
        tensors = numbers(layout, fill)
        frame = encoded(LAYERED, tensors, layout, terms)
        header = parse_header(frame)
        bounds = [bound_at(header, frame, level) for level in range(LEVELS + 1)]
        for level, bound in enumerate(bounds):
            assert largest_error(layout, tensors, at_level(frame, level)) <= bound
        if header.accuracy is Accuracy.bounded:
            assert bounds == sorted(bounds, reverse=True)
            assert bounds[-1] == pytest.approx(header.error_bound, rel=1e-6)


def test_each_level_cuts_the_error_to_a_third() -> None:
    layout = layouts(DType.float32)["gqa"]
    tensors = numbers(layout)
    frame = encoded(LAYERED, tensors, layout)
    errors = [largest_error(layout, tensors, at_level(frame, k)) for k in range(LEVELS + 1)]
    assert errors[1] == pytest.approx(errors[0] / 3, rel=0.05)
    assert errors[2] == pytest.approx(errors[1] / 3, rel=0.05)


def test_the_base_is_what_the_coarsest_quality_gives() -> None:
    layout = layouts(DType.bfloat16)["several"]
    tensors = numbers(layout)
    for terms in (None, TERMS):
        frame = encoded(LAYERED, tensors, layout, terms)
        single = encoded(KvqCodec(0), tensors, layout, terms)
        assert same(at_level(frame, 0), decoded(single))
        rows, of_single = parse_header(frame).segments, parse_header(single).segments
        assert np.array_equal(rows["checksum"][: len(of_single)], of_single["checksum"])


def test_all_levels_together_are_little_larger_than_a_fine_step_alone() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 2, 128, 256),))
    tensors = numbers(layout, lambda shape, rng: rng.standard_normal(shape))
    values = layout.raw_bytes / 2
    header = parse_header(encoded(LAYERED, tensors, layout))
    single = [len(encoded(KvqCodec(q), tensors, layout)) * 8 / values for q in range(4)]
    per_value = [header.level_end(level) * 8 / values for level in range(LEVELS + 1)]
    for level in (1, 2):  # a bit for each halving of the step
        alone = single[3] + np.log2(3**level / 8)
        assert per_value[level] < alone + 0.1


def test_keys_come_back_at_the_position_asked_for_at_every_level() -> None:
    layout = layouts(DType.float32)["gqa"]
    tensors = numbers(layout)
    frame = encoded(LAYERED, tensors, layout, TERMS)
    for level in range(LEVELS + 1):
        here, there = at_level(frame, level), at_level(frame, level, position=512)
        assert same(here, there)
        moved = at_level(frame, level, position=513)
        assert not same(here, moved)
        bound = bound_at(parse_header(frame), frame, level)
        back = encoded(KvqCodec(3), moved, layout)
        assert len(back) > 0
        assert largest_error(layout, here, moved) > bound


def test_reference_and_compiled_write_the_same_levels() -> None:
    for dtype in FLOATS:
        layout = layouts(dtype)["several"]
        for fill in (centred, outliers):
            tensors = numbers(layout, fill)
            reference = KvqCodec(None, NUMPY_KVQ)
            frame = encoded(reference, tensors, layout, TERMS)
            assert np.array_equal(frame, encoded(LAYERED, tensors, layout, TERMS))
            out = filled(layout, all_zero)
            reference.decode_into(parse_header(frame), frame, out)
            assert same(out, decoded(frame))


def test_layers_kept_exactly_have_nothing_behind_them() -> None:
    layout = layouts(DType.bfloat16)["gqa"]
    tensors = numbers(layout)
    for part in tensors[0][1]:
        part[...] = special_values(part.shape, 2, np.random.default_rng(1))
    frame = encoded(LAYERED, tensors, layout)
    stored = parse_header(frame).segments["stored_bytes"].reshape(LEVELS + 1, -1)
    assert (stored[1:, 1] == 0).all()
    assert (stored[1:, [0, 2]] > 0).all()
    for level in range(LEVELS + 1):
        assert same([[at_level(frame, level)[0][1]]], [[tensors[0][1]]])


def test_a_prefix_too_short_for_its_level_is_refused() -> None:
    frame = encoded(LAYERED, numbers(SMALL), SMALL)
    header = parse_header(frame)
    for level in range(LEVELS + 1):
        end = header.level_end(level)
        with pytest.raises(ChunkCorruptError):
            LAYERED.decode_prefix(header, frame[: end - 1], level, filled(SMALL, all_zero))
    for level in (-1, LEVELS + 1):
        with pytest.raises(InvalidFrameError, match="level"):
            LAYERED.decode_prefix(header, frame, level, filled(SMALL, all_zero))


def test_refinements_changed_or_mixed_up_are_read_or_refused() -> None:
    frame = encoded(LAYERED, numbers(SMALL), SMALL)
    header = parse_header(frame)
    component = SMALL.components[0]
    data = [header.segment(frame, 2 * level) for level in range(LEVELS + 1)]
    out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(3000):
        level = int(rng.integers(1, LEVELS + 1))
        bodies = [each.copy() for each in data]
        for _ in range(rng.integers(1, 4)):
            body = bodies[level]
            at = rng.integers(0, len(body) if rng.random() < 0.5 else min(32, len(body)))
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        if rng.random() < 0.3:
            bodies[level] = bodies[level][: int(rng.integers(0, len(bodies[level])))]
        try:
            LAYERED.decode_layer(bodies, component, out, None)
        except InvalidFrameError:
            refused += 1
    assert refused > 1000
    for bodies in ([data[0], data[2]], [data[0], data[2], data[1]], [data[0], data[0]]):
        with pytest.raises(InvalidFrameError):
            LAYERED.decode_layer(bodies, component, out, None)
