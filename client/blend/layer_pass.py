"""One pass over an engine's layers, in which some rows are computed and the rest is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvstore.client.blend.plan import UNROTATED, BlendPlan, Origin, Segment
from kvstore.client.blend.rope import RopeSpec, rerotate
from kvstore.client.blend.selectors import Selector
from kvstore.proto.errors import LayoutMismatchError

# What an engine must be able to do for its prompts to be blended: one layer, some rows.

LayerKV: TypeAlias = tuple[Tensor, Tensor]
"""K and V of one layer: (kv_heads, tokens, head_dim) each, in the engine's dtype."""
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


# Rows at absolute positions as runs without a gap.
#
# Varlen attention kernels align a causal mask to the bottom right: with m scattered rows of n
# keys as one sequence, row i reads keys up to n - m + i, which lie in its future. A run [a, b) as
# a sequence of its own, with b - a queries and b keys, is exact.


def runs_of(positions: Tensor) -> list[Run]:
    """Return the runs of *positions*, which rise: (rows,)."""
    if not positions.numel():
        return []
    cuts = (torch.nonzero(positions[1:] != positions[:-1] + 1).flatten() + 1).tolist()
    starts, ends = [0, *cuts], [*cuts, positions.numel()]
    values = positions.tolist()
    return [(values[a], values[b - 1] + 1) for a, b in zip(starts, ends, strict=True)]


def positions_of(runs: Sequence[Run], device: torch.device | None = None) -> Tensor:
    """Return the positions of *runs*: (rows,)."""
    return torch.cat([torch.arange(a, b, device=device) for a, b in runs])


def reads(positions: Tensor, first_key: int, last_key: int, window: int | None) -> Tensor:
    """Return which keys of [first_key, last_key) each row reads: bool (rows, keys).

    Those up to its own position, and after its position less *window*.
    """
    keys = torch.arange(first_key, last_key, device=positions.device)
    mask = keys <= positions[:, None]
    if window is not None:
        mask &= keys > positions[:, None] - window
    return mask


# One pass over an engine's layers, in which some rows are computed and the rest is stored.

Stored = Callable[[int], LayerKV]
"""K and V of the whole prompt at a layer, with what is stored in its place."""


@dataclass(slots=True)
class Pass:
    """What a pass is to do, and what it found.

    *rows*: positions that are computed, rising. *checks*: layers at which *selector* says
    which of them stay; *sinks* all do. *probe*: rows whose attention is summed. *logits_from*:
    the first position whose logits are wanted. *is_engines_own*: no stale row is read, and the
    result is to be the engine's own to the bit: the last layer is then computed for all rows, as
    engines do, and not only for those whose logits are wanted (other shapes, other sums).
    """

    plan: BlendPlan
    rows: Tensor
    logits_from: int
    checks: tuple[int, ...] = ()
    selector: Selector | None = None
    probe: Tensor | None = None
    is_engines_own: bool = False
    narrow: Callable[[Tensor, int], None] | None = None
    sinks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kv: list[LayerKV] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)
    deviation: dict[int, Tensor] = field(default_factory=dict)
    attention: Tensor | None = None
    selected: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """The rows of the last layer."""
    runs: list[Run] = field(default_factory=list)

    def run(self, adapter: EngineAdapter, stored: Stored) -> Tensor:
        """Compute all layers; return the logits of the rows from ``logits_from`` on.

        *stored* is not asked when every row is computed and none is compared.
        """
        tokens = torch.tensor(self.plan.tokens, device=adapter.device)
        self._set_rows(self.rows.to(adapter.device))
        hidden = adapter.embed(tokens[self.rows])
        for layer in range(adapter.n_layers):
            hidden = self._layer(adapter, layer, hidden, stored)
        if self.rows.numel():
            hidden = hidden[self.rows >= self.logits_from]
        return adapter.logits(hidden)

    def _layer(self, adapter: EngineAdapter, layer: int, hidden: Tensor, stored: Stored) -> Tensor:
        is_whole = not self.checks and self.rows.numel() == len(self.plan.tokens)
        placed = None if is_whole else stored(layer)  # waits; the next layer is asked for
        query, *fresh = adapter.qkv(layer, hidden, self.rows)
        if placed is not None and layer in self.checks:
            self._compare(layer, fresh[1], placed[1])
        kv = _written(placed, self.rows, fresh)
        self.kv.append(kv)
        if layer in self.checks:
            query, hidden = self._keep(layer, query, hidden)
        self.row_counts.append(self.rows.numel())
        self._probe(adapter, layer, query, kv)
        if layer == adapter.n_layers - 1:
            self.selected = self.rows
        if layer == adapter.n_layers - 1 and not self.is_engines_own:
            # its KV is written; only these rows are read again
            is_wanted = self.rows >= self.logits_from
            query, hidden = query[:, is_wanted], hidden[is_wanted]
            self._set_rows(self.rows[is_wanted])
        if not self.runs:
            return hidden
        read = adapter.attend(layer, query, self.runs, kv)
        return adapter.post(layer, hidden, read)

    def _set_rows(self, rows: Tensor) -> None:
        self.rows, self.runs = rows, runs_of(rows)

    def _compare(self, layer: int, fresh: Tensor, stored: Tensor) -> None:
        found = torch.zeros(len(self.plan.tokens), device=fresh.device)
        differences = fresh.float() - stored[:, self.rows].float()
        found[self.rows] = differences.square().sum((0, 2))
        self.deviation[layer] = found

    def _keep(self, layer: int, query: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.selector is None:
            return query, hidden
        is_open = approx_mask(self.plan, self.rows.device)
        is_open[self.sinks] = False
        is_approx = is_open[self.rows]
        chosen = self.selector.at_layer(
            self.plan, layer, self.deviation[layer], self.rows[is_approx]
        )
        is_kept = ~is_approx | torch.isin(self.rows, chosen)
        self._set_rows(self.rows[is_kept])
        if self.narrow is not None:
            self.narrow(self.rows, layer + 1)
        return query[:, is_kept], hidden[is_kept]

    def _probe(self, adapter: EngineAdapter, layer: int, query: Tensor, kv: LayerKV) -> None:
        if self.probe is None:
            return
        is_asked = torch.isin(self.rows, self.probe)
        mass = adapter.mass(layer, query[:, is_asked], self.rows[is_asked], kv)
        self.attention = mass if self.attention is None else self.attention + mass


def _written(placed: LayerKV | None, rows: Tensor, fresh: Sequence[Tensor]) -> LayerKV:
    """Return *fresh* K and V in *rows* of what is *placed*; None: they are all rows."""
    keys, values = fresh
    if placed is None:
        return keys.contiguous(), values.contiguous()
    placed[0][:, rows], placed[1][:, rows] = keys, values
    return placed


def approx_mask(plan: BlendPlan, device: torch.device) -> Tensor:
    """Return which tokens are ``approx``: bool (tokens,)."""
    mask = torch.zeros(len(plan.tokens), dtype=torch.bool, device=device)
    for _, segment in plan.of_kind("approx"):
        mask[segment.start : segment.end] = True
    return mask


def rows_of_kind(plan: BlendPlan, *kinds: str) -> Tensor:
    """Return the positions of the tokens of *kinds*: (rows,)."""
    spans = [(s.start, s.end) for s in plan.segments if s.kind in kinds]
    return torch.cat([torch.arange(*span) for span in [(0, 0), *spans]])


def place(
    adapter: EngineAdapter, plan: BlendPlan, layer: int, loaded: Mapping[int, LayerKV]
) -> LayerKV:
    """Return K and V of the prompt at *layer* with what was *loaded* in its place, keys turned.

    0 where nothing is stored. Raises LayoutMismatchError for what is missing or has another
    shape or dtype.
    """
    shape = (adapter.kv_heads, len(plan.tokens), adapter.head_dim)
    keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
    values = torch.zeros_like(keys)
    for index, segment in enumerate(plan.segments):
        if segment.kind == "miss":
            continue
        k, v = _checked(adapter, index, segment, loaded)
        span = slice(segment.start, segment.end)
        keys[:, span] = _moved(adapter, layer, segment, k.to(adapter.device))
        values[:, span] = v.to(adapter.device)
    return keys, values


def _checked(
    adapter: EngineAdapter, index: int, segment: Segment, loaded: Mapping[int, LayerKV]
) -> LayerKV:
    if index not in loaded:
        raise LayoutMismatchError("segment", index, "the source did not bring it")
    wanted = (adapter.kv_heads, len(segment), adapter.head_dim)
    for part in loaded[index]:
        if tuple(part.shape) != wanted or part.dtype != adapter.dtype:
            found = (tuple(part.shape), str(part.dtype))
            raise LayoutMismatchError(
                f"segment {index}", found, f"the engine keeps {wanted} of {adapter.dtype}"
            )
    return loaded[index]


def _moved(adapter: EngineAdapter, layer: int, segment: Segment, keys: Tensor) -> Tensor:
    rope = adapter.rope[layer]
    if rope is None or segment.src_pos == segment.start:
        return keys
    new = torch.arange(segment.start, segment.end, device=keys.device)
    old = None
    if segment.src_pos != UNROTATED:
        old = new - segment.start + segment.src_pos
    return rerotate(keys, old, new, rope)
