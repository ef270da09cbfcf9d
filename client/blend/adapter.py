"""What an engine must be able to do for its prompts to be blended: one layer, some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvstore.client.blend.plan import Origin
from kvstore.client.blend.rope import RopeSpec
from kvstore.client.blend.source import LayerKV

Run = tuple[int, int]
"""Rows at positions [a, b): as one sequence of a varlen kernel, b - a queries of b keys."""


class EngineAdapter(Protocol):
    """One model of one engine. Hidden states are (rows, hidden), heads come first elsewhere."""

    n_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    rope: Sequence[RopeSpec | None]
    """A layer each; None for layers whose keys are not rotated."""
    window: Sequence[int | None]
    """A layer each: how many tokens, itself included, a token reads; None for all."""

    @property
    def origin(self) -> Origin:
        """What KV that is computed now is computed with."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of *tokens*, (rows,): (rows, hidden)."""

    def qkv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q (heads, rows, head_dim), rotated to *positions*, and K and V alike."""

    def attend(self, layer: int, query: Tensor, runs: Sequence[Run], kv: LayerKV) -> Tensor:
        """Return what the rows of *runs* read of *kv*: (rows, heads * head_dim).

        A row at position p reads keys at positions up to p, and those after p - window.
        """

    def mass(self, layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """Return how much attention each key gets of the rows at *positions*: (tokens,).

        The mean over the rows of the sum over the heads; float32 or wider.
        """

    def post(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Return the layer's output for these rows: projection, residuals, MLP."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows: (rows, vocabulary)."""
