"""The kernels of frame_kernels.cu: their arguments, compilation and launches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.paged import (
    DeviceTables,
    FrameAt,
    FrameKernels,
    HostKernels,
    Paged,
    Pages,
    Sums,
    frame_starts,
)
from kvstore.proto.device import import_cupy
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import ChunkShard, Component, KVLayout

SOURCE = Path(__file__).with_suffix(".cu")
COMPILER_FLAGS = ("-std=c++17",)
THREADS = 128
MAX_GRID_X = 4096
"""In a larger job each thread takes several pieces."""
MAX_GRID_Y = 65535
"""CUDA's limit; a larger job takes several launches."""
MAX_PLANS = 16
"""Pairs of layout and pages whose tables stay on the device."""
_SHORT_BYTES = 240
_BLOCK_BYTES = 1024
_LANES = 8
_WORDS_AHEAD = 4
_WORD_BYTES = 16
"""The largest word that a thread moves."""

Argument: TypeAlias = "torch.Tensor | np.uint32 | np.uint64"
"""A kernel's argument: memory, or a number of exactly its parameter's size."""

Launch: TypeAlias = Callable[[str, tuple[int, int], Sequence[Argument]], None]
"""Queue a kernel by name on torch's current stream: the grid, in blocks of THREADS."""


def run(launch: Launch, name: str, grid: tuple[int, int], *arguments: Argument | int) -> None:
    """Queue a kernel; a plain number is 32 bits wide."""
    launch(name, grid, [np.uint32(each) if isinstance(each, int) else each for each in arguments])


@dataclass(frozen=True, slots=True)
class _Segments:
    """The segments of a frame, and their blocks to sum."""

    count: int
    blocks: int
    """Blocks of the whole frame."""
    most_blocks: int
    """Largest number of blocks of one segment."""
    table: torch.Tensor
    """On the device, a row each: offset, size, blocks before it, its first row of the pages."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        first_rows: NDArray[np.int64] | None = None,
    ) -> _Segments:
        blocks = np.where(sizes > _SHORT_BYTES, (sizes - 1) // _BLOCK_BYTES, 0)
        rows = np.zeros(len(sizes), np.int64) if first_rows is None else first_rows
        table = np.stack([offsets, sizes, np.cumsum(blocks) - blocks, rows], 1)
        (there,) = device_table(device, table.ravel())
        return cls(len(sizes), int(blocks.sum()), int(blocks.max(initial=0)), there)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Device tables shared by all frames of one layout and the same pages."""

    pages: tuple[Pages, ...]
    """Referenced, so that their id stays unique."""
    segments: _Segments
    rows: torch.Tensor
    """A row for each part of each layer: address, offset in the frame, table, shape."""
    shapes: torch.Tensor
    row_count: int
    word_bytes: int
    """The largest word that divides every row on both sides, regardless of the frame's start."""
    most_row_bytes: int


class LaunchedKernels(FrameKernels):
    """The kernels, run by *launch*. *device* holds their tables."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch
        self._plans: OrderedDict[tuple[KVLayout, int, int, ChunkShard | None], _Plan] = (
            OrderedDict()
        )
        self._lock = Lock()  # guards the plans

    @override
    def sums(self, memory: torch.Tensor, frames: Sequence[FrameAt]) -> Sums:
        tables = [frame.header.segments for frame in frames]
        offsets = [t["offset"] + frame.offset for t, frame in zip(tables, frames, strict=True)]
        segments = _Segments.of(
            self._device,
            np.concatenate(offsets).astype(np.int64),
            np.concatenate([table["stored_bytes"] for table in tables]).astype(np.int64),
        )
        (whole,) = device_table(self._device, [0, 0])
        sums = self._empty(_LANES * segments.blocks)
        for cut in grid_cuts(segments.count if segments.blocks else 0):
            grid = (grid_of(4 * segments.most_blocks), cut.stop - cut.start)
            table = segments.table[4 * cut.start :]
            run(self._launch, "sum_blocks", grid, memory, whole, table, sums, segments.count, 0)
        return self._finish(segments, [memory, whole, sums], [len(table) for table in tables])

    def _finish(
        self, segments: _Segments, summed: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> Sums:
        """Compute checksums from the sums of blocks; *counts* has each frame's segments."""
        memory, frames, sums = summed
        total, hashes = sum(counts), self._empty(sum(counts))
        sizes = (segments.count, segments.blocks, total)
        if segments.blocks:
            grid = (-(-_LANES * total // THREADS), 1)
            run(self._launch, "chain_blocks", grid, segments.table, sums, *sizes)
        given = (memory, frames, segments.table, sums, hashes)
        run(self._launch, "finish_segments", (-(-total // THREADS), 1), *given, *sizes)
        there = to_host(hashes)

        def wait() -> list[list[int]]:
            found = there().view(np.uint64).tolist()
            stops = accumulate(counts)
            return [found[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]

        return wait

    def _empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int64, device=self._device)

    @override
    def start(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        tables: DeviceTables | None = None,
    ) -> Sums:
        """Copy and sum in one pass if all rows consist of the largest words and all are copied:
        each word is read once, so the copied bytes are those summed.
        """
        plan = self._plan(frames[0].header, paged)
        if paged.shard is not None or self._word(plan, memory, frames) != _WORD_BYTES:
            return super().start(memory, frames, paged, tables)
        there = tables or self.tables(frame_starts(frames), paged)
        starts, blocks = there.starts, there.blocks
        segments, counts = plan.segments, [plan.segments.count] * len(frames)
        sums = self._empty(_LANES * segments.blocks * len(frames))
        threads = 4 * -(-plan.most_row_bytes * 2 // _BLOCK_BYTES)
        for cut in _frame_cuts(len(frames), segments.count):
            grid = (grid_of(threads), segments.count * (cut.stop - cut.start))
            run(
                self._launch, "scatter_and_sum", grid, memory, starts[2 * cut.start :],
                segments.table, sums[_LANES * segments.blocks * cut.start :], segments.count,
                segments.blocks, plan.rows, plan.shapes, blocks, paged.table_blocks,
            )  # fmt: skip
        return self._finish(segments, [memory, starts, sums], counts)

    @override
    def move(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        tables: DeviceTables | None = None,
        *,
        to_pages: bool,
    ) -> None:
        plan = self._plan(frames[0].header, paged)
        there = tables or self.tables(frame_starts(frames), paged)
        starts, blocks = there.starts, there.blocks
        word = self._word(plan, memory, frames)
        name = f"{'scatter' if to_pages else 'gather'}_{word}"
        for cut in _frame_cuts(len(frames), plan.row_count):
            words = -(-plan.most_row_bytes // word // _WORDS_AHEAD)
            grid = (grid_of(words), plan.row_count * (cut.stop - cut.start))
            run(
                self._launch, name, grid, memory, starts[2 * cut.start :], plan.rows, plan.shapes,
                blocks, plan.row_count, paged.table_blocks,
            )  # fmt: skip

    @override
    def tables(self, starts: NDArray[np.int64], paged: Paged) -> DeviceTables:
        blocks = np.concatenate([np.asarray(table, np.int64) for table in paged.tables])
        return DeviceTables(*device_table(self._device, starts.ravel(), blocks))

    @override
    def words(
        self, memory: torch.Tensor, tables: DeviceTables, before: int, count: int
    ) -> Callable[[], NDArray[np.int64]]:
        frames = len(tables.starts) // 2
        found = self._empty(frames * count)
        for cut in grid_cuts(frames):
            run(
                self._launch, "read_words", (grid_of(count), cut.stop - cut.start), memory,
                tables.starts[2 * cut.start :], found[count * cut.start :],
                np.uint64(len(memory)), before, count,
            )  # fmt: skip
        there = to_host(found)
        return lambda: there().reshape(frames, count)

    def _word(self, plan: _Plan, memory: torch.Tensor, frames: Sequence[FrameAt]) -> int:
        starts = [memory.data_ptr(), *(frame.offset for frame in frames)]
        return int(np.gcd.reduce([plan.word_bytes, *starts]))

    def _plan(self, header: FrameHeader, paged: Paged) -> _Plan:
        """Return the cached plan for frames like that of *header* and these pages."""
        offset = int(header.segments["offset"][0])
        key = header.layout, offset, id(paged.pages), paged.shard
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._make_plan(header, paged)
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            return plan

    def _make_plan(self, header: FrameHeader, paged: Paged) -> _Plan:
        segments = header.segments
        rows: list[tuple[int, ...]] = []
        shapes, first_rows = [], []
        part_bytes = 0
        offsets = FrameAt(0, header, 0).part_offsets(paged.shard)
        for number, (those, (component, starts)) in enumerate(
            zip(paged.pages, offsets, strict=True)
        ):
            shapes.append(_shape(component, those))
            part_bytes = max(part_bytes, component.part_bytes)
            at = iter(starts)
            for views, table in zip(those.views, those.tables, strict=True):
                first_rows.append(len(rows))
                rows += [(view.data_ptr(), next(at), table, number) for view in views]
        columns = np.array(shapes)[:, [2, 5, 6, 7]], np.array(rows)[:, :2]
        word = np.gcd.reduce([_WORD_BYTES, *(number for c in columns for number in c.ravel())])
        there = device_table(self._device, np.ravel(rows), np.ravel(shapes))
        return _Plan(
            paged.pages,
            _Segments.of(
                self._device,
                segments["offset"].astype(np.int64),
                segments["stored_bytes"].astype(np.int64),
                np.array(first_rows, np.int64) if paged.shard is None else None,
            ),
            there[0],
            there[1],
            len(rows),
            int(word),
            part_bytes,
        )


def _shape(component: Component, pages: Pages) -> tuple[int, ...]:
    """Return the kernels' Shape, common to all rows of a component."""
    row_bytes = component.head_dim * component.dtype.item_bytes
    return (
        component.tokens, component.kv_heads, row_bytes, component.first_token,
        pages.first.shape[2], *map(int, byte_strides(pages)),
    )  # fmt: skip


def _frame_cuts(frames: int, rows: int) -> list[slice]:
    """Cut *frames*, each of *rows* rows of a grid, into launches."""
    return grid_cuts(frames, max(1, MAX_GRID_Y // rows))


def to_host(numbers: torch.Tensor) -> Callable[[], NDArray[np.int64]]:
    """Queue a copy of *numbers* to the host; the returned function waits for it."""
    if numbers.device.type == "cpu":
        return numbers.numpy
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record()

    def wait() -> NDArray[np.int64]:
        event.synchronize()
        return there.numpy()

    return wait


def device_table(
    device: torch.device, *columns: Sequence[int] | NDArray[Any]
) -> list[torch.Tensor]:
    """Return *columns* as int64 on *device*, by one asynchronous copy."""
    arrays = [np.asarray(column, np.int64) for column in columns]
    stops = np.cumsum([len(array) for array in arrays]).tolist()
    # From pageable memory torch would wait for all queued work. It keeps pinned memory until the
    # copy is done.
    rows = torch.empty(stops[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=rows.numpy())
    table = rows.to(device, non_blocking=True)
    return [table[stop - len(a) : stop] for stop, a in zip(stops, arrays, strict=True)]


def grid_cuts(rows: int, most: int | None = None) -> list[slice]:
    """Cut the rows of a grid into launches of at most *most*, or CUDA's limit."""
    step = min(most or MAX_GRID_Y, MAX_GRID_Y)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def grid_of(threads: int, block_threads: int = THREADS) -> int:
    """Return the number of blocks for *threads*, at most MAX_GRID_X."""
    return min(MAX_GRID_X, -(-threads // block_threads))


def byte_strides(pages: Pages) -> list[np.uint64]:
    """Return the strides of a block, a token and a head, in bytes."""
    item_bytes = pages.first.element_size()
    block, head, token, _ = pages.first.stride()
    return [np.uint64(stride * item_bytes) for stride in (block, token, head)]


def open_kernels(device: torch.device) -> FrameKernels:
    """Return the kernels of *device*. Raises TierUnavailableError when they cannot be compiled."""
    if device.type == "cpu":
        return HostKernels()
    return LaunchedKernels(device, cuda_launcher(device.index or 0))


class _TorchStream:
    """A stream in the form that cupy takes (the CUDA stream protocol)."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@lru_cache(maxsize=64)
def cuda_launcher(
    index: int, sources: tuple[Path, ...] = (SOURCE,), threads: int = THREADS
) -> Launch:
    """Compile *sources*, concatenated, for the CUDA device number *index*.

    Returns the launcher of their kernels, in blocks of *threads*. cupy caches compiled kernels in a
    folder of the user, so only the first start waits.
    """
    cupy = import_cupy()
    text = "".join(source.read_text() for source in sources)
    module = cupy.RawModule(code=text, options=COMPILER_FLAGS)
    try:
        with cupy.cuda.Device(index):
            module.compile()
    except (RuntimeError, OSError, cupy.cuda.compiler.CompileException) as error:
        reason = str(error).partition("\n")[0]
        raise TierUnavailableError("gpu", f"cannot compile {sources[-1].name}: {reason}") from error
    function = cache(module.get_function)
    stream_of = lru_cache(maxsize=64)(lambda at: cupy.cuda.Stream.from_external(_TorchStream(at)))

    def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given = tuple(
            np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
        # torch.cuda.current_stream creates an object, which takes longer than the launch.
        stream = stream_of(torch._C._cuda_getCurrentRawStream(index))
        with cupy.cuda.Device(index), stream:
            function(name)((*grid, 1), (threads, 1, 1), given)

    return launch
