from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import decoded
from contracts.lossy_codec import LossyCodecContract, encoded, largest_error, numbers, promise_held

from kvstore.codecs.base import Part, codec_by_name
from kvstore.codecs.floats import to_float32
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_models import MODELS
from kvstore.codecs.mixed import MixedCodec
from kvstore.codecs.mixed_tiles import PLAIN, classes_of, factors_of, moved
from kvstore.codecs.rans import NUMPY as NUMPY_RANS
from kvstore.codecs.terms import EncodeTerms
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import parse_header
from kvstore.proto.types import Component, DType, Fidelity, KVLayout, LayerKind, RopeParameters

LAYOUT = KVLayout((Component(LayerKind.attention, DType.float32, 1, 2, 64, 300),))
WEIGHTS = np.random.default_rng(3).permutation(300).astype(np.float32)
"""Every token another; one is worth nothing."""
TERMS = EncodeTerms(importance=WEIGHTS)


class TestMixedCodec(LossyCodecContract):
    codec = MixedCodec()


def token_errors(left: Part, right: Part) -> np.ndarray:
    one, other = (to_float32(part, DType.float32) for part in (left, right))
    found: np.ndarray = np.abs(one - other).max((0, 2))
    return found


def test_important_tokens_come_back_more_exactly() -> None:
    tensors = numbers(LAYOUT)
    frame = encoded(MixedCodec(), tensors, LAYOUT, TERMS)
    assert promise_held(frame, tensors) is Fidelity.bounded
    plain = encoded(KvqCodec(), tensors, LAYOUT)
    bound = parse_header(plain).error_bound
    classes = classes_of(WEIGHTS, 512, 300)
    for ours, theirs in zip(tensors[0][0], decoded(frame)[0][0], strict=True):
        errors = token_errors(ours, theirs)
        for kind in range(4):
            worst = errors[classes == kind].max()
            assert 0.2 * bound < worst / 2.0 ** (kind - PLAIN) <= 1.001 * bound
    assert len(plain) < len(frame) < 1.06 * len(plain)


def test_classes_go_by_rank_and_nothing_is_the_least() -> None:
    classes = classes_of(WEIGHTS, 0, 300)
    order = np.argsort(-WEIGHTS)
    assert (classes[order[:6]] == 0).all()
    assert (classes[order[6:36]] == 1).all()
    assert (classes[order[36:-1]] == PLAIN).all()
    assert classes[order[-1]] == 3


@pytest.mark.parametrize(("position", "sinks"), [(0, 4), (1, 3), (4, 0), (512, 0)])
def test_without_importance_the_prompts_first_tokens_are_the_important_ones(
    position: int, sinks: int
) -> None:
    classes = classes_of(None, position, 16)
    assert classes.tolist() == [0] * sinks + [PLAIN] * (16 - sinks)


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


def test_keys_come_back_at_the_position_asked_for() -> None:
    terms = EncodeTerms(rope=RopeParameters(10000.0, 64), importance=WEIGHTS)
    tensors = numbers(LAYOUT)
    frame = encoded(MixedCodec(3), tensors, LAYOUT, terms)
    assert promise_held(frame, tensors) is Fidelity.bounded
    header = parse_header(frame)
    out = numbers(LAYOUT, seed=9)
    MixedCodec().decode_prefix(header, frame, 0, out, header.position)
    assert largest_error(LAYOUT, out, decoded(frame)) == 0
    MixedCodec().decode_prefix(header, frame, 0, out, header.position + 1)
    assert largest_error(LAYOUT, out, decoded(frame)) > header.error_bound


def test_the_reference_writes_the_same_bytes() -> None:
    tensors = numbers(LAYOUT)
    frame = encoded(MixedCodec(), tensors, LAYOUT, TERMS)
    assert np.array_equal(frame, encoded(MixedCodec(2, NUMPY_RANS), tensors, LAYOUT, TERMS))


@pytest.mark.parametrize("terms", ["", "4", "layered"])
def test_unknown_qualities_are_refused_by_name(terms: str) -> None:
    assert codec_by_name("mixed:3").name == "mixed"
    with pytest.raises(UnknownCodecError, match=f"mixed:{terms}"):
        codec_by_name(f"mixed:{terms}")


def test_classes_behind_the_last_token_are_refused() -> None:
    layout = KVLayout((Component(LayerKind.mla, DType.float32, 1, 1, 64, 61),))
    frame = encoded(MixedCodec(), numbers(layout), layout)
    body = parse_header(frame).segment(frame, 0).copy()
    out = [np.zeros((1, 61, 64), np.uint32)]
    MixedCodec().decode_segment(body, layout.components[0], out)
    body[-1] |= 0x40
    with pytest.raises(InvalidFrameError, match="classes"):
        MixedCodec().decode_segment(body, layout.components[0], out)
