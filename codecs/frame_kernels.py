"""The kernels of frame_kernels.cu: what they are given, and how CUDA compiles and runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.paged import FrameAt, FrameKernels, HostKernels, Paged, Pages, Sums
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

Argument: TypeAlias = "torch.Tensor | np.uint32 | np.uint64"
"""What a kernel takes: memory, or a number of exactly its parameter's size."""

Launch: TypeAlias = Callable[[str, tuple[int, int], Sequence[Argument]], None]
"""Queue a kernel by name on torch's current stream: the grid, in blocks of THREADS."""


class LaunchedKernels(FrameKernels):
    """The kernels, whatever *launch* runs them on. *device* is where their tables go."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch

    @override
    def sums(self, memory: torch.Tensor, frames: Sequence[FrameAt]) -> Sums:
        rows = [frame.header.segments for frame in frames]
        offsets = np.concatenate(
            [r["offset"] + f.offset for r, f in zip(rows, frames, strict=True)]
        )
        sizes = np.concatenate([r["stored_bytes"] for r in rows])
        blocks = np.where(sizes > _SHORT_BYTES, (sizes - 1) // _BLOCK_BYTES, 0).astype(np.int64)
        first = np.cumsum(blocks) - blocks
        count = len(sizes)
        at, size, before = device_table(self._device, offsets, sizes, first)
        sums, accumulators, hashes = (
            torch.empty(length, dtype=torch.int64, device=self._device)
            for length in (_LANES * int(blocks.sum()), _LANES * count, count)
        )
        for cut in grid_cuts(count if blocks.any() else 0):
            grid = (grid_of(4 * int(blocks.max())), cut.stop - cut.start)
            self._launch("sum_blocks", grid, [memory, at[cut], size[cut], before[cut], sums])
        number = np.uint32(count)
        given: list[Argument] = [size, before, sums, accumulators, number]
        self._launch("chain_blocks", (grid_of(_LANES * count), 1), given)
        given = [memory, at, size, accumulators, hashes, number]
        self._launch("finish_segments", (grid_of(count), 1), given)

        def wait() -> list[list[int]]:
            found = iter(hashes.cpu().numpy().view(np.uint64).tolist())
            return [[next(found) for _ in r] for r in rows]

        return wait

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
        pointers = [view.data_ptr() for parts in pages.views for view in parts]
        starts = np.concatenate([starts for _, starts in frames])
        tokens = np.repeat([frame.first_token for frame, _ in frames], len(pointers))
        word = _word_bytes(component, pages, [memory.data_ptr(), *starts.tolist(), *pointers])
        at, first, places, ids = device_table(
            self._device, starts, tokens, np.tile(pointers, len(frames)), list(paged.block_ids)
        )
        row_words = component.head_dim * component.dtype.item_bytes // word
        shape = (component.tokens, component.kv_heads, row_words)
        rest: list[Argument] = [
            *map(np.uint32, (*shape, pages.first.shape[2])),
            *byte_strides(pages),
        ]
        for cut in grid_cuts(len(starts)):
            grid = (grid_of(math.prod(shape)), cut.stop - cut.start)
            given: list[Argument] = [memory, at[cut], first[cut], places[cut], ids, *rest]
            self._launch(f"{way}_{word}", grid, given)


def device_table(
    device: torch.device, *columns: Sequence[int] | NDArray[Any]
) -> list[torch.Tensor]:
    """Return *columns* as int64 on *device*, sent in one copy."""
    arrays = [np.asarray(column).astype(np.int64) for column in columns]
    table = torch.from_numpy(np.concatenate(arrays)).to(device)
    stops = np.cumsum([len(array) for array in arrays]).tolist()
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
    row_bytes = component.head_dim * component.dtype.item_bytes
    strides = [int(stride) for stride in byte_strides(pages)]
    return int(np.gcd.reduce([16, row_bytes, *strides, *addresses]))


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
    try:
        import cupy
    except ImportError as error:
        raise TierUnavailableError("gpu", f"needs cupy ({error}); install kvstore[gpu]") from None
    text = "".join(source.read_text() for source in sources)
    module = cupy.RawModule(code=text, options=COMPILER_FLAGS)
    try:
        with cupy.cuda.Device(index):
            module.compile()
    except RuntimeError as error:  # cupy's own derive from it
        raise TierUnavailableError("gpu", f"cannot compile {sources[-1].name}: {error}") from error

    def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        given = tuple(
            np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
        stream = _TorchStream(torch.cuda.current_stream(index).cuda_stream)
        with cupy.cuda.Device(index), cupy.cuda.Stream.from_external(stream):
            module.get_function(name)((*grid, 1), (threads, 1, 1), given)

    return launch
