"""A prompt's chunks between its cache and the store: taken out, put back, and on which way.

A window or a state is that of the last token, so it can be stored only while the model stands
there. As Marconi has it (Pan et al., MLSys 2025, section 4.2), two places of a prompt are worth
a pause: where it leaves what others asked, which the server knows, and where it ends. Both are
ends of chunks; so is every chunk_tokens-th token of what is generated, of which the last is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from threading import RLock
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

from kvstore.client.client import Client
from kvstore.client.engines.base import About, Span
from kvstore.client.engines.transformers.cache import (
    CacheShape,
    LayerShape,
    Nested,
    Parts,
    StateShape,
    TokenShape,
    flat,
    forward,
    length,
    notes_of,
    probe_ids,
)
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.codecs.base import AnyTensors
from kvstore.proto.device import Device, HostDevice, open_device
from kvstore.proto.errors import ModelError
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    Accuracy,
    ChunkKey,
    KVLayout,
    LayerKind,
    Model,
    Stated,
)

PACK_BYTES = 64 << 20
"""Device memory that copies of a cache's end are packed into, or one larger tensor's."""

MAX_CHECKPOINTS = 4096
"""Of models that keep windows alone, which need one every so many tokens."""

RING_BYTES = 128 << 20
"""Host memory of a ring: as many chunks as fit, or one that is larger."""

ALIGN_BYTES = 64
"""Each tensor of a chunk begins at a multiple of it."""

_ROUNDINGS = 64
"""Of the largest number, what two ways to the same one may differ by in float32."""


@dataclass(frozen=True)
class CacheCheckpoint:
    """What a cache keeps of its end after ``position`` tokens, by layer, on the CPU.

    ``states`` are uint8 (bytes,). ``windows`` are K and V of the tokens before ``position``, as
    many as the layer keeps, (kv_heads, tokens, head_dim).
    """

    position: int
    windows: Mapping[TokenShape, Parts]
    states: Mapping[StateShape, torch.Tensor]

    @classmethod
    def of(cls, cache: Cache, shape: CacheShape, tokens: int = 0) -> CacheCheckpoint:
        """Return a copy of what *cache* has of its only prompt, of the last *tokens* if any."""
        kept = [s for s in shape.tokens if s.window]
        views, layers = [], list[Any](cache.layers)
        for s in kept:
            last = slice(-min(s.window - 1, tokens or s.window), None)
            layer = layers[s.layer]
            views += [part[0, :, last].detach() for part in (layer.keys, layer.values)]
        packed = [s.packed(layers[s.layer]) for s in shape.states]
        if any(part.device.type != "cpu" for part in (*views, *packed)):
            parts = _from_device([*views, *packed])
        else:
            parts = iter([*(part.clone() for part in views), *packed])
        windows = {s: [next(parts), next(parts)] for s in kept}
        return cls(length(cache, shape), windows, {s: next(parts) for s in shape.states})

    def first(self, shape: TokenShape) -> int:
        """Return the first token of the layer's window."""
        return self.position - int(self.windows[shape][0].shape[1])

    def has_windows(self, span: Span) -> bool:
        """Return whether it has what each window layer keeps of the chunk at *span*."""
        is_before = span[1] <= self.position
        return is_before and all(s.start(span) >= self.first(s) for s in self.windows)


def _from_device(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies of *parts* on the CPU, in order; each copy brings about PACK_BYTES of them."""
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
    """The chunks of one prompt, out of a cache and the checkpoints taken while it grew.

    *row*: which prompt of the cache it is; *first*: the place of its first token.
    """

    model: Model
    shape: CacheShape
    cache: Cache
    checkpoints: Sequence[CacheCheckpoint] = ()
    row: int = 0
    first: int = 0

    def _windows(self, span: Span) -> CacheCheckpoint | None:
        return next((one for one in self.checkpoints if one.has_windows(span)), None)

    def _states(self, span: Span) -> CacheCheckpoint | None:
        return next((one for one in self.checkpoints if one.position == span[1]), None)

    def layout(self, span: Span) -> KVLayout:
        """Return what there is of the chunk at *span*."""
        window, state = self._windows(span) is not None, self._states(span) is not None
        return KVLayout.of(self.model, span[1] - span[0], window=window, state=state)

    def about(self, span: Span) -> About:
        """Return the layout of the chunk at *span*, and its importance, if of all its tokens."""
        weights = notes_of(self.cache).importance
        known = None if weights is None or len(weights) < span[1] else weights[slice(*span)]
        return About(self.layout(span), known)

    def has(self, span: Span, *, must_end: bool) -> bool:
        """Return whether the chunk at *span* is worth storing: some models keep windows alone.

        With *must_end* only where a prefix can end: nobody goes on behind a short chunk.
        """
        if must_end and self._states(span) is None:
            return False
        return self.shape.keeps_all or self._windows(span) is not None

    def tensors(self, span: Span) -> LayerTensors:
        """Return the tensors of the chunk at *span*, without copying, where they are."""
        windows, states = self._windows(span), self._states(span)

        def parts_of(shape: LayerShape) -> list[torch.Tensor]:
            if isinstance(shape, StateShape):
                assert states is not None
                return [states.states[shape].view(1, 1, -1)]
            if shape.window:
                assert windows is not None
                return shape.cut(windows.windows[shape], windows.first(shape), span)
            layer: Any = self.cache.layers[shape.layer]
            whole = [part[self.row].detach() for part in (layer.keys, layer.values)]
            parts = shape.cut(whole, -self.first, span)
            return [torch.cat(parts, -1)] if shape.kind is LayerKind.mla else parts

        return self.shape.chunk(self.layout(span), parts_of)


class PrefixBuffers:
    """Memory on *device* for a prefix of the chunks at *spans*.

    With windows or states all chunks have to come.
    """

    def __init__(self, shape: CacheShape, spans: Sequence[Span], device: torch.device) -> None:
        self._shape = shape
        self._spans = spans
        self._tokens = end = spans[-1][1]
        self._first = {
            s: s.start(next(span for span in spans if self._sees(s, span))) for s in shape.tokens
        }
        # Tensors of their own, so that each is freed once its layer has grown past it.
        self._parts: dict[TokenShape, Parts] = {
            s: [
                torch.empty((s.kv_heads, end - first, width), dtype=s.dtype, device=device)
                for width in s.widths
            ]
            for s, first in self._first.items()
        }
        self._states = {
            s: torch.empty(s.size_bytes, dtype=torch.uint8, device=device) for s in shape.states
        }

    def _sees(self, shape: TokenShape, span: Span) -> bool:
        """Return whether the next token sees any of the chunk at *span*."""
        return not shape.window or span[1] > self._tokens - (shape.window - 1)

    def chunk(self, index: int, layout: KVLayout) -> Nested:
        """Return where chunk *index* goes: views; no layers for what the next token cannot see."""
        span = self._spans[index]

        def parts_of(shape: LayerShape) -> list[torch.Tensor]:
            if isinstance(shape, StateShape):
                is_last = index == len(self._spans) - 1
                return [self._states[shape].view(1, 1, -1)] if is_last else []
            if not self._sees(shape, span):
                return []
            return shape.cut(self._parts[shape], self._first[shape], span)

        found = self._shape.chunk(layout, parts_of)
        return [layers if all(layers) else [] for layers in found]

    def chunks(self, model: Model) -> list[Nested]:
        """Return where all chunks of *model* go, which has neither windows nor states."""
        layouts = [KVLayout.of(model, stop - start) for start, stop in self._spans]
        return [self.chunk(index, layout) for index, layout in enumerate(layouts)]

    def fill(self, cache: Cache, tokens: int) -> None:
        """Have *cache* hold *tokens* of these behind those that it has: with windows or states all.

        An empty DynamicCache takes them without a copy.
        """
        first = length(cache, self._shape)
        is_moved = isinstance(cache, DynamicCache) and not first
        for shape in self._shape.tokens:
            keys, values = self._keys_values(shape, first + tokens)
            if is_moved:
                shape.put(cache.layers[shape.layer], (keys, values), self._tokens)
            else:
                cache.update(keys[:, :, first:], values[:, :, first:], shape.layer)
        for state, data in self._states.items():
            state.unpack(cache.layers[state.layer], data)

    def _keys_values(self, shape: TokenShape, tokens: int) -> Parts:
        kept = slice(-(shape.window - 1), None) if shape.window else slice(tokens)
        parts = [part[None, :, kept] for part in self._parts[shape]]
        return parts[0].split(shape.dims, -1) if shape.kind is LayerKind.mla else parts


# --- where a prefill pauses


def checkpoint_positions(
    shape: CacheShape, span: Span, shared_tokens: int, chunk_tokens: int
) -> list[int]:
    """Return after which tokens of a prompt to pause, ascending.

    *span*: the tokens that are in the cache already, and those of the prompt, the last of which
    is left to generate from. *shared_tokens*: how far others went the same way.
    """
    start, stop = span
    wanted = {end // chunk_tokens * chunk_tokens for end in (stop - 1, shared_tokens)}
    for first in [end - kept for end in wanted for kept in shape.windows]:
        if first > 0 and first % chunk_tokens:  # it reaches into a chunk that it does not cover
            wanted.add((first // chunk_tokens + 1) * chunk_tokens)
    if not shape.keeps_all:
        step = max(chunk_tokens, min(shape.windows, default=0) // chunk_tokens * chunk_tokens)
        wanted.update(range(start // chunk_tokens * chunk_tokens + step, stop, step))
    return sorted(place for place in wanted if start < place < stop)


def prefill(
    model: PreTrainedModel,
    tokens: Sequence[int],
    cache: Cache,
    shape: CacheShape,
    places: Sequence[int],
) -> list[CacheCheckpoint]:
    """Run *model* over *tokens* from the end of *cache* to the last of *places*.

    Return what the cache has of its end at each.
    """
    taken = []
    for place in places:
        ids = torch.tensor([tokens[length(cache, shape) : place]], device=model.device)
        forward(model, ids, cache)
        taken.append(CacheCheckpoint.of(cache, shape))
    return taken


class CheckpointCriteria(StoppingCriteria):
    """Takes checkpoints while a model generates, at ends of chunks; stops nothing.

    Each has the windows of its chunk alone. As many are kept as the longest window reaches over,
    or all of them for models that keep windows alone.
    """

    def __init__(self, cache: Cache, shape: CacheShape, chunk_tokens: int) -> None:
        self.checkpoints: list[CacheCheckpoint] = []
        self._cache = cache
        self._shape = shape
        self._step = chunk_tokens
        longest = max(shape.windows, default=1)
        self._limit = -(-longest // chunk_tokens) if shape.keeps_all else MAX_CHECKPOINTS

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Look at the cache behind *input_ids*, (1, tokens), the last of which is not in it."""
        if length(self._cache, self._shape) % self._step == 0:
            taken = CacheCheckpoint.of(self._cache, self._shape, self._step)
            self.checkpoints = [*self.checkpoints, taken][-self._limit :]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def check_resumable(model: PreTrainedModel, shape: CacheShape, identity: Model) -> None:
    """Raise ModelError unless *model* goes on from a stored prefix as it would have by itself.

    What it computes has to be the same but for rounding, and far less the same with a state left
    out: some models look at theirs for a single token only.
    """
    ids = probe_ids(model)
    whole = forward(model, ids, DynamicCache(config=model.config))

    def error(without: str = "") -> float:
        cache = _restored(model, shape, identity)
        for state in shape.states if without else ():
            for tensor in getattr(cache.layers[state.layer], without).values():
                if tensor is not None:
                    tensor.zero_()
        found = forward(model, ids[:, MIN_CHUNK_TOKENS:], cache)
        return float((found - whole).abs().max())

    rounding, scale = torch.finfo(whole.dtype).eps, float(whole.abs().max())
    bound = min(_ROUNDINGS * rounding, math.sqrt(rounding)) * scale
    for name in {piece.states for state in shape.states for piece in state.pieces}:
        bound = min(bound, max(error(name) / 8, 4 * rounding * scale))
    found = error()
    if not found <= bound:
        fix = f"behind a stored prefix it is {found:.2g} off, more than the {bound:.2g} allowed"
        raise ModelError("model", type(model).__name__, fix)


def _restored(model: PreTrainedModel, shape: CacheShape, identity: Model) -> DynamicCache:
    """Return a cache of the first tokens of the probe, through a chunk and back."""
    span = (0, MIN_CHUNK_TOKENS)
    cache, again = (DynamicCache(config=model.config) for _ in range(2))
    forward(model, probe_ids(model)[:, : span[1]], cache)
    reader = CacheReader(identity, shape, cache, [CacheCheckpoint.of(cache, shape)])
    buffers = PrefixBuffers(shape, [span], model.device)
    _copy(buffers.chunk(0, reader.layout(span)), reader.tensors(span))
    buffers.fill(again, span[1])
    return again


# --- between a device and the host: one copy for all layers of a chunk


class Staging:
    """Memory that chunks of *shape*, *tokens* each at most, pass through to and from *where*.

    A ring of host memory and one piece of device memory, both allocated once. All is queued on
    the stream that the engine computes on: a store reads what was computed before it, and what is
    computed after a load sees what it brought. Hold ``lock`` while places of the ring are in use.
    """

    def __init__(self, device: Device, where: torch.device, shape: CacheShape, tokens: int) -> None:
        self.lock = RLock()
        self._device = device
        self._where = where
        self._slot_bytes = chunk_bytes(shape, tokens)
        self.slots = max(1, RING_BYTES // self._slot_bytes)
        self._last = 0

    @cached_property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ring's memory, uint8 (slots, slot bytes), and the device's, uint8 (slot bytes,)."""
        with torch.inference_mode(False):  # the next to use them may be outside of it
            ring = self._device.staging(self.slots * self._slot_bytes)
            room = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._where)
        return ring.view(self.slots, -1), room

    def to_host(self, tensors: LayerTensors) -> Nested:
        """Return what *tensors* hold, in the ring's next place, when it is there.

        Tensors that are on the host already are returned as they are.
        """
        ring, room = self._memory
        self._last = (self._last + 1) % self.slots
        gathered, size = self._placed(room, tensors)
        found, _ = self._placed(ring[self._last], tensors)
        stream = self._device.current_stream()
        stream.launch(lambda: _copy(gathered, tensors))
        stream.copy(ring[self._last, :size], room[:size])
        stream.record().synchronize()
        return found

    def read(
        self,
        client: Client,
        keys: Sequence[ChunkKey],
        buffers: PrefixBuffers,
        first: int,
        least: Accuracy,
    ) -> list[Stated]:
        """Read the longest run of *keys* from number *first* on into *buffers*, on the device.

        Return what each states, none less so than *least*. They come a ring's worth at a time,
        each in one copy; the last of them is awaited.
        """
        ring, room = self._memory
        found: list[Stated] = []
        for start in range(first, len(keys), self.slots):
            some, wanted = keys[start : start + self.slots], dict[int, Nested]()

            def place(
                index: int, layout: KVLayout, start: int = start, wanted: dict[int, Nested] = wanted
            ) -> AnyTensors:
                wanted[index] = buffers.chunk(start + index, layout)
                return to_arrays(self._placed(ring[index], wanted[index])[0])

            stated: list[Stated] = []
            client.get_chunks(some, place, accuracy=least, stated=stated)
            stream = self._device.current_stream()
            for index in range(len(stated)):
                arrived, size = self._placed(room, wanted[index])
                stream.copy(room[:size], ring[index, :size])
                stream.launch(partial(_copy, wanted[index], arrived))
            stream.record().synchronize()
            found += stated
            if len(stated) < len(some):
                break
        return found

    def _placed(self, memory: torch.Tensor, tensors: LayerTensors) -> tuple[Nested, int]:
        """Return views of *memory*, uint8 (bytes,), like *tensors*, and the bytes they take."""
        end = 0

        def place(like: Any) -> torch.Tensor:
            nonlocal end
            if like.device != self._where:
                return like  # type: ignore[no-any-return]
            start, end = end, end + _aligned(like.nbytes)
            return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

        nested = [[[place(part) for part in parts] for parts in layers] for layers in tensors]
        return nested, end


def _copy(out: LayerTensors, data: LayerTensors) -> None:
    with torch.no_grad():
        for to, part in zip(flat(out), flat(data), strict=True):
            if to is not part:
                to.copy_(part)


def chunk_bytes(shape: CacheShape, tokens: int) -> int:
    """Return what a chunk of so many tokens takes at most, with its windows and states."""
    sizes = [state.size_bytes for state in shape.states]
    for layer in shape.tokens:
        row_bytes = layer.held(tokens) * layer.kv_heads * layer.dtype.itemsize
        sizes += [row_bytes * dim for dim in layer.dims]
    return sum(map(_aligned, sizes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def device_of(model: PreTrainedModel) -> Device | None:
    """Return the model's device; None for the CPU, between which and itself nothing is copied."""
    if model.device.type == "cpu":
        return None
    # Copies of torch's own wait for other devices than CUDA's.
    return open_device(model.device) if model.device.type == "cuda" else HostDevice()
