from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from contracts.codec import (
    FILLS,
    SCRATCH_BYTES,
    SMALL,
    Tensors,
    decoded,
    encoded,
    filled,
    frame_of_bodies,
    layouts,
    peak_bytes,
    same,
    template,
)
from contracts.lossy_codec import SMALL as LOSSY
from contracts.lossy_codec import centred, largest_error, numbers
from golden.samples import template_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import CODECS, Codec, LossyCodec, Part, codec_by_name, codec_class
from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FLAG_RESTORED, FrameWriter, check_frame, parse_header
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind, Stated

LOSSLESS = [name for name in CODECS if not issubclass(codec_class(name), LossyCodec)]
"""The others give other bytes: contracts/lossy_codec.py moves them."""
BOUNDED = ("kivi:8", "kivi:4", "kivi:2", "kvq")
"""Those that state a bound and need no tables of a model."""
CHAINS = st.lists(st.sampled_from(BOUNDED), min_size=2, max_size=5).filter(
    lambda chain: all(one != other for one, other in pairwise(chain))
)
LAYER_BYTES = SMALL.components[0].layer_bytes


class Backwards(Codec):
    """A third codec: V before K, and lossy by its own account."""

    name = "backwards"
    codec_id = 900
    revision = 1
    accuracy = Accuracy.bounded

    def max_segment_bytes(self, component: Component) -> int:
        return component.layer_bytes

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        return RawCodec().encode_segment(parts[::-1], component, out)

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        RawCodec().decode_segment(data, component, out[::-1])


class Boundless(Backwards):
    """States no bound."""

    name = "boundless"
    codec_id = 901
    accuracy = Accuracy.approximate


def moved(frame: Bytes, codec: Codec) -> Bytes:
    out = np.full(max_transcoded_bytes(parse_header(frame).layout, codec), 0x5A, np.uint8)
    header = transcode(frame, codec, out)
    return out[: header.frame_bytes]


def resigned(
    frame: Bytes, accuracy: Accuracy = Accuracy.exact, error_bound: float = 0.0, revision: int = 1
) -> Bytes:
    """Return *frame* with another accuracy or revision in its header."""
    header = check_frame(frame)
    out = np.zeros(len(frame), np.uint8)
    writer = FrameWriter(header, out)
    for index in range(len(header.segments)):
        body = header.segment(frame, index)
        writer.reserve(len(body))[:] = body
        writer.commit(len(body))
    writer.finish(header.codec_id, revision, accuracy, error_bound)
    return out


_every_pair = pytest.mark.parametrize(("source", "target"), list(product(LOSSLESS, LOSSLESS)))


@_every_pair
def test_moving_gives_the_frame_that_encoding_gives_and_what_was_lossy_stays_so(
    source: str, target: str
) -> None:
    for dtype, fill in product(DType, FILLS):
        layout = layouts(dtype)["several"]
        tensors = filled(layout, fill)
        frame = encoded(codec_by_name(source), tensors, layout)
        there = moved(frame, codec_by_name(target))
        assert np.array_equal(there, encoded(codec_by_name(target), tensors, layout))
        assert np.array_equal(moved(there, codec_by_name(source)), frame)
    for accuracy in (Accuracy.approximate, Accuracy.bounded):
        lossy = resigned(encoded(codec_by_name(source), filled(SMALL), SMALL), accuracy, 0.125)
        header = check_frame(moved(lossy, codec_by_name(target)))
        assert template_of(header) == template(SMALL)
        assert (header.accuracy, header.error_bound) == (accuracy, 0.125)


def test_what_was_lossy_is_marked_as_restored_whatever_codec_it_goes_through() -> None:
    raw = np.empty(RawCodec().max_frame_bytes(LOSSY), np.uint8)
    RawCodec().encode(template(LOSSY, flags=0), numbers(LOSSY), raw)
    frame = moved(raw, codec_by_name("kivi:4"))
    assert not parse_header(frame).flags & FLAG_RESTORED
    for name in ("raw", "lossless", "kivi:8", "raw"):
        frame = moved(frame, codec_by_name(name))
        assert parse_header(frame).flags & FLAG_RESTORED


@_every_pair
@given(data=st.data(), mask=st.integers(1, 255))
def test_a_changed_byte_never_reaches_the_new_frame(
    source: str, target: str, data: st.DataObject, mask: int
) -> None:
    tensors = filled(SMALL)
    frame = encoded(codec_by_name(source), tensors, SMALL)
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= mask
    try:
        there = moved(frame, codec_by_name(target))
    except (InvalidFrameError, ChunkCorruptError):
        return
    assert np.array_equal(there, encoded(codec_by_name(target), tensors, SMALL))


@_every_pair
def test_frames_that_cannot_be_moved_are_refused(source: str, target: str) -> None:
    reader, writer = codec_by_name(source), codec_by_name(target)
    frame, out = encoded(reader, filled(SMALL), SMALL), np.empty(1 << 16, np.uint8)
    for wrong in (frame[:-1], np.append(frame, np.uint8(0))):
        with pytest.raises(ChunkCorruptError, match="bytes of"):
            moved(wrong, writer)
    with pytest.raises(UnknownCodecError, match="revision 3"):
        moved(resigned(frame, revision=3), writer)
    most_bytes = max(LAYER_BYTES, reader.max_segment_bytes(SMALL.components[0]))
    with pytest.raises(InvalidFrameError):
        transcode(frame_of_bodies(reader, SMALL, [bytes(most_bytes + 64)] * 2), writer, out)
    with pytest.raises(InvalidFrameError, match=r"^out="):
        transcode(frame, writer, out[:512])


def test_a_third_codec_lowers_accuracy_to_its_own_and_is_not_read_where_it_is_unknown() -> None:
    there = moved(encoded(LosslessCodec(), filled(SMALL), SMALL), Backwards())
    header, back = check_frame(there), filled(SMALL, seed=1)
    assert header.accuracy is Accuracy.bounded
    Backwards().decode_into(header, there, back)
    assert same(back, filled(SMALL))
    with pytest.raises(UnknownCodecError, match="900"):
        moved(there, RawCodec())


@_every_pair
def test_moving_holds_no_more_than_a_few_layers(source: str, target: str) -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 24, 4, 128, 512),))
    frame = encoded(codec_by_name(source), filled(layout), layout)
    out = np.empty(max_transcoded_bytes(layout, codec_by_name(target)), np.uint8)
    peak = peak_bytes(lambda: transcode(frame, codec_by_name(target), out))
    assert peak <= 2 * layout.components[0].layer_bytes + SCRATCH_BYTES < layout.raw_bytes // 3


def test_frames_that_cannot_be_written_are_read_where_they_lie() -> None:
    for codec in (RawCodec(), LosslessCodec()):
        frame = encoded(codec, filled(SMALL), SMALL)
        frozen = np.frombuffer(b"." + frame.tobytes(), np.uint8)[1:]
        for name in LOSSLESS:
            assert same(decoded(moved(frozen, codec_by_name(name))), filled(SMALL))


def error_after(chain: Sequence[str], tensors: Tensors) -> tuple[float, float]:
    """Return how far *tensors* are off after they went through *chain*, and the bound stated."""
    frame = encoded(RawCodec(), tensors, LOSSY)
    for name in chain:
        frame = moved(frame, codec_by_name(name))
    header = check_frame(frame)
    assert header.accuracy is Accuracy.bounded
    return largest_error(LOSSY, tensors, decoded(frame)), header.error_bound


@settings(max_examples=20, deadline=None)
@example(chain=["kivi:8", "kivi:4"], seed=0, scale=1.0)
@example(chain=["kvq", "kivi:8"], seed=0, scale=1.0)
@given(chain=CHAINS, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_the_stated_bound_is_never_below_the_error_after_any_chain_of_lossy_codecs(
    chain: list[str], seed: int, scale: float
) -> None:
    tensors = numbers(LOSSY, lambda shape, rng: scale * centred(shape, rng), seed)
    error, bound = error_after(chain, tensors)
    assert error <= bound


def test_a_frame_without_a_bound_names_the_codec_that_has_none() -> None:
    bounded = moved(encoded(RawCodec(), numbers(LOSSY), LOSSY), codec_by_name("kivi:4"))
    for frame in (bounded, moved(bounded, RawCodec())):
        found = parse_header(moved(frame, Boundless()))
        assert found.stated == Stated(Accuracy.approximate, Boundless.codec_id)
