"""The suite every lossy codec passes: what frames promise is held against what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from contracts.codec import (
    FILLS,
    ROWS,
    AnyCodecContract,
    Tensors,
    all_zero,
    decoded,
    encoded,
    filled,
    layouts,
    pairwise,
    random_bits,
    same,
    special_values,
    strided,
    template,
)
from golden.samples import template_of
from typing_extensions import override

from kvstore.codecs.base import EncodeTerms, LossyCodec, Part
from kvstore.codecs.floats import FLOAT_TYPES, from_float32, is_finite, to_float32
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, UnknownCodecError
from kvstore.proto.frame import FrameWriter, check_frame, parse_header
from kvstore.proto.types import Accuracy, ChunkKey, Component, DType, KVLayout, LayerKind

Numbers = Callable[[tuple[int, ...], np.random.Generator], Part]

FLOATS = sorted(FLOAT_TYPES)
SMALL = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, 2, 32, 64),))
"""Small, and yet large enough for every codec to gain something."""


def centred(shape: tuple[int, ...], rng: np.random.Generator) -> Part:
    """Normal numbers about each channel's own mean."""
    return rng.standard_normal(shape) + 2 * rng.standard_normal((shape[0], 1, shape[2]))


def outliers(shape: tuple[int, ...], rng: np.random.Generator) -> Part:
    """A few channels a hundred times as large as the others, and a few numbers alone."""
    numbers = rng.standard_normal(shape) * np.where(
        rng.random((shape[0], 1, shape[2])) < 0.05, 99, 1
    )
    return np.where(rng.random(shape) < 0.01, 300 * numbers, numbers)


def tiny(shape: tuple[int, ...], rng: np.random.Generator) -> Part:
    """Denormals of float16, and less."""
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-40, -5, (shape[0], 1, shape[2]))


def large(shape: tuple[int, ...], rng: np.random.Generator) -> Part:
    """Up to what float16 can hold."""
    return rng.uniform(-65000, 65000, shape)


def constant(shape: tuple[int, ...], rng: np.random.Generator) -> Part:
    """One number a channel."""
    return np.broadcast_to(rng.standard_normal((shape[0], 1, shape[2])), shape)


NUMBERS: list[Numbers] = [centred, outliers, tiny, large, constant]


def bits_of(values: np.ndarray, dtype: DType) -> Part:
    """Return *values* as numbers of *dtype*, rounded."""
    bits = np.empty(values.shape, f"<u{dtype.item_bytes}")
    from_float32(np.array(values, np.float32, order="C"), dtype, bits)
    return bits


def numbers(layout: KVLayout, fill: Numbers = centred, seed: int = 0) -> Tensors:
    """Return tensors of *layout* whose floats are *fill*; other types get any bits."""
    rng = np.random.default_rng(seed)

    def part(component: Component) -> Part:
        if component.dtype not in FLOAT_TYPES:
            return random_bits(component.shape, component.dtype.item_bytes, rng)
        return bits_of(fill(component.shape, rng), component.dtype)

    return [[[part(c) for _ in range(c.parts)] for _ in range(c.layers)] for c in layout.components]


def largest_error(layout: KVLayout, left: Tensors, right: Tensors) -> float:
    """Return how far two tensors are apart; what is not finite must be the same bits."""
    worst = 0.0
    for component, ours, theirs in zip(layout.components, left, right, strict=True):
        for a, b in (
            (a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
        ):
            if component.dtype not in FLOAT_TYPES or not is_finite(a, component.dtype):
                assert np.array_equal(a, b)
                continue
            one, other = (to_float32(p, component.dtype).astype(np.float64) for p in (a, b))
            worst = max(worst, float(np.abs(one - other).max()))
    return worst


def promise_held(frame: Bytes, tensors: Tensors) -> Accuracy:
    """Check what the frame says of itself against *tensors*; return its accuracy."""
    header = check_frame(frame)
    found = decoded(frame)
    if header.accuracy is Accuracy.exact:
        assert same(found, tensors)
        assert header.error_bound == 0
    error = largest_error(header.layout, tensors, found)
    if header.accuracy is Accuracy.bounded:
        assert error <= header.error_bound
    return header.accuracy


NUMBER_ROWS = pairwise(FLOATS, list(layouts(DType.uint8)), NUMBERS)
BITS_ROWS = [row for row in ROWS if row[0] not in FLOAT_TYPES or row[1] == "several"]
BITS_ROWS += [(dtype, "several", fill) for dtype in FLOATS for fill in FILLS]


class LossyCodecContract(AnyCodecContract):
    """Subclass as ``TestX`` and set ``codec``."""

    codec: ClassVar[LossyCodec]
    small = SMALL
    dtypes = FLOATS
    is_always_finite: ClassVar[bool] = False
    """Whether no stored bytes are read as NaN or infinity."""

    def asset_of(self, layout: KVLayout) -> bytes:
        """Return the digest of the asset that chunks of *layout* are encoded by."""
        return self.codec.asset

    @override
    def tensors(self, layout: KVLayout, seed: int = 0) -> Tensors:
        return numbers(layout, seed=seed)

    @override
    def assert_right(self, frame: Bytes, tensors: Tensors) -> None:
        assert promise_held(frame, tensors) >= self.codec.accuracy

    def checked(self, tensors: Tensors, layout: KVLayout) -> Accuracy:
        """Encode *tensors* densely and from pages, and read them into both; return the accuracy."""
        frame = encoded(self.codec, tensors, layout)
        header = check_frame(frame, ChunkKey(bytes(range(32))))
        assert template_of(header) == template(layout)
        assert (header.levels, header.asset) == (self.codec.levels, self.asset_of(layout))
        self.codec.check_header(header)
        assert np.array_equal(frame, encoded(self.codec, strided(tensors), layout))
        pages = strided(filled(layout, all_zero))
        self.codec.decode_into(header, frame, pages)
        assert same(pages, decoded(frame))
        self.assert_right(frame, tensors)
        return header.accuracy

    @pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
    def test_numbers_come_back_as_exactly_as_the_frame_says(self, dtype: DType) -> None:
        for name, fill in [row[1:] for row in NUMBER_ROWS if row[0] is dtype]:
            layout = layouts(dtype)[name]
            self.checked(numbers(layout, fill), layout)

    @pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
    def test_bits_of_any_kind_are_coded_or_kept(self, dtype: DType) -> None:
        for name, fill in [row[1:] for row in BITS_ROWS if row[0] is dtype]:
            layout = layouts(dtype)[name]
            accuracy = self.checked(filled(layout, fill), layout)
            assert dtype in FLOAT_TYPES or accuracy is Accuracy.exact

    def test_recurrent_states_are_kept_exactly(self) -> None:
        for dtype in FLOATS:
            layout = layouts(dtype)["state"]
            assert self.checked(numbers(layout), layout) is Accuracy.exact

    def test_a_layer_with_nan_or_infinity_comes_back_bit_by_bit(self) -> None:
        for dtype in FLOATS:
            layout = layouts(dtype)["gqa"]
            tensors = numbers(layout)
            for part in tensors[0][1]:
                some = special_values(part.shape, part.dtype.itemsize, np.random.default_rng(1))
                part[...] = some
            frame = encoded(self.codec, tensors, layout)
            assert same([[decoded(frame)[0][1]]], [[tensors[0][1]]])
            assert promise_held(frame, tensors) is self.codec.accuracy

    def test_bounds_hold_and_such_rooms_are_enough(self) -> None:
        for dtype, name, fill in pairwise(FLOATS, list(layouts(DType.uint8)), [*NUMBERS, None]):
            layout = layouts(dtype)[name]
            tensors = filled(layout, random_bits) if fill is None else numbers(layout, fill)
            self.bounds_hold(tensors, layout)

    def test_terms_of_another_layout_are_refused(self) -> None:
        out = np.empty(self.codec.max_frame_bytes(SMALL), np.uint8)
        for terms in (
            EncodeTerms(layer_ids=(1, 2, 3)),
            EncodeTerms(importance=np.ones(SMALL.tokens + 1, np.float32)),
            EncodeTerms(importance=np.full(SMALL.tokens, np.nan, np.float32)),
            EncodeTerms(importance=np.full(SMALL.tokens, -1, np.float32)),
        ):
            with pytest.raises(InvalidRequestError):
                self.codec.encode(template(SMALL), numbers(SMALL), out, terms)

    def test_a_segment_changed_and_signed_again_is_read_or_refused(self) -> None:
        component, rng = SMALL.components[0], np.random.default_rng(1)
        out = [np.zeros(component.shape, np.uint16) for _ in range(2)]
        right = self._body()
        for _ in range(10_000):
            body = bytearray(right)
            for _ in range(rng.integers(1, 4)):
                at = rng.integers(0, len(body) if rng.random() < 0.5 else min(64, len(body)))
                body[at] = rng.choice(np.array([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(0, 256))]))
            if rng.random() < 0.3:
                del body[int(rng.integers(0, len(body))) :]
            self._is_read_or_refused(bytes(body), component, out)

    def _body(self) -> bytes:
        """Return the stored bytes of a layer."""
        frame = encoded(self.codec, numbers(SMALL), SMALL)
        return parse_header(frame).segment(frame, 0).tobytes()

    def _is_read_or_refused(self, body: bytes, component: Component, out: list[Part]) -> None:
        try:
            self.codec.decode_segment(np.frombuffer(body, np.uint8), component, out)
        except (InvalidFrameError, UnknownCodecError):
            return
        if self.is_always_finite:
            assert all(np.isfinite(to_float32(part, component.dtype)).all() for part in out)

    def test_coded_states_and_codes_are_refused(self) -> None:
        state = Component(LayerKind.state, DType.float32, 1, 1, 700, 1)
        codes = [replace(SMALL.components[0], dtype=each) for each in set(DType) - FLOAT_TYPES]
        for component in (state, *codes):
            layout = KVLayout((replace(component, layers=1),))
            tensors = filled(layout)
            frame = encoded(self.codec, tensors, layout)
            header = check_frame(frame)
            data = header.segment(frame, 0).copy()
            assert header.accuracy is Accuracy.exact
            data[0] = 1
            with pytest.raises(InvalidFrameError, match="method"):
                self.codec.decode_segment(data, component, tensors[0][0])

    def test_a_body_of_rubbish_in_a_right_frame_is_refused(self) -> None:
        for body in (b"", b"\xff" * 99, bytes(99)):
            count = SMALL.segment_count * (1 + self.codec.levels)
            out = np.zeros(4096 * (1 + count), np.uint8)
            writer = FrameWriter(template(SMALL), out, self.codec.levels)
            for _ in range(count):
                writer.reserve(len(body))[:] = np.frombuffer(body, np.uint8)
                writer.commit(len(body))
            names = self.codec.codec_id, self.codec.revision
            asset = self.asset_of(SMALL)
            header = writer.finish(*names, Accuracy.approximate, asset=asset)
            with pytest.raises(InvalidFrameError):
                decoded(out[: header.frame_bytes])

    def test_moving_keeps_the_promise_and_tells_of_the_loss(self) -> None:
        tensors = numbers(SMALL)
        raw = np.empty(RawCodec().max_frame_bytes(SMALL), np.uint8)
        RawCodec().encode(template(SMALL), tensors, raw)
        out = np.empty(self.codec.max_frame_bytes(SMALL), np.uint8)
        there = out[: transcode(raw, self.codec, out).frame_bytes]
        assert np.array_equal(there, encoded(self.codec, tensors, SMALL))
        accuracy = promise_held(there, tensors)
        again = np.empty_like(out)
        assert np.array_equal(again[: transcode(there, self.codec, again).frame_bytes], there)
        back = np.empty_like(raw)
        header = transcode(there, RawCodec(), back)
        assert header.accuracy is accuracy
        assert header.error_bound == parse_header(there).error_bound
        assert same(decoded(back), decoded(there))
        promise_held(back, tensors)
        twice = np.empty_like(out)
        header = transcode(back, self.codec, twice)
        assert header.accuracy is accuracy
        promise_held(twice[: header.frame_bytes], tensors)
