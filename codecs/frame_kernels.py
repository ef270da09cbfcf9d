"""The kernels of frame_kernels.cu: what they are given, and how CUDA compiles and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.paged import FrameAt, FrameKernels, HostKernels, Paged, Pages, Sums
from kvstore.proto.cuda import import_cupy
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import Component

SOURCE = Path(__file__).with_suffix(".cu")
COMPILER_FLAGS = ("-std=c++17",)
THREADS = 128
MAX_GRID_X = 4096
"""Threads of a larger job take several pieces each."""
MAX_GRID_Y = 65535
"""CUDA's own limit; a larger job takes several launches."""
_SHORT_BYTES = 240
_BLOCK_BYTES = 1024
_LANES = 8
_WORD_BYTES = 16
"""The largest word that a thread moves."""

Argument: TypeAlias = "torch.Tensor | np.uint32 | np.uint64"
"""What a kernel takes: memory, or a number of exactly its parameter's size."""

Launch: TypeAlias = Callable[[str, tuple[int, int], Sequence[Argument]], None]
"""Queue a kernel by name on torch's current stream: the grid, in blocks of THREADS."""


@dataclass(frozen=True, slots=True)
class _Segments:
    """Where the segments of some frames of one layout lie, and how many blocks are summed of each.

    In order of components, and of frames in each: those of component i are ``rows[i]``.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    blocks: NDArray[np.int64]
    rows: tuple[slice, ...]
    order: NDArray[np.intp]
    """Which of all segments, frame by frame, is in each place."""

    @classmethod
    def of(cls, frames: Sequence[FrameAt]) -> _Segments:
        tables = [frame.header.segments for frame in frames]
        numbers = np.concatenate([table["component"] for table in tables])
        order = np.argsort(numbers, kind="stable")
        offsets = np.concatenate(
            [table["offset"] + frame.offset for table, frame in zip(tables, frames, strict=True)]
        )
        sizes = np.concatenate([table["stored_bytes"] for table in tables])[order].astype(np.int64)
        blocks = np.where(sizes > _SHORT_BYTES, (sizes - 1) // _BLOCK_BYTES, 0)
        _, counts = np.unique(numbers, return_counts=True)
        stops = np.cumsum(counts).tolist()
        rows = tuple(slice(a, b) for a, b in zip([0, *stops], stops, strict=False))
        return cls(offsets[order].astype(np.int64), sizes, blocks, rows, order)

    @property
    def columns(self) -> list[NDArray[np.int64]]:
        """What kernels are told: offset, size, and how many blocks there are before."""
        return [self.offsets, self.sizes, np.cumsum(self.blocks) - self.blocks]

    def cuts(self, rows: slice) -> list[slice]:
        """Cut *rows* into as many as one launch takes."""
        return [
            slice(rows.start + cut.start, rows.start + cut.stop)
            for cut in grid_cuts(rows.stop - rows.start)
        ]


class LaunchedKernels(FrameKernels):
    """The kernels, whatever *launch* runs them on. *device* is where their tables go."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch

    @override
    def sums(self, memory: torch.Tensor, frames: Sequence[FrameAt]) -> Sums:
        segments = _Segments.of(frames)
        at, size, before = device_table(self._device, *segments.columns)
        sums = self._empty(_LANES * int(segments.blocks.sum()))
        for cut in grid_cuts(len(segments.order) if segments.blocks.any() else 0):
            grid = (grid_of(4 * int(segments.blocks.max())), cut.stop - cut.start)
            self._launch("sum_blocks", grid, [memory, at[cut], size[cut], before[cut], sums])
        return self._finish(segments, [memory, at, size, before, sums], _counts(frames))

    def _finish(
        self, segments: _Segments, summed: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> Sums:
        """Make checksums of the sums of blocks; *counts* says how many segments a frame has."""
        memory, at, size, before, sums = summed
        count = len(segments.order)
        accumulators, hashes = self._empty(_LANES * count), self._empty(count)
        number = np.uint32(count)
        given: list[Argument] = [size, before, sums, accumulators, number]
        self._launch("chain_blocks", (grid_of(_LANES * count), 1), given)
        given = [memory, at, size, accumulators, hashes, number]
        self._launch("finish_segments", (grid_of(count), 1), given)

        def wait() -> list[list[int]]:
            ordered = np.empty(count, np.uint64)
            ordered[segments.order] = hashes.cpu().numpy().view(np.uint64)
            found = iter(ordered.tolist())
            return [[next(found) for _ in range(each)] for each in counts]

        return wait

    def _empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int64, device=self._device)

    @override
    def _scatter(self, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged) -> Sums:
        """Sum words as they are copied, where all rows are made of the largest: each is read once,
        and what was copied is what was summed.
        """
        components = frames[0].header.layout.components
        segments = _Segments.of(frames)
        pointers = [page_addresses(pages) for pages in paged.pages]
        starts = [memory.data_ptr(), *segments.offsets.tolist()]
        words = [
            _word_bytes(component, pages, [*starts, *places])
            for component, pages, places in zip(components, paged.pages, pointers, strict=True)
        ]
        if set(words) != {_WORD_BYTES}:
            return super()._scatter(memory, frames, paged)
        tokens = [frame.first_token for frame in frames]
        at, size, before, ids, *columns = device_table(
            self._device, *segments.columns, list(paged.block_ids),
            *(np.repeat(tokens, component.layers) for component in components),
            *(np.tile(places, len(frames)) for places in pointers),
        )  # fmt: skip
        sums = self._empty(_LANES * int(segments.blocks.sum()))
        firsts, places = columns[: len(components)], columns[len(components) :]
        for index, (component, pages) in enumerate(zip(components, paged.pages, strict=True)):
            rest = [ids, *_row_arguments(component, pages, parts=True)]
            grid_x = grid_of(4 * -(-component.layer_bytes // _BLOCK_BYTES))
            rows = segments.rows[index]
            for cut in segments.cuts(rows):
                first, last = cut.start - rows.start, cut.stop - rows.start
                given: list[Argument] = [
                    memory, at[cut], size[cut], before[cut], sums, firsts[index][first:last],
                    places[index][first * component.parts : last * component.parts], *rest,
                ]  # fmt: skip
                self._launch("scatter_and_sum", (grid_x, last - first), given)
        return self._finish(segments, [memory, at, size, before, sums], _counts(frames))

    @override
    def move(
        self, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged, *, to_pages: bool
    ) -> None:
        columns = zip(*(frame.part_offsets() for frame in frames), strict=True)
        components = frames[0].header.layout.components
        for component, pages, starts in zip(components, paged.pages, columns, strict=True):
            way = "scatter" if to_pages else "gather"
            self._move(way, component, pages, memory, list(zip(frames, starts, strict=True)), paged)

    def _move(
        self,
        way: str,
        component: Component,
        pages: Pages,
        memory: torch.Tensor,
        frames: Sequence[tuple[FrameAt, Sequence[int]]],
        paged: Paged,
    ) -> None:
        """Move one component of several frames: a row of the grid for each part of each layer."""
        pointers = page_addresses(pages)
        starts = np.concatenate([starts for _, starts in frames])
        tokens = np.repeat([frame.first_token for frame, _ in frames], len(pointers))
        word = _word_bytes(component, pages, [memory.data_ptr(), *starts.tolist(), *pointers])
        at, first, places, ids = device_table(
            self._device, starts, tokens, np.tile(pointers, len(frames)), list(paged.block_ids)
        )
        rest = _row_arguments(component, pages, word)
        words = component.tokens * component.kv_heads * _row_bytes(component) // word
        for cut in grid_cuts(len(starts)):
            given: list[Argument] = [memory, at[cut], first[cut], places[cut], ids, *rest]
            self._launch(f"{way}_{word}", (grid_of(words), cut.stop - cut.start), given)


def _counts(frames: Sequence[FrameAt]) -> list[int]:
    return [len(frame.header.segments) for frame in frames]


def page_addresses(pages: Pages) -> list[int]:
    """Return where the pages of each part of each layer begin."""
    return [view.data_ptr() for parts in pages.views for view in parts]


def _row_arguments(
    component: Component, pages: Pages, word: int = _WORD_BYTES, *, parts: bool = False
) -> list[Argument]:
    """Return what a kernel that moves rows in words of *word* bytes is told of them."""
    shape = [component.tokens, component.kv_heads]
    if parts:
        shape.append(component.parts)
    shape += [_row_bytes(component) // word, pages.first.shape[2]]
    return [*map(np.uint32, shape), *byte_strides(pages)]


def _row_bytes(component: Component) -> int:
    return component.head_dim * component.dtype.item_bytes


def device_table(
    device: torch.device, *columns: Sequence[int] | NDArray[Any]
) -> list[torch.Tensor]:
    """Return *columns* as int64 on *device*, sent in one copy that the host does not wait for."""
    arrays = [np.asarray(column).astype(np.int64) for column in columns]
    stops = np.cumsum([len(array) for array in arrays]).tolist()
    # From pageable memory torch would wait for all that is queued. It keeps pinned memory until
    # the copy out of it is done.
    rows = torch.empty(stops[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=rows.numpy())
    table = rows.to(device, non_blocking=True)
    return [table[stop - len(a) : stop] for stop, a in zip(stops, arrays, strict=True)]


def grid_cuts(rows: int, most: int | None = None) -> list[slice]:
    """Cut the rows of a grid into as many as one launch takes, *most* or CUDA's limit."""
    step = min(most or MAX_GRID_Y, MAX_GRID_Y)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def grid_of(threads: int, block_threads: int = THREADS) -> int:
    """Return how many blocks make *threads*, or as many as a grid should have."""
    return min(MAX_GRID_X, -(-threads // block_threads))


def byte_strides(pages: Pages) -> list[np.uint64]:
    """Return the strides of a block, a token and a head, in bytes."""
    item_bytes = pages.first.element_size()
    block, head, token, _ = pages.first.stride()
    return [np.uint64(stride * item_bytes) for stride in (block, token, head)]


def _word_bytes(component: Component, pages: Pages, addresses: Sequence[int]) -> int:
    """Return the largest word that every row of both sides is made of."""
    row_bytes = _row_bytes(component)
    strides = [int(stride) for stride in byte_strides(pages)]
    return int(np.gcd.reduce([_WORD_BYTES, row_bytes, *strides, *addresses]))


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
    """Compile *sources*, one behind the other, for the CUDA device number *index*.

    Returns how to run their kernels, in blocks of *threads*.

    cupy keeps what it compiled in a folder of the user's, so only the first start waits.
    """
    cupy = import_cupy("gpu")
    text = "".join(source.read_text() for source in sources)
    module = cupy.RawModule(code=text, options=COMPILER_FLAGS)
    try:
        with cupy.cuda.Device(index):
            module.compile()
    except (RuntimeError, OSError, cupy.cuda.compiler.CompileException) as error:
        reason = str(error).partition("\n")[0]
        raise TierUnavailableError("gpu", f"cannot compile {sources[-1].name}: {reason}") from error
    function = cache(module.get_function)

    def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given = tuple(
            np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
        stream = _TorchStream(torch.cuda.current_stream(index).cuda_stream)
        with cupy.cuda.Device(index), cupy.cuda.Stream.from_external(stream):
            function(name)((*grid, 1), (threads, 1, 1), given)

    return launch
