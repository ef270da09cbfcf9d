"""What a transformers cache keeps of a prompt, layer by layer: every token, a window, or a state.

A short forward probes it. A cache holds the window or state of its last token only, so it can be
stored only while the cache ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor
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

from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.prefix import About, Span
from kvstore.codecs.base import Importance
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import DType, KVLayout, LayerGroup, LayerKind, Model

PROBE_TOKENS = 24
NO_KIND = "hybrid"
"""The kind that ``generate`` ignores; for None it takes that of the model's own settings."""
PACK_BYTES = 64 << 20
"""Device memory for packed copies of a cache's end; a larger tensor is copied alone."""
_BOTH = (
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
_SLIDING = (cache_utils.DynamicSlidingWindowLayer, _BOTH[1])
_TOKENS = (cache_utils.DynamicLayer, _BOTH[0], *_SLIDING)
_STATES = (cache_utils.LinearAttentionLayer, *_BOTH)
_EMPTY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers that keep nothing; added in transformers 5.19."""
Parts: TypeAlias = Sequence[Tensor]
"""One layer's tensors: K and V of (kv_heads, tokens, head_dim), or both concatenated."""
Nested: TypeAlias = list[list[list[Tensor]]]
"""A chunk's tensors: components, then layers, then parts."""


# --- what a model's layers keep


class StatePiece(NamedTuple):
    """One tensor of a layer's state, with its shape and dtype for one prompt."""

    states: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer: its pieces, concatenated as bytes."""

    layer: int
    pieces: tuple[StatePiece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def group(self) -> LayerGroup:
        """The group of this layer alone, with id 0."""
        return LayerGroup(LayerKind.state, DType.uint8, (0,), 1, self.size_bytes)

    def packed(self, cache: Cache) -> Tensor:
        """Return a copy of the state in *cache*, which has one prompt, uint8 (bytes,)."""
        layer = cache.layers[self.layer]
        pieces = [getattr(layer, one.states)[one.number][0].detach() for one in self.pieces]
        return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in pieces])

    def unpack(self, cache: Cache, data: Tensor) -> None:
        """Copy *data*, uint8 (prompts, bytes), into *cache*."""
        layer: Any = cache.layers[self.layer]
        parts = data.split([piece.size_bytes for piece in self.pieces], 1)
        for (states, number, shape, dtype), some in zip(self.pieces, parts, strict=True):
            # Cloned flat: a view of another dtype needs aligned, contiguous memory.
            tensor = some.reshape(-1).clone().view(dtype).view(len(data), *shape)
            layer.lazy_initialization(**{states: tensor, "state_idx": number})
            getattr(layer, states)[number].copy_(tensor)
            layer.has_previous_state[number] = True


@dataclass(frozen=True, slots=True)
class TokenShape:
    """The keys and values of one layer of the cache, (kv_heads, tokens, dims[i]).

    Parts of different widths, as MLA's latent and rotated ones, are concatenated into one.
    """

    layer: int
    kv_heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    window: int = 0
    """0 where every token is kept."""

    @property
    def kind(self) -> LayerKind:
        """Its kind in the store."""
        if self.window:
            return LayerKind.window
        return LayerKind.attention if self.dims[0] == self.dims[1] else LayerKind.mla

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a token in each part of a chunk."""
        return (sum(self.dims),) if self.kind is LayerKind.mla else self.dims

    @property
    def group(self) -> LayerGroup:
        """The group of this layer alone, with id 0."""
        dtype = DType.parse(str(self.dtype))
        return LayerGroup(self.kind, dtype, (0,), self.kv_heads, self.widths[0], self.window)

    def start(self, span: Span) -> int:
        """Return the first token kept of the chunk at *span*: a window of w keeps w - 1."""
        return max(span[0], span[1] - (self.window - 1)) if self.window else span[0]

    def put(self, cache: Cache, parts: Parts, tokens: int) -> None:
        """Set K and V in *cache*, (prompts, kv_heads, held tokens, dim), after *tokens* tokens."""
        layer: Any = cache.layers[self.layer]
        # update() would concatenate, which copies.
        layer.lazy_initialization(*parts)
        layer.keys, layer.values = parts
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
    """Whether it was probed; otherwise a tested architecture's config states it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> CacheShape:
        """Return what a short forward of *model* leaves in its cache. Raises ModelError."""
        cache = DynamicCache(config=model.config)
        try:
            forward(model, probe_ids(model), cache)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            fix = f"it does not run with a DynamicCache: {error}"
            raise ModelError("model", type(model).__name__, fix) from None
        return cls.of_cache(cache)

    @classmethod
    def of_cache(cls, cache: Cache) -> CacheShape:
        """Return what *cache*, filled by a forward, keeps. Raises ModelError."""
        if type(cache) is not DynamicCache:
            raise ModelError("cache", type(cache).__name__, "use a DynamicCache")
        tokens, states = [], []
        for index, layer in enumerate(cache.layers):
            if type(layer) not in (*_TOKENS, *_STATES, *_EMPTY):
                fix = "supported layers keep every token, a window or a state"
                raise ModelError(f"layers[{index}]", type(layer).__name__, fix)
            if type(layer) in _TOKENS:
                tokens.append(_token_shape(index, layer))
            if type(layer) in _STATES:
                states.append(_state_shape(index, layer))
        if not tokens:
            raise ModelError("cache", "states only", "a cache of states only has no token count")
        return cls(len(cache.layers), tuple(tokens), tuple(states))

    @cached_property
    def windows(self) -> tuple[TokenShape, ...]:
        """The layers that keep a window."""
        return tuple(shape for shape in self.tokens if shape.window)

    @property
    def has_ends(self) -> bool:
        """Whether some layers keep windows or states: a prefix cannot be cut anywhere then."""
        return bool(self.windows or self.states)

    @property
    def keeps_all(self) -> bool:
        """Whether some layers keep every token."""
        return len(self.windows) < len(self.tokens)

    @cached_property
    def _numbered(self) -> dict[int, LayerShape]:
        """Layers by the store's id. A layer with both tokens and a state has a second id."""
        found: dict[int, LayerShape] = {shape.layer: shape for shape in self.tokens}
        both = set(found)
        for state in self.states:
            found[state.layer + self.layer_count * (state.layer in both)] = state
        return found

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers grouped by what they keep."""
        found: dict[LayerGroup, list[int]] = {}
        for number, shape in self._numbered.items():
            found.setdefault(shape.group, []).append(number)
        return tuple(replace(one, layer_ids=tuple(sorted(ids))) for one, ids in found.items())

    def chunk(self, layout: KVLayout, parts_of: Callable[[LayerShape], list[Tensor]]) -> Nested:
        """Return a chunk's tensors: *parts_of* each layer; a group with a layer missing is []."""
        found = [
            [parts_of(self._numbered[number]) for number in group.layer_ids]
            for group in self.groups
            if layout.has(group.kind)
        ]
        return [layers if all(layers) else [] for layers in found]


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
        for name in ("conv_states", "recurrent_states")
        for number, tensor in getattr(layer, name).items()
        if tensor is not None
    ]
    if not pieces:
        fix = "after a forward it is empty: the model keeps its state elsewhere"
        raise ModelError(f"layers[{index}]", type(layer).__name__, fix)
    return StateShape(index, tuple(pieces))


# --- tensors of a prompt


@dataclass(frozen=True)
class Held:
    """What some layers keep of a prompt's tokens up to ``end``."""

    end: int
    tokens: Mapping[TokenShape, Parts]
    """K and V of the last tokens before ``end``."""
    states: Mapping[StateShape, Tensor]
    """The states at ``end``, uint8 (bytes,)."""

    @classmethod
    def of_row(cls, cache: Cache, shape: CacheShape, row: int = 0, first: int = 0) -> Held:
        """Return views of the layers that keep all tokens of prompt *row*, from *first* on."""
        end, kept = length(cache, shape), dict[TokenShape, Parts]()
        for s in shape.tokens:
            layer: Any = cache.layers[s.layer]
            if not s.window:
                parts = (layer.keys, layer.values)
                kept[s] = [part[row, :, first:end].detach() for part in parts]
        return cls(end - first, kept, {})

    @classmethod
    def of_end(cls, cache: Cache, shape: CacheShape, tokens: int = 0) -> Held:
        """Copy states and windows, or the windows' last *tokens*, to the CPU."""
        views = []
        for s in shape.windows:
            last = slice(-min(s.window - 1, tokens or s.window), None)
            layer: Any = cache.layers[s.layer]
            views += [part[0, :, last].detach() for part in (layer.keys, layer.values)]
        packed = [s.packed(cache) for s in shape.states]
        if any(part.device.type != "cpu" for part in (*views, *packed)):
            parts = _from_device([*views, *packed])
        else:
            parts = iter([*(part.clone() for part in views), *packed])
        windows = {s: [next(parts), next(parts)] for s in shape.windows}
        return cls(length(cache, shape), windows, {s: next(parts) for s in shape.states})

    @classmethod
    def empty(cls, shape: CacheShape, spans: Sequence[Span], device: torch.device) -> Held:
        """Allocate memory for a prefix of the chunks at *spans*, of windows for the last one."""
        end, tokens = spans[-1][1], dict[TokenShape, Parts]()
        new = partial(torch.empty, device=device)
        for s in shape.tokens:
            seen = (span for span in spans if not s.window or span[1] > end - (s.window - 1))
            rows = (s.kv_heads, end - s.start(next(seen)))
            # Separate tensors, so that each is freed once its layer outgrows it.
            tokens[s] = [new((*rows, width), dtype=s.dtype) for width in s.widths]
        return cls(end, tokens, {s: new(s.size_bytes, dtype=torch.uint8) for s in shape.states})

    def cut(self, shape: LayerShape, span: Span) -> list[Tensor]:
        """Return views of the layer's parts of the chunk at *span*; [] unless all of it is here."""
        if isinstance(shape, StateShape):
            is_here = span[1] == self.end and shape in self.states
            return [self.states[shape].view(1, 1, -1)] if is_here else []
        held, start = self.tokens.get(shape, ()), shape.start(span)
        first = self.end - held[0].shape[-2] if held else self.end
        if not first <= start < span[1] <= self.end:
            return []
        parts = [part.narrow(-2, start - first, span[1] - start) for part in held]
        return parts if len(parts) == len(shape.widths) else [torch.cat(parts, -1)]

    def fill(self, cache: Cache, shape: CacheShape, tokens: int) -> None:
        """Extend *cache* to the first *tokens* of these; an empty DynamicCache adopts them."""
        first = length(cache, shape)
        for s, held in self.tokens.items():
            kept = slice(-(s.window - 1), None) if s.window else slice(first + tokens)
            parts: Any = [part[None, :, kept] for part in held]
            if len(parts) == 1:
                parts = parts[0].split(s.dims, -1)
            if isinstance(cache, DynamicCache) and not first:
                s.put(cache, parts, self.end)
            else:
                cache.update(*(part[:, :, first:] for part in parts), s.layer)
        for state, data in self.states.items():
            state.unpack(cache, data[None])


def _from_device(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield CPU copies of *parts*, in order; each transfer packs about PACK_BYTES."""
    for _, alike in groupby(parts, lambda part: part.dtype):
        some = list(alike)
        count = max(1, PACK_BYTES // max(part.nbytes for part in some))
        for start in range(0, len(some), count):
            pack = some[start : start + count]
            joined = torch.cat([part.reshape(-1) for part in pack]).cpu()
            pieces = joined.split([part.numel() for part in pack])
            yield from (p.view(part.shape) for p, part in zip(pieces, pack, strict=True))


@dataclass(frozen=True)
class CacheReader:
    """The chunks of one prompt, to be stored."""

    model: Model
    shape: CacheShape
    whole: Held
    """The layers that keep all tokens."""
    ends: Sequence[Held] = ()
    """Windows and states at earlier lengths."""
    importance: Importance | None = None
    """Of the first tokens."""

    def _cut(self, shape: LayerShape, span: Span) -> list[Tensor]:
        """Return views of the layer's parts of the chunk at *span*; [] unless all of it is held."""
        return next(filter(None, (one.cut(shape, span) for one in (self.whole, *self.ends))), [])

    def _has(self, shapes: Sequence[LayerShape], span: Span) -> bool:
        return all(self._cut(shape, span) for shape in shapes)

    def about(self, span: Span) -> About:
        """Return the layout of the chunk at *span*, and its importance if all of it is known."""
        weights = self.importance
        known = None if weights is None or len(weights) < span[1] else weights[slice(*span)]
        window, state = (self._has(some, span) for some in (self.shape.windows, self.shape.states))
        return About(KVLayout.of(self.model, span[1] - span[0], window=window, state=state), known)

    def has(self, span: Span, *, must_end: bool) -> bool:
        """Return whether the chunk at *span* can be stored; with *must_end*, as a prefix's last."""
        if must_end and all(one.end != span[1] for one in self.ends):
            return False
        # Some models keep only windows.
        return self.shape.keeps_all or self._has(self.shape.windows, span)

    def tensors(self, span: Span) -> Nested:
        """Return the tensors of the chunk at *span*, as views where possible."""
        layout = self.about(span).layout
        assert layout is not None
        return self.shape.chunk(layout, lambda layer: self._cut(layer, span))


# --- caches of transformers


def new_cache(
    config: PreTrainedConfig, settings: GenerationConfig, shape: CacheShape, prompt_tokens: int
) -> Cache:
    """Return an empty cache of the kind in *settings*, and have ``generate`` make none.

    Raises InvalidRequestError for a static cache of windows or states.
    """
    is_static = settings.cache_implementation == "static"
    settings.cache_implementation = NO_KIND
    if not is_static:
        return DynamicCache(config=config)
    if shape.has_ends:
        fix = "a static cache of windows or states is a ring: its ends cannot be copied"
        raise InvalidRequestError("cache_implementation", "static", fix)
    more = settings.max_new_tokens or (settings.max_length or prompt_tokens) - prompt_tokens
    return StaticCache(config=config, max_cache_len=prompt_tokens + max(1, more))


@dataclass
class CacheNotes:
    """Metadata of a cache's contents, kept in copies of the cache, too."""

    exact_tokens: int | None = None
    """Nothing after these is exact; None: all is."""
    importance: Importance | None = None
    """Of its first tokens, as in ``Chunk``."""
    weights: Any = None
    """The weights that computed it; None: those at the connector's creation."""


def notes_of(cache: Cache) -> CacheNotes:
    """Return the mutable notes of *cache*."""
    notes: CacheNotes = vars(cache).setdefault("kvstore_notes", CacheNotes())
    return notes


def length(cache: Cache, shape: CacheShape) -> int:
    """Return how many tokens *cache* has processed."""
    return int(cache.get_seq_length(shape.tokens[0].layer))


def join_rows(caches: Sequence[Cache], shape: CacheShape, model: PreTrainedModel) -> DynamicCache:
    """Return one cache of all prompts of *model*, shorter ones padded on the left with zeros."""
    whole, device = DynamicCache(config=model.config), model.device
    width = max(length(cache, shape) for cache in caches)
    for s in shape.tokens:
        parts = []
        for name, dim in zip(("keys", "values"), s.dims, strict=True):
            rows = [getattr(cache.layers[s.layer], name) for cache in caches]
            nothing = torch.empty((1, s.kv_heads, 0, dim), dtype=s.dtype, device=device)
            held = min(width, s.window - 1) if s.window else width
            # A one-token prompt's is empty: the last token is never in it.
            rows = [nothing if row is None or not row.numel() else row for row in rows]
            parts.append(torch.cat([pad(row, (0, 0, held - row.shape[2], 0)) for row in rows]))
        s.put(whole, parts, width)
    for state in shape.states:
        zeros = torch.zeros(state.size_bytes, dtype=torch.uint8, device=device)
        rows = [state.packed(one) if length(one, shape) else zeros for one in caches]
        state.unpack(whole, torch.stack(rows))
    return whole


def as_argument(cache: Any) -> dict[str, Any]:
    """Return *cache* as a keyword argument of models and ``generate``: renamed in 5.24."""
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    return {"cache" if release >= (5, 24) else "past_key_values": cache}


# --- forwards


def probe_ids(model: PreTrainedModel) -> Tensor:
    """Return the tokens of a short prompt, (1, PROBE_TOKENS)."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.arange(3, 3 + 7 * PROBE_TOKENS, 7, device=model.device) % vocabulary
    # In a prompt it is a token like others; the positions of some models do not count it.
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    ids[1] = padding if isinstance(padding, int) and 0 <= padding < vocabulary else ids[1]
    return ids[None]


def forward(model: PreTrainedModel, input_ids: Tensor, cache: Cache) -> Tensor:
    """Return the last hidden state, (1, hidden), of *input_ids*, (1, tokens), behind *cache*."""
    inner: Any = model.base_model
    with torch.no_grad():
        found: Tensor = inner(input_ids, **as_argument(cache), use_cache=True)[0]
    return found[:, -1]


def copy(out: LayerTensors, data: LayerTensors) -> None:
    """Copy a chunk's tensors from *data* to *out*."""
    flat = ([part for layers in one for parts in layers for part in parts] for one in (out, data))
    with torch.no_grad():
        for to, part in zip(*flat, strict=True):
            if to is not part:
                to.copy_(part)
