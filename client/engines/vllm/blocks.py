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
from numpy.typing import NDArray

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
    scratch, seed = _scratch(pages), torch.Generator().manual_seed(7)
    normal = [torch.randn((tokens, heads, width // parts), generator=seed) for _ in range(parts)]
    # No zero among it in fp8: kernels do not keep the sign of those.
    noise = [(n + n.sign() / 2).to(pages.device, kept or pages.dtype) for n in normal]
    slots = torch.arange(tokens, device=pages.device) + _PROBED_BLOCK * tokens
    try:
        write(noise, scratch, slots)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        fix = f"this attention backend does not write it: {error}"
        raise LayoutMismatchError("pages", str(pages.dtype), fix) from None
    for packing in BLOCK_LAYOUTS if parts == 2 else (rows,):
        with suppress(RuntimeError):  # torch has no view of such strides as this packing is
            found = [part[_PROBED_BLOCK].permute(1, 0, 2) for part in packing(scratch)]
            pairs = zip(found, noise, strict=True)
            if all(torch.equal(one, other.view(one.dtype)) for one, other in pairs):
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
class GroupPages:
    """Pages of the layers of one group in CPU memory, as they were registered.

    ``parts``: of each layer, as unsigned integers, (blocks, kv_heads, block_tokens, head_dim).
    ``alike``: what copies of all layers at once need, where these are alike and have one table.
    """

    shape: LayerGroupShape
    layout: BlockLayout
    whole: list[torch.Tensor]
    parts: list[list[Part]]
    alike: Alike | None


class EnginePages:
    """The pages of every layer in CPU memory. Raises LayoutMismatchError for unknown ones."""

    def __init__(
        self,
        shape: KVCacheShape,
        registered: Mapping[str, torch.Tensor],
        writer: Callable[[str], BlockWriter],
    ) -> None:
        layouts = block_layouts_of(shape, registered, writer)
        for name, pages in registered.items():
            if pages.device.type != "cpu" or pages.shape[2] != shape.block_tokens:
                fix = f"blocks of {shape.block_tokens} tokens in CPU memory"
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
    """Where one chunk goes that is loaded into an engine's *pages*, the blocks in its *tables*.

    The first *kept_blocks* hold what the engine found in its own cache, and may be in use: they are
    not written to, nor are null blocks. What cannot go straight into blocks for that spills into
    memory of its own, and is brought in by ``finish``.
    """

    def __init__(self, pages: EnginePages, tables: BlockTables, kept_blocks: int = 0) -> None:
        self._pages = pages
        self._tables = [
            [NULL_BLOCK if at < kept_blocks else block for at, block in enumerate(table)]
            for table in tables
        ]
        self._spill: list[tuple[Part, Part, list[int]]] = []

    def tensors(self, layout: KVLayout) -> AnyTensors:
        """Return where the tensors of the chunk go. Raises what ``components_of`` does."""
        self._spill.clear()  # of a read that was begun again
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
        """Bring in what spilled. Call once, when the chunk has been read."""
        tokens = self._pages.shape.block_tokens
        for part, found, ids in self._spill:
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
    """An engine's pages in CPU memory, as a worker loads into them and stores out of them: copied
    beside the engine, read straight into the blocks. ``DeviceSide`` is the other.
    """

    waits_in_pages = False
    """Whether what cannot be copied yet waits in the engine's pages, and takes no memory."""
    is_gpu_tier_far = False
    """Whether the server has a gpu tier that this side does not reach."""

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
        """Begin to copy *chunks*, or the first of them that there is room for; after a step."""
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
        """Put copies that need no host memory; return the numbers of those that are there."""
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
        self._groups = [
            _GroupGather(group, pages.shape.kept_blocks(group.shape, chunk_blocks))
            for group in pages.groups
        ]

    def take(self, tables: BlockTables) -> Staged | None:
        """Copy the chunk whose blocks *tables* name; return what the engine still has of it."""
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
        if is_run:  # its elements follow each other in whatever order
            copied = copied.as_strided(copied.shape, (block.numel(), *block.stride()))
        self._copies = to_array(copied).reshape(layers, kept, *block.shape)
        parts = [_unsigned(part) for part in group.layout(copied)]
        self._stack = BlockStack([part.reshape(layers, kept, *part.shape[1:]) for part in parts])
        self._rows: NDArray[np.uint64] | None = None
        if is_run:  # as ``copy_summed`` takes them: where to, from where, units, size, sum
            count, size = layers * kept, block.nbytes
            self._rows = np.zeros((count, 5), np.uint64)
            self._rows[:, 0] = copied.data_ptr() + np.arange(count) * size
            self._rows[:, 2] = size // LOOP_UNIT_BYTES
            self._rows[-1, 3] = count * size
            self._starts = np.array([[whole.data_ptr()] for whole in group.whole])
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
