"""An engine's pages, full of noise, and a reference read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.client.paged_cache import PagedCache, page_axes
from kvstore.proto.types import Model

AXES = [
    "block kv token head dim",
    "kv block token head dim",
    "kv block head token dim",
    "block kv head token dim",
    "block token head dim",
    "layer kv block token head dim",
    "block layer kv token head dim",
]
"""Axis orders of engines; without kv, K and V are separate tensors."""


class EnginePages(PagedCache):
    """A PagedCache that keeps its arguments."""

    def __init__(self, model: Model, tensors: Any, axes: tuple[str, ...]) -> None:
        super().__init__(model, tensors, " ".join(axes))
        self.given = tensors
        self.axes = axes


def engine_pages(
    model: Model, axes: str, blocks: int, block_tokens: int, draw: np.random.Generator
) -> EnginePages:
    """Return pages of a model with one group of bfloat16 attention layers, as torch tensors."""
    (group,) = model.layer_groups
    names = page_axes(axes)
    sizes = {
        "layer": len(group.layer_ids), "block": blocks, "kv": 2, "token": block_tokens,
        "head": group.kv_heads, "dim": group.head_dim,
    }  # fmt: skip

    def tensor() -> torch.Tensor:
        shape = [sizes[name] for name in names]
        noise = draw.integers(-(1 << 15), 1 << 15, shape).astype(np.int16)
        return torch.from_numpy(noise).view(torch.bfloat16)

    if "layer" in names:
        return EnginePages(model, tensor(), names)
    if "kv" in names:
        return EnginePages(model, [tensor() for _ in group.layer_ids], names)
    return EnginePages(model, [(tensor(), tensor()) for _ in group.layer_ids], names)


def rows_of(pages: EnginePages, block_ids: Sequence[int]) -> NDArray[Any]:
    """Return (layers, parts, kv_heads, tokens, head_dim) of the blocks, one after another."""
    given, names = pages.given, pages.axes
    if "layer" in names:
        whole = given
    elif "kv" in names:
        whole, names = torch.stack(given), ("layer", *names)
    else:
        whole = torch.stack([torch.stack(pair) for pair in given])
        names = ("layer", "kv", *names)
    order = [names.index(n) for n in ("layer", "kv", "head", "block", "token", "dim")]
    rows = whole.view(torch.int16).permute(order)[:, :, :, list(block_ids)].contiguous()
    array: NDArray[Any] = rows.reshape(*rows.shape[:3], -1, rows.shape[5]).numpy()
    return array
