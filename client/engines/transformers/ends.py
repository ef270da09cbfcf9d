"""What of a transformers cache is of a prefix's end: taken out of it, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
from transformers import Cache, DynamicCache

from kvstore.client.engines.prefix import About, Span
from kvstore.client.engines.transformers.batch import Row
from kvstore.client.engines.transformers.cache import (
    CacheShape,
    StateShape,
    TokenShape,
    importance_of,
)
from kvstore.client.tensors import LayerTensors, TensorLike
from kvstore.proto.types import KVLayout, LayerKind, Model

PACK_BYTES = 64 << 20
"""Device memory that copies of a cache's end are packed into, or one larger tensor's."""

Parts: TypeAlias = Sequence[torch.Tensor]
"""One layer's tensors: K and V of (kv_heads, tokens, head_dim), or both side by side."""

Nested: TypeAlias = list[list[list[torch.Tensor]]]
"""A chunk's tensors: components, then layers, then parts."""


@dataclass(frozen=True)
class Snapshot:
    """What a cache keeps of its end after ``position`` tokens, by layer, on the CPU.

    ``states`` are uint8 (bytes,). ``windows`` are K and V of the tokens before ``position``, as
    many as the layer keeps, (kv_heads, tokens, head_dim).
    """

    position: int
    windows: Mapping[TokenShape, Parts]
    states: Mapping[StateShape, torch.Tensor]

    @classmethod
    def of(cls, cache: Cache, shape: CacheShape, tokens: int = 0) -> Snapshot:
        """Return a copy of what *cache* has of its only prompt, of the last *tokens* if any."""
        kept = [s for s in shape.tokens if s.window]
        views = [part for s in kept for part in _window(cache.layers[s.layer], s, tokens)]
        copies = [_state(cache.layers[s.layer], s) for s in shape.states]
        if any(part.device.type != "cpu" for part in (*views, *copies)):
            parts = _from_device([*views, *copies])
        else:
            parts = iter([*(part.clone() for part in views), *copies])
        windows = {s: [next(parts), next(parts)] for s in kept}
        states = {s: next(parts) for s in shape.states}
        return cls(length(cache, shape), windows, states)

    def has_windows(self, span: Span) -> bool:
        """Whether it has what each window layer keeps of the chunk at *span*."""
        return span[1] <= self.position and all(
            window_start(shape, span) >= self.position - parts[0].shape[1]
            for shape, parts in self.windows.items()
        )

    def window(self, shape: TokenShape, span: Span) -> Parts:
        """Return what the layer keeps of the chunk at *span*."""
        parts = self.windows[shape]
        first = self.position - parts[0].shape[1]
        return [part[:, window_start(shape, span) - first : span[1] - first] for part in parts]


def length(cache: Cache, shape: CacheShape) -> int:
    """Return how many tokens *cache* has seen."""
    return int(cache.get_seq_length(shape.tokens[0].layer))


def window_start(shape: TokenShape, span: Span) -> int:
    """Return the first token of the chunk at *span* that the layer keeps: of w, w - 1."""
    return max(span[0], span[1] - (shape.window - 1))


def _window(layer: Any, shape: TokenShape, tokens: int) -> Parts:
    kept = slice(-min(shape.window - 1, tokens or shape.window), None)
    return [part[0, :, kept].detach() for part in (layer.keys, layer.values)]


def _state(layer: Any, shape: StateShape) -> torch.Tensor:
    pieces = [getattr(layer, piece.states)[piece.number][0] for piece in shape.pieces]
    return torch.cat(
        [piece.detach().contiguous().reshape(-1).view(torch.uint8) for piece in pieces]
    )


def _from_device(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies of *parts* on the CPU, in order; each copy brings about PACK_BYTES of them."""
    for _, alike in groupby(parts, lambda part: part.dtype):
        some = list(alike)
        count = max(1, PACK_BYTES // max(part.nbytes for part in some))
        for start in range(0, len(some), count):
            pack = some[start : start + count]
            flat = torch.cat([part.reshape(-1) for part in pack]).cpu()
            pieces = flat.split([part.numel() for part in pack])
            yield from (p.view(part.shape) for p, part in zip(pieces, pack, strict=True))


class EndSource:
    """The chunks of one prompt, out of a cache and the snapshots taken while it grew."""

    def __init__(
        self,
        representation: Model,
        shape: CacheShape,
        cache: Cache,
        snapshots: Sequence[Snapshot] = (),
        row: Row | None = None,
    ) -> None:
        """The prompt is the only one in *cache*, or in *row* of it."""
        self._row, self._first = (row.number, row.first) if row else (0, 0)
        self._representation = representation
        self._shape = shape
        self._cache = cache
        self._snapshots = snapshots

    def layout(self, span: Span) -> KVLayout:
        """Return what there is of the chunk at *span*."""
        return KVLayout.of(
            self._representation,
            span[1] - span[0],
            window=self._with_windows(span) is not None,
            state=self._with_states(span) is not None,
        )

    def about(self, span: Span) -> About:
        """Return what there is to say of the chunk at *span*."""
        return About(self.layout(span), importance_of(self._cache, *span))

    def has(self, span: Span, *, must_end: bool) -> bool:
        """Whether the chunk at *span* is worth storing: some models keep nothing but windows.

        With *must_end* only where a prefix can end: nobody goes on behind a short chunk.
        """
        if must_end and self._with_states(span) is None:
            return False
        return self._shape.keeps_all or self._with_windows(span) is not None

    def _with_windows(self, span: Span) -> Snapshot | None:
        return next((s for s in self._snapshots if s.has_windows(span)), None)

    def _with_states(self, span: Span) -> Snapshot | None:
        return next((s for s in self._snapshots if s.position == span[1]), None)

    def tensors(self, span: Span) -> LayerTensors:
        """Return the tensors of the chunk at *span*, without copying, where they are."""
        windows, states = self._with_windows(span), self._with_states(span)
        found: list[list[list[TensorLike]]] = []
        for group, shapes in self._shape.members():
            if group.kind is LayerKind.state:
                if states is not None:
                    found.append([[states.states[s].view(1, 1, -1)] for s in shapes])  # type: ignore[index]
            elif group.kind is LayerKind.window:
                if windows is not None:
                    found.append([list(windows.window(s, span)) for s in shapes])  # type: ignore[arg-type]
            else:
                found.append([self._tokens(s, span) for s in shapes])  # type: ignore[arg-type]
        return found

    def _tokens(self, shape: TokenShape, span: Span) -> list[TensorLike]:
        layer: Any = self._cache.layers[shape.layer]
        at = slice(span[0] + self._first, span[1] + self._first)
        parts = [part[self._row, :, at].detach() for part in (layer.keys, layer.values)]
        return [torch.cat(parts, -1)] if shape.kind is LayerKind.mla else parts


class PrefixRoom:
    """Room on *device* for a prefix of the chunks at *spans*.

    With windows or states all have to come.
    """

    def __init__(self, shape: CacheShape, spans: Sequence[Span], device: torch.device) -> None:
        self._shape = shape
        self._spans = spans
        self._device = device
        self._tokens = spans[-1][1]
        self._parts = {s: self._empty(s) for s in shape.tokens}
        self._states = {
            s: torch.empty(s.size_bytes, dtype=torch.uint8, device=device) for s in shape.states
        }

    def _first(self, shape: TokenShape) -> int:
        """Return the first token that there is room for: where a chunk that is wanted begins."""
        if not shape.window:
            return 0
        oldest = next(span for span in self._spans if self._reaches(shape, span))
        return window_start(shape, oldest)

    def _reaches(self, shape: TokenShape, span: Span) -> bool:
        """Whether the next token sees any of the chunk at *span*."""
        return span[1] > self._tokens - (shape.window - 1)

    def _empty(self, shape: TokenShape) -> Parts:
        tokens = self._tokens - self._first(shape)
        widths = (sum(shape.dims),) if shape.kind is LayerKind.mla else shape.dims
        # Tensors of their own, so that each is freed once its layer has grown past it.
        return [
            torch.empty((1, shape.kv_heads, tokens, width), dtype=shape.dtype, device=self._device)
            for width in widths
        ]

    def chunk(self, index: int, layout: KVLayout) -> Nested:
        """Return where chunk *index* goes: views; no layers for what the next token cannot see."""
        span = self._spans[index]
        found: Nested = []
        for group, shapes in self._shape.members():
            if layout.has(group.kind):
                found.append([self._layer(shape, index, span) for shape in shapes])
            if found and not all(found[-1]):
                found[-1] = []
        return found

    def _layer(self, shape: TokenShape | StateShape, index: int, span: Span) -> list[torch.Tensor]:
        if isinstance(shape, StateShape):
            is_last = index == len(self._spans) - 1
            return [self._states[shape].view(1, 1, -1)] if is_last else []
        if shape.window and not self._reaches(shape, span):
            return []
        first = self._first(shape)
        start = window_start(shape, span) if shape.window else span[0]
        return [part[0, :, start - first : span[1] - first] for part in self._parts[shape]]

    def move_into(self, cache: DynamicCache, tokens: int) -> None:
        """Make the first *tokens* the contents of an empty *cache*, without a copy.

        With windows or states those are all.
        """
        for shape, parts in self._parts.items():
            layer: Any = cache.layers[shape.layer]
            keys, values = self._keys_values(shape, parts, tokens)
            # update() would concatenate, which copies.
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if shape.window:
                layer.cumulative_length = self._tokens
        for state, data in self._states.items():
            _restore(cache.layers[state.layer], state, data)

    def copy_into(self, cache: Cache, tokens: int, first: int = 0) -> None:
        """Copy the tokens from *first* on into *cache*, which has those before, up to *tokens*."""
        for shape, parts in self._parts.items():
            keys, values = self._keys_values(shape, parts, tokens)
            cache.update(keys[:, :, first:], values[:, :, first:], shape.layer)

    def _keys_values(self, shape: TokenShape, parts: Parts, tokens: int) -> Parts:
        kept = slice(-(shape.window - 1), None) if shape.window else slice(tokens)
        parts = [part[:, :, kept] for part in parts]
        return parts[0].split(shape.dims, -1) if shape.kind is LayerKind.mla else parts


def _restore(layer: Any, shape: StateShape, data: torch.Tensor) -> None:
    end = 0
    for piece in shape.pieces:
        start, end = end, end + piece.size_bytes
        # Cloned, as memory of another type has to begin at a multiple of its size.
        tensor = data[start:end].clone().view(piece.dtype).view(1, *piece.shape)
        layer.lazy_initialization(**{piece.states: tensor, "state_idx": piece.number})
        getattr(layer, piece.states)[piece.number].copy_(tensor)
        layer.has_previous_state[piece.number] = True
