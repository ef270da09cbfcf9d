"""The codec of a tier: whose chunks go by which, and what none of them may be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation
from helpers.coarse_codec import CoarseCodec, coarse_codec

from kvstore.codecs.base import CODECS, EncodeTerms, codec_by_name, codec_class
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import (
    FLAG_RESTORED,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_frame,
    raw_frame_bytes,
)
from kvstore.proto.types import (
    Accuracy,
    Component,
    DType,
    KVLayout,
    LayerKind,
    RopeParameters,
    Stated,
)
from kvstore.server.index.known_models import MAX_KNOWN_MODELS, KnownModels
from kvstore.server.tiering.tier_slot import LOSSLESS, TierCodec, may_lose


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with coarse_codec():
        yield


def stored(encoder: TierCodec, frame: Bytes, tenant: str = "red") -> FrameHeader:
    return check_frame(encoder.encode(frame, tenant))


def frame_of(*components: Component) -> Bytes:
    layout = KVLayout(components)
    info, _ = make_frame(1)
    template = FrameTemplate(info.key, info.parent, bytes(16), bytes(16), layout)
    frame = np.zeros(raw_frame_bytes(layout), np.uint8)
    writer = FrameWriter(template, frame)
    for component in components:
        for _ in range(component.layers):
            writer.reserve(component.layer_bytes)[:] = 7
            writer.commit(component.layer_bytes)
    writer.finish(0, 1, Accuracy.exact)
    return frame


def test_a_tenant_may_have_a_codec_of_its_own() -> None:
    encoder = TierCodec("raw", {"blue": "coarse"})
    _, frame = make_frame(1)
    assert stored(encoder, frame, "red").accuracy is Accuracy.exact
    assert stored(encoder, frame, "blue").codec_id == CoarseCodec.codec_id
    assert encoder.encode(frame, "red") is frame
    assert not encoder.is_exact
    assert TierCodec("lossless", {"blue": "raw"}).is_exact


def test_only_floats_that_are_no_states_may_lose_anything() -> None:
    for kind, dtype, may in [
        (LayerKind.attention, DType.bfloat16, True),
        (LayerKind.window, DType.float16, True),
        (LayerKind.mla, DType.bfloat16, True),
        (LayerKind.attention, DType.float8_e4m3fn, False),
        (LayerKind.attention, DType.int8, False),
        (LayerKind.state, DType.bfloat16, False),
        (LayerKind.state, DType.float32, False),
    ]:
        component = Component(kind, dtype, 2, 1, 8, 16)
        assert may_lose(KVLayout((component,))) is may
        if not may:
            encoder = TierCodec("coarse")
            header = stored(encoder, frame_of(component))
            assert (header.codec_id, header.accuracy) == (
                codec_by_name(LOSSLESS).codec_id,
                Accuracy.exact,
            )


def test_states_do_not_keep_the_keys_beside_them_from_loss() -> None:
    attention = Component(LayerKind.attention, DType.bfloat16, 2, 1, 8, 16)
    state = Component(LayerKind.state, DType.bfloat16, 1, 1, 8, 1, 16)
    assert may_lose(KVLayout((attention, state)))
    assert not may_lose(KVLayout((state,)))


def test_terms_come_from_the_model_that_a_session_was_opened_for() -> None:
    models = KnownModels()
    told: list[EncodeTerms | None] = []

    def terms_of(header: FrameHeader) -> EncodeTerms | None:
        told.append(models.terms_of(header))
        return told[-1]

    encoder = TierCodec("coarse", {}, terms_of)
    representation = make_representation()
    _, frame = make_frame(1, representation=representation)
    assert stored(encoder, frame).accuracy is Accuracy.bounded
    models.learn(check_frame(frame).representation, representation)
    stored(encoder, frame)
    assert told[0] is None
    assert told[1] is not None
    assert told[1].rope == representation.rope
    assert told[1].layer_ids == representation.layer_groups[0].layer_ids


def test_terms_of_another_number_of_layers_are_not_given() -> None:
    models = KnownModels()
    _, frame = make_frame(1)
    header = check_frame(frame)
    models.learn(header.representation, make_representation(layers=5))
    assert models.terms_of(header) is None


def test_a_model_that_the_codec_refuses_is_kept_without_loss() -> None:
    models = KnownModels()
    representation = replace(make_representation(), rope=RopeParameters(13.0, 8))
    _, frame = make_frame(1, representation=representation)
    models.learn(check_frame(frame).representation, representation)
    header = stored(TierCodec("coarse", {}, models.terms_of), frame)
    assert (header.codec_id, header.accuracy) == (codec_by_name(LOSSLESS).codec_id, Accuracy.exact)


def test_the_model_seen_longest_ago_is_forgotten_first() -> None:
    models = KnownModels()
    representation = make_representation()
    _, frame = make_frame(1)
    header = check_frame(frame)
    models.learn(header.representation, representation)
    for number in range(MAX_KNOWN_MODELS - 1):
        models.learn(number.to_bytes(16, "little"), representation)
    assert models.terms_of(header) is not None
    models.learn(header.representation, representation)
    models.learn(b"another model...", representation)
    assert models.terms_of(header) is not None, "it was seen again"
    assert models.terms_of(replace(header, representation=bytes(16))) is None


def test_a_frame_coded_with_loss_is_kept_as_it_is() -> None:
    for codec in ["coarse", "lossless"]:
        _, frame = make_frame(1)
        coarse = TierCodec("coarse").encode(frame, "red")
        assert TierCodec(codec).encode(coarse, "red") is coarse
        raw = stored(TierCodec("raw"), coarse)
        assert (raw.codec_id, raw.accuracy, raw.flags) == (0, Accuracy.bounded, FLAG_RESTORED)


def test_what_was_restored_says_by_which_codec_it_is_lossy_however_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoarseCodec, "accuracy", Accuracy.approximate)
    _, frame = make_frame(1)
    for codec in ("coarse", "raw", "lossless", "raw", "lossless"):
        frame = TierCodec(codec).encode(frame, "red")
        assert check_frame(frame).stated == Stated(Accuracy.approximate, CoarseCodec.codec_id), (
            codec
        )


# --- the codecs that there are


def tensor_frame(seed: int, dtype: DType = DType.bfloat16, *, nan: bool = False) -> Bytes:
    """Return a raw frame of one attention layer of plausible numbers, or with a NaN among them."""
    component = Component(LayerKind.attention, dtype, 1, 2, 64, 64)
    frame = frame_of(component)
    header = check_frame(frame)
    numbers = np.random.default_rng(seed).standard_normal(component.layer_bytes // 2, np.float32)
    numbers[7] = np.nan if nan else 1.0
    writer = FrameWriter(header, frame)
    writer.reserve(component.layer_bytes).view("<u2")[:] = numbers.view(np.uint32) >> 16
    writer.commit(component.layer_bytes)
    writer.finish(0, 1, Accuracy.exact)
    return frame


LOSSY = [
    name for name in CODECS if name != "coarse" and codec_class(name).accuracy is not Accuracy.exact
]


def floats_of(frame: Bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    header = check_frame(frame)
    bits = header.segment(frame, 0).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def test_a_lossy_codec_keeps_its_promise_on_the_way_down_and_up() -> None:
    for name in LOSSY:
        frame = tensor_frame(1)
        down = TierCodec(name).encode(frame, "red")
        header = check_frame(down)
        up = TierCodec("raw").encode(down, "red")
        restored = check_frame(up)
        if header.accuracy is Accuracy.exact:  # no asset of this model
            assert header.codec_id == codec_by_name(LOSSLESS).codec_id
            assert (up == frame).all()
            continue
        assert (restored.accuracy, restored.flags) == (header.accuracy, FLAG_RESTORED)
        error = float(np.abs(floats_of(up) - floats_of(frame)).max())
        assert error < 2
        if header.accuracy is Accuracy.bounded:
            assert 0 < error <= header.error_bound == restored.error_bound


def test_nan_comes_back_as_it_was_from_every_lossy_codec() -> None:
    for name in LOSSY:
        frame = tensor_frame(2, nan=True)
        down = TierCodec(name).encode(frame, "red")
        up = TierCodec("raw").encode(down, "red")
        component = check_frame(frame).layout.components[0]
        keys = check_frame(frame).segment(frame, 0)[: component.part_bytes]
        assert (check_frame(up).segment(up, 0)[: component.part_bytes] == keys).all()


def test_frames_that_need_assets_are_not_for_everybody_to_read() -> None:
    assert TierCodec("raw", {"blue": "cachegen"}).needs_assets
    assert not TierCodec("kvq").needs_assets
