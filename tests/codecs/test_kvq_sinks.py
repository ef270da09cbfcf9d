"""kvq's exact first tokens of a prompt, and what each token's importance does to its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import (
    Tensors,
    all_zero,
    decoded,
    filled,
    layouts,
    pairwise,
    same,
    special_values,
    template,
)
from contracts.lossy_codec import (
    FLOATS,
    SMALL,
    centred,
    largest_error,
    numbers,
    outliers,
    promise_held,
)
from oracles.kvq import bound_at
from oracles.kvq_numpy import NUMPY_KVQ, moved

from kvstore.codecs.base import EncodeTerms, LossyCodec, Part, codec_by_id, codec_by_name
from kvstore.codecs.floats import from_float32, to_float32
from kvstore.codecs.kvq import KvqCodec, Options
from kvstore.codecs.kvq_body import HEAD, Body, parse_body
from kvstore.codecs.kvq_models import MODELS, PLAIN, classes_of, factors_of
from kvstore.codecs.kvq_tiles import LEVELS
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FrameWriter, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

ROPE = EncodeTerms(rope=RopeParameters(10000.0, 32))
LAYOUT = KVLayout((Component(LayerKind.attention, DType.float32, 1, 2, 64, 300),))
WEIGHTS = np.random.default_rng(3).permutation(300).astype(np.float32)
"""Every token another; one is worth nothing."""
TERMS = EncodeTerms(importance=WEIGHTS)
SETTINGS = ["kvq:0", "kvq:2", "kvq:2,sinks=4", "kvq:layered,sinks=3", "kvq:1,importance"]
_every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


def codec(name: str) -> KvqCodec:
    found = codec_by_name(name)
    assert isinstance(found, KvqCodec)
    return found


def encoded(
    by: LossyCodec, tensors: Tensors, layout: KVLayout, terms: EncodeTerms | None = None,
    position: int = 0,
) -> Bytes:  # fmt: skip
    """Return the frame of the chunk of a prompt that begins at *position*."""
    out = np.empty(by.max_frame_bytes(layout), np.uint8)
    header = by.encode(template(layout, position=position), tensors, out, terms)
    return out[: header.frame_bytes]


def body_of(frame: Bytes, index: int = 0) -> Body:
    header = parse_header(frame)
    component = header.layout.components[int(header.segments[index]["component"])]
    return parse_body(header.segment(frame, index), component)


def read(frame: Bytes, position: int) -> Tensors:
    header = parse_header(frame)
    out = filled(header.layout, all_zero)
    KvqCodec().decode_prefix(header, frame, header.levels, out, position)
    return out


def first(tensors: Tensors, count: int) -> Tensors:
    return [[[part[:, :count] for part in parts] for parts in layers] for layers in tensors]


# --- exact tokens


SHAPES = ["gqa", "mla", "several", "hybrid", "mha"]
ROWS = pairwise(SETTINGS, FLOATS, SHAPES, [centred, outliers])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_tokens_of_a_prompt_come_back_bit_by_bit(name: str) -> None:
    by = codec(name)
    sinks = by.options.sinks
    for dtype, layout, fill in [row[1:] for row in ROWS if row[0] == name]:
        shape = layouts(dtype)[layout]
        tensors = numbers(shape, fill)
        for position in (0, 1, sinks, 512):
            frame = encoded(by, tensors, shape, ROPE, position)
            promise_held(frame, tensors)
            found = decoded(frame)
            for component, ours, theirs in zip(shape.components, tensors, found, strict=True):
                count = max(0, sinks - position - component.first_token)
                assert same(first([ours], count), first([theirs], count))


def test_only_tokens_before_the_count_are_exact_and_only_they_cost_bytes() -> None:
    layout = layouts(DType.bfloat16)["gqa"]
    tensors = numbers(layout)
    for sinks, position in ((0, 0), (1, 0), (4, 1), (4, 3), (4, 4), (1, 512)):
        frame = encoded(codec(f"kvq:2,sinks={sinks}"), tensors, layout, None, position)
        plain = encoded(codec("kvq:2,sinks=0"), tensors, layout, None, position)
        count, exact = max(0, sinks - position), body_of(frame).sinks
        assert exact.shape[1] == count
        assert count or np.array_equal(frame, plain)
        for part, stored in zip(tensors[0][0], exact, strict=True):
            assert np.array_equal(stored.transpose(1, 0, 2), part[:, :count])


def test_a_first_token_far_from_all_others_no_longer_makes_their_steps_coarse() -> None:
    layout = layouts(DType.float32)["gqa"]
    tensors = numbers(layout)
    for parts in tensors[0]:
        for part in parts:
            part[:, 0] = (to_float32(part[:, 0], DType.float32) * 100).view(np.uint32)
    with_it, without = (
        parse_header(encoded(codec(f"kvq:2,sinks={count}"), tensors, layout)) for count in (0, 1)
    )
    assert without.error_bound < 0.2 * with_it.error_bound


def test_the_first_chunk_of_256_tokens_takes_at_most_three_percent_more() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, 4, 128, 256),))
    tensors = numbers(layout)
    for quality in range(4):
        plain, frame = (
            encoded(codec(f"kvq:{quality},sinks={count}"), tensors, layout) for count in (0, 1)
        )
        assert len(plain) < len(frame) < 1.03 * len(plain)


@_every_float
def test_moved_exact_keys_are_those_that_a_model_computes_there(dtype: DType) -> None:
    """The keys of one content at two positions: what is stored at the one is read at the other."""
    layout = layouts(dtype)["gqa"]
    component = layout.components[0]
    frequencies = inverse_frequencies(ROPE.rope, component.head_dim)
    assert frequencies is not None

    def at(position: int) -> Tensors:
        rng, layers = np.random.default_rng(1), []
        for _ in range(component.layers):
            parts = []
            for index in range(2):
                rows = centred(component.shape, rng).astype(np.float32)
                if not index:
                    rotate(rows, *rotation(frequencies, position, component.tokens))
                bits = np.empty(component.shape, f"u{dtype.item_bytes}")
                from_float32(rows, dtype, bits)
                parts.append(bits)
            layers.append(parts)
        return [layers]

    frame = encoded(codec("kvq:3,sinks=3"), at(0), layout, ROPE)
    slack = {DType.float32: 1e-4, DType.float16: 0.01, DType.bfloat16: 0.07}[dtype]
    assert largest_error(layout, first(read(frame, 700), 3), first(at(700), 3)) <= slack


def test_a_chunk_of_nothing_but_exact_tokens_is_kept_exactly() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, 4, 128, 4),))
    tensors = numbers(layout)
    for sinks, position in ((4, 0), (3, 0), (4, 2)):
        frame = encoded(codec(f"kvq:0,sinks={sinks}"), tensors, layout, ROPE, position)
        is_exact = promise_held(frame, tensors) is Accuracy.exact
        assert is_exact or sinks - position < layout.tokens
    assert promise_held(encoded(codec("kvq:0,sinks=4"), tensors, layout), tensors) is Accuracy.exact


def test_a_layer_with_nan_in_an_exact_token_comes_back_bit_by_bit() -> None:
    layout = layouts(DType.bfloat16)["gqa"]
    tensors = numbers(layout)
    part = tensors[0][1][0]
    part[:, :1] = special_values(part[:, :1].shape, part.itemsize, np.random.default_rng(1))
    found = decoded(encoded(KvqCodec(), tensors, layout))
    assert same([[found[0][1]]], [[tensors[0][1]]])
    assert not same([[found[0][0]]], [[tensors[0][0]]])


def test_every_level_has_the_exact_tokens_and_keeps_its_bound() -> None:
    layout = layouts(DType.bfloat16)["several"]
    tensors, by = numbers(layout), codec("kvq:layered,sinks=2")
    frame = encoded(by, tensors, layout, ROPE)
    header = parse_header(frame)
    for level in range(LEVELS + 1):
        prefix = frame[: header.level_end(level)]
        out = filled(layout, all_zero)
        by.decode_prefix(header, prefix, level, out)
        assert same(first(out[:2], 2), first(tensors[:2], 2))
        assert largest_error(layout, out, tensors) <= bound_at(header, prefix, level)
    assert bound_at(header, frame, LEVELS) <= header.error_bound * (1 + 1e-6)


def test_moving_a_frame_to_another_tier_keeps_its_exact_tokens() -> None:
    tensors, by = numbers(SMALL), codec("kvq:0,sinks=4")
    raw = np.empty(RawCodec().max_frame_bytes(SMALL), np.uint8)
    RawCodec().encode(template(SMALL, position=0), tensors, raw)
    out = np.empty(by.max_frame_bytes(SMALL), np.uint8)
    there = out[: transcode(raw, by, out).frame_bytes]
    assert np.array_equal(there, encoded(by, tensors, SMALL))
    again = np.empty_like(out)
    assert np.array_equal(again[: transcode(there, KvqCodec(), again).frame_bytes], there)
    back = np.empty_like(raw)
    transcode(there, RawCodec(), back)
    assert same(first(decoded(back), 4), first(tensors, 4))


def test_reference_and_compiled_write_and_read_the_same_exact_tokens() -> None:
    for dtype in FLOATS:
        layout = layouts(dtype)["several"]
        tensors = numbers(layout, outliers)
        for quality, options in ((2, Options(3)), (None, Options(1)), (1, Options(2, True))):
            weights = np.arange(layout.tokens, dtype=np.float32)
            terms = replace(ROPE, importance=weights)
            reference = KvqCodec(quality, NUMPY_KVQ, options)
            frame = encoded(reference, tensors, layout, terms)
            compiled = KvqCodec(quality, options=options)
            assert np.array_equal(frame, encoded(compiled, tensors, layout, terms))
            out = filled(layout, all_zero)
            reference.decode_into(parse_header(frame), frame, out)
            assert same(out, decoded(frame))


def test_more_exact_tokens_than_there_can_be_are_refused() -> None:
    for sinks in (5, 64, 255):
        for layout in (SMALL, KVLayout((replace(SMALL.components[0], tokens=sinks),))):
            frame = encoded(KvqCodec(), numbers(layout), layout)
            body = parse_header(frame).segment(frame, 0).copy()
            if body[0] != 1:  # so few tokens do not get smaller
                continue
            body[1] = sinks
            out = [np.zeros(layout.components[0].shape, np.uint16) for _ in range(2)]
            with pytest.raises(InvalidFrameError, match="sinks"):
                KvqCodec().decode_segment(body, layout.components[0], out)
    component = replace(SMALL.components[0], tokens=3)
    head = HEAD.pack(1, 3, 0, 0, 0, 0, 1.0, 0)
    out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
    with pytest.raises(InvalidFrameError, match="sinks"):
        KvqCodec().decode_segment(np.frombuffer(head, np.uint8), component, out)


def test_exact_tokens_cut_short_or_uncounted_are_refused() -> None:
    frame = encoded(codec("kvq:2,sinks=2"), numbers(SMALL), SMALL)
    whole = parse_header(frame).segment(frame, 0)
    out = [np.zeros(SMALL.components[0].shape, np.uint16) for _ in range(2)]
    for body in (whole[:-1], whole[:-2], np.append(whole, np.uint8(0))):
        with pytest.raises(InvalidFrameError, match="stored_bytes"):
            KvqCodec().decode_segment(body.copy(), SMALL.components[0], out)
    for count in (0, 1, 3):
        body = whole.copy()
        body[1] = count
        with pytest.raises(InvalidFrameError, match="stored_bytes"):
            KvqCodec().decode_segment(body, SMALL.components[0], out)


# --- names


def test_every_quality_keeps_one_token_unless_told_how_many() -> None:
    for quality in ("0", "1", "2", "3", "layered"):
        assert codec(f"kvq:{quality}").options.sinks == codec("kvq").options.sinks == 1
        found = [codec(f"kvq:{quality},sinks={n}").options.sinks for n in range(5)]
        assert found == [0, 1, 2, 3, 4]


UNKNOWN = [
    "2,sinks=5", "2,sinks=-1", "2,sinks=01", "2,sinks=", "2,sinks", "2,sinks=1,sinks=1", "2,",
    "2,importance,importance", "layered,importance", "sinks=1", "importance", "2,Importance",
    "2,importance=1", "2, sinks=1", ",", "2,importance,sinks=1",
]  # fmt: skip


def test_unknown_terms_are_refused_with_what_there_is() -> None:
    for terms in UNKNOWN:
        with pytest.raises(UnknownCodecError, match=r",sinks=0 to ,sinks=4; .* ,imp") as error:
            codec_by_name(f"kvq:{terms}")
        assert f"kvq:{terms}" in str(error.value)
    for name in ("mixed", "mixed:0", "mixed:3"):
        with pytest.raises(UnknownCodecError, match="kvq:N,importance, which replaces mixed"):
            codec_by_name(name)


def test_frames_of_the_codec_mixed_and_of_revision_1_are_of_no_codec_here() -> None:
    with pytest.raises(UnknownCodecError, match="11"):
        codec_by_id(11)
    frame = encoded(KvqCodec(), numbers(SMALL), SMALL)
    header = parse_header(frame)
    writer = FrameWriter(template(SMALL), np.zeros(len(frame), np.uint8))
    for index in range(len(header.segments)):
        body = header.segment(frame, index)
        writer.reserve(len(body))[:] = body
        writer.commit(len(body))
    old = writer.finish(header.codec_id, 1, header.accuracy, asset=header.asset)
    out = filled(SMALL, all_zero)
    with pytest.raises(UnknownCodecError, match="revision 1"):
        KvqCodec().decode_into(old, frame, out)
    assert same(out, filled(SMALL, all_zero))


# --- importance


def token_errors(left: Part, right: Part) -> np.ndarray:
    one, other = (to_float32(part, DType.float32) for part in (left, right))
    found: np.ndarray = np.abs(one - other).max((0, 2))
    return found


def test_important_tokens_come_back_more_exactly() -> None:
    tensors = numbers(LAYOUT)
    frame = encoded(codec("kvq:2,importance"), tensors, LAYOUT, TERMS)
    assert promise_held(frame, tensors) is Accuracy.bounded
    plain = encoded(KvqCodec(), tensors, LAYOUT)
    bound = parse_header(plain).error_bound
    classes = classes_of(WEIGHTS[1:])
    for ours, theirs in zip(tensors[0][0], decoded(frame)[0][0], strict=True):
        errors = token_errors(ours, theirs)
        assert errors[0] == 0
        for kind in range(4):
            worst = errors[1:][classes == kind].max()
            assert 0.2 * bound < worst / 2.0 ** (kind - PLAIN) <= 1.001 * bound
    assert len(plain) < len(frame) < 1.06 * len(plain)


def test_without_importance_the_frame_is_that_of_plain_kvq() -> None:
    tensors = numbers(LAYOUT)
    frame = encoded(codec("kvq:2,importance"), tensors, LAYOUT)
    assert np.array_equal(frame, encoded(codec("kvq:2"), tensors, LAYOUT))
    assert np.array_equal(frame, encoded(codec("kvq:2"), tensors, LAYOUT, TERMS))


def test_classes_go_by_rank_and_nothing_is_the_least() -> None:
    classes = classes_of(WEIGHTS)
    order = np.argsort(-WEIGHTS)
    assert (classes[order[:6]] == 0).all()
    assert (classes[order[6:36]] == 1).all()
    assert (classes[order[36:-1]] == PLAIN).all()
    assert classes[order[-1]] == 3


def test_a_class_finer_by_two_has_the_model_four_scales_up() -> None:
    models = np.arange(MODELS, dtype=np.uint8)[None]
    classes = np.arange(4, dtype=np.uint8)
    found = moved(models, classes)[0].astype(int)
    assert (found % 2 == models % 2).all()
    assert found[PLAIN].tolist() == list(range(MODELS))
    assert found[1].tolist() == [min(m + 8, 62 + m % 2) for m in range(MODELS)]
    assert found[0].tolist() == [min(m + 16, 62 + m % 2) for m in range(MODELS)]
    assert found[3].tolist() == [max(m - 8, m % 2) for m in range(MODELS)]
    assert factors_of(classes).tolist() == [0.25, 0.5, 1, 2]


def test_weighed_keys_come_back_at_the_position_asked_for() -> None:
    terms = EncodeTerms(rope=RopeParameters(10000.0, 64), importance=WEIGHTS)
    tensors = numbers(LAYOUT)
    frame = encoded(codec("kvq:3,importance"), tensors, LAYOUT, terms, 512)
    assert promise_held(frame, tensors) is Accuracy.bounded
    assert largest_error(LAYOUT, read(frame, 512), decoded(frame)) == 0
    bound = parse_header(frame).error_bound
    assert largest_error(LAYOUT, read(frame, 513), decoded(frame)) > bound


def test_classes_behind_the_last_token_are_refused() -> None:
    layout = KVLayout((Component(LayerKind.mla, DType.float32, 1, 1, 64, 61),))
    terms = EncodeTerms(importance=np.arange(61, dtype=np.float32))
    frame = encoded(codec("kvq:2,importance"), numbers(layout), layout, terms, 512)
    body = parse_header(frame).segment(frame, 0).copy()
    out = [np.zeros((1, 61, 64), np.uint32)]
    KvqCodec().decode_segment(body, layout.components[0], out)
    body[-1] |= 0x40
    with pytest.raises(InvalidFrameError, match="classes"):
        KvqCodec().decode_segment(body, layout.components[0], out)


def test_refinements_of_tokens_with_classes_are_refused() -> None:
    terms = EncodeTerms(importance=np.arange(SMALL.tokens, dtype=np.float32))
    weighed = encoded(codec("kvq:0,importance"), numbers(SMALL), SMALL, terms)
    layered = encoded(codec("kvq:layered"), numbers(SMALL), SMALL)
    base = parse_header(weighed).segment(weighed, 0)
    finer = parse_header(layered).segment(layered, SMALL.segment_count)
    out = [np.zeros(SMALL.components[0].shape, np.uint16) for _ in range(2)]
    with pytest.raises(InvalidFrameError, match="refinements"):
        KvqCodec().decode_layer([base, finer], SMALL.components[0], out, None)
