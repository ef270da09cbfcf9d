from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import (
    SMALL,
    CodecContract,
    Tensors,
    decoded,
    encoded,
    filled,
    frame_of_bodies,
    layouts,
    random_bits,
    same,
    strided,
    template,
)

from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import LOOP_FROM_BYTES, Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import (
    FLAG_UNSUMMED,
    check_frame,
    copy_frame,
    parse_header,
    raw_frame_bytes,
)
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

LAYER_BYTES = SMALL.components[0].layer_bytes


class TestRawCodec(CodecContract):
    codec = RawCodec()


def test_the_bound_is_the_size() -> None:
    for layout in layouts(DType.float16).values():
        frame = encoded(RawCodec(), filled(layout), layout)
        assert len(frame) == raw_frame_bytes(layout) == RawCodec().max_frame_bytes(layout)


def test_segment_bytes_are_the_tensor_bytes() -> None:
    bodies = [np.random.default_rng(i).bytes(LAYER_BYTES) for i in range(2)]
    tensors = decoded(frame_of_bodies(RawCodec(), SMALL, bodies))
    joined = [b"".join(part.tobytes() for part in parts) for parts in tensors[0]]
    assert joined == bodies


LARGE = KVLayout((Component(LayerKind.attention, DType.bfloat16, 3, 4, 128, 128),))
assert 2 * LARGE.components[0].layer_bytes >= LOOP_FROM_BYTES


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("from_pages", [0, 1, 3])
def test_a_frame_left_to_its_receiver_to_sum_is_the_same_when_that_did(
    layout: KVLayout, from_pages: int
) -> None:
    whole = filled(layout, random_bits)
    tensors = [[*strided(whole)[0][:from_pages], *whole[0][from_pages:]]]
    wanted = encoded(RawCodec(), whole, layout)
    left, out = np.full_like(wanted, 0xA5), np.full_like(wanted, 0x5A)
    RawCodec().encode(template(layout, flags=1 | FLAG_UNSUMMED), tensors, left)
    copy_frame(out, left, template(layout).key)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("size", [0, LAYER_BYTES - 2, LAYER_BYTES - 1, LAYER_BYTES + 64])
def test_a_layer_of_another_size_is_refused(size: int) -> None:
    frame = frame_of_bodies(RawCodec(), SMALL, [bytes(LAYER_BYTES), bytes(size)])
    with pytest.raises(InvalidFrameError, match=f"stored_bytes={size}"):
        decoded(frame)
    with pytest.raises(InvalidFrameError, match=f"stored_bytes={size}"):
        RawCodec().views(check_frame(frame), frame)


def views_of(frame: Bytes) -> Tensors:
    views = RawCodec().views(parse_header(frame), frame)
    return [[list(parts) for parts in layers] for layers in views]


def test_views_share_the_memory_of_the_frame() -> None:
    layout = layouts(DType.float16)["several"]
    tensors = filled(layout, random_bits)
    frame = encoded(RawCodec(), tensors, layout)
    views = views_of(frame)
    assert same(views, tensors)
    assert all(np.shares_memory(part, frame) for part in views[1][0])
    views[0][0][0][0, 0, 0] ^= 1
    assert not same(views_of(frame), tensors)


def test_views_of_frames_that_cannot_be_written_cannot_be_written() -> None:
    frame = np.frombuffer(encoded(RawCodec(), filled(SMALL), SMALL).tobytes(), np.uint8)
    assert not RawCodec().views(parse_header(frame), frame)[0][0][0].flags.writeable


def test_views_of_a_cut_frame_or_of_another_codec_are_refused() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    with pytest.raises(InvalidFrameError, match="stored_bytes"):
        RawCodec().views(parse_header(frame), frame[:-1])
    other = encoded(LosslessCodec(), filled(SMALL), SMALL)
    with pytest.raises(UnknownCodecError):
        RawCodec().views(parse_header(other), other)


def test_torch_slices_go_in_and_come_out_without_a_copy_in_between() -> None:
    torch = pytest.importorskip("torch")
    pages = torch.arange(2 * 2 * 16 * 2 * 8 * 2, dtype=torch.int32).to(torch.bfloat16)
    pages = pages.reshape(2, 2, 16, 2, 8, 2)[..., 0]
    tensors = [[[pages[i, j].transpose(0, 1).view(torch.uint16).numpy() for j in range(2)]
                for i in range(2)]]  # fmt: skip
    assert not tensors[0][0][0].flags.c_contiguous
    frame = encoded(RawCodec(), tensors, SMALL)
    back = torch.zeros_like(pages)
    out = [[[back[i, j].transpose(0, 1).view(torch.uint16).numpy() for j in range(2)]
            for i in range(2)]]  # fmt: skip
    RawCodec().decode_into(check_frame(frame), frame, out)
    assert torch.equal(back, pages)
