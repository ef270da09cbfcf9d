"""One pass over an engine's layers, with some rows computed and the others stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvstore.client.blend.plan import BlendPlan, Origin
from kvstore.client.blend.selectors import CHECK_LAYER
from kvstore.codecs.rope import KNOWN_RULES, inverse_frequencies, key_gain
from kvstore.proto.errors import LayoutMismatchError, ModelError
from kvstore.proto.types import RopeParameters

LayerKV: TypeAlias = tuple[Tensor, Tensor]
"""K and V of one layer: (kv_heads, tokens, head_dim) each, in the engine's dtype."""
StoredKV: TypeAlias = Callable[[int], LayerKV]
"""Returns K and V of the whole prompt at a layer, with stored rows in their places."""
Watch: TypeAlias = Callable[[int, Tensor, Tensor, LayerKV], None]
"""Called before each layer's attention, with its number, Q, the rows of Q, and K and V."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of one layer's keys; channels after the rotated ones do not change.

    *frequencies*: float32 numbers, one per pair of channels (i, i + pairs), in radians per token.
    *gain*: the scale of rotated keys. Raises ModelError.
    """

    frequencies: tuple[float, ...]
    gain: float = 1.0

    def __post_init__(self) -> None:
        if not self.frequencies or not all(map(math.isfinite, self.frequencies)):
            raise ModelError("frequencies", self.frequencies[:4], "give finite numbers")
        if not (math.isfinite(self.gain) and self.gain > 0):
            raise ModelError("gain", self.gain, "give a positive number")

    @classmethod
    def of(cls, rope: RopeParameters, head_dim: int) -> RopeSpec | None:
        """Return the rotation that *rope* defines; None for models without one.

        Raises ModelError, with its name, for an unsupported rule: keys of ``dynamic`` and
        ``longrope`` depend on the length of the prompt they were computed in.
        """
        if rope.scaling == "none":
            return None
        found = inverse_frequencies(rope, head_dim)
        if found is None:
            fix = f"keys can be moved only under {', '.join(KNOWN_RULES)}"
            raise ModelError("rope", (rope.scaling, rope.factors), fix)
        return cls(tuple(found.tolist()), key_gain(rope))


def rerotate(keys: Tensor, old: Tensor, new: Tensor, rope: RopeSpec) -> Tensor:
    """Return *keys*, (heads, tokens, head_dim), rotated from their *old* positions to *new* ones.

    Computed in float64 and rounded once to the keys' dtype: within one unit in the last place of
    the exact rotation. Raises ModelError for keys with fewer channels than are rotated.
    """
    # Positions times frequencies are rounded to float32 before subtraction, to match the engine's
    # own tables (float64 alone is off by 4e-3 after 900,000 tokens).
    pairs = len(rope.frequencies)
    if 2 * pairs > keys.shape[-1]:
        found = (2 * pairs, keys.shape[-1])
        raise ModelError("rope", found, "keys have fewer channels than are rotated")
    table = torch.tensor(rope.frequencies, dtype=torch.float32, device=keys.device)
    before, after = ((at.float()[:, None] * table).double() for at in (old, new))
    angles = after - before
    cosine, sine = torch.cos(angles), torch.sin(angles)
    first, second = keys[..., :pairs].double(), keys[..., pairs : 2 * pairs].double()
    moved = keys.clone()
    moved[..., :pairs] = first * cosine - second * sine
    moved[..., pairs : 2 * pairs] = second * cosine + first * sine
    return moved


class EngineAdapter(Protocol):
    """One model of one engine. Hidden states are (rows, hidden), heads come first elsewhere."""

    n_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    rope: Sequence[RopeSpec | None]
    """One per layer; None for layers whose keys are not rotated."""
    window: Sequence[int | None]
    """One per layer: how many tokens, itself included, a token attends to; None for all."""

    @property
    def origin(self) -> Origin:
        """The origin of KV computed now."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of *tokens*, (rows,): (rows, hidden)."""

    def qkv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V, (heads, rows, head_dim), Q and K rotated to *positions*."""

    def attend(self, layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """Return the attention output of ascending *positions* on *kv*: (rows, heads * head_dim).

        A row at position p attends to keys after p - window up to p. Kernels that align a causal
        mask of scattered rows to the bottom right let them attend to the future.
        """

    def attention_mass(self, layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """Return the attention that each key gets from the rows at *positions*: (tokens,).

        The mean over the rows of the sum over the heads; float32 or wider.
        """

    def post(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Return the layer's output for these rows: projection, residuals, MLP."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows: (rows, vocabulary)."""


def reads(positions: Tensor, first_key: int, last_key: int, window: int | None) -> Tensor:
    """Return which keys of [first_key, last_key) each row attends to: bool (rows, keys)."""
    keys = torch.arange(first_key, last_key, device=positions.device)
    mask = keys <= positions[:, None]
    if window is not None:
        mask &= keys > positions[:, None] - window
    return mask


@dataclass(slots=True)
class LayerPass:
    """A pass over *tokens*, and its results.

    *rows*: positions that are computed, ascending; at the end those of the last layer.
    *logits_from*: the first position whose logits are needed. *choose*: given the *deviation*, the
    squared distance of fresh values from stored at CHECK_LAYER, (tokens,), returns the rows to
    compute from there on.
    """

    tokens: Sequence[int]
    rows: Tensor
    logits_from: int
    choose: Callable[[Tensor], Tensor] | None = None
    watch: Watch | None = None
    deviation: Tensor | None = None
    kv: list[LayerKV] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)

    def run(self, adapter: EngineAdapter, stored_kv: StoredKV | None = None) -> Tensor:
        """Compute all layers; return the logits of the rows from ``logits_from`` on.

        *stored_kv* is not called if every row is computed and none is compared: the result is then
        bit-identical to the engine's own, because the last layer computes all rows, too.
        """
        self.rows = self.rows.to(adapter.device)
        is_whole = self.choose is None and len(self.rows) == len(self.tokens)
        hidden = adapter.embed(torch.tensor(self.tokens, device=adapter.device)[self.rows])
        for layer in range(adapter.n_layers):
            placed = None if is_whole or stored_kv is None else stored_kv(layer)  # waits
            query, *fresh = adapter.qkv(layer, hidden, self.rows)
            before = self.rows
            self._place(layer, fresh, placed)
            if self.rows is not before:
                is_kept = torch.isin(before, self.rows)
                query, hidden = query[:, is_kept], hidden[is_kept]
            self.row_counts.append(len(self.rows))
            if self.watch is not None:
                self.watch(layer, query, self.rows, self.kv[-1])
            rows = self.rows
            if layer == adapter.n_layers - 1 and not is_whole:
                # Its KV is complete; only these rows are needed further.
                is_wanted = rows >= self.logits_from
                query, hidden, rows = query[:, is_wanted], hidden[is_wanted], rows[is_wanted]
            if len(rows):
                attended = adapter.attend(layer, query, rows, self.kv[-1])
                hidden = adapter.post(layer, hidden, attended)
        return adapter.logits(hidden[self.rows >= self.logits_from] if is_whole else hidden)

    def _place(self, layer: int, fresh: Sequence[Tensor], placed: LayerKV | None) -> None:
        """Put *fresh* K and V of the rows into the stored KV; at CHECK_LAYER choose the rows."""
        if placed is None:
            self.kv.append((fresh[0].contiguous(), fresh[1].contiguous()))
            return
        rows, stored = self.rows, placed[1]
        if self.choose is not None and layer == CHECK_LAYER:
            self.deviation = torch.zeros(len(self.tokens), device=stored.device)
            distance = fresh[1].float() - stored[:, rows].float()
            self.deviation[rows] = distance.square().sum((0, 2))
            self.rows = self.choose(self.deviation).to(rows.device)
        placed[0][:, rows], placed[1][:, rows] = fresh
        self.kv.append(placed)


def place_segments(
    adapter: EngineAdapter, plan: BlendPlan, layer: int, loaded: Mapping[int, LayerKV]
) -> LayerKV:
    """Return K and V of the prompt at *layer*, with *loaded* segments in place, keys rotated.

    0 where nothing is stored. Raises LayoutMismatchError for a segment that is missing or has
    another shape or dtype.
    """
    shape = (adapter.kv_heads, len(plan.tokens), adapter.head_dim)
    keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
    values = torch.zeros_like(keys)
    rope = adapter.rope[layer]
    for index, segment in enumerate(plan.segments):
        if segment.kind == "miss":
            continue
        if index not in loaded:
            raise LayoutMismatchError("segment", index, "the source did not return it")
        wanted = (adapter.kv_heads, len(segment), adapter.head_dim)
        for part in loaded[index]:
            found = (tuple(part.shape), part.dtype)
            if found != (wanted, adapter.dtype):
                fix = f"expected {wanted} of {adapter.dtype}"
                raise LayoutMismatchError(f"segment {index}", found, fix)
        k, v = (part.to(adapter.device) for part in loaded[index])
        if rope is not None and segment.src_pos != segment.start:
            new = torch.arange(segment.start, segment.end, device=k.device)
            k = rerotate(k, new - segment.start + segment.src_pos, new, rope)
        span = slice(segment.start, segment.end)
        keys[:, span], values[:, span] = k, v
    return keys, values
