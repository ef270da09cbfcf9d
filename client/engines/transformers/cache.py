"""What the layers of a transformers cache keep: every token, a window, or a state.

A list of classes would be old with every release, so it is found by looking into a cache after a
short forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch.nn.functional import pad
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvstore.client.engines.base import Span
from kvstore.client.tensors import LayerTensors
from kvstore.codecs.terms import Importance
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import END_KINDS, DType, KVLayout, LayerGroup, LayerKind

PROBE_TOKENS = 24

_FULL = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_LINEAR = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_EMPTY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers that keep nothing; transformers before 5.19 has none."""
_STATE_DICTS = ("conv_states", "recurrent_states")

Parts: TypeAlias = Sequence[torch.Tensor]
"""One layer's tensors: K and V of (kv_heads, tokens, head_dim), or both side by side."""

Nested: TypeAlias = list[list[list[torch.Tensor]]]
"""A chunk's tensors: components, then layers, then parts."""


def flat(tensors: LayerTensors | Nested) -> Iterator[Any]:
    """Yield a chunk's tensors, one after another."""
    return (part for layers in tensors for parts in layers for part in parts)


# --- what a model's layers keep


class StatePiece(NamedTuple):
    """One tensor of a layer's state: which, and the shape and type it has for one prompt."""

    states: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def put(self, layer: Any, tensor: torch.Tensor) -> None:
        """Have *layer* keep *tensor*, (prompts, *shape)."""
        layer.lazy_initialization(**{self.states: tensor, "state_idx": self.number})
        getattr(layer, self.states)[self.number].copy_(tensor)
        layer.has_previous_state[self.number] = True


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer: its pieces, one after another, as bytes."""

    layer: int
    pieces: tuple[StatePiece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def group(self) -> tuple[LayerKind, DType, int, int, int]:
        """What layers of one group have in common: kind, dtype, heads, width and window."""
        return LayerKind.state, DType.uint8, 1, self.size_bytes, 0

    def packed(self, layer: Any) -> torch.Tensor:
        """Return a copy of what *layer* keeps of its only prompt, uint8 (bytes,)."""
        pieces = [getattr(layer, piece.states)[piece.number][0] for piece in self.pieces]
        flat = [piece.detach().contiguous().reshape(-1).view(torch.uint8) for piece in pieces]
        return torch.cat(flat)

    def unpack(self, layer: Any, data: torch.Tensor) -> None:
        """Have *layer* keep what *data* holds."""
        sizes = [piece.size_bytes for piece in self.pieces]
        for piece, some in zip(self.pieces, data.split(sizes), strict=True):
            # Cloned, as memory of another type has to begin at a multiple of its size.
            piece.put(layer, some.clone().view(piece.dtype).view(1, *piece.shape))


@dataclass(frozen=True, slots=True)
class TokenShape:
    """The keys and values of one layer of the cache, (kv_heads, tokens, dims[i]).

    ``window`` is 0 where every token is kept. What has keys and values of different widths, as
    the latent and the rotated part of MLA do, is one part of both, side by side.
    """

    layer: int
    kv_heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    window: int = 0

    @property
    def kind(self) -> LayerKind:
        """What the store calls it."""
        if self.window:
            return LayerKind.window
        return LayerKind.attention if self.dims[0] == self.dims[1] else LayerKind.mla

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a token in each part of a chunk."""
        return (sum(self.dims),) if self.kind is LayerKind.mla else self.dims

    @property
    def group(self) -> tuple[LayerKind, DType, int, int, int]:
        """What layers of one group have in common: kind, dtype, heads, width and window."""
        dtype = DType.parse(str(self.dtype))
        return self.kind, dtype, self.kv_heads, self.widths[0], self.window

    def start(self, span: Span) -> int:
        """Return the first token of the chunk at *span* that is kept: of a window w, w - 1."""
        return max(span[0], span[1] - (self.window - 1)) if self.window else span[0]

    def held(self, tokens: int) -> int:
        """Return how many of so many tokens are kept."""
        return min(tokens, self.window - 1) if self.window else tokens

    def cut(self, parts: Parts, first: int, span: Span) -> list[torch.Tensor]:
        """Return what is kept of the chunk at *span*, of *parts* that begin with token *first*."""
        start = self.start(span)
        return [part.narrow(-2, start - first, span[1] - start) for part in parts]

    def put(self, layer: Any, parts: Parts, tokens: int) -> None:
        """Have *layer* keep K and V, (prompts, kv_heads, held tokens, dim), of so many *tokens*."""
        keys, values = parts
        # update() would concatenate, which copies.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if self.window:
            layer.cumulative_length = tokens


LayerShape: TypeAlias = TokenShape | StateShape


@dataclass(frozen=True)
class CacheShape:
    """What a model's cache keeps of one prompt, layer by layer."""

    layer_count: int
    tokens: tuple[TokenShape, ...]
    states: tuple[StateShape, ...]
    is_probed: bool = True
    """Whether it was seen, and not only stated by an architecture that is tested with."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> CacheShape:
        """Return what a short forward of *model* leaves in its cache.

        Raises ModelError that names what cannot be stored, and why.
        """
        cache = DynamicCache(config=model.config)
        try:
            forward(model, probe_ids(model), cache)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            fix = f"it does not run with a DynamicCache: {error}"
            raise ModelError("model", type(model).__name__, fix) from None
        return cls.of_cache(cache)

    @classmethod
    def of_cache(cls, cache: Cache) -> CacheShape:
        """Return what *cache*, that a forward has filled, keeps. Raises ModelError."""
        if type(cache) is not DynamicCache:
            raise ModelError("cache", type(cache).__name__, "use a DynamicCache")
        tokens, states = [], []
        for index, layer in enumerate(cache.layers):
            if type(layer) not in (*_FULL, *_SLIDING, *_LINEAR, *_EMPTY):
                fix = "layers that this version knows keep every token, a window or a state"
                raise ModelError(f"layers[{index}]", type(layer).__name__, fix)
            if type(layer) in (*_FULL, *_SLIDING):
                tokens.append(_token_shape(index, layer))
            if type(layer) in _LINEAR:
                states.append(_state_shape(index, layer))
        if not tokens:
            fix = "a cache of states alone does not tell how many tokens it has seen"
            raise ModelError("cache", "states only", fix)
        return cls(len(cache.layers), tuple(tokens), tuple(states))

    @property
    def has_ends(self) -> bool:
        """Whether some layers keep windows or states: a prefix cannot be cut everywhere then."""
        return any(group.kind in END_KINDS for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether some layers keep every token."""
        return any(group.kind not in END_KINDS for group in self.groups)

    @property
    def windows(self) -> frozenset[int]:
        """Tokens that layers with windows keep."""
        return frozenset(shape.window - 1 for shape in self.tokens if shape.window)

    @cached_property
    def _numbered(self) -> dict[int, LayerShape]:
        """Layers by the store's numbers. One that keeps tokens and a state has a second number."""
        found: dict[int, LayerShape] = {shape.layer: shape for shape in self.tokens}
        both = set(found)
        for state in self.states:
            found[state.layer + self.layer_count * (state.layer in both)] = state
        return found

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what they keep."""
        found: dict[tuple[LayerKind, DType, int, int, int], list[int]] = {}
        for number, shape in self._numbered.items():
            found.setdefault(shape.group, []).append(number)
        return tuple(
            LayerGroup(kind, dtype, tuple(sorted(ids)), heads, dim, window)
            for (kind, dtype, heads, dim, window), ids in found.items()
        )

    def chunk(
        self, layout: KVLayout, parts_of: Callable[[LayerShape], list[torch.Tensor]]
    ) -> Nested:
        """Return the tensors of a chunk of *layout*, of which *parts_of* returns a layer's."""
        return [
            [parts_of(self._numbered[number]) for number in group.layer_ids]
            for group in self.groups
            if layout.has(group.kind)
        ]


def _token_shape(index: int, layer: Any) -> TokenShape:
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        shapes = [None if part is None else tuple(part.shape) for part in (keys, values)]
        fix = "after a forward it needs keys and values of (batch, kv_heads, tokens, head_dim)"
        raise ModelError(f"layers[{index}]", shapes, fix)
    is_sliding = type(layer) in _SLIDING
    window = layer.sliding_window if is_sliding else 0
    dims = (int(keys.shape[3]), int(values.shape[3]))
    if is_sliding and (window < 2 or dims[0] != dims[1]):
        fix = "a window of 2 tokens or more, with keys as wide as values"
        raise ModelError(f"layers[{index}]", (window, dims), fix)
    return TokenShape(index, int(keys.shape[1]), dims, keys.dtype, window)


def _state_shape(index: int, layer: Any) -> StateShape:
    pieces = [
        StatePiece(name, number, tuple(tensor.shape[1:]), tensor.dtype)
        for name in _STATE_DICTS
        for number, tensor in getattr(layer, name).items()
        if tensor is not None
    ]
    if not pieces:
        fix = "after a forward it is empty: the model keeps its state elsewhere"
        raise ModelError(f"layers[{index}]", type(layer).__name__, fix)
    return StateShape(index, tuple(pieces))


# --- caches of transformers


def new_cache(
    config: PreTrainedConfig, settings: GenerationConfig, shape: CacheShape, prompt_tokens: int
) -> Cache:
    """Return an empty cache of the kind that *settings* name, which then say that it is given.

    Raises InvalidRequestError for a static cache of windows or states.
    """
    is_static, settings.cache_implementation = settings.cache_implementation == "static", None
    if not is_static:
        return DynamicCache(config=config)
    if shape.has_ends:
        fix = "a static cache of windows or states goes round: its ends cannot be taken out"
        raise InvalidRequestError("cache_implementation", "static", fix)
    more = settings.max_new_tokens or (settings.max_length or prompt_tokens) - prompt_tokens
    return StaticCache(config=config, max_cache_len=prompt_tokens + max(1, more))


@dataclass
class CacheNotes:
    """What is known of a cache's contents. Copies of the cache have it, too."""

    exact_tokens: int | None = None
    """Nothing behind so many is exact; None: all is."""
    importance: Importance | None = None
    """Of its first tokens, as of a ``Chunk``."""
    weights: Any = None
    """Which the connector had when it was made; None: those of its birth."""


def notes_of(cache: Cache) -> CacheNotes:
    """Return the notes of *cache*, to read or to change."""
    notes: CacheNotes = vars(cache).setdefault("kvstore_notes", CacheNotes())
    return notes


def length(cache: Cache, shape: CacheShape) -> int:
    """Return how many tokens *cache* has seen."""
    return int(cache.get_seq_length(shape.tokens[0].layer))


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """Return the tokens of a short prompt, (1, PROBE_TOKENS)."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.arange(3, 3 + 7 * PROBE_TOKENS, 7, device=model.device) % vocabulary
    return ids[None]


def as_argument(cache: Any) -> dict[str, Any]:
    """Return *cache* as models and ``generate`` are given it: by another name since 5.24."""
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    return {"cache" if release >= (5, 24) else "past_key_values": cache}


def forward(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Run *model* over *input_ids*, (1, tokens), behind what *cache* has; return what comes out.

    Those are the last token's activations before the output layer, (1, hidden).
    """
    inner: Any = model.base_model
    with torch.no_grad():
        found: torch.Tensor = inner(input_ids, **as_argument(cache), use_cache=True)[0]
    return found[:, -1]


def join_rows(
    caches: Sequence[Cache], shape: CacheShape, config: PreTrainedConfig, device: torch.device
) -> DynamicCache:
    """Return one cache of all prompts on *device*, the shorter ones padded on the left with zeros.

    All of a prompt but its last token is in its cache, so the longest says how wide they are.
    """
    whole = DynamicCache(config=config)
    width = max(length(cache, shape) for cache in caches)
    for kept in shape.tokens:
        parts = []
        for name, dim in zip(("keys", "values"), kept.dims, strict=True):
            # A prompt of one token has nothing in its cache.
            empty = torch.empty((1, kept.kv_heads, 0, dim), dtype=kept.dtype, device=device)
            rows = [getattr(cache.layers[kept.layer], name) for cache in caches]
            rows = [empty if row is None or not row.numel() else row for row in rows]
            held = kept.held(width)
            parts.append(torch.cat([pad(row, (0, 0, held - row.shape[2], 0)) for row in rows]))
        kept.put(whole.layers[kept.layer], parts, width)
    for state in shape.states:
        for piece in state.pieces:
            rows = [getattr(c.layers[state.layer], piece.states).get(piece.number) for c in caches]
            empty = torch.zeros((1, *piece.shape), dtype=piece.dtype, device=device)
            joined = torch.cat([empty if row is None else row for row in rows])
            piece.put(whole.layers[state.layer], joined)
    return whole
