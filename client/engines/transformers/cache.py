"""What the layers of a transformers cache keep, found by looking into one after a short forward.

A list of classes would be old with every release; what a layer keeps shows in its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
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

from kvstore.codecs.terms import Importance
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import END_KINDS, DType, LayerGroup, LayerKind

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
_LOSSY_FROM = "kvstore_lossy_from"
"""The first token of a cache that is not exact: an attribute, which copies of a cache keep."""
_IMPORTANCE = "kvstore_importance"
"""What is known of the importance of its tokens: likewise."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """One tensor of a layer's state: which, and the shape and type it has for one prompt."""

    states: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer: its pieces, one after another, as bytes."""

    layer: int
    pieces: tuple[StatePiece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


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
        """Whether a prefix cannot be cut or continued everywhere."""
        return any(group.kind in END_KINDS for group in self.groups)

    @property
    def keeps_all(self) -> bool:
        """Whether some layers keep every token."""
        return any(group.kind not in END_KINDS for group in self.groups)

    @property
    def shortest_window(self) -> int:
        """Tokens that every layer with a window keeps; 0 without such layers."""
        return min((shape.window - 1 for shape in self.tokens if shape.window), default=0)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what they keep. One that keeps tokens and a state has a second number."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for shape in self.tokens:
            width = sum(shape.dims) if shape.kind is LayerKind.mla else shape.dims[0]
            dtype = DType.parse(str(shape.dtype))
            key = (shape.kind, dtype, shape.kv_heads, width, shape.window)
            found.setdefault(key, []).append(shape.layer)
        both = {shape.layer for shape in self.tokens}
        for state in self.states:
            key = (LayerKind.state, DType.uint8, 1, state.size_bytes, 0)
            number = state.layer + self.layer_count * (state.layer in both)
            found.setdefault(key, []).append(number)
        return tuple(
            LayerGroup(kind, dtype, tuple(sorted(ids)), heads, dim, window)
            for (kind, dtype, heads, dim, window), ids in found.items()
        )

    def members(self) -> Iterator[tuple[LayerGroup, Sequence[TokenShape | StateShape]]]:
        """Yield each group with its layers, in the order of its numbers."""
        shapes: dict[int, TokenShape | StateShape] = {s.layer: s for s in self.tokens}
        both = set(shapes)
        for state in self.states:
            shapes[state.layer + self.layer_count * (state.layer in both)] = state
        for group in self.groups:
            yield group, [shapes[number] for number in group.layer_ids]


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


def note_lossy(cache: Cache, first: int) -> None:
    """Have *cache*, and its copies, say that nothing from token *first* on is exact."""
    vars(cache)[_LOSSY_FROM] = first


def exact_tokens_of(cache: Cache, tokens: int) -> int:
    """Return how many of the first *tokens* of *cache* are exact, as far as was noted."""
    first: int = vars(cache).get(_LOSSY_FROM, tokens)
    return min(tokens, first)


def note_importance(cache: Cache, weights: Importance) -> None:
    """Have *cache* say which of its first tokens matter: *weights*, as of a ``Chunk``."""
    vars(cache)[_IMPORTANCE] = weights


def importance_of(cache: Cache, start: int, stop: int) -> Importance | None:
    """Return what was noted of the tokens from *start* to *stop*; None if not of all of them."""
    weights: Importance | None = vars(cache).get(_IMPORTANCE)
    return None if weights is None or len(weights) < stop else weights[start:stop]


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
