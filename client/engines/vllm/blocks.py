"""An engine's pages as vLLM registers them: the detected layout of K and V in a block, and the
targets of loaded chunks.

vLLM registers one tensor per layer, (blocks, kv_heads, block_tokens, 2 * head_dim), for latent
layers (blocks, 1, block_tokens, head_dim), with any strides. Its blocks are those of the kernels;
a block of the block tables may have several. The attention backend defines the layout in a
block: CPU kernels keep K transposed. So the backend writes a block of noise, and pages that do
not read back correctly are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.client.chunk import Chunk, LayerTensors, to_array
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape
from kvstore.client.engines.vllm.messages import BlockTables, LoadSpec
from kvstore.codecs.base import AnyPart, AnyTensors, Part
from kvstore.codecs.block_part import Alike, BlockLayers, BlockPart, BlockSpan, BlockStack
from kvstore.proto.buffers import LOOP_UNIT_BYTES, address
from kvstore.proto.device import Event
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.native import loops
from kvstore.proto.plans import Hints
from kvstore.proto.types import END_KINDS, Component, DType, KVLayout, Stated

BlockWriter: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""``write(parts, pages, slots)`` of the engine's backend: writes parts (keys and values, or
latents), each (tokens, kv_heads, head_dim), into the slots of pages in an int64 tensor."""
BlockLayout: TypeAlias = Callable[[torch.Tensor], "tuple[torch.Tensor, ...]"]
"""Returns the parts of pages as views, each (blocks, kv_heads, block_tokens, head_dim)."""
NULL_BLOCK = 0
"""In a block table: vLLM's placeholder for no block."""
_PROBE_BLOCKS = 3
_PROBED_BLOCK = 1


def side_by_side(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where each token's V follows its K, as in the registered shape."""
    head_dim = pages.shape[3] // 2
    return pages[..., :head_dim], pages[..., head_dim:]


def one_after_the_other(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where a head has all K, then all V, both (tokens, head_dim)."""
    blocks, heads, tokens, width = pages.shape
    both = pages.view(blocks, heads, 2 * tokens, width // 2)
    return both[:, :, :tokens], both[:, :, tokens:]


def keys_transposed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where a head has K as (head_dim, tokens), then V as (tokens, head_dim)."""
    keys, values = one_after_the_other(pages)
    blocks, heads, tokens, head_dim = keys.shape
    return keys.view(blocks, heads, head_dim, tokens).transpose(2, 3), values


def rows(pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the only part of latent layers: one row per token, as in the registered shape."""
    return (pages,)


BLOCK_LAYOUTS: tuple[BlockLayout, ...] = (keys_transposed, side_by_side, one_after_the_other)
"""The supported layouts of K and V."""


def detect_block_layout(
    pages: torch.Tensor, parts: int, write: BlockWriter, kept: torch.dtype | None = None
) -> BlockLayout:
    """Return how *write* packs *parts* into blocks like those of *pages*, which are not changed.
    *kept*: the dtype of elements, if pages are of bytes. Raises LayoutMismatchError if no known
    layout reads back the written data."""
    _, heads, tokens, width = pages.shape
    scratch, seed = _scratch(pages), torch.Generator().manual_seed(7)
    normal = [torch.randn((tokens, heads, width // parts), generator=seed) for _ in range(parts)]
    # No zeros in fp8: kernels do not keep their sign.
    noise = [(n + n.sign() / 2).to(pages.device, kept or pages.dtype) for n in normal]
    slots = torch.arange(tokens, device=pages.device) + _PROBED_BLOCK * tokens
    try:
        write(noise, scratch, slots)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        fix = f"this attention backend cannot write it: {error}"
        raise LayoutMismatchError("pages", str(pages.dtype), fix) from None
    for packing in BLOCK_LAYOUTS if parts == 2 else (rows,):
        with suppress(RuntimeError):  # torch cannot view these strides in this packing
            found = [part[_PROBED_BLOCK].permute(1, 0, 2) for part in packing(scratch)]
            pairs = zip(found, noise, strict=True)
            if all(torch.equal(one, other.view(one.dtype)) for one, other in pairs):
                return packing
    raise LayoutMismatchError(
        "pages", f"{pages.dtype} in blocks of {tokens}", "unknown layout of this attention backend"
    )


def _scratch(pages: torch.Tensor) -> torch.Tensor:
    """Return a few empty blocks with the memory order of dimensions of *pages*."""
    sizes = (_PROBE_BLOCKS, *pages.shape[1:])
    order = sorted(range(4), key=pages.stride, reverse=True)
    empty = torch.zeros([sizes[at] for at in order], dtype=pages.dtype, device=pages.device)
    return empty.permute([order.index(at) for at in range(4)])


def block_layouts_of(
    shape: KVCacheShape,
    registered: Mapping[str, torch.Tensor],
    writer: Callable[[str], BlockWriter],
) -> tuple[BlockLayout, ...]:
    """Return the layout of each group of *shape* in the pages *registered* by layer name. *writer*
    returns a layer's BlockWriter. Raises LayoutMismatchError for pages of another shape, or on
    several devices."""
    names = {layer.name for group in shape.groups for layer in group.layers}
    if names != set(registered):
        raise LayoutMismatchError("layers", sorted(registered)[:4], f"expected {len(names)}")
    devices = sorted({str(pages.device) for pages in registered.values()})
    if len(devices) != 1:
        raise LayoutMismatchError("device", devices, "all pages must be on one device")
    for group in shape.groups:
        for layer in group.layers:
            _check(shape, group, registered[layer.name])
    return tuple(
        detect_block_layout(
            registered[group.layers[0].name],
            group.layer_group.parts,
            writer(group.layers[0].name),
            getattr(torch, group.dtype.name),
        )
        for group in shape.groups
    )


def with_heads(pages: torch.Tensor) -> torch.Tensor:
    """Return *pages* with a heads dimension, which latents of vLLM 0.26 lack."""
    return pages.unsqueeze(1) if pages.ndim == 3 else pages


def _check(shape: KVCacheShape, group: LayerGroupShape, pages: torch.Tensor) -> None:
    width = group.layer_group.parts * group.head_dim
    if DType.parse(str(pages.dtype)) is not group.dtype and not (
        pages.dtype is torch.uint8 and group.dtype.item_bytes == 1
    ):
        raise LayoutMismatchError("dtype", str(pages.dtype), f"expected {group.dtype.name}")
    is_known = pages.ndim == 4 and (pages.shape[1], pages.shape[3]) == (group.kv_heads, width)
    if not is_known or shape.block_tokens % pages.shape[2]:
        wanted = (group.kv_heads, shape.block_tokens, width)
        raise LayoutMismatchError("pages", tuple(pages.shape), f"expected blocks of {wanted}")


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """Pages of the layers of one group in CPU memory, as registered.

    ``parts``: of each layer, as unsigned integers, (blocks, kv_heads, block_tokens, head_dim).
    ``alike``: for copies of all layers at once, if they are alike and share one table.
    """

    shape: LayerGroupShape
    layout: BlockLayout
    whole: list[torch.Tensor]
    parts: list[list[Part]]
    alike: Alike | None


class EnginePages:
    """The pages of every layer in CPU memory. Raises LayoutMismatchError for unsupported ones."""

    def __init__(
        self,
        shape: KVCacheShape,
        registered: Mapping[str, torch.Tensor],
        writer: Callable[[str], BlockWriter],
    ) -> None:
        layouts = block_layouts_of(shape, registered, writer)
        for name, pages in registered.items():
            if pages.device.type != "cpu" or pages.shape[2] != shape.block_tokens:
                fix = f"expected blocks of {shape.block_tokens} tokens in CPU memory"
                raise LayoutMismatchError(name, (str(pages.device), tuple(pages.shape)), fix)
        self.shape = shape
        self.groups: list[GroupPages] = []
        for group, layout in zip(shape.groups, layouts, strict=True):
            whole = [registered[layer.name] for layer in group.layers]
            parts = [[_unsigned(part) for part in layout(each)] for each in whole]
            alike = Alike.of(parts) if len(group.tables) == 1 else None
            self.groups.append(GroupPages(group, layout, whole, parts, alike))


def _unsigned(part: torch.Tensor) -> Part:
    array = to_array(part)
    return array.view(f"u{array.itemsize}")


def windows_left(shape: KVCacheShape, tables: BlockTables) -> bool | None:
    """Return whether the engine still has a chunk's windows in the blocks in *tables*; None: it
    does not have the chunk."""
    has_windows = True
    for group in shape.groups:
        kept = shape.kept_blocks(group, len(tables[0]))
        if any(NULL_BLOCK in tables[at][len(tables[at]) - kept :] for at in group.tables):
            if group.kind not in END_KINDS:
                return None
            has_windows = False
    return None if shape.has_ends_only and not has_windows else has_windows


def components_of(
    shape: KVCacheShape, layout: KVLayout, tables: BlockTables
) -> list[tuple[Component | None, bool]]:
    """Return a chunk's component of each group by *layout*, and whether its blocks, in *tables*,
    need it. Raises LayoutMismatchError if it lacks a needed one."""
    tokens = len(tables[0]) * shape.block_tokens
    if layout.tokens != tokens:
        raise LayoutMismatchError("tokens", layout.tokens, f"give {tokens}")
    left = [*reversed(layout.components)]
    found: list[tuple[Component | None, bool]] = []
    for group in shape.groups:
        component = left.pop() if left and left[-1].kind is group.kind else None
        used = [tables[table] for table in group.tables]
        is_wanted = group.kind not in END_KINDS or any(map(any, used))
        if is_wanted and component is None:
            raise LayoutMismatchError("layout", group.kind.name, "the chunk lacks it")
        if is_wanted and component is not None:
            kept = component.tokens // shape.block_tokens
            if any(any(ids[: len(ids) - kept]) for ids in used):
                fix = "the engine needs more of it than the chunk has"
                raise LayoutMismatchError("layout", group.kind.name, fix)
        found.append((component, is_wanted))
    return found


class BlockTarget:
    """The target of one chunk loaded into an engine's *pages*: the blocks in its *tables*.

    The first *kept_blocks* were in the engine's own cache and may be in use: they are not written,
    nor are null blocks. Parts that include such blocks are read into spill buffers, and copied to
    the others by ``finish``.
    """

    def __init__(self, pages: EnginePages, tables: BlockTables, kept_blocks: int = 0) -> None:
        self._pages = pages
        self._tables = [
            [NULL_BLOCK if at < kept_blocks else block for at, block in enumerate(table)]
            for table in tables
        ]
        self._spill: list[tuple[Part, Part, list[int]]] = []

    def tensors(self, layout: KVLayout) -> AnyTensors:
        """Return the target tensors of the chunk. Raises as ``components_of``."""
        self._spill.clear()  # from an earlier attempt
        wanted = components_of(self._pages.shape, layout, self._tables)
        return [
            self._layers(group, component) if is_wanted else []
            for group, (component, is_wanted) in zip(self._pages.groups, wanted, strict=True)
            if component is not None
        ]

    def _layers(self, group: GroupPages, component: Component) -> Sequence[Sequence[AnyPart]]:
        tokens, size = component.tokens, self._pages.shape.block_tokens
        ids = {table: self._tables[table][-(tokens // size) :] for table in group.shape.tables}
        spans = {
            table: BlockSpan.of(np.asarray(blocks, np.intp), size, 0, tokens)
            for table, blocks in ids.items()
            if NULL_BLOCK not in blocks
        }
        if group.alike is not None and spans:
            return BlockLayers(group.parts, group.alike, *spans.values())
        found: list[list[AnyPart]] = []
        for layer, parts in zip(group.shape.layers, group.parts, strict=True):
            if layer.table in spans:
                found.append([BlockPart(part, spans[layer.table]) for part in parts])
                continue
            spill = [np.empty(component.shape, part.dtype) for part in parts]
            self._spill += [(*pair, ids[layer.table]) for pair in zip(parts, spill, strict=True)]
            found.append([*spill])
        return found

    def finish(self) -> None:
        """Copy spilled parts into their blocks. Call once, after the chunk was read."""
        tokens = self._pages.shape.block_tokens
        for part, found, ids in self._spill:
            for at, block in enumerate(ids):
                if block != NULL_BLOCK:
                    part[block] = found[:, at * tokens : (at + 1) * tokens]


# --- stores and loads beside the engine

BATCH_BYTES = 64 << 20
"""Limit of a joint put of several requests: one call each would delay the engine."""


def batch_chunks(chunk_bytes: int) -> int:
    """Return the most chunks of *chunk_bytes* in one put."""
    return max(1, BATCH_BYTES // chunk_bytes)


class Staged(NamedTuple):
    """A copied chunk: the tensors to put, and whether they include its windows."""

    tensors: LayerTensors
    has_windows: bool


@dataclass(slots=True)
class LoadJob:
    """The load of *spec*, each chunk into the blocks in its ``chunks`` entry.

    No block is written before the event ``after``. ``arrived`` is called on progress; ``is_over``
    returns whether time is up. Only a side that supports partial reads uses the spec's terms.
    """

    spec: LoadSpec
    chunks: Sequence[BlockTables]
    after: Event | None
    arrived: Callable[[], None]
    is_over: Callable[[], bool]
    read: int = 0
    """Chunks in their blocks so far."""
    stated: list[Stated] = field(default_factory=list)
    """As ``Connector.read_into`` fills it, for a side that reads lossy copies."""


class HostSide:
    """A worker's loads and stores for pages in CPU memory: stores copy in the background, loads
    read directly into the blocks. ``DeviceSide`` is for pages on a device."""

    waits_in_pages = False
    """Whether chunks not copied yet wait in the engine's pages, and take no memory."""

    def __init__(self, pages: EnginePages, connector: Connector, chunk_blocks: int) -> None:
        self._pages = pages
        self._connector = connector
        self._chunk_blocks = chunk_blocks
        self.chunk_bytes = sum(
            pages.shape.kept_blocks(group.shape, chunk_blocks) * layer[0].nbytes
            for group in pages.groups
            for layer in group.whole
        )
        self.idle: list[BlockGather] = []

    def copies(self, chunks: Sequence[BlockTables]) -> list[BlockCopy]:
        """Start copies of *chunks*, or of the leading ones that fit; after a step."""
        return [BlockCopy(self, tables) for tables in chunks]

    def mark(self) -> Event | None:
        """Return None: the engine has no asynchronous work to wait for."""
        return None

    def read(self, job: LoadJob) -> None:
        """Read as many chunks of *job* as possible."""
        targets = [
            BlockTarget(self._pages, tables, 0 if number else job.spec.kept_blocks)
            for number, tables in enumerate(job.chunks)
        ]

        def target(number: int, layout: KVLayout) -> AnyTensors:
            job.arrived()
            return targets[number].tensors(layout)

        if targets:
            spec = job.spec
            read = self._connector.read_into(spec.digests, target, job.stated, spec.terms)
            for one in targets[:read]:
                one.finish()
            job.read = read  # not before: a chunk that was read must be in its blocks

    def put_near(
        self, chunks: Callable[[], Sequence[Chunk]], copies: Sequence[Any], hints: Hints
    ) -> set[int]:
        """Put copies that need no host memory; return the indices of those stored."""
        return set()

    def take(self) -> BlockGather:
        """Return memory for one chunk; append it to ``idle`` after use."""
        with suppress(IndexError):
            return self.idle.pop()
        return BlockGather(self._pages, self._chunk_blocks)

    def close(self) -> None:
        """Release memory: no load or store may follow."""
        self.idle.clear()


class BlockCopy:
    """One chunk in the blocks in *tables*, copied by the first thread that calls ``run``:
    ``result``; None if the engine no longer had the chunk."""

    def __init__(self, side: HostSide, tables: BlockTables) -> None:
        self.side = side
        self._tables: BlockTables | None = tables
        self._lock = threading.Lock()  # held while copying
        self._memory: BlockGather | None = None
        self.result: Staged | None = None

    def begin(self) -> None:
        """Do nothing: ``run`` copies."""

    def run(self) -> None:
        """Copy it, unless already done; on return no thread reads the blocks."""
        with self._lock:
            tables, self._tables = self._tables, None
            if tables is not None:
                self._memory = self.side.take()
                self.result = self._memory.take(tables)

    def free(self) -> None:
        """Return the copy's memory, which must be out of use."""
        if self._memory is not None:
            self.side.idle.append(self._memory)
        self._memory = self.result = None


class BlockGather:
    """Reusable memory for one chunk of *chunk_blocks* blocks."""

    def __init__(self, pages: EnginePages, chunk_blocks: int) -> None:
        self._shape = pages.shape
        self._groups = [
            _GroupGather(group, pages.shape.kept_blocks(group.shape, chunk_blocks))
            for group in pages.groups
        ]

    def take(self, tables: BlockTables) -> Staged | None:
        """Copy the chunk in the blocks in *tables*; None if the engine no longer has it."""
        has_windows = windows_left(self._shape, tables)
        if has_windows is None:
            return None
        pairs = zip(self._shape.groups, self._groups, strict=True)
        taken = [one for group, one in pairs if has_windows or group.kind not in END_KINDS]
        return Staged([one.take(tables) for one in taken], has_windows)


class _GroupGather:
    """Memory for the last *kept* blocks of a chunk, of each layer of *group*."""

    def __init__(self, group: GroupPages, kept: int) -> None:
        self._kept = kept
        self._tables = [layer.table for layer in group.shape.layers]
        self._pages = [to_array(whole) for whole in group.whole]
        layers, block = len(group.whole), group.whole[0][0]
        steps = zip(block.shape, block.stride(), strict=True)
        reach = sum((size - 1) * step for size, step in steps)
        is_run = reach + 1 == block.numel() and not block.nbytes % LOOP_UNIT_BYTES
        copied = torch.empty((layers * kept, *block.shape), dtype=block.dtype)
        if is_run:  # its elements are contiguous, in any order
            copied = copied.as_strided(copied.shape, (block.numel(), *block.stride()))
        self._copies = to_array(copied).reshape(layers, kept, *block.shape)
        parts = [_unsigned(part) for part in group.layout(copied)]
        self._stack = BlockStack([part.reshape(layers, kept, *part.shape[1:]) for part in parts])
        self._rows: NDArray[np.uint64] | None = None
        if is_run:  # rows of ``copy_summed``: destination, source, units, size, sum
            count, size = layers * kept, block.nbytes
            self._rows = np.zeros((count, 5), np.uint64)
            self._rows[:, 0] = copied.data_ptr() + np.arange(count) * size
            self._rows[:, 2] = size // LOOP_UNIT_BYTES
            self._rows[-1, 3] = count * size
            self._starts = np.array([[whole.data_ptr()] for whole in group.whole])
            self._steps = np.array([[pages.strides[0]] for pages in self._pages])

    def take(self, tables: BlockTables) -> BlockStack:
        """Copy the blocks' contents; return the copy."""
        ids = np.array([tables[table][-self._kept :] for table in self._tables])
        if ids.min() < 0 or ids.max() >= min(map(len, self._pages)):
            raise LayoutMismatchError("blocks", int(ids.max()), "the pages have no such block")
        if self._rows is not None:
            self._rows[:, 1] = (self._starts + ids * self._steps).ravel()
            loops().copy_summed(address(self._rows), len(self._rows), False)
        else:
            for pages, copied, table in zip(self._pages, self._copies, ids, strict=True):
                np.take(pages, table, 0, out=copied, mode="clip")
        return self._stack
