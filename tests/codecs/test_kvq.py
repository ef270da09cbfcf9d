"""kvq: its promise, its levels, its exact first tokens, and steps by importance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import (
    Tensors,
    all_zero,
    decoded,
    encoded,
    filled,
    layouts,
    pairwise,
    same,
    special_values,
    template,
)
from contracts.lossy_codec import (
    FLOATS,
    NUMBERS,
    SMALL,
    LossyCodecContract,
    bits_of,
    centred,
    largest_error,
    numbers,
    outliers,
    promise_held,
)
from golden import kvq_models as computed

from kvstore.codecs.base import EncodeTerms, codec_by_id, codec_by_name
from kvstore.codecs.floats import to_float32
from kvstore.codecs.kvq import KEY_SHARE, VALUE_SHARE, KvqCodec
from kvstore.codecs.kvq_layer import HEAD, QUANTISED, Head, parse_body, parse_refinement
from kvstore.codecs.kvq_models import ASSET, PLAIN, RATIOS, classes_of, kvq_models
from kvstore.codecs.kvq_tiles import LEVELS, Cut, KvqLoops
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import check_frame, parse_header
from kvstore.proto.native import paths
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

ROPE = RopeParameters(10000.0, 32)
TURNED = EncodeTerms(rope=ROPE)
LAYOUT = KVLayout((Component(LayerKind.attention, DType.float32, 1, 2, 64, 300),))
WEIGHTS = np.random.default_rng(3).permutation(300).astype(np.float32)
"""Every token another; one is worth nothing."""
WEIGHED = EncodeTerms(importance=WEIGHTS)
SETTINGS = ["0", "2", "2,sinks=4", "layered,sinks=3", "1,importance"]
GQA = {dtype: layouts(dtype)["gqa"] for dtype in FLOATS}
_every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


class TestKvqCodec(LossyCodecContract):
    codec = KvqCodec()


class TestLayeredKvqCodec(LossyCodecContract):
    codec = KvqCodec(None)


def kvq(terms: str) -> KvqCodec:
    found = codec_by_name(f"kvq:{terms}")
    assert isinstance(found, KvqCodec)
    return found


def read(frame: Bytes, position: int | None = None, level: int | None = None) -> Tensors:
    """Read *frame* from no more of its bytes than *level* needs."""
    header = parse_header(frame)
    level = header.levels if level is None else level
    prefix = frame[: header.level_end(level)].copy()
    header = check_frame(prefix, level=level)
    out = filled(header.layout, all_zero)
    KvqCodec().decode_prefix(header, prefix, level, out, position)
    return out


def bound_at(frame: Bytes, level: int) -> float:
    """Return the largest error that *frame* states for *level*."""
    header, bound = parse_header(frame), 0.0
    components = [c for c in header.layout.components for _ in range(c.layers)]
    for index, component in enumerate(components):
        base = header.segment(frame, index)
        if not len(base) or base[0] != QUANTISED:
            continue
        head = Head.of(base, len(base), component)
        data = header.segment(frame, index + level * header.layout.segment_count)
        of_level = parse_refinement(data, level, head.tiles)[1] if level else head.error_bound
        bound = max(bound, of_level)
    return bound


def attention(dtype: DType, heads: int = 2, dim: int = 64, tokens: int = 96) -> KVLayout:
    return KVLayout((Component(LayerKind.attention, dtype, 2, heads, dim, tokens),))


def rotated_keys(layout: KVLayout, position: int) -> Tensors:
    """Return tensors whose keys have a mean a channel before they are rotated."""
    component = layout.components[0]
    rng, layers = np.random.default_rng(5), []
    for _ in range(component.layers):
        keys = (centred(component.shape, rng) + 3).astype(np.float32)
        frequencies = inverse_frequencies(ROPE, component.head_dim)
        assert frequencies is not None
        rotate(keys, *rotation(frequencies, position, component.tokens))
        values = centred(component.shape, rng)
        layers.append([bits_of(keys, component.dtype), bits_of(values, component.dtype)])
    return [layers]


def first(tensors: Tensors, count: int) -> Tensors:
    return [[[part[:, :count] for part in parts] for parts in layers] for layers in tensors]


# --- every path


PATH_ROWS = pairwise(
    SETTINGS, FLOATS, ["mha", "mla", "several", "hybrid", "partial"], [None, TURNED], NUMBERS
)


@pytest.mark.parametrize("path", [path for path in paths() if path != "portable"])
def test_every_path_writes_and_reads_the_bytes_of_the_plainest(path: str) -> None:
    for name, dtype, shape, terms, fill in PATH_ROWS:
        layout, by = layouts(dtype)[shape], kvq(name)
        quality = None if by.levels else RATIOS.index(by.ratio)
        weights = np.arange(layout.tokens, dtype=np.float32)
        given = replace(terms or EncodeTerms(), importance=weights)
        plain, found = (
            KvqCodec(quality, KvqLoops(loops), by.options) for loops in ("portable", path)
        )
        tensors, outs = numbers(layout, fill), []
        frame = encoded(plain, tensors, layout, given, 1)
        assert np.array_equal(frame, encoded(found, tensors, layout, given, 1))
        for codec in (plain, found):
            outs.append(filled(layout, all_zero))
            codec.decode_into(parse_header(frame), frame, outs[-1])
        assert same(*outs)


def test_a_changed_layer_is_refused_or_is_the_same_to_all_paths() -> None:
    layout, rng = attention(DType.bfloat16), np.random.default_rng(9)
    component, weights = layout.components[0], np.arange(96, dtype=np.float32)
    terms = EncodeTerms(ROPE, importance=weights)
    codecs = [KvqCodec(0, loops) for loops in map(KvqLoops, paths())]
    refused = 0
    for name in SETTINGS[1:]:
        frame = encoded(kvq(name), numbers(layout, outliers), layout, terms, 1)
        header = parse_header(frame)
        right = [header.segment(frame, 2 * level) for level in range(header.levels + 1)]
        for number in range(60):
            bodies = [each.copy() for each in right]
            body = bodies[rng.integers(len(bodies))]
            at = rng.integers(0, len(body) if number % 2 else 64, rng.integers(1, 4))
            body[at] = rng.integers(0, 256, len(at))
            bodies[-1] = bodies[-1][: rng.choice([len(bodies[-1])] * 3 + [int(rng.integers(999))])]
            found = []
            for codec in codecs:
                out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
                try:
                    codec.decode_layer(bodies, component, out, None)
                except (InvalidFrameError, UnknownCodecError):
                    found.append(b"")
                else:
                    found.append(b"".join(part.tobytes() for part in out))
            assert len(set(found)) == 1
            refused += not found[0]
    assert 40 < refused < 200


# --- steps and bounds


@_every_float
def test_higher_qualities_are_larger_and_nearer(dtype: DType) -> None:
    layout = attention(dtype)
    tensors = numbers(layout)
    frames = [encoded(KvqCodec.of(str(q)), tensors, layout) for q in range(len(RATIOS))]
    errors = [largest_error(layout, tensors, decoded(frame)) for frame in frames]
    bounds = [parse_header(frame).error_bound for frame in frames]
    assert [*map(len, frames)] == sorted(map(len, frames))
    assert errors == sorted(errors, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert all(promise_held(frame, tensors) is Accuracy.bounded for frame in frames)


def test_the_bound_is_half_a_step_and_the_rounding() -> None:
    layout = attention(DType.float32, heads=2, tokens=256)
    tensors = numbers(layout)
    for quality, ratio in enumerate(RATIOS):
        steps = [
            share * ratio * np.sqrt(np.mean((x - x.mean(1, keepdims=True)) ** 2))
            for parts in tensors[0]
            for part, share in zip(parts, (KEY_SHARE, VALUE_SHARE), strict=True)
            for x in [to_float32(part, DType.float32)]
        ]
        bound = parse_header(encoded(KvqCodec(quality), tensors, layout)).error_bound
        assert bound == pytest.approx(max(steps) / 2, rel=0.01)


def test_turning_keys_back_makes_them_smaller_at_the_same_step_and_never_latents() -> None:
    for dtype in FLOATS:
        layout = attention(dtype)
        tensors = rotated_keys(layout, 512)
        plain, turned = (encoded(KvqCodec(), tensors, layout, each) for each in (None, TURNED))
        assert promise_held(turned, tensors) is Accuracy.bounded
        keys, *found = (
            [[[parts[0]] for parts in x[0]]] for x in (tensors, *map(decoded, (plain, turned)))
        )
        worse, better = (largest_error(layout, keys, one) for one in found)
        assert better < 0.75 * worse
        assert len(turned) < 1.1 * len(plain)
        unknown = EncodeTerms(rope=RopeParameters(10000.0, 32, "linear"))
        assert np.array_equal(plain, encoded(KvqCodec(), tensors, layout, unknown))
    latents = layouts(DType.bfloat16)["mla"]
    with_it, without = (
        encoded(KvqCodec(), numbers(latents), latents, terms) for terms in (TURNED, None)
    )
    assert np.array_equal(with_it, without)


@_every_float
def test_keys_come_back_at_the_position_asked_for(dtype: DType) -> None:
    layout = attention(dtype)
    slack = 1e-4 if dtype is DType.float32 else 0.05  # both sides were rounded after rotation
    for name, here, there in [("3", 512, 7), ("layered", 512, 7), ("3,sinks=4", 0, 300)]:
        frame = encoded(kvq(name), rotated_keys(layout, here), layout, TURNED, here)
        bound, moved = parse_header(frame).error_bound, rotated_keys(layout, there)
        assert largest_error(layout, read(frame, there), moved) <= bound + slack
        if here == 0:
            exact = {DType.float32: 1e-4, DType.float16: 0.01, DType.bfloat16: 0.07}[dtype]
            found = first(read(frame, there), 4)
            assert largest_error(layout, found, first(moved, 4)) <= exact
        assert same(read(frame, here), read(frame))
        values = ([[[layer[1]] for layer in x[0]]] for x in (read(frame, there), decoded(frame)))
        assert same(*values)


@pytest.mark.parametrize(
    "largest", [2.0**126, 3e38, 65520.0], ids=["near infinity", "largest", "a mean above float16"]
)
def test_what_cannot_keep_the_promise_is_kept_exactly(largest: float) -> None:
    layout = attention(DType.bfloat16)
    tensors = numbers(layout)
    for part in tensors[0][0]:
        part[:, :, 3] = bits_of(np.full((2, 96), largest), DType.bfloat16)
    frame = encoded(KvqCodec(), tensors, layout)
    assert promise_held(frame, tensors) is Accuracy.bounded
    found = decoded(frame)
    assert same([[found[0][0]]], [[tensors[0][0]]])
    assert not same([[found[0][1]]], [[tensors[0][1]]])


def test_quotients_beyond_the_models_are_escaped_and_come_back() -> None:
    layout = attention(DType.float32, tokens=256)
    tensors = numbers(layout)
    for part in tensors[0][0]:
        part[0, 17, 5] = bits_of(np.array(90.0), DType.float32)
        part[1, 255, 63] = bits_of(np.array(-90.0), DType.float32)
    frame = encoded(KvqCodec(3), tensors, layout)
    assert promise_held(frame, tensors) is Accuracy.bounded
    key = to_float32(decoded(frame)[0][0][0], DType.float32)
    assert abs(key[0, 17, 5] - 90) < 0.2
    assert abs(key[1, 255, 63] + 90) < 0.2


@pytest.mark.parametrize("name", ["2", "layered", "2,importance"])
def test_an_escape_counted_for_another_tile_is_refused(name: str) -> None:
    layout = attention(DType.float32, heads=4)
    component, tensors = layout.components[0], numbers(layout)
    tensors[0][0][0][0, 17, 5] = bits_of(np.array(90.0), DType.float32)
    weights = EncodeTerms(importance=np.arange(96, dtype=np.float32))
    frame = encoded(kvq(name), tensors, layout, weights)
    header = parse_header(frame)
    data = [header.segment(frame, 2 * level) for level in range(header.levels + 1)]
    body = parse_body(data[0], component)
    moved, changed = body.escapes.copy(), np.empty_like(data[0])
    moved[:2] += np.array([-1, 1]).astype(np.uint32)
    replace(body, escapes=moved).pack(changed)
    out = [np.zeros(component.shape, np.uint32) for _ in range(2)]
    KvqCodec().decode_layer(data, component, out, None)
    with pytest.raises(InvalidFrameError, match="escapes"):
        KvqCodec().decode_layer([changed, *data[1:]], component, out, None)


def test_more_tokens_than_a_tile_are_cut_into_blocks_as_equal_as_can_be() -> None:
    def sizes(tokens: int) -> list[int]:
        cut = Cut.of(Component(LayerKind.mla, DType.bfloat16, 1, 1, 8, tokens))
        return [block.stop - block.start for block in cut.blocks]

    assert [sizes(1), sizes(256), sizes(257), sizes(1000)] == [[1], [256], [129, 128], [250] * 4]
    assert all(sum(sizes(n)) == n and max(sizes(n)) <= 256 for n in range(1, 2000, 37))


def test_the_model_file_is_the_one_that_was_computed() -> None:
    family = kvq_models()
    assert np.abs(family.frequencies.astype(int) - computed.frequencies()).max() <= 1
    assert np.abs(family.costs.astype(int) - computed.costs(family.frequencies)).max() <= 1
    assert np.abs(family.ternary.astype(int) - computed.ternary()).max() <= 1
    assert (family.frequencies.sum(1) == 4096).all()
    assert (family.ternary.sum(2) == 4096).all()
    assert family.ternary.min() > 0
    assert parse_header(encoded(KvqCodec(), numbers(SMALL), SMALL)).asset == ASSET
    for row, reach in zip(family.frequencies, family.reach, strict=True):
        assert row[64 - reach : 65 + reach].all()
        assert not row[1 : 64 - reach].any()
        assert not row[65 + reach :].any()
        assert row[0] >= 2


# --- levels


def test_each_level_is_within_its_own_bound_and_has_the_exact_tokens() -> None:
    for dtype, fill, terms in pairwise(FLOATS, NUMBERS, [None, TURNED]):
        layout = layouts(dtype)["several"]
        tensors = numbers(layout, fill)
        frame = encoded(kvq("layered,sinks=2"), tensors, layout, terms, 0)
        header = parse_header(frame)
        bounds = [bound_at(frame, level) for level in range(LEVELS + 1)]
        for level, bound in enumerate(bounds):
            found = read(frame, level=level)
            assert largest_error(layout, tensors, found) <= bound
            assert same(first(found[:2], 2), first(tensors[:2], 2))
        if header.accuracy is Accuracy.bounded:
            assert bounds == sorted(bounds, reverse=True)
            assert bounds[-1] == pytest.approx(header.error_bound, rel=1e-6)


def test_the_base_is_what_the_coarsest_quality_gives() -> None:
    layout = layouts(DType.bfloat16)["several"]
    tensors = numbers(layout)
    frame, single = (encoded(kvq(name), tensors, layout, TURNED) for name in ("layered", "0"))
    assert same(read(frame, level=0), decoded(single))
    rows, of_single = parse_header(frame).segments, parse_header(single).segments
    assert np.array_equal(rows["checksum"][: len(of_single)], of_single["checksum"])


def test_where_float32_is_too_coarse_for_the_finest_step_a_layer_is_kept_exactly() -> None:
    layout = attention(DType.float32)
    tensors = numbers(layout, lambda shape, rng: 8192 + 0.02 * rng.standard_normal(shape))
    for name, accuracy in (("0", Accuracy.bounded), ("layered", Accuracy.exact)):
        assert promise_held(encoded(kvq(name), tensors, layout), tensors) is accuracy


def test_layers_kept_exactly_have_nothing_behind_them() -> None:
    layout = GQA[DType.bfloat16]
    tensors = numbers(layout)
    for part in tensors[0][1]:
        part[...] = special_values(part.shape, 2, np.random.default_rng(1))
    frame = encoded(kvq("layered"), tensors, layout)
    stored = parse_header(frame).segments["stored_bytes"].reshape(LEVELS + 1, -1)
    assert (stored[1:, 1] == 0).all()
    assert (stored[1:, [0, 2]] > 0).all()
    for level in range(LEVELS + 1):
        assert same([[read(frame, level=level)[0][1]]], [[tensors[0][1]]])


def test_a_prefix_too_short_for_its_level_is_refused() -> None:
    frame = encoded(kvq("layered"), numbers(SMALL), SMALL)
    header = parse_header(frame)
    for level in range(LEVELS + 1):
        prefix = frame[: header.level_end(level) - 1]
        with pytest.raises(ChunkCorruptError):
            KvqCodec(None).decode_prefix(header, prefix, level, filled(SMALL, all_zero))
    for level in (-1, LEVELS + 1):
        with pytest.raises(InvalidFrameError, match="level"):
            KvqCodec(None).decode_prefix(header, frame, level, filled(SMALL, all_zero))


def test_refinements_mixed_up_or_behind_classes_are_refused() -> None:
    frame = encoded(kvq("layered"), numbers(SMALL), SMALL)
    header = parse_header(frame)
    data = [header.segment(frame, 2 * level) for level in range(LEVELS + 1)]
    out = [np.zeros(SMALL.components[0].shape, np.uint16) for _ in range(2)]

    def is_refused(bodies: list[Bytes]) -> bool:
        try:
            KvqCodec().decode_layer(bodies, SMALL.components[0], out, None)
        except InvalidFrameError:
            return True
        return False

    for mixed in ([data[0], data[2]], [data[0], data[2], data[1]], [data[0], data[0]]):
        assert is_refused(mixed)
    terms = EncodeTerms(importance=np.arange(SMALL.tokens, dtype=np.float32))
    weighed = encoded(kvq("0,importance"), numbers(SMALL), SMALL, terms)
    assert is_refused([parse_header(weighed).segment(weighed, 0), data[1]])


# --- exact first tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_tokens_of_a_prompt_come_back_bit_by_bit(name: str) -> None:
    by = kvq(name)
    for dtype, shape, fill in pairwise(FLOATS, ["gqa", "several", "hybrid"], [centred, outliers]):
        layout = layouts(dtype)[shape]
        tensors = numbers(layout, fill)
        for position in (0, 1, by.options.sinks, 512):
            frame = encoded(by, tensors, layout, TURNED, position)
            promise_held(frame, tensors)
            found = decoded(frame)
            for component, ours, theirs in zip(layout.components, tensors, found, strict=True):
                count = max(0, by.options.sinks - position - component.first_token)
                assert same(first([ours], count), first([theirs], count))


def test_only_tokens_before_the_count_are_exact_and_only_they_cost_bytes() -> None:
    layout = GQA[DType.bfloat16]
    tensors = numbers(layout)
    for sinks, position in ((0, 0), (1, 0), (4, 1), (4, 3), (4, 4), (1, 512)):
        frame = encoded(kvq(f"2,sinks={sinks}"), tensors, layout, None, position)
        plain = encoded(kvq("2,sinks=0"), tensors, layout, None, position)
        body = parse_body(parse_header(frame).segment(frame, 0), layout.components[0])
        count = max(0, sinks - position)
        assert body.sinks.shape[1] == count
        assert count or np.array_equal(frame, plain)
        for part, stored in zip(tensors[0][0], body.sinks, strict=True):
            assert np.array_equal(stored.transpose(1, 0, 2), part[:, :count])


def test_a_first_token_far_from_all_others_no_longer_makes_their_steps_coarse() -> None:
    layout = GQA[DType.float32]
    tensors = numbers(layout)
    for parts in tensors[0]:
        for part in parts:
            part[:, 0] = (to_float32(part[:, 0], DType.float32) * 100).view(np.uint32)
    with_it, without = (
        parse_header(encoded(kvq(f"2,sinks={count}"), tensors, layout, None, 0)).error_bound
        for count in (0, 1)
    )
    assert without < 0.2 * with_it


def test_the_first_chunk_of_256_tokens_takes_at_most_three_percent_more() -> None:
    layout = attention(DType.bfloat16, 4, 128, 256)
    tensors = numbers(layout)
    for quality in range(4):
        plain, frame = (
            encoded(kvq(f"{quality},sinks={count}"), tensors, layout, None, 0) for count in (0, 1)
        )
        assert len(plain) < len(frame) < 1.03 * len(plain)


def test_a_chunk_of_nothing_but_exact_tokens_is_kept_exactly() -> None:
    layout = attention(DType.bfloat16, 4, 128, 4)
    tensors = numbers(layout)
    for sinks, position in ((4, 0), (3, 0), (4, 2)):
        frame = encoded(kvq(f"0,sinks={sinks}"), tensors, layout, TURNED, position)
        is_exact = promise_held(frame, tensors) is Accuracy.exact
        assert is_exact or sinks - position < layout.tokens


def test_moving_a_frame_to_another_tier_keeps_its_exact_tokens() -> None:
    tensors, by = numbers(SMALL), kvq("0,sinks=4")
    raw = np.empty(RawCodec().max_frame_bytes(SMALL), np.uint8)
    RawCodec().encode(template(SMALL, position=0), tensors, raw)
    out = np.empty(by.max_frame_bytes(SMALL), np.uint8)
    there = out[: transcode(raw, by, out).frame_bytes]
    assert np.array_equal(there, encoded(by, tensors, SMALL, None, 0))
    transcode(there, RawCodec(), raw)
    assert same(first(decoded(raw), 4), first(tensors, 4))


def test_exact_tokens_too_many_cut_short_or_uncounted_are_refused() -> None:
    frame = encoded(kvq("2,sinks=2"), numbers(SMALL), SMALL, None, 0)
    component, whole = SMALL.components[0], parse_header(frame).segment(frame, 0)
    short = replace(component, tokens=3)

    def refuse(body: Bytes, why: str, component: Component = component) -> None:
        out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
        with pytest.raises(InvalidFrameError, match=why):
            KvqCodec().decode_segment(body.copy(), component, out)

    for body in (whole[:-1], whole[:-2], np.append(whole, np.uint8(0))):
        refuse(body, "stored_bytes")
    for count in (0, 1, 3, 5, 64, 255):
        body = whole.copy()
        body[1] = count
        refuse(body, "stored_bytes" if count < 5 else "sinks")
    refuse(np.frombuffer(HEAD.pack(1, 3, 0, 0, 0, 0, 1.0, 0), np.uint8), "sinks", short)


# --- names


def test_every_quality_keeps_one_token_unless_told_how_many() -> None:
    assert kvq("layered").levels == LEVELS
    for quality in ("0", "1", "2", "3", "layered"):
        assert kvq(quality).options.sinks == KvqCodec().options.sinks == 1
        assert [kvq(f"{quality},sinks={n}").options.sinks for n in range(5)] == [0, 1, 2, 3, 4]


UNKNOWN = [
    "", "4", "-1", "02", "x", "layers", "2,sinks=5", "2,sinks=-1", "2,sinks=01", "2,sinks=",
    "2,sinks", "2,sinks=1,sinks=1", "2,", "2,importance,importance", "layered,importance",
    "sinks=1", "importance", "2,Importance", "2,importance=1", "2, sinks=1", ",",
    "2,importance,sinks=1",
]  # fmt: skip


def test_unknown_terms_and_codecs_of_old_are_refused_with_what_there_is() -> None:
    for terms in UNKNOWN:
        with pytest.raises(UnknownCodecError, match=r",sinks=0 to ,sinks=4; .* ,imp") as error:
            kvq(terms)
        assert f"kvq:{terms}" in str(error.value)
    for name in ("mixed", "mixed:0", "mixed:3"):
        with pytest.raises(UnknownCodecError, match="kvq:N,importance, which replaces mixed"):
            codec_by_name(name)
    with pytest.raises(UnknownCodecError, match="raw:2"):
        codec_by_name("raw:2")
    with pytest.raises(UnknownCodecError, match="11"):
        codec_by_id(11)
    assert [KvqCodec().reads(revision) for revision in (1, 2, 3)] == [False, True, False]


# --- importance


def test_important_tokens_come_back_more_exactly() -> None:
    tensors = numbers(LAYOUT)
    frame = encoded(kvq("2,importance"), tensors, LAYOUT, WEIGHED, 0)
    assert promise_held(frame, tensors) is Accuracy.bounded
    plain = encoded(KvqCodec(), tensors, LAYOUT, None, 0)
    bound, classes = parse_header(plain).error_bound, classes_of(WEIGHTS[1:])
    for pair in zip(tensors[0][0], decoded(frame)[0][0], strict=True):
        one, other = (to_float32(part, DType.float32) for part in pair)
        errors = np.abs(one - other).max((0, 2))
        assert errors[0] == 0
        for kind in range(4):
            worst = errors[1:][classes == kind].max()
            assert 0.2 * bound < worst / 2.0 ** (kind - PLAIN) <= 1.001 * bound
    assert len(plain) < len(frame) < 1.06 * len(plain)
    unweighed = encoded(kvq("2,importance"), tensors, LAYOUT, None, 0)
    assert np.array_equal(unweighed, plain)
    assert np.array_equal(plain, encoded(kvq("2"), tensors, LAYOUT, WEIGHED, 0))


def test_classes_go_by_rank_and_nothing_is_the_least() -> None:
    in_order = classes_of(WEIGHTS)[np.argsort(-WEIGHTS)]
    assert in_order.tolist() == [0] * 6 + [1] * 30 + [PLAIN] * 263 + [3]


def test_classes_behind_the_last_token_are_refused() -> None:
    layout = KVLayout((Component(LayerKind.mla, DType.float32, 1, 1, 64, 61),))
    terms = EncodeTerms(importance=np.arange(61, dtype=np.float32))
    frame = encoded(kvq("2,importance"), numbers(layout), layout, terms)
    body = parse_header(frame).segment(frame, 0).copy()
    out = [np.zeros((1, 61, 64), np.uint32)]
    KvqCodec().decode_segment(body, layout.components[0], out)
    body[-1] |= 0x40
    with pytest.raises(InvalidFrameError, match="classes"):
        KvqCodec().decode_segment(body, layout.components[0], out)
