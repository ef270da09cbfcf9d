"""What chunks of a prompt attended to while it was computed: Cache-Craft's context impact.

Agarwal et al., "Cache-Craft", SIGMOD 2025 (arXiv 2502.15734), equations 3 and 4: attention
between a chunk and those before it, and within it. Measured of a few rows and layers, which is
a small part of the prefill that they are looked at in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstore.client.blend.adapter import EngineAdapter, Run
from kvstore.client.blend.blender import Blender
from kvstore.client.blend.report import BlendResult
from kvstore.client.blend.runs import positions_of
from kvstore.client.blend.segments import NamedChunk
from kvstore.client.blend.source import LayerKV
from kvstore.proto.blend import ContextMass

SAMPLED_ROWS = 8
"""Of a chunk, spread over it."""
SAMPLED_LAYERS = 8
"""Of a model, spread over it; fewer of a model with fewer."""
MAX_CONTEXT = 16
"""Chunks before one that are told, the nearest; no server takes more."""


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one chunk's tokens: weights summed over them, mean over heads and layers.

    ``context``: what went to the chunks before it, the nearest last. What went to tokens of no
    chunk, or farther away, is in none; with ``intra_mass`` the sum is the chunk's tokens at most.
    """

    chunk: NamedChunk
    context: tuple[ContextMass, ...]
    intra_mass: float


def measured_prefill(
    adapter: EngineAdapter,
    tokens: Sequence[int],
    chunks: Sequence[NamedChunk],
    rows: int = SAMPLED_ROWS,
) -> tuple[BlendResult, list[ChunkAttention]]:
    """Compute all of *tokens*; return it, and what each of its *chunks* attended to.

    At most *rows* of each chunk are looked at. Chunks whose weights are no numbers are left out.
    """
    watch = _Watch(adapter, len(tokens), chunks, rows)
    result = Blender(watch).prefill(tokens)
    return result, list(watch.found())


class _Watch:
    """An EngineAdapter that does what *adapter* does, and looks at rows of *chunks*."""

    def __init__(
        self, adapter: EngineAdapter, count: int, chunks: Sequence[NamedChunk], rows: int
    ) -> None:
        self._adapter = adapter
        self._chunks = chunks
        self._rows = [_spread(one.start, one.stop, rows) for one in chunks]
        self._layers = set(_spread(0, adapter.n_layers, SAMPLED_LAYERS).tolist())
        self._sums = torch.zeros((len(chunks), count), dtype=torch.float64)
        """(chunks, tokens): mean weight of a row, summed over heads and layers."""
        self._weights = 0
        """Heads of all layers that were looked at."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def attend(self, layer: int, query: Tensor, runs: Sequence[Run], kv: LayerKV) -> Tensor:
        """Do what the engine does, and look on."""
        if layer in self._layers:
            positions = positions_of(runs, query.device)
            for number, rows in enumerate(self._rows):
                at = torch.isin(positions, rows.to(positions.device))
                mass = self._adapter.mass(layer, query[:, at], positions[at], kv)
                self._sums[number] += mass.double().cpu()
            self._weights += query.shape[0]
        return self._adapter.attend(layer, query, runs, kv)

    def found(self) -> Iterator[ChunkAttention]:
        """Yield what was seen of each chunk."""
        if not self._weights:
            return
        for one, sums in zip(self._chunks, self._sums, strict=True):
            share = sums / self._weights
            before = [other for other in self._chunks if other.stop <= one.start][-MAX_CONTEXT:]
            masses = [one.tokens * float(share[c.start : c.stop].sum()) for c in (*before, one)]
            if all(map(math.isfinite, masses)):
                yield ChunkAttention(one, tuple(_merged(before, masses)), masses[-1])


def _merged(chunks: Sequence[NamedChunk], masses: Sequence[float]) -> Iterator[ContextMass]:
    """Yield a mass for each content once, where it stands last."""
    found: dict[bytes, tuple[int, float]] = {}
    for one, mass in zip(chunks, masses, strict=False):
        _, known = found.pop(one.content, (0, 0.0))
        found[one.content] = (one.tokens, known + mass)
    for content, (tokens, mass) in found.items():
        yield ContextMass(content, tokens, mass)


def _spread(start: int, stop: int, count: int) -> Tensor:
    """Return at most *count* numbers from *start* to below *stop*, spread over them."""
    if stop - start <= count:
        return torch.arange(start, stop)
    steps = (torch.arange(count) + 0.5) * ((stop - start) / count)
    return start + steps.long()
