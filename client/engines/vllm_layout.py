"""An engine's pages as vLLM registers them: how K and V lie in a block, found by looking.

vLLM hands over one tensor a layer, (blocks, kv_heads, block_tokens, 2 * head_dim). What lies in
a block is the attention backend's business: its CPU kernels keep K transposed. So the backend
is asked to write a block of noise, and whoever cannot be read back right is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvstore.client.engines.vllm_identity import EngineShape
from kvstore.client.pages import PageAxes, PagedKV
from kvstore.client.tensors import LayerTensors, to_array
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import Representation

BlockWriter: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The engine's own: writes keys and values, each (tokens, kv_heads, head_dim), into the slots
of pages that a tensor of int64 names: ``write(keys, values, pages, slots)``."""

Packing: TypeAlias = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]
"""Returns K and V of pages as views, each (blocks, kv_heads, block_tokens, head_dim)."""

_PROBE_BLOCKS = 3
_PROBED_BLOCK = 1
_AXES = PageAxes.parse("block head token dim")


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


PACKINGS: tuple[Packing, ...] = (keys_transposed, side_by_side, one_after_the_other)
"""Every packing that is understood."""


def find_packing(pages: torch.Tensor, write: BlockWriter) -> Packing:
    """Return how *write* packs K and V into blocks of the kind of *pages*, which stay as they are.

    Raises LayoutMismatchError when no known packing reads back what was written.
    """
    _, heads, tokens, width = pages.shape
    scratch = torch.zeros(_PROBE_BLOCKS, heads, tokens, width, dtype=pages.dtype)
    noise = torch.Generator().manual_seed(7)
    keys, values = (
        torch.randn(tokens, heads, width // 2, generator=noise).to(pages.dtype) for _ in "KV"
    )
    slots = torch.arange(tokens) + _PROBED_BLOCK * tokens
    try:
        write(keys, values, scratch, slots)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        fix = f"this attention backend does not write it: {error}"
        raise LayoutMismatchError("pages", str(pages.dtype), fix) from None
    for packing in PACKINGS:
        found = [part[_PROBED_BLOCK].permute(1, 0, 2) for part in packing(scratch)]
        if all(map(torch.equal, found, (keys, values))):
            return packing
    raise LayoutMismatchError(
        "pages", f"{pages.dtype} in blocks of {tokens}", "this attention backend packs otherwise"
    )


def in_model_order(names: Sequence[str]) -> list[str]:
    """Return layer *names* by the number of their layer, 0 to their count.

    Raises LayoutMismatchError when they do not say so.
    """
    numbered = {}
    for name in names:
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
        if len(numbers) == 1:
            numbered[int(numbers[0])] = name
    if sorted(numbered) != list(range(len(names))):
        raise LayoutMismatchError("layers", list(names)[:4], "one number a layer, from 0 on")
    return [numbered[number] for number in sorted(numbered)]


@dataclass(frozen=True, slots=True, eq=False)
class EnginePages:
    """The pages of every layer, by the model's order, and how K and V lie in them."""

    representation: Representation
    layers: tuple[torch.Tensor, ...]
    packing: Packing
    paged: PagedKV

    @classmethod
    def of(
        cls,
        representation: Representation,
        shape: EngineShape,
        registered: Mapping[str, torch.Tensor],
        write: BlockWriter,
    ) -> EnginePages:
        """Return the pages in *registered*, by layer name. Raises LayoutMismatchError."""
        layers = tuple(registered[name] for name in in_model_order(list(registered)))
        wanted = (shape.kv_heads, shape.block_tokens, 2 * shape.head_dim)
        for pages in layers:
            if pages.device.type != "cpu":
                raise LayoutMismatchError("device", str(pages.device), "only the CPU's for now")
            if pages.ndim != 4 or tuple(pages.shape[1:]) != wanted:
                raise LayoutMismatchError("pages", tuple(pages.shape), f"blocks of {wanted}")
        packing = find_packing(layers[0], write)
        return cls(representation, layers, packing, _paged(representation, layers, packing))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(pages[0].numel() * pages.element_size() for pages in self.layers)

    def room(self, block_ids: Sequence[int]) -> LayerTensors:
        """Return the tensors of the tokens in *block_ids*, as they lie."""
        return self.paged.tensors(block_ids, 0, len(block_ids) * self.paged.block_tokens)


class PageCopy:
    """A copy of some blocks, in memory that is used again and again.

    ``tensors``: those of the blocks' tokens. numpy copies here: torch would start its threads,
    which are the engine's.
    """

    def __init__(self, pages: EnginePages, blocks: int) -> None:
        self._pages = [to_array(layer) for layer in pages.layers]
        layers = [
            torch.empty((blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in pages.layers
        ]
        self._copies = [to_array(layer) for layer in layers]
        paged = _paged(pages.representation, layers, pages.packing)
        self.tensors = paged.tensors(range(blocks), 0, blocks * paged.block_tokens)

    def take(self, block_ids: Sequence[int]) -> None:
        """Copy the blocks *block_ids*, as many as there are here."""
        ids = np.asarray(block_ids)
        for pages, copied in zip(self._pages, self._copies, strict=True):
            np.take(pages, ids, 0, out=copied, mode="clip")

    def give(self, block_ids: Sequence[int], first: int) -> None:
        """Copy the blocks from number *first* on to the engine's *block_ids*."""
        ids = np.asarray(block_ids)
        for pages, copied in zip(self._pages, self._copies, strict=True):
            pages[ids] = copied[first : first + len(ids)]


def _paged(
    representation: Representation, layers: Sequence[torch.Tensor], packing: Packing
) -> PagedKV:
    return PagedKV(representation, [list(packing(pages)) for pages in layers], _AXES)
