"""Frames from and into an engine's pages, on the CPU as the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from contracts.chunks import make_frame, make_representation, payload

from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import FrameAt, FrameKernels, Paged, Pages, Sums, check_sums
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header

LAYERS, HEADS, DIM, TOKENS = 3, 2, 8, 40
BLOCKS, BLOCK_TOKENS, FIRST_TOKEN = 7, 16, 20
BLOCK_IDS = (5, 0, 3, 1)
REPRESENTATION = make_representation(LAYERS, HEADS, DIM)


@pytest.fixture
def kernels() -> FrameKernels:
    return open_kernels(torch.device("cpu"))


def make_pages(seed: int = 1, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> Pages:
    shape = (LAYERS, 2, BLOCKS, HEADS, BLOCK_TOKENS, dim)
    data = torch.from_numpy(payload(seed, int(np.prod(shape)) * dtype.itemsize))
    tensor = data.view(dtype).view(shape)
    return Pages(tuple(tuple(tensor[at, part] for part in range(2)) for at in range(LAYERS)))


def make_chunk() -> tuple[torch.Tensor, FrameHeader]:
    _, frame = make_frame(4, TOKENS, representation=REPRESENTATION)
    return torch.from_numpy(frame), parse_header(frame)


def paged(pages: Pages) -> Paged:
    return Paged((pages,), [BLOCK_IDS])


def scatter(kernels: FrameKernels, frame: torch.Tensor, header: FrameHeader, pages: Pages) -> Sums:
    return kernels.scatter(frame, [FrameAt(0, header, FIRST_TOKEN)], paged(pages))


def token_of(pages: Pages, layer: int, part: int, token: int) -> bytes:
    """The heads of one token of the chunk, read slot by slot."""
    slot = FIRST_TOKEN + token
    view = pages.views[layer][part].view(torch.uint8)
    return view[BLOCK_IDS[slot // BLOCK_TOKENS], :, slot % BLOCK_TOKENS].numpy().tobytes()


def test_scattered_tokens_are_where_the_engine_looks_for_them(kernels: FrameKernels) -> None:
    frame, header = make_chunk()
    pages, before = make_pages(), make_pages()
    check_sums(header, scatter(kernels, frame, header, pages)()[0])
    tensors = empty_tensors(header.layout)
    RawCodec().decode_into(header, frame.numpy(), tensors)
    for layer in range(LAYERS):
        for part in range(2):
            for token in range(TOKENS):
                right = tensors[0][layer][part][:, token].tobytes()
                assert token_of(pages, layer, part, token) == right
            ours, theirs = (p.views[layer][part].view(torch.uint8) for p in (pages, before))
            changed = ours != theirs
            assert int(changed.any(-1).any(1).sum()) <= TOKENS, "nothing else is touched"


def test_what_was_damaged_on_the_device_is_told_by_its_layer(kernels: FrameKernels) -> None:
    frame, header = make_chunk()
    frame[int(header.segments[1]["offset"]) + 5] ^= 1
    with pytest.raises(ChunkCorruptError, match="component 0 layer 1"):
        check_sums(header, scatter(kernels, frame, header, make_pages())()[0])


def test_a_frame_of_another_codec_is_refused(kernels: FrameKernels) -> None:
    frame, header = make_chunk()
    packed = replace(header, codec_id=codec_by_name("lossless").codec_id)
    with pytest.raises(UnknownCodecError):
        scatter(kernels, frame, packed, make_pages())


@pytest.mark.parametrize("cut", [slice(0, -1), slice(1, None)])
def test_a_frame_that_is_cut_or_not_aligned_is_refused(kernels: FrameKernels, cut: slice) -> None:
    frame, header = make_chunk()
    with pytest.raises(InvalidFrameError, match="aligned"):
        scatter(kernels, frame[cut], header, make_pages())


def test_segments_of_other_sizes_than_their_layers_are_refused(kernels: FrameKernels) -> None:
    """A header that lies about sizes must not lead a kernel out of the frame."""
    frame, header = make_chunk()
    rows = header.segments.copy()
    rows["stored_bytes"][0] += 64
    with pytest.raises(InvalidFrameError, match="stored_bytes"):
        scatter(kernels, frame, replace(header, segments=rows), make_pages())


@pytest.mark.parametrize(
    "pages",
    [make_pages(dtype=torch.float16), make_pages(dim=2 * DIM)],
    ids=["dtype", "head_dim"],
)
def test_pages_of_another_layout_are_refused(kernels: FrameKernels, pages: Pages) -> None:
    frame, header = make_chunk()
    with pytest.raises(LayoutMismatchError):
        scatter(kernels, frame, header, pages)
    with pytest.raises(LayoutMismatchError):
        kernels.scatter(frame, [FrameAt(0, header, 0)], Paged((), [BLOCK_IDS]))


@pytest.mark.parametrize(
    ("ids", "first", "field"),
    [
        ((5, 0, 3), 20, "first_token"),
        ((5, 0, 3, 1), -1, "first_token"),
        ((5, 0, 3, 7), 20, "block_ids"),
        ((5, 0, 3, -2), 20, "block_ids"),
        ((5, 0, 5, 1), 20, "block_ids"),
    ],
)
def test_blocks_that_do_not_hold_the_tokens_are_refused(
    kernels: FrameKernels, ids: tuple[int, ...], first: int, field: str
) -> None:
    frame, header = make_chunk()
    pages, before = make_pages(), make_pages()
    with pytest.raises(InvalidRequestError, match=field):
        kernels.scatter(frame, [FrameAt(0, header, first)], Paged((pages,), [ids]))
    for ours, theirs in zip(pages.views[0], before.views[0], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_views_that_are_not_alike_are_refused() -> None:
    good = torch.zeros(4, HEADS, BLOCK_TOKENS, DIM)
    for bad in (good[:3], good.half(), good.transpose(1, 2), good[0]):
        with pytest.raises(LayoutMismatchError):
            Pages(((good, bad),))
    with pytest.raises(LayoutMismatchError):
        Pages(())
    with pytest.raises(LayoutMismatchError, match="head_dim contiguous"):
        Pages(((good.transpose(2, 3),),))


def test_frames_of_one_call_have_one_layout(kernels: FrameKernels) -> None:
    frame, header = make_chunk()
    _, short = make_frame(4, 17, representation=REPRESENTATION)
    memory = torch.cat([frame, torch.zeros(-len(frame) % 64, dtype=torch.uint8)])
    frames = [FrameAt(0, header, 0), FrameAt(len(memory), parse_header(short), 0)]
    memory = torch.cat([memory, torch.from_numpy(short)])
    with pytest.raises(LayoutMismatchError, match="one layout"):
        kernels.scatter(memory, frames, paged(make_pages()))
