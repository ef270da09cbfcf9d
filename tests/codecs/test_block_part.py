"""BlockParts against plain indexing, slot by slot, and as codecs use them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import Codec, Part, empty_tensors
from kvstore.codecs.block_part import (
    BLOCK_ROW,
    ROW_SUM,
    BlockPart,
    BlockSpan,
    block_rows,
    check_block_ids,
    to_dense,
)
from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec
from kvstore.proto import native
from kvstore.proto.buffers import address, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidRequestError, LayoutMismatchError
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import ChainDigest, ChunkKey, Component, DType, KVLayout, LayerKind

HEADS, DIM = 3, 4

LAYOUT = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, HEADS, DIM, 40),))
TEMPLATE = FrameTemplate(ChunkKey(bytes(32)), ChainDigest(bytes(16)), bytes(16), bytes(16), LAYOUT)


def pages_of(blocks: int, block_tokens: int) -> Part:
    """Token-major pages of numbers that are all different, in the order that BlockParts take."""
    shape = (blocks, block_tokens, HEADS, DIM)
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape).transpose(0, 2, 1, 3)


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Block ids, tokens of a block, first and last token."""
    blocks = draw(st.integers(1, 12))
    block_tokens = draw(st.integers(1, 9))
    ids = draw(st.permutations(range(blocks)))[: draw(st.integers(1, blocks))]
    if draw(st.booleans()):
        ids = sorted(ids)
    start = draw(st.integers(0, len(ids) * block_tokens - 1))
    stop = draw(st.integers(start + 1, len(ids) * block_tokens))
    return ids, block_tokens, start, stop


def head_runs(blocks: int, heads: int, tokens: int, width: int, dtype: str) -> Part:
    """Pages in which a head of a block has its tokens one after another."""
    return np.zeros((blocks, heads, tokens, width), dtype)


def turned_heads(blocks: int, heads: int, tokens: int, width: int, dtype: str) -> Part:
    """Pages in which a head of a block has its elements one after another, as vLLM's keys."""
    return np.zeros((blocks, heads, width, tokens), dtype).swapaxes(2, 3)


BLOCKS = [
    (32, 64, "u4"), (16, 64, "u2"), (64, 128, "u1"), (16, 40, "u2"), (20, 64, "u4"), (4, 256, "u2"),
]  # fmt: skip


@pytest.mark.parametrize("path", native.paths())
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize(("tokens", "width", "dtype"), BLOCKS)
def test_the_loop_fills_blocks_and_sums_them_as_numpy_does(
    tokens: int, width: int, dtype: str, offset: int, path: str
) -> None:
    heads, ids, rng = 3, np.array([5, 0, 7]), np.random.default_rng(tokens)
    shape = (2, 2, heads, len(ids) * tokens, width)
    memory = rng.integers(0, 256, offset + np.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
    frame = memory[offset:]
    wanted = frame.view(dtype).reshape(shape)
    span = BlockSpan.of(ids, tokens, 0, len(ids) * tokens)
    pages = [
        [make(9, heads, tokens, width, dtype) for make in (turned_heads, head_runs)]
        for _ in range(2)
    ]
    layers = [[BlockPart(part, span) for part in parts] for parts in pages]
    rows = block_rows(layers, frame, [0, frame.nbytes // 2])
    if tokens * width * np.dtype(dtype).itemsize % 1024:
        assert rows is None
        return
    assert rows is not None
    native.loops(path).scatter_summed(address(rows), rows.size // BLOCK_ROW)
    sums = [checksum(half) for half in np.split(frame, 2)]
    assert rows[:, -1, -1, -1, ROW_SUM].tolist() == sums
    for layer, parts in enumerate(layers):
        for number, part in enumerate(parts):
            assert np.array_equal(to_dense(part), wanted[layer, number])
            assert not np.delete(part.pages, ids, 0).any()


def test_rows_are_of_whole_blocks_that_are_there_and_alike() -> None:
    frame = np.zeros(1 << 20, np.uint8)

    def rows(ids: list[int], *pages: Part, stop: int = 64) -> object:
        span = BlockSpan.of(np.array(ids), 32, 0, stop)
        layers = [[BlockPart(part, span)] for part in pages]
        return block_rows(layers, frame, range(0, 1 << 20, (1 << 20) // len(pages)))

    plain, turned = head_runs(4, 2, 32, 64, "u4"), turned_heads(4, 2, 32, 64, "u4")
    assert rows([1, 3], plain, plain) is not None
    assert rows([1, 4], plain) is None
    assert rows([-1, 2], plain) is None
    assert rows([1, 2], plain, plain[:2]) is None
    assert rows([1, 2], plain, turned) is None
    sparse = np.lib.stride_tricks.as_strided(plain.view("u2"), plain.shape, plain.strides)
    assert rows([1, 2], plain, sparse) is None
    assert rows([1, 3], plain, stop=40) is None
    assert rows([1, 3], plain[..., ::2]) is None
    assert block_rows([[np.zeros((2, 64, 64), "u4")]], frame, [0]) is None
    span = BlockSpan.of(np.array([1, 3]), 32, 0, 64)
    layer, size = [BlockPart(plain, span)], 2 * 64 * 64 * 4
    assert block_rows([layer], frame[:size], [0]) is not None
    assert block_rows([layer], frame[: size - 1], [0]) is None
    assert block_rows([layer, layer], frame[:size], [0, 64]) is None
    assert block_rows([layer], frame[::2], [0]) is None
    plain.flags.writeable = False
    assert block_rows([layer], frame[:size], [0]) is None


@pytest.mark.parametrize("make", [head_runs, turned_heads])
def test_blocks_that_cannot_be_written_are_refused_and_stay_as_they_are(
    make: Callable[..., Part],
) -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.float32, 1, 2, 64, 64),))
    template = FrameTemplate(ChunkKey(bytes(32)), ChainDigest(bytes(16)), bytes(16), b"", layout)
    frame = np.zeros(RawCodec().max_frame_bytes(layout), np.uint8)
    header = RawCodec().encode(template, [[list(np.ones((2, 2, 64, 64), np.uint32))]], frame)
    span = BlockSpan.of(np.array([1, 3]), 32, 0, 64)
    pages = [make(4, 2, 32, 64, "u4") for _ in range(2)]
    for part in pages:
        part.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        RawCodec().decode_into(header, frame, [[[BlockPart(part, span) for part in pages]]])
    assert not np.any(pages)


@given(spans())
def test_a_span_reads_and_writes_the_slots_of_its_tokens_and_no_other(
    span: tuple[list[int], int, int, int],
) -> None:
    ids, block_tokens, start, stop = span
    pages = pages_of(12, block_tokens)
    part = BlockPart(pages, BlockSpan.of(np.array(ids), block_tokens, start, stop))
    slots = [(ids[t // block_tokens], t % block_tokens) for t in range(start, stop)]
    right = np.stack([pages[block, :, slot] for block, slot in slots], axis=1)
    assert part.shape == right.shape
    assert part.nbytes == right.nbytes
    assert np.array_equal(to_dense(part), right)
    news = right + np.uint32(1 << 30)
    wanted = pages.copy()
    for at, (block, slot) in enumerate(slots):
        wanted[block, :, slot] = news[:, at]
    part.scatter(news)
    assert np.array_equal(pages, wanted)
    part[1:2].scatter(right[1:2])
    wanted[:, 1] = pages_of(12, block_tokens)[:, 1]
    assert np.array_equal(pages, wanted)


def block_tensors(pages: list[Part]) -> list[list[list[BlockPart]]]:
    span = BlockSpan.of(np.array([4, 1, 2, 7]), 16, 5, 45)
    return [[[BlockPart(part, span) for part in pages[at : at + 2]] for at in (0, 2)]]


def noise(seed: int) -> list[Part]:
    draw = np.random.default_rng(seed)
    shape = (8, 16, HEADS, DIM)
    return [
        draw.integers(0, 1 << 16, shape, dtype=np.uint16).transpose(0, 2, 1, 3) for _ in range(4)
    ]


@pytest.mark.parametrize("codec", [RawCodec(), LosslessCodec()], ids=lambda codec: codec.name)
def test_every_codec_encodes_from_blocks_and_decodes_into_them_and_finds_damage(
    codec: Codec,
) -> None:
    source, room = block_tensors(noise(1)), block_tensors(noise(2))
    frame = np.zeros(codec.max_frame_bytes(LAYOUT), np.uint8)
    header = codec.encode(TEMPLATE, source, frame)
    codec.decode_into(header, frame, room)
    dense = empty_tensors(LAYOUT)
    codec.decode_into(header, frame, dense)
    for one, other, third in zip(source[0], room[0], dense[0], strict=True):
        for given_part, found, array in zip(one, other, third, strict=True):
            assert np.array_equal(to_dense(given_part), to_dense(found))
            assert np.array_equal(to_dense(given_part), array)
    data = header.segment(frame, 1)
    data[-1] ^= 1
    codec.decode_checked(header, 0, header.segment(frame, 0), room[0][0])
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        codec.decode_checked(header, 1, data, room[0][1])


def test_blocks_that_are_not_there_or_too_few_are_refused() -> None:
    assert check_block_ids([3, 0], 4).tolist() == [3, 0]
    assert check_block_ids([], 4).tolist() == []
    for ids, message in (
        ([4], r"block_ids=\(4, 4\): the pages have 4 blocks"),
        ([-1], "the pages have 4 blocks"),
        ([1, 1], "block_ids=2: name each block once"),
        ([0.5], "block_ids='float64': give a flat list"),
        ([[1], [2]], "give a flat list of numbers"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            check_block_ids(ids, 4)  # type: ignore[arg-type]
    for start, stop in ((0, 33), (-1, 4), (5, 5)):
        with pytest.raises(InvalidRequestError, match="do not fit that many blocks of 16"):
            BlockSpan.of(np.array([0, 1]), 16, start, stop)
    with pytest.raises(LayoutMismatchError, match=r"give \(blocks, kv_heads, 16, head_dim\)"):
        BlockPart(pages_of(2, 8), BlockSpan.of(np.array([0, 1]), 16, 0, 20))
