"""An engine's pages as vLLM registers them: how K and V lie in a block, found by looking, and where
a chunk that is loaded goes.

vLLM hands over one tensor a layer, (blocks, kv_heads, block_tokens, 2 * head_dim), of latent
layers (blocks, 1, block_tokens, head_dim), with any strides. Its blocks are those of the kernels,
of which a block of the block tables may have several. What lies in a block is the attention
backend's business: its CPU kernels keep K transposed. So the backend is called to write a block of
noise, and whoever cannot be read back right is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape
from kvstore.client.engines.vllm.messages import BlockTables
from kvstore.client.tensors import to_array
from kvstore.codecs.base import AnyPart, AnyTensors, Part
from kvstore.codecs.block_part import BlockPart, BlockSpan
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import END_KINDS, Component, DType, KVLayout

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
        return cls(shape, groups, layouts)

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
        components = components_of(self._pages.shape, layout, self._tables)
        return [
            [self._layer(layer, component, spans) for layer in layers if is_wanted]
            for (component, is_wanted), layers in zip(components, self._pages.groups, strict=True)
            if component is not None
        ]

    def _layer(
        self,
        layer: LayerPages,
        component: Component,
        spans: dict[tuple[int, int], BlockSpan | None],
    ) -> list[AnyPart]:
        tokens, block_tokens = component.tokens, self._pages.shape.block_tokens
        ids, named = self._tables[layer.table][-(tokens // block_tokens) :], (layer.table, tokens)
        if named not in spans:  # the same for all layers of a table
            array = np.asarray(ids, np.intp)
            spans[named] = BlockSpan.of(array, block_tokens, 0, tokens) if all(ids) else None
        if (span := spans[named]) is not None:
            return [BlockPart(part, span) for part in layer.parts]
        item = f"u{component.dtype.item_bytes}"
        spill: list[Part] = [np.empty(component.shape, item) for _ in layer.parts]
        self._spill.append((layer, ids, spill))
        return list(spill)

    def finish(self) -> None:
        """Bring in what spilled. Call once, when the chunk has been read."""
        tokens = self._pages.shape.block_tokens
        for layer, ids, spill in self._spill:
            for part, found in zip(layer.parts, spill, strict=True):
                for at, block in enumerate(ids):
                    if block != NULL_BLOCK:
                        part[block] = found[:, at * tokens : (at + 1) * tokens]
