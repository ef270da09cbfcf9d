"""Pages of engines that pack K and V in different ways, and reference KV in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from kvstore.client.chunk import Shard
from kvstore.client.engines.vllm.blocks import BlockLayout, BlockWriter, rows
from kvstore.client.engines.vllm.identity import KVCacheShape, LayerGroupShape, LayerRef
from kvstore.proto.types import DType, LayerKind, Model, RopeParameters

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
BLOCKS = 48
HEADS, HEAD_DIM = 2, 8

Tables: TypeAlias = Sequence[Sequence[int]]


def _group(kind: LayerKind, window_tokens: int, **tables: int) -> LayerGroupShape:
    """Return a group of layers, given as ``n<number>=table``."""
    layers = tuple(
        LayerRef(f"model.layers.{name[1:]}.attn", int(name[1:]), table)
        for name, table in tables.items()
    )
    heads = 1 if kind is LayerKind.mla else HEADS
    return LayerGroupShape(kind, DType.float32, heads, HEAD_DIM, window_tokens, layers)


SHAPE = KVCacheShape((_group(LayerKind.attention, 0, n0=0, n1=0, n2=0),), BLOCK_TOKENS)
LATENT = KVCacheShape((_group(LayerKind.mla, 0, n0=0, n1=0),), BLOCK_TOKENS)
HYBRID = KVCacheShape(
    (_group(LayerKind.window, 33, n0=0, n2=1), _group(LayerKind.attention, 0, n1=2)), BLOCK_TOKENS
)
"""Two tables of window layers that look one block back, and one of full attention."""
SLIDING = KVCacheShape((_group(LayerKind.window, 97, n0=0, n1=0),), BLOCK_TOKENS)
"""Windows of a chunk and a half."""


def representation(revision: str = "r1", shape: KVCacheShape = SHAPE) -> Model:
    groups = tuple(group.layer_group for group in shape.groups)
    rope = RopeParameters(10000.0, HEAD_DIM)
    return Model("tiny", revision, "none", "none", groups, rope, "t")


def writer(packing: BlockLayout) -> Callable[[str], BlockWriter]:
    """Return the write function of engine layers with *packing*."""

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        packed = packing(pages) if len(parts) == 2 else rows(pages)
        for part, whole in zip(parts, packed, strict=True):
            for token, slot in enumerate(slots.tolist()):
                whole[slot // pages.shape[2], :, slot % pages.shape[2]] = part[token]

    return lambda _: write


def scrambled(_: str) -> BlockWriter:
    """Return a writer with an unknown packing of K and V."""

    def write(parts: Sequence[torch.Tensor], pages: torch.Tensor, slots: torch.Tensor) -> None:
        block = int(slots[0]) // pages.shape[2]
        both = torch.cat(list(parts), 2).permute(1, 0, 2)
        pages[block] = both.flip(1)

    return write


def empty_pages(value: float = 0.0, shape: KVCacheShape = SHAPE) -> dict[str, torch.Tensor]:
    """Return the pages of every layer, as vLLM registers them, unordered."""
    return {
        layer.name: torch.full(
            (BLOCKS, group.kv_heads, BLOCK_TOKENS, group.layer_group.parts * group.head_dim), value
        )
        for group in shape.groups
        for layer in reversed(group.layers)
    }


def kv_of(token: int, position: int, layer: int) -> torch.Tensor:
    """Return K and V, each (kv_heads, head_dim), derived from a token and its position."""
    seed = np.random.default_rng([token, position, layer])
    return torch.from_numpy(seed.random((2, HEADS, HEAD_DIM), np.float32))


def _places(
    pages: dict[str, torch.Tensor], packing: BlockLayout, shape: KVCacheShape
) -> list[tuple[int, int, tuple[torch.Tensor, ...]]]:
    """Return number, table and parts of each layer."""
    return [
        (layer.number, layer.table, (rows if group.kind is LayerKind.mla else packing)(whole))
        for group in shape.groups
        for layer in group.layers
        for whole in (pages[layer.name],)
    ]


def tables_of(blocks: Sequence[int] | Tables) -> Tables:
    """Return block tables; *blocks* may be a single one."""
    return blocks if isinstance(blocks[0], Sequence) else [blocks]  # type: ignore[list-item,return-value]


def compute(
    pages: dict[str, torch.Tensor], packing: BlockLayout, tokens: list[int],
    blocks: Sequence[int] | Tables, start: int = 0, shape: KVCacheShape = SHAPE,
) -> None:  # fmt: skip
    """Fill the slots of *tokens* from *start* on, like a forward pass."""
    for number, table, parts in _places(pages, packing, shape):
        ids = tables_of(blocks)[table]
        for position in range(start, len(tokens)):
            block, slot = ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            if block:
                values = kv_of(tokens[position], position, number)
                for part, value in zip(parts, values, strict=False):
                    part[block, :, slot] = value[: part.shape[1]]


def holds(
    pages: dict[str, torch.Tensor], packing: BlockLayout, tokens: list[int],
    blocks: Sequence[int] | Tables, shape: KVCacheShape = SHAPE,
) -> bool:  # fmt: skip
    """Whether the slots of *tokens* have the values of ``compute``; null blocks are skipped."""
    reference = empty_pages(shape=shape)
    compute(reference, packing, tokens, blocks, shape=shape)
    both = zip(_places(pages, packing, shape), _places(reference, packing, shape), strict=True)
    return all(
        torch.equal(found[ids[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS],
                    expected[ids[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS])
        for (_, table, parts), (_, _, others) in both
        for ids in (tables_of(blocks)[table],)
        for found, expected in zip(parts, others, strict=True)
        for at in range(len(tokens))
        if ids[at // BLOCK_TOKENS]
    )  # fmt: skip


def ranks_of(tensor: int, *stages: tuple[int, int]) -> list[Shard | None]:
    """Return the shards of a parallel engine over the model of SHAPE; None for a single rank."""
    if tensor == 1 and not stages:
        return [None]
    return [
        Shard.of_rank(representation(), rank, tensor, layers)
        for layers in stages or (None,)
        for rank in range(tensor)
    ]


def shape_of_rank(shape: KVCacheShape, rank: Shard | None) -> KVCacheShape:
    """Return the shape of a rank of a model with one group, *shape*."""
    if rank is None:
        return shape
    (group,) = shape.groups
    first, stop = rank.layers or (0, len(group.layers))
    heads = rank.kv_heads[0] if rank.kv_heads else (0, group.kv_heads)
    own = replace(
        group,
        kv_heads=heads[1] - heads[0],
        layers=group.layers[first:stop],
        model_kv_heads=group.kv_heads,
        model_layers=len(group.layers),
    )
    return replace(shape, groups=(own,))


def pages_of_rank(
    pages: dict[str, torch.Tensor], shape: KVCacheShape, rank: Shard | None
) -> dict[str, torch.Tensor]:
    """Return a rank's layers and heads of the *pages* of a whole model, in the same memory."""
    names = [layer.name for group in shape_of_rank(shape, rank).groups for layer in group.layers]
    heads = slice(*rank.kv_heads[0]) if rank is not None and rank.kv_heads else slice(None)
    return {name: pages[name][:, heads] for name in names}
