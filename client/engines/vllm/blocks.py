"""An engine's pages as vLLM registers them: how K and V lie in a block, found by looking, and where
a chunk that is loaded goes.

vLLM hands over one tensor a layer, (blocks, kv_heads, block_tokens, 2 * head_dim), of latent
layers (blocks, 1, block_tokens, head_dim), with any strides. Its blocks are those of the kernels,
of which a block of the block tables may have several. What lies in a block is the attention
backend's business: its CPU kernels keep K transposed. So the backend is called to write a block of
noise, and whoever cannot be read back right is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore.client.chunk import Chunk, LayerTensors, to_array
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape
from kvstore.client.engines.vllm.messages import BlockTables
from kvstore.client.planning import PlanTerms
from kvstore.codecs.base import AnyPart, AnyTensors, Part
from kvstore.codecs.block_part import Alike, BlockLayers, BlockPart, BlockSpan, BlockStack
from kvstore.proto.buffers import LOOP_UNIT_BYTES, address
from kvstore.proto.device import Event
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.native import loops
from kvstore.proto.plans import Hints
from kvstore.proto.types import END_KINDS, ChainDigest, Component, DType, KVLayout, Stated

BlockWriter: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""The engine's own: writes parts (keys and values, or latents), each (tokens, kv_heads,
head_dim), into the slots of pages that a tensor of int64 names: ``write(parts, pages, slots)``."""
BlockLayout: TypeAlias = Callable[[torch.Tensor], "tuple[torch.Tensor, ...]"]
"""Returns the parts of pages as views, each (blocks, kv_heads, block_tokens, head_dim)."""
NULL_BLOCK = 0
"""In a block table: vLLM's block that stands for none."""
_PROBE_BLOCKS = 3
_PROBED_BLOCK = 1


def side_by_side(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where each token's V follows its K, as the registered shape says."""
    head_dim = pages.shape[3] // 2
    return pages[..., :head_dim], pages[..., head_dim:]


def keys_transposed(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where a head has K as (head_dim, tokens), then V as (tokens, head_dim)."""
    blocks, heads, tokens, width = pages.shape
    rows = pages.view(blocks, heads, 2 * tokens, width // 2)
    keys = rows[:, :, :tokens].view(blocks, heads, width // 2, tokens)
    return keys.transpose(2, 3), rows[:, :, tokens:]


def one_after_the_other(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V where a head has all K, then all V, both (tokens, head_dim)."""
    blocks, heads, tokens, width = pages.shape
    rows = pages.view(blocks, heads, 2 * tokens, width // 2)
    return rows[:, :, :tokens], rows[:, :, tokens:]


def rows(pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the one part of latent layers: a row a token, as the registered shape says."""
    return (pages,)


BLOCK_LAYOUTS: tuple[BlockLayout, ...] = (keys_transposed, side_by_side, one_after_the_other)
"""Every packing of K and V that is understood."""


def detect_block_layout(
    pages: torch.Tensor, parts: int, write: BlockWriter, kept: torch.dtype | None = None
) -> BlockLayout:
    """Return how *write* packs *parts* into blocks of the kind of *pages*, which stay as they are.

    *kept*: the type of elements, where pages are of bytes. Raises LayoutMismatchError when no known
    layout reads back what was written.
    """
    _, heads, tokens, width = pages.shape
    scratch = _scratch(pages)
    seed = torch.Generator().manual_seed(7)
    noise = [
        _noise((tokens, heads, width // parts), seed).to(pages.device, kept or pages.dtype)
        for _ in range(parts)
    ]
    slots = torch.arange(tokens, device=pages.device) + _PROBED_BLOCK * tokens
    try:
        write(noise, scratch, slots)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        fix = f"this attention backend does not write it: {error}"
        raise LayoutMismatchError("pages", str(pages.dtype), fix) from None
    for packing in BLOCK_LAYOUTS if parts == 2 else (rows,):
        try:
            found = [part[_PROBED_BLOCK].permute(1, 0, 2) for part in packing(scratch)]
        except RuntimeError:  # torch has no view of such strides as this packing is
            continue
        if all(
            torch.equal(one, other.view(one.dtype)) for one, other in zip(found, noise, strict=True)
        ):
            return packing
    raise LayoutMismatchError(
        "pages", f"{pages.dtype} in blocks of {tokens}", "this attention backend packs otherwise"
    )


def _scratch(pages: torch.Tensor) -> torch.Tensor:
    """Return a few empty blocks whose dimensions lie in memory in the order of those of *pages*."""
    sizes = (_PROBE_BLOCKS, *pages.shape[1:])
    order = sorted(range(4), key=pages.stride, reverse=True)
    empty = torch.zeros([sizes[at] for at in order], dtype=pages.dtype, device=pages.device)
    return empty.permute([order.index(at) for at in range(4)])


def _noise(shape: tuple[int, int, int], seed: torch.Generator) -> torch.Tensor:
    """Return numbers none of which is a zero in fp8: kernels do not keep the sign of those."""
    normal = torch.randn(shape, generator=seed)
    return normal + normal.sign() / 2


def block_layouts_of(
    shape: KVCacheShape,
    registered: Mapping[str, torch.Tensor],
    writer: Callable[[str], BlockWriter],
) -> tuple[BlockLayout, ...]:
    """Return how the layers of each group of *shape* lie in pages *registered* by name.

    *writer* returns how the backend of a layer writes. Raises LayoutMismatchError for pages that
    are not of *shape*, or of several devices.
    """
    names = {layer.name for group in shape.groups for layer in group.layers}
    if names != set(registered):
        raise LayoutMismatchError("layers", sorted(registered)[:4], f"{len(names)} are kept")
    devices = sorted({str(pages.device) for pages in registered.values()})
    if len(devices) != 1:
        raise LayoutMismatchError("device", devices, "pages of one device are stored")
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
    """Return *pages* with their dimension of heads, which latents of vLLM 0.26 lack."""
    return pages.unsqueeze(1) if pages.ndim == 3 else pages


def _check(shape: KVCacheShape, group: LayerGroupShape, pages: torch.Tensor) -> None:
    width = group.layer_group.parts * group.head_dim
    if DType.parse(str(pages.dtype)) is not group.dtype and not (
        pages.dtype is torch.uint8 and group.dtype.item_bytes == 1
    ):
        raise LayoutMismatchError("dtype", str(pages.dtype), f"pages of {group.dtype.name}")
    is_known = pages.ndim == 4 and (pages.shape[1], pages.shape[3]) == (group.kv_heads, width)
    if not is_known or shape.block_tokens % pages.shape[2]:
        wanted = (group.kv_heads, shape.block_tokens, width)
        raise LayoutMismatchError("pages", tuple(pages.shape), f"blocks of {wanted}")


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """Pages of one layer in CPU memory: as they were registered, and each part as unsigned
    integers, (blocks, kv_heads, block_tokens, head_dim). ``table`` names its blocks."""

    table: int
    whole: torch.Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EnginePages:
    """The pages of every layer in CPU memory, in the order of the shape's groups."""

    shape: KVCacheShape
    groups: tuple[tuple[LayerPages, ...], ...]
    layouts: tuple[BlockLayout, ...]
    alike: tuple[Alike | None, ...]
    """Of each group whose layers have one table and are alike."""

    @classmethod
    def of(
        cls,
        shape: KVCacheShape,
        registered: Mapping[str, torch.Tensor],
        writer: Callable[[str], BlockWriter],
    ) -> EnginePages:
        """Return the pages in *registered*, as ``block_layouts_of`` takes them."""
        layouts = block_layouts_of(shape, registered, writer)
        for name, pages in registered.items():
            if pages.device.type != "cpu" or pages.shape[2] != shape.block_tokens:
                fix = f"blocks of {shape.block_tokens} tokens in CPU memory"
                raise LayoutMismatchError(name, (str(pages.device), tuple(pages.shape)), fix)

        def layer(table: int, whole: torch.Tensor, layout: BlockLayout) -> LayerPages:
            arrays = [to_array(part) for part in layout(whole)]
            return LayerPages(table, whole, tuple(a.view(f"u{a.dtype.itemsize}") for a in arrays))

        groups = tuple(
            tuple(layer(one.table, registered[one.name], layout) for one in group.layers)
            for group, layout in zip(shape.groups, layouts, strict=True)
        )
        alike = tuple(
            Alike.of([layer.parts for layer in layers]) if len(group.tables) == 1 else None
            for group, layers in zip(shape.groups, groups, strict=True)
        )
        return cls(shape, groups, layouts, alike)

    def chunk_bytes(self, chunk_blocks: int) -> int:
        """Return the bytes of a chunk of so many blocks."""
        return sum(
            self.shape.kept_blocks(group, chunk_blocks) * layer.whole[0].nbytes
            for group, layers in zip(self.shape.groups, self.groups, strict=True)
            for layer in layers
        )


def windows_left(shape: KVCacheShape, tables: BlockTables) -> bool | None:
    """Return whether the engine still has the windows of a chunk in the blocks that *tables* name;
    None: it has nothing of it.
    """
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
    """Return what a chunk of *layout* has of each group, and whether it goes into the blocks.

    *tables*: the blocks of the chunk. Raises LayoutMismatchError when it lacks what they need.
    """
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
            raise LayoutMismatchError("layout", group.kind.name, "the chunk is without it")
        if is_wanted and component is not None:
            kept = component.tokens // shape.block_tokens
            if any(any(ids[: len(ids) - kept]) for ids in used):
                fix = "the engine wants more of it than a chunk has"
                raise LayoutMismatchError("layout", group.kind.name, fix)
        found.append((component, is_wanted))
    return found


class BlockTarget:
    """Where one chunk goes that is loaded into an engine's *pages* in CPU memory.

    *tables*: the blocks of the chunk in each of the request's block tables. The first
    *kept_blocks* of them hold what the engine found in its own cache, and may be in use: they are
    not written to, nor are null blocks. What cannot go straight into blocks for that spills into
    memory of its own, and is brought in by ``finish``.
    """

    def __init__(self, pages: EnginePages, tables: BlockTables, kept_blocks: int = 0) -> None:
        self._pages = pages
        self._tables = [
            [NULL_BLOCK if at < kept_blocks else block for at, block in enumerate(table)]
            for table in tables
        ]
        self._spill: list[tuple[LayerPages, list[int], list[Part]]] = []

    def tensors(self, layout: KVLayout) -> AnyTensors:
        """Return where the tensors of the chunk, which is of *layout*, go.

        Raises LayoutMismatchError when it does not have what this load needs of it.
        """
        self._spill.clear()  # of a read that was begun again
        spans: dict[tuple[int, int], BlockSpan | None] = {}
        pages = self._pages
        wanted = components_of(pages.shape, layout, self._tables)
        every = zip(wanted, pages.groups, pages.alike, strict=True)
        return [
            self._layers(layers, alike, component, spans) if is_wanted else []
            for (component, is_wanted), layers, alike in every
            if component is not None
        ]

    def _layers(
        self,
        layers: Sequence[LayerPages],
        alike: Alike | None,
        component: Component,
        spans: dict[tuple[int, int], BlockSpan | None],
    ) -> Sequence[Sequence[AnyPart]]:
        if alike is not None:
            span = self._span(layers[0].table, component.tokens, spans)
            if span is not None:
                return BlockLayers([layer.parts for layer in layers], alike, span)
        return [self._layer(layer, component, spans) for layer in layers]

    def _span(
        self, table: int, tokens: int, spans: dict[tuple[int, int], BlockSpan | None]
    ) -> BlockSpan | None:
        """Return where the last *tokens* of a table go; None where some go nowhere."""
        if (table, tokens) not in spans:  # the same for all layers of a table
            ids, size = self._ids(table, tokens), self._pages.shape.block_tokens
            array = np.asarray(ids, np.intp)
            spans[table, tokens] = BlockSpan.of(array, size, 0, tokens) if all(ids) else None
        return spans[table, tokens]

    def _ids(self, table: int, tokens: int) -> list[int]:
        return self._tables[table][-(tokens // self._pages.shape.block_tokens) :]

    def _layer(
        self,
        layer: LayerPages,
        component: Component,
        spans: dict[tuple[int, int], BlockSpan | None],
    ) -> list[AnyPart]:
        span = self._span(layer.table, component.tokens, spans)
        if span is not None:
            return [BlockPart(part, span) for part in layer.parts]
        item = f"u{component.dtype.item_bytes}"
        spill: list[Part] = [np.empty(component.shape, item) for _ in layer.parts]
        self._spill.append((layer, self._ids(layer.table, component.tokens), spill))
        return list(spill)

    def finish(self) -> None:
        """Bring in what spilled. Call once, when the chunk has been read."""
        tokens = self._pages.shape.block_tokens
        for layer, ids, spill in self._spill:
            for part, found in zip(layer.parts, spill, strict=True):
                for at, block in enumerate(ids):
                    if block != NULL_BLOCK:
                        part[block] = found[:, at * tokens : (at + 1) * tokens]


# --- stores and loads beside the engine

BATCH_BYTES = 64 << 20
"""What several requests put together at most: a call for each would hold the engine up."""


def batch_chunks(chunk_bytes: int) -> int:
    """Return how many chunks of so many bytes are put together at most."""
    return max(1, BATCH_BYTES // chunk_bytes)


class Staged(NamedTuple):
    """A chunk that was copied: what is put, and whether its windows are among that."""

    tensors: LayerTensors
    has_windows: bool


@dataclass(slots=True)
class LoadJob:
    """One load: the chunks *digests*, each into the blocks that its ``chunks`` entry names.

    The first ``kept_blocks`` are not written to, and none before ``after``. ``arrived`` is to be
    called when something came, ``is_over`` says that there is no more time. ``terms``: of a load
    with a deadline, for a side that can read in part.
    """

    digests: Sequence[ChainDigest]
    chunks: Sequence[BlockTables]
    kept_blocks: int
    after: Event | None
    arrived: Callable[[], None]
    is_over: Callable[[], bool]
    terms: PlanTerms | None = None
    read: int = 0
    """How many chunks were read so far: their blocks have them."""
    stated: list[Stated] = field(default_factory=list)
    """Of a side that reads lossy copies: as ``Connector.read_into`` fills it."""


class HostSide:
    """Where an engine's pages lie, as a worker loads into them and stores out of them: in CPU
    memory. Copied beside the engine, read straight into the blocks. ``DeviceSide`` is the other.
    """

    waits_in_pages = False
    """Whether what cannot be copied yet waits in the engine's pages, and takes no memory."""
    is_gpu_tier_far = False
    """Whether the server has a gpu tier that this side does not reach."""

    def __init__(self, pages: EnginePages, connector: Connector, chunk_blocks: int) -> None:
        self._pages = pages
        self._connector = connector
        self._chunk_blocks = chunk_blocks
        self.chunk_bytes = pages.chunk_bytes(chunk_blocks)
        self.idle: list[BlockGather] = []

    def copies(self, chunks: Sequence[BlockTables]) -> list[BlockCopy]:
        """Begin to copy *chunks*, or the first of them that there is memory for.

        For the engine's thread, at the end of a step.
        """
        return [BlockCopy(self, tables) for tables in chunks]

    def mark(self) -> Event | None:
        """Return an event behind the engine's work so far, if it does any beside the host."""
        return None

    def read(self, job: LoadJob) -> None:
        """Read what can be read of a load."""
        targets = [
            BlockTarget(self._pages, tables, 0 if number else job.kept_blocks)
            for number, tables in enumerate(job.chunks)
        ]

        def target(number: int, layout: KVLayout) -> AnyTensors:
            job.arrived()
            return targets[number].tensors(layout)

        if targets:
            read = self._connector.read_into(job.digests, target, job.stated, job.terms)
            for one in targets[:read]:
                one.finish()
            job.read = read

    def put_near(
        self, chunks: Callable[[], Sequence[Chunk]], copies: Sequence[object], hints: Hints
    ) -> set[int]:
        """Put copies that no host memory has to have; return the numbers of those that are there.

        *chunks* returns what they are, without tensors.
        """
        return set()

    def take(self) -> BlockGather:
        """Return memory for one chunk; who is through with it appends it to ``idle``."""
        with suppress(IndexError):
            return self.idle.pop()
        return BlockGather(self._pages, self._chunk_blocks)

    def close(self) -> None:
        """Let go of memory: nothing is loaded or stored any more."""
        self.idle.clear()


class BlockCopy:
    """One chunk that lies in the blocks *tables* name, to be copied by whoever comes first.

    ``result`` is the copy once it is made; None if the engine had given up what it is of.
    """

    def __init__(self, side: HostSide, tables: BlockTables) -> None:
        self._side = side
        self._tables: BlockTables | None = tables
        self._lock = threading.Lock()  # held by who makes the copy
        self._memory: BlockGather | None = None
        self.result: Staged | None = None

    def begin(self) -> None:
        """Do nothing: whoever runs it copies."""

    def run(self) -> None:
        """Copy it, unless that was done; return when nobody reads the blocks any more."""
        with self._lock:
            tables, self._tables = self._tables, None
            if tables is not None:
                self._memory = self._side.take()
                self.result = self._memory.take(tables)

    def free(self) -> None:
        """Give the memory of the copy back, which nobody reads any more."""
        if self._memory is not None:
            self._side.idle.append(self._memory)
        self._memory = self.result = None


class BlockGather:
    """Memory for one chunk of *chunk_blocks* blocks, used again and again."""

    def __init__(self, pages: EnginePages, chunk_blocks: int) -> None:
        self._shape = pages.shape
        every = zip(pages.shape.groups, pages.groups, pages.layouts, strict=True)
        self._groups = [
            _GroupGather(layers, layout, pages.shape.kept_blocks(group, chunk_blocks))
            for group, layers, layout in every
        ]

    def take(self, tables: BlockTables) -> Staged | None:
        """Copy the chunk whose blocks *tables* name; return what there is of it, if anything.

        Windows that the engine has given up already are left out.
        """
        has_windows = windows_left(self._shape, tables)
        if has_windows is None:
            return None
        pairs = zip(self._shape.groups, self._groups, strict=True)
        taken = [one for group, one in pairs if has_windows or group.kind not in END_KINDS]
        return Staged([one.take(tables) for one in taken], has_windows)


class _GroupGather:
    """Memory for the last *kept* blocks of a chunk, of each of *layers*."""

    def __init__(self, layers: Sequence[LayerPages], layout: BlockLayout, kept: int) -> None:
        self._kept = kept
        self._tables = [layer.table for layer in layers]
        self._pages = [to_array(layer.whole) for layer in layers]
        block = layers[0].whole[0]
        count = len(layers) * kept
        reach = sum(
            (size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)
        )
        is_run = reach + 1 == block.numel() and not block.nbytes % LOOP_UNIT_BYTES
        copied = torch.empty((count, *block.shape), dtype=block.dtype)
        if is_run:  # its elements follow each other in whatever order
            copied = copied.as_strided(copied.shape, (block.numel(), *block.stride()))
        self._copies = to_array(copied).reshape(len(layers), kept, *block.shape)
        parts = [to_array(part) for part in layout(copied)]
        self._stack = BlockStack(
            [p.view(f"u{p.itemsize}").reshape(len(layers), kept, *p.shape[1:]) for p in parts]
        )
        self._rows: np.ndarray[tuple[int, int], np.dtype[np.uint64]] | None = None
        if is_run:  # as ``copy_summed`` takes them: where to, from where, units, size, sum
            self._rows = np.zeros((count, 5), np.uint64)
            self._rows[:, 0] = copied.data_ptr() + np.arange(count) * block.nbytes
            self._rows[:, 2] = block.nbytes // LOOP_UNIT_BYTES
            self._rows[-1, 3] = count * block.nbytes
            self._starts = np.array([[layer.whole.data_ptr()] for layer in layers])
            self._steps = np.array([[pages.strides[0]] for pages in self._pages])

    def take(self, tables: BlockTables) -> BlockStack:
        """Copy what the blocks have; return the copy."""
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
