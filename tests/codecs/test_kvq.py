from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import all_zero, decoded, filled, layouts, pairwise, same, template
from contracts.lossy_codec import (
    LossyCodecContract,
    centred,
    encoded,
    largest_error,
    numbers,
    outliers,
    promise_held,
)
from golden import kvq_models as computed
from oracles.kvq import classes_agree, refinements_agree, tiles_agree
from oracles.kvq_numpy import NUMPY_KVQ

from kvstore.codecs.base import EncodeTerms, Part, codec_by_name
from kvstore.codecs.floats import from_float32, to_float32
from kvstore.codecs.kvq import KEY_SHARE, VALUE_SHARE, KvqCodec
from kvstore.codecs.kvq_models import ASSET, RATIOS, kvq_models
from kvstore.codecs.kvq_tiles import Cut, KvqLoops
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import parse_header
from kvstore.proto.native import paths
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, RopeParameters

ROPE = RopeParameters(10000.0, 32)
TERMS = EncodeTerms(rope=ROPE)
FLOATS = [DType.bfloat16, DType.float16, DType.float32]
_every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


class TestKvqCodec(LossyCodecContract):
    codec = KvqCodec()


def attention(dtype: DType, heads: int = 2, dim: int = 64, tokens: int = 96) -> KVLayout:
    return KVLayout((Component(LayerKind.attention, dtype, 2, heads, dim, tokens),))


def bits_of(floats: np.ndarray, dtype: DType) -> Part:
    out = np.empty(floats.shape, f"u{dtype.item_bytes}")
    from_float32(floats.astype(np.float32), dtype, out)
    return out


def rotated_keys(layout: KVLayout, position: int = 512) -> list[list[list[Part]]]:
    """Return tensors whose keys have a mean a channel before they are rotated."""
    component = layout.components[0]
    rng = np.random.default_rng(5)
    layers = []
    for _ in range(component.layers):
        keys = (centred(component.shape, rng) + 3).astype(np.float32)
        frequencies = inverse_frequencies(ROPE, component.head_dim)
        assert frequencies is not None
        rotate(keys, *rotation(frequencies, position, component.tokens))
        values = centred(component.shape, rng)
        layers.append([bits_of(keys, component.dtype), bits_of(values, component.dtype)])
    return [layers]


BACKEND_ROWS = pairwise(FLOATS, list(layouts(DType.uint8)), [None, TERMS], [centred, outliers])


@_every_float
def test_backends_write_and_read_the_same_bytes(dtype: DType) -> None:
    reference = KvqCodec(3, NUMPY_KVQ)
    for name, terms, fill in [row[1:] for row in BACKEND_ROWS if row[0] is dtype]:
        layout = layouts(dtype)[name]
        tensors = numbers(layout, fill)
        frame = encoded(reference, tensors, layout, terms)
        numbers_of_it = read(reference, frame)
        for path in paths():
            codec = KvqCodec(3, KvqLoops(path))
            assert np.array_equal(frame, encoded(codec, tensors, layout, terms))
            assert same(read(codec, frame), numbers_of_it)


def test_a_changed_layer_is_refused_or_is_the_same_to_all_backends() -> None:
    layout, rng = attention(DType.bfloat16), np.random.default_rng(9)
    component = layout.components[0]
    frame = encoded(KvqCodec(), numbers(layout), layout)
    right = parse_header(frame).segment(frame, 0)
    found: list[list[Part] | None] = []
    for number in range(150):
        body = right.copy()
        at = rng.integers(0, len(body) if number % 2 else 64, rng.integers(1, 4))
        body[at] = rng.integers(0, 256, len(at))
        body = body[: rng.choice([len(body)] * 3 + [int(rng.integers(len(body)))])]
        for codec in (KvqCodec(), KvqCodec(loops=NUMPY_KVQ)):
            out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
            try:
                codec.decode_segment(body, component, out)
            except (InvalidFrameError, UnknownCodecError):
                found.append(None)
            else:
                found.append(out)
    assert 0 < found.count(None) < len(found)
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or same([[ours]], [[theirs]])


def read(codec: KvqCodec, frame: Bytes, position: int | None = None) -> list[list[list[Part]]]:
    header = parse_header(frame)
    out = filled(header.layout, all_zero)
    codec.decode_prefix(header, frame, 0, out, position)
    return out


@pytest.mark.parametrize("path", paths())
def test_each_path_gives_the_reference_s_tiles(path: str) -> None:
    for dtype in FLOATS:
        assert tiles_agree(KvqLoops(path), dtype)
        assert classes_agree(KvqLoops(path), dtype)
        assert refinements_agree(KvqLoops(path), dtype)


@_every_float
def test_higher_qualities_are_larger_and_nearer(dtype: DType) -> None:
    layout = attention(dtype)
    tensors = numbers(layout)
    frames = [encoded(KvqCodec.of(str(q)), tensors, layout) for q in range(len(RATIOS))]
    sizes = [len(frame) for frame in frames]
    errors = [largest_error(layout, tensors, decoded(frame)) for frame in frames]
    bounds = [parse_header(frame).error_bound for frame in frames]
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert all(promise_held(frame, tensors) is Accuracy.bounded for frame in frames)


def test_the_bound_is_half_a_step_and_the_rounding() -> None:
    layout = attention(DType.float32, heads=2, tokens=256)
    tensors = numbers(layout)
    for quality, ratio in enumerate(RATIOS):
        frame = encoded(KvqCodec(quality), tensors, layout)
        steps = [
            share * ratio * np.sqrt(np.mean((x - x.mean(1, keepdims=True)) ** 2))
            for parts in tensors[0]
            for part, share in zip(parts, (KEY_SHARE, VALUE_SHARE), strict=True)
            for x in [to_float32(part, DType.float32)]
        ]
        bound = parse_header(frame).error_bound
        assert bound == pytest.approx(max(steps) / 2, rel=0.01)


def test_unknown_qualities_and_terms_of_codecs_that_have_none_are_refused_by_name() -> None:
    for name in (*(f"kvq:{terms}" for terms in ("", "4", "-1", "02", "x", "layers")), "raw:2"):
        with pytest.raises(UnknownCodecError, match=name):
            codec_by_name(name)


@_every_float
def test_turning_keys_back_makes_them_smaller_at_the_same_step(dtype: DType) -> None:
    layout = attention(dtype)
    tensors = rotated_keys(layout)
    plain, turned = (encoded(KvqCodec(), tensors, layout, terms) for terms in (None, TERMS))
    assert promise_held(turned, tensors) is Accuracy.bounded
    keys, *found = (
        [[[parts[0]] for parts in x[0]]] for x in (tensors, *map(decoded, (plain, turned)))
    )
    worse, better = (largest_error(layout, keys, one) for one in found)
    assert better < 0.75 * worse
    assert len(turned) < 1.1 * len(plain)


@_every_float
def test_keys_come_back_at_the_position_asked_for(dtype: DType) -> None:
    layout = attention(dtype)
    here, there = rotated_keys(layout, 512), rotated_keys(layout, 7)
    frame = encoded(KvqCodec(3), here, layout, TERMS)
    bound = parse_header(frame).error_bound
    slack = 0 if dtype is DType.float32 else 0.05  # both sides were rounded after rotation
    assert largest_error(layout, read(KvqCodec(), frame, 7), there) <= bound + slack
    assert same(read(KvqCodec(), frame, 512), read(KvqCodec(), frame))
    values = [[[layer[1]] for layer in tensors[0]] for tensors in (read(KvqCodec(), frame, 7),)]
    assert same(values, [[[layer[1]] for layer in decoded(frame)[0]]])


def test_keys_of_an_unknown_rotation_stay_as_they_are() -> None:
    layout = attention(DType.bfloat16)
    tensors = rotated_keys(layout)
    plain = encoded(KvqCodec(), tensors, layout)
    for rope in (
        RopeParameters(10000.0, 32, "dynamic", (("factor", 2.0),)),
        RopeParameters(10000.0, 32, "linear"),
        RopeParameters(10000.0, 0, "none"),
        RopeParameters(10000.0, 33),
        RopeParameters(10000.0, 128),
    ):
        assert np.array_equal(plain, encoded(KvqCodec(), tensors, layout, EncodeTerms(rope=rope)))


def test_latents_are_never_turned() -> None:
    layout = layouts(DType.bfloat16)["mla"]
    tensors = numbers(layout)
    turned = encoded(KvqCodec(), tensors, layout, TERMS)
    assert np.array_equal(turned, encoded(KvqCodec(), tensors, layout))


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


def test_more_tokens_than_a_tile_are_cut_into_blocks_as_equal_as_can_be() -> None:
    def sizes(tokens: int) -> list[int]:
        cut = Cut.of(Component(LayerKind.mla, DType.bfloat16, 1, 1, 8, tokens))
        return [block.stop - block.start for block in cut.blocks]

    assert sizes(1) == [1]
    assert sizes(256) == [256]
    assert sizes(257) == [129, 128]
    assert sizes(1000) == [250] * 4
    assert all(sum(sizes(n)) == n and max(sizes(n)) <= 256 for n in range(1, 2000, 37))


def test_side_information_is_an_eighth_of_a_bit_a_number() -> None:
    layout = attention(DType.bfloat16, heads=8, dim=128, tokens=256)
    frame = encoded(KvqCodec(), numbers(layout, seed=1), layout)
    assert len(frame) * 8 / (layout.raw_bytes / 2) < 4.25  # 2.05 bits of entropy, 2 of quality


def test_the_model_file_is_the_one_that_was_computed() -> None:
    family = kvq_models()
    assert np.abs(family.frequencies.astype(int) - computed.frequencies()).max() <= 1
    assert np.abs(family.costs.astype(int) - computed.costs(family.frequencies)).max() <= 1
    assert np.abs(family.ternary.astype(int) - computed.ternary()).max() <= 1
    assert (family.frequencies.sum(1) == 4096).all()
    assert (family.ternary.sum(2) == 4096).all()
    assert family.ternary.min() > 0
    assert parse_header(encoded(KvqCodec(), numbers(attention(DType.bfloat16)),
                                attention(DType.bfloat16))).asset == ASSET  # fmt: skip


def test_every_symbol_within_reach_of_a_model_has_a_slot() -> None:
    family = kvq_models()
    for row, reach in zip(family.frequencies, family.reach, strict=True):
        assert row[64 - reach : 65 + reach].all()
        assert not row[1 : 64 - reach].any()
        assert not row[65 + reach :].any()
        assert row[0] >= 2


def test_a_template_position_is_where_keys_were_turned_back_from() -> None:
    layout = attention(DType.float32)
    tensors = rotated_keys(layout, 0)
    out = np.empty(KvqCodec().max_frame_bytes(layout), np.uint8)
    header = KvqCodec().encode(template(layout, position=0), tensors, out, TERMS)
    at_zero = out[: header.frame_bytes].copy()
    assert largest_error(layout, decoded(at_zero), tensors) <= header.error_bound
    moved = read(KvqCodec(), at_zero, 300)
    bound = header.error_bound + 1e-4
    assert largest_error(layout, moved, rotated_keys(layout, 300)) <= bound


def test_coded_states_and_codes_are_refused() -> None:
    layout = attention(DType.float32)
    frame = encoded(KvqCodec(), numbers(layout), layout)
    body = parse_header(frame).segment(frame, 0)
    state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1)
    codes = Component(LayerKind.attention, DType.int8, 1, 2, 64, 96)
    for component in (state, codes):
        out = [np.zeros(component.shape, f"u{component.dtype.item_bytes}")] * component.parts
        with pytest.raises(InvalidFrameError, match="is not quantised"):
            KvqCodec().decode_segment(body, component, out)
