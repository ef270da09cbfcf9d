"""Pages of engines that pack K and V in different ways, and what is written to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvstore.client.engines.vllm_identity import EngineShape
from kvstore.client.engines.vllm_layout import Packing
from kvstore.proto.types import DType, LayerGroup, LayerKind, Representation, RopeParameters

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
BLOCKS = 24
SHAPE = EngineShape(3, 2, 8, BLOCK_TOKENS, DType.float32, ranks=1)

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def representation(revision: str = "r1") -> Representation:
    group = LayerGroup(LayerKind.attention, SHAPE.dtype, (0, 1, 2), SHAPE.kv_heads, SHAPE.head_dim)
    rope = RopeParameters(10000.0, SHAPE.head_dim)
    return Representation("tiny", revision, "none", "none", (group,), rope, "t")


def writer(packing: Packing) -> Writer:
    """Return how an engine writes that packs as *packing* reads."""

    def write(
        keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for part, whole in zip((keys, values), packing(pages), strict=True):
            for token, slot in enumerate(slots.tolist()):
                whole[slot // pages.shape[2], :, slot % pages.shape[2]] = part[token]

    return write


def scrambled(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write K and V where no known packing looks for them."""
    block = int(slots[0]) // pages.shape[2]
    both = torch.cat([keys, values], 2).permute(1, 0, 2)
    pages[block] = both.flip(1)


def empty_pages(value: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the pages of every layer, as vLLM registers them."""
    shape = (BLOCKS, SHAPE.kv_heads, BLOCK_TOKENS, 2 * SHAPE.head_dim)
    return {f"model.layers.{number}.attn": torch.full(shape, value) for number in (1, 0, 2)}


def kv_of(token: int, position: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, each (kv_heads, head_dim), that follow from a token and its place."""
    seed = np.random.default_rng([token, position, layer])
    noise = torch.from_numpy(seed.random((2, SHAPE.kv_heads, SHAPE.head_dim), np.float32))
    return noise[0], noise[1]


def compute(
    pages: dict[str, torch.Tensor],
    packing: Packing,
    tokens: list[int],
    block_ids: list[int],
    start: int = 0,
) -> None:
    """Fill the slots of *tokens* from *start* on, as a forward pass would."""
    for name, whole in pages.items():
        keys, values = packing(whole)
        for position in range(start, len(tokens)):
            block, slot = block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            layer = int(name.split(".")[2])
            keys[block, :, slot], values[block, :, slot] = kv_of(tokens[position], position, layer)


def holds(
    pages: dict[str, torch.Tensor], packing: Packing, tokens: list[int], block_ids: list[int]
) -> bool:
    """Whether the slots of *tokens* have what ``compute`` puts there."""
    right = empty_pages()
    compute(right, packing, tokens, block_ids)
    count, ids = len(tokens), torch.tensor(block_ids)
    return all(
        torch.equal(
            part[ids].transpose(1, 2).flatten(0, 1)[:count],
            other[ids].transpose(1, 2).flatten(0, 1)[:count],
        )
        for name in pages
        for part, other in zip(packing(pages[name]), packing(right[name]), strict=True)
    )
