"""The kernels' own source, run on the CPU and compiled for CUDA, against xxhash and torch."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_frame, make_representation, payload
from helpers.cpu_kernels import compile_kernels
from helpers.cuda_compiler import ARCHITECTURES, compile_cuda

from kvstore.codecs import frame_kernels
from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.frame_kernels import (
    COMPILER_FLAGS,
    SOURCE,
    Argument,
    LaunchedKernels,
    cuda_launcher,
    open_kernels,
)
from kvstore.codecs.paged import (
    FrameAt,
    FrameKernels,
    HostKernels,
    Paged,
    Pages,
    check_sums,
    frame_starts,
)
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import SEGMENT_DTYPE, FrameHeader, parse_header
from kvstore.proto.types import ChunkShard, DType, Extent, KVLayout, LayerGroup, LayerKind, Model

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> LaunchedKernels:
    """The CUDA source, compiled for the CPU with checks for undefined behaviour."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return LaunchedKernels(CPU, compile_kernels(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(params=["host", "compiled"])
def either(request: pytest.FixtureRequest, compiled: LaunchedKernels) -> FrameKernels:
    return compiled if request.param == "compiled" else HostKernels()


@pytest.fixture(
    scope="session", params=["compiled", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return CPU if request.param == "compiled" else torch.device("cuda", 0)


@pytest.fixture(scope="session")
def kernels(device: torch.device, compiled: LaunchedKernels) -> FrameKernels:
    """Those of *device*, launched."""
    return compiled if device is CPU else open_kernels(device)


def lay_out(sizes: Sequence[int]) -> tuple[Bytes, FrameHeader]:
    """Return bytes cut into segments of *sizes*, 64-byte aligned, with a header that says so."""
    _, frame = make_frame(1)
    rows = np.zeros(len(sizes), SEGMENT_DTYPE)
    at = 0
    for row, size in zip(rows, sizes, strict=True):
        row["offset"], row["stored_bytes"] = at, size
        at += -(-size // 64) * 64
    data = payload(at, at + 64)
    return data, replace(parse_header(frame), segments=rows)


def aligned(data: Bytes, device: torch.device = CPU) -> torch.Tensor:
    out = torch.empty(len(data), dtype=torch.uint8, device=device)
    return out.copy_(torch.from_numpy(data.copy()))


def assert_sums(kernels: FrameKernels, sizes: Sequence[int], device: torch.device) -> None:
    data, header = lay_out(sizes)
    found = kernels.sums(aligned(data, device), [FrameAt(0, header, 0)])()
    assert found == [[checksum(header.segment(data, at)) for at in range(len(sizes))]]


SIZES = [
    list(range(300)),
    [1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3071, 3072, 3073],
    [64 * at + 1 for at in range(3, 40)],
    [1 << 16, 5, (1 << 18) + 1, 0, 240, 241, 99_999],
]


@pytest.mark.parametrize("sizes", SIZES, ids=["short", "edges", "stripes", "long"])
def test_checksums_are_xxh3_whatever_the_size(
    kernels: FrameKernels, device: torch.device, sizes: list[int]
) -> None:
    assert_sums(kernels, sizes, device)


# --- rows between a frame and pages

SHAPES = [
    # dtype, layers, kv_heads, head_dim, tokens, block_tokens, first_token
    (DType.bfloat16, 2, 2, 64, 32, 16, 0),
    (DType.bfloat16, 3, 1, 128, 50, 16, 7),
    (DType.float8_e4m3fn, 2, 3, 8, 16, 1, 2),
    (DType.float32, 1, 2, 3, 20, 8, 5),
    (DType.float16, 2, 5, 5, 17, 4, 3),
    (DType.uint8, 1, 1, 1, 16, 64, 11),
    # the same in words of 16 bytes: one, three and five a row, in whole blocks of 1 KiB and less
    (DType.bfloat16, 2, 3, 8, 17, 4, 3),
    (DType.float16, 1, 1, 24, 16, 16, 0),
    (DType.bfloat16, 2, 2, 40, 33, 8, 5),
    (DType.uint8, 2, 1, 16, 16, 4, 1),
]
ORDERS = ["block_major", "layer_major", "heads_first"]


def make_pages(order: str, shape: tuple[int, ...], dtype: DType, device: torch.device) -> Pages:
    """Return pages full of noise: *shape* is layers, blocks, block_tokens, kv_heads, head_dim."""
    layers, blocks, block_tokens, heads, dim = shape
    shapes = {
        "block_major": (blocks, layers, 2, block_tokens, heads, dim),
        "layer_major": (layers, 2, blocks, block_tokens, heads, dim),
        "heads_first": (layers, 2, blocks, heads, block_tokens, dim),
    }
    count = int(np.prod(shape)) * 2 * dtype.item_bytes
    raw = torch.from_numpy(payload(7, count)).to(device)
    tensor = raw.view(getattr(torch, dtype.name)).view(shapes[order])
    if order == "block_major":
        tensor = tensor.movedim(0, 2)
    if order != "heads_first":
        tensor = tensor.transpose(-3, -2)
    return Pages(tuple(tuple(tensor[at, part] for part in range(2)) for at in range(layers)))


def bytes_of(pages: Pages) -> bytes:
    views = [view.contiguous().view(torch.uint8).cpu() for parts in pages.views for view in parts]
    return b"".join(view.numpy().tobytes() for view in views)


def assert_rows_move(
    kernels: FrameKernels, shape: tuple[DType, int, int, int, int, int, int], order: str,
    device: torch.device,
) -> None:  # fmt: skip
    dtype, layers, heads, dim, tokens, block_tokens, first_token = shape
    memory, frames = two_frames(shape)
    taken = -(-(first_token + 2 * tokens) // block_tokens)
    ids = random.Random(1).sample(range(taken + 3), taken)
    extent = (layers, taken + 3, block_tokens, heads, dim)
    expected = make_pages(order, extent, dtype, CPU)
    right = HostKernels().scatter(aligned(memory), frames, Paged((expected,), [ids]))()
    pages = make_pages(order, extent, dtype, device)
    found = kernels.scatter(aligned(memory, device), frames, Paged((pages,), [ids]))()
    assert found == right == [f.header.segments["checksum"].tolist() for f in frames]
    assert bytes_of(pages) == bytes_of(expected)
    assert bytes_of(pages) != bytes_of(make_pages(order, extent, dtype, CPU))
    back = aligned(np.zeros_like(memory), device)
    kernels.move(back, frames, Paged((pages,), [ids]), to_pages=False)
    for frame in frames:
        ours, theirs = back.cpu().numpy()[frame.offset :], memory[frame.offset :]
        for at in range(layers):
            segment = frame.header.segment(theirs, at)
            assert np.array_equal(frame.header.segment(ours, at), segment)


def two_frames(shape: tuple[DType, int, int, int, int, int, int]) -> tuple[Bytes, list[FrameAt]]:
    """Return two frames in one piece of memory, each chunk behind the other in the request."""
    dtype, layers, heads, dim, tokens, _, first_token = shape
    of_model = make_representation(layers, heads, dim, dtype)
    made = [make_frame(seed, tokens, representation=of_model)[1] for seed in (5, 6)]
    second = 64 + -(-len(made[0]) // 64) * 64
    memory = np.zeros(second + len(made[1]), np.uint8)
    memory[64 : 64 + len(made[0])], memory[second:] = made
    return memory, [
        FrameAt(64, parse_header(made[0]), first_token),
        FrameAt(second, parse_header(made[1]), first_token + tokens),
    ]


@pytest.mark.parametrize(
    "extent", [Extent(0, 2, 1, 3), Extent(1, 3, 0, 4), Extent(2, 3, 3, 4)], ids=str
)
def test_pages_of_a_rank_get_their_layers_and_heads_and_the_whole_frame_is_summed(
    either: FrameKernels, extent: Extent
) -> None:
    layers, heads, dim, tokens, block_tokens, first_token = 3, 4, 16, 17, 4, 3
    memory, frames = two_frames(
        (DType.bfloat16, layers, heads, dim, tokens, block_tokens, first_token)
    )
    taken = -(-(first_token + 2 * tokens) // block_tokens)
    ids = random.Random(2).sample(range(taken + 3), taken)
    size = (taken + 3, block_tokens)
    whole = make_pages("layer_major", (layers, *size, heads, dim), DType.bfloat16, CPU)
    HostKernels().scatter(aligned(memory), frames, Paged((whole,), [ids]))
    pages = make_pages(
        "block_major", (extent.layers, *size, extent.heads, dim), DType.bfloat16, CPU
    )
    shard = ChunkShard(frames[0].header.layout, (extent,))
    paged = Paged((pages,), [ids], shard)
    found = either.scatter(aligned(memory), frames, paged)()
    assert found == [f.header.segments["checksum"].tolist() for f in frames]
    slots = np.arange(first_token, first_token + 2 * tokens)
    blocks, places = np.array(ids)[slots // block_tokens], slots % block_tokens
    for layer in range(extent.layers):
        for part in range(2):
            mine = pages.views[layer][part].view(torch.int16)[blocks, :, places]
            theirs = whole.views[extent.first_layer + layer][part].view(torch.int16)[
                blocks, :, places
            ]
            assert torch.equal(mine, theirs[:, extent.first_head : extent.head_stop])


def test_pages_of_a_rank_are_checked_against_its_shard(compiled: LaunchedKernels) -> None:
    memory, frames = two_frames((DType.bfloat16, 3, 4, 16, 17, 4, 3))
    pages = make_pages("layer_major", (3, 20, 4, 4, 16), DType.bfloat16, CPU)
    layout = frames[0].header.layout
    for shard in (
        ChunkShard(layout, (Extent(0, 2, 0, 4),)),
        ChunkShard(layout, (Extent(0, 3, 0, 2),)),
    ):
        with pytest.raises(LayoutMismatchError):
            compiled.check(aligned(memory), frames, Paged((pages,), [range(20)], shard))
    other = make_representation(2, 4, 16, DType.bfloat16)
    shard = ChunkShard(KVLayout.of(other, 17), (Extent(0, 2, 0, 4),))
    with pytest.raises(LayoutMismatchError):
        compiled.check(aligned(memory), frames, Paged((pages,), [range(20)], shard))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape[1:])))
def test_rows_move_as_torch_moves_them(
    kernels: FrameKernels, device: torch.device, shape: tuple[DType, int, int, int, int, int, int]
) -> None:
    for order in ORDERS:
        assert_rows_move(kernels, shape, order, device)


def launched_by(work: Callable[[LaunchedKernels], object]) -> list[str]:
    """Return the names of the kernels that *work* launches."""
    launched: list[str] = []

    def note(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        launched.append(name)

    work(LaunchedKernels(CPU, note))
    return launched


def test_rows_move_in_the_largest_words_that_fit_and_are_summed_as_they_are_copied() -> None:
    sizes = (16, 16, 8, 4, 2, 1, 16, 16, 16, 16)
    for shape, size in zip(SHAPES, sizes, strict=True):
        memory, frames, paged = paged_frames(shape)
        given: dict[str, Any] = {"memory": memory, "frames": frames, "paged": paged}
        move = partial(LaunchedKernels.move, **given, to_pages=True)
        assert launched_by(move) == [f"scatter_{size}"]
        launched = launched_by(partial(LaunchedKernels.scatter, **given))
        assert launched[0] == ("scatter_and_sum" if size == 16 else f"scatter_{size}")
        if shape in SHAPES[:2]:  # whole blocks of 1 KiB
            assert launched[1:] == ["chain_blocks", "finish_segments"]


def test_words_before_and_in_frames_are_read_and_none_past_the_end_of_memory(
    either: FrameKernels,
) -> None:
    words = np.arange(40, dtype=np.int64)
    starts = np.array([(64, 0), (16, 9), (304, 3)], np.int64)
    tables = either.tables(starts, Paged((), [(4, 0, 5)]))
    assert tables.blocks.tolist() == [4, 0, 5]
    found = either.words(torch.from_numpy(words.view(np.uint8)), tables, 8, 4)()
    assert found.tolist() == [[7, 8, 9, 10], [1, 2, 3, 4], [37, 38, 39, 0]]
    (last,) = either.words(torch.from_numpy(words.view(np.uint8)), tables.cut(1, 2), 16, 2)()
    assert last.tolist() == [0, 1]


def test_tables_that_were_brought_before_serve_any_part_of_the_frames(
    compiled: LaunchedKernels,
) -> None:
    memory, frames, paged = paged_frames(SHAPES[0])
    more = [frames[0], *frames]
    tables = compiled.tables(frame_starts(more), paged).cut(1, len(more))
    found = compiled.start(memory, frames, paged, tables)()
    assert found == compiled.start(memory, frames, paged)()
    back, again = torch.zeros_like(memory), torch.zeros_like(memory)
    compiled.move(back, frames, paged, tables, to_pages=False)
    compiled.move(again, frames, paged, to_pages=False)
    assert torch.equal(back, again)
    assert back.any()


def engine_of_tables(device: torch.device) -> tuple[Model, Callable[[], Paged]]:
    """Return a model of attention and a window that reaches half a chunk back, and how to make
    pages for it: three block tables, some blocks of which are skipped."""
    of_model = make_representation(3, 2, 64)
    window = LayerGroup(LayerKind.window, DType.float16, (3, 4), 1, 24, 9)
    of_model = replace(of_model, layer_groups=(*of_model.layer_groups, window))
    tables = [(4, 0, -1, 1, 3, 2), (-1, -1, 5, 7, 6, 4), (0, 1, 2, -1, 4, 5)]

    def engine() -> Paged:
        whole = make_pages("layer_major", (3, 8, 8, 2, 64), DType.bfloat16, device)
        ends = make_pages("block_major", (2, 8, 8, 1, 24), DType.float16, device)
        return Paged((replace(whole, tables=(0, 2, 0)), replace(ends, tables=(1, 1))), tables)

    return of_model, engine


def test_each_layer_has_its_block_table_and_skipped_blocks_stay_as_they_are(
    kernels: FrameKernels, device: torch.device
) -> None:
    of_model, engine = engine_of_tables(device)
    _, on_cpu = engine_of_tables(CPU)
    made = [make_frame(seed, representation=of_model)[1] for seed in (5, 6, 7)]
    room = -(-len(made[0]) // 64) * 64
    memory = np.zeros(3 * room, np.uint8)
    frames = []
    for at, frame in enumerate(made):
        memory[at * room : at * room + len(frame)] = frame
        frames.append(FrameAt(at * room, parse_header(frame), 16 * at))
    ours, theirs = engine(), on_cpu()
    found = kernels.scatter(aligned(memory, device), frames, ours)()
    HostKernels().scatter(aligned(memory), frames, theirs)
    assert found == [f.header.segments["checksum"].tolist() for f in frames]
    assert [*map(bytes_of, ours.pages)] == [*map(bytes_of, theirs.pages)]
    back, right = aligned(np.zeros_like(memory), device), aligned(np.zeros_like(memory))
    kernels.move(back, frames, ours, to_pages=False)
    HostKernels().move(right, frames, theirs, to_pages=False)
    assert torch.equal(back.cpu(), right)


def test_frames_of_a_step_are_gathered_by_one_launch() -> None:
    of_model, engine = engine_of_tables(CPU)
    _, frame = make_frame(5, representation=of_model)
    header = parse_header(frame)
    memory = torch.zeros(3 * 65536, dtype=torch.uint8)
    frames = [FrameAt(65536 * at, header, 16 * at) for at in range(3)]
    move = partial(
        LaunchedKernels.move, memory=memory, frames=frames, paged=engine(), to_pages=False
    )
    assert launched_by(move) == ["gather_16"]


def test_what_no_grid_holds_takes_several_launches(
    compiled: LaunchedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_kernels, "MAX_GRID_Y", 5)
    assert_sums(compiled, SIZES[1], CPU)
    for order in ORDERS:
        assert_rows_move(compiled, SHAPES[1], order, CPU)


def paged_frames(
    shape: tuple[DType, int, int, int, int, int, int],
) -> tuple[torch.Tensor, list[FrameAt], Paged]:
    dtype, layers, heads, dim, tokens, block_tokens, first_token = shape
    memory, frames = two_frames(shape)
    blocks = -(-(first_token + 2 * tokens) // block_tokens)
    pages = make_pages("layer_major", (layers, blocks, block_tokens, heads, dim), dtype, CPU)
    return aligned(memory), frames, Paged((pages,), [range(blocks)])


# --- CUDA's compiler


@pytest.mark.parametrize("architecture", [ARCHITECTURES[0], ARCHITECTURES[-1]])
def test_cudas_own_compiler_takes_the_source(architecture: str) -> None:
    status, log, binary = compile_cuda([SOURCE], architecture, *COMPILER_FLAGS)
    assert (status, log) == (0, ""), "not even a warning"
    assert b"sum_blocks" in binary
    assert b"scatter_16" in binary
    assert b"scatter_and_sum" in binary


@pytest.mark.gpu
@needs_gpu
def test_a_device_is_compiled_for_once() -> None:
    assert cuda_launcher(0) is cuda_launcher(0)


def test_a_compiler_that_refuses_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompileError(Exception):
        """cupy's CompileException, which is no RuntimeError."""

    def refuses() -> None:
        raise CompileError("no such architecture\nand more")

    fake = SimpleNamespace(
        RawModule=lambda **_: SimpleNamespace(compile=refuses),
        cuda=SimpleNamespace(
            Device=lambda _: nullcontext(), compiler=SimpleNamespace(CompileException=CompileError)
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(TierUnavailableError, match=r"no such architecture$"):
        cuda_launcher(77)


# --- frames and pages that do not belong together


@pytest.fixture
def chunk() -> tuple[torch.Tensor, FrameHeader]:
    _, frame = make_frame(4, 40, representation=make_representation(3, 2, 8))
    return torch.from_numpy(frame), parse_header(frame)


def engine(dtype: DType = DType.bfloat16, dim: int = 8, ids: Sequence[int] = (5, 0, 3, 1)) -> Paged:
    return Paged((make_pages("heads_first", (3, 7, 16, 2, dim), dtype, CPU),), [ids])


def test_scattered_tokens_are_where_the_engine_looks_for_them_or_told_damaged(
    chunk: tuple[torch.Tensor, FrameHeader],
) -> None:
    (frame, header), paged, kernels = chunk, engine(), open_kernels(CPU)
    before = [[view.clone() for view in parts] for parts in paged.pages[0].views]
    check_sums(header, kernels.scatter(frame, [FrameAt(0, header, 20)], paged)()[0])
    tensors = empty_tensors(header.layout)
    RawCodec().decode_into(header, frame.numpy(), tensors)
    slots = np.arange(20, 60)
    blocks, places = np.array((5, 0, 3, 1))[slots // 16], slots % 16
    for views, parts, olds in zip(paged.pages[0].views, tensors[0], before, strict=True):
        for view, part, old in zip(views, parts, olds, strict=True):
            found, was = (each.view(torch.uint16).numpy() for each in (view, old))
            assert np.array_equal(found[blocks, :, places].swapaxes(0, 1), part)
            found[blocks, :, places] = was[blocks, :, places]
            assert np.array_equal(found, was), "nothing else is touched"
    frame[int(header.segments[1]["offset"]) + 5] ^= 1
    with pytest.raises(ChunkCorruptError, match="component 0 layer 1"):
        check_sums(header, kernels.scatter(frame, [FrameAt(0, header, 20)], paged)()[0])


def test_frames_that_are_not_whole_raw_chunks_of_the_pages_are_refused_and_nothing_written(
    chunk: tuple[torch.Tensor, FrameHeader],
) -> None:
    frame, header = chunk
    rows = header.segments.copy()
    rows["stored_bytes"][0] += 64  # a header that lies must not lead a kernel out of the frame
    packed = replace(header, codec_id=codec_by_name("lossless").codec_id)
    for memory, of, at, paged, error, why in [
        (frame, packed, 20, engine(), UnknownCodecError, None),
        (frame[:-1], header, 20, engine(), InvalidFrameError, "aligned"),
        (frame[1:], header, 20, engine(), InvalidFrameError, "aligned"),
        (frame, replace(header, segments=rows), 20, engine(), InvalidFrameError, "stored_bytes"),
        (frame, header, 20, engine(DType.float16), LayoutMismatchError, None),
        (frame, header, 20, engine(dim=16), LayoutMismatchError, None),
        (frame, header, 20, Paged((), [(5, 0, 3, 1)]), LayoutMismatchError, None),
        (frame, header, 20, engine(ids=(5, 0, 3)), InvalidRequestError, "first_token"),
        (frame, header, -1, engine(), InvalidRequestError, "first_token"),
        (frame, header, 20, engine(ids=(5, 0, 3, 7)), InvalidRequestError, "block_ids"),
        (frame, header, 20, engine(ids=(5, 0, 3, -2)), InvalidRequestError, "block_ids"),
        (frame, header, 20, engine(ids=(5, 0, 5, 1)), InvalidRequestError, "block_ids"),
    ]:
        before = [*map(bytes_of, paged.pages)]
        with pytest.raises(error, match=why):
            open_kernels(CPU).scatter(memory, [FrameAt(0, of, at)], paged)
        assert [*map(bytes_of, paged.pages)] == before


def test_frames_of_one_call_have_one_layout_and_views_are_alike(
    chunk: tuple[torch.Tensor, FrameHeader],
) -> None:
    frame, header = chunk
    _, short = make_frame(4, 17, representation=make_representation(3, 2, 8))
    memory = torch.cat([frame, torch.zeros(-len(frame) % 64, dtype=torch.uint8)])
    frames = [FrameAt(0, header, 0), FrameAt(len(memory), parse_header(short), 0)]
    with pytest.raises(LayoutMismatchError, match="one layout"):
        open_kernels(CPU).scatter(torch.cat([memory, torch.from_numpy(short)]), frames, engine())
    good = torch.zeros(4, 2, 16, 8)
    for bad in (good[:3], good.half(), good.transpose(1, 2), good[0]):
        with pytest.raises(LayoutMismatchError):
            Pages(((good, bad),))
    with pytest.raises(LayoutMismatchError):
        Pages(())
    with pytest.raises(LayoutMismatchError, match="head_dim contiguous"):
        Pages(((good.transpose(2, 3),),))
