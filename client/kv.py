"""KV of a whole prompt, as a caller holds it, and the location of each chunk in it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from kvstore.client.chunk import (
    Chunk,
    Span,
    TensorLike,
    bits,
    check_apart,
    copying,
    group_array,
    host_tensor,
    is_on_device,
    parents,
    tensors_in,
    twin,
)
from kvstore.client.decode import Layer
from kvstore.client.paged_cache import Blocks, PagedCache, kept_from
from kvstore.codecs.base import Part
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, is_whole
from kvstore.proto.keys import chunk_spans
from kvstore.proto.types import ChainDigest, ChunkKey, KVLayout, LayerGroup, LayerKind, Model

KV: TypeAlias = "TensorLike | Mapping[int, Sequence[TensorLike]] | Sequence[TensorLike] | Blocks"
"""One tensor (layers, 2, kv_heads, tokens, head_dim), numpy or torch, CPU or CUDA; of hybrid models
a list of such, one for each layer group; the parts of each layer by its number, (kv_heads, tokens,
head_dim) each; or ``cache[block_ids]`` of a PagedCache. All of the model's dtype, or unsigned
integers of its size."""
STAGED_BYTES = 256 << 20
"""Limit of KV of CUDA tensors staged in host memory at once, but at least one chunk."""


class WholeKV:
    """Tensors over all tokens of a prompt; see KV. ``groups``: layers, then parts."""

    def __init__(self, model: Model, groups: Sequence[Sequence[Sequence[Part]]]) -> None:
        self._model = model
        self._groups = groups
        self.tokens = min(part.shape[1] for group in groups for parts in group for part in parts)

    @property
    def is_writable(self) -> bool:
        """Whether all of it may be written to."""
        return all(p.flags.writeable for group in self._groups for parts in group for p in parts)

    def chunk(self, start: int, stop: int, layout: KVLayout) -> Any:
        """Return tokens *start* to *stop* as they lie, of the layers that *layout* has."""
        found = []
        for group, layers in zip(self._model.layer_groups, self._groups, strict=True):
            if layout.has(group.kind):
                first = kept_from(group, start, stop)
                found.append([[part[:, first:stop] for part in parts] for parts in layers])
        return found


class StagedKV:
    """CUDA tensors, see KV, whose chunks pass through host memory, ``most`` at a time; it is
    allocated at the first chunk.
    """

    is_writable = True

    def __init__(
        self, name: str, kv: Any, model: Model, prompt: Prompt, *, is_target: bool
    ) -> None:
        self._model = model
        self._blocks = kv if isinstance(kv, Blocks) else None
        self._prompt = prompt
        numbers = [number for group in model.layer_groups for number in group.layer_ids]
        far: Iterable[Any]
        if isinstance(kv, Blocks):
            self.tokens, far = kv.tokens, kv.cache.far
        else:
            tensors = list(tensors_in(kv))
            if not all(map(is_on_device, tensors)):
                fix = "give CUDA tensors only, or none"
                raise LayoutMismatchError(name, "a tensor on the host", fix)
            self.tokens = WholeKV(model, _groups(name, twin(kv), model)).tokens
            if isinstance(kv, Mapping):
                far = (kv[at] for at in numbers)
            else:
                far = (list(layer) for one in tensors for layer in one.detach())
        self._far: dict[int, Sequence[Any]] = dict(zip(numbers, far, strict=True))
        has_windows = any(group.kind is LayerKind.window for group in model.layer_groups)
        self._is_read = not is_target or has_windows
        """Also for targets with windows: tokens left out of them keep the caller's contents."""
        self.most = max(1, STAGED_BYTES // KVLayout.of(model, prompt.chunk_tokens).raw_bytes)
        self._part: _StagedPart | None = None
        self._opening = Lock()

    def chunk(self, start: int, stop: int, layout: KVLayout) -> Any:
        """Do what ``WholeKV.chunk`` does, in host memory. Raises TierUnavailableError.

        Invalidates what was returned for other parts of the prompt.
        """
        tokens = self.most * self._prompt.chunk_tokens
        first = start - (start - self._prompt.spans[0][0]) % tokens
        with self._opening:  # concurrent callers wait for the same part
            if self._part is None or self._part.start != first:
                self._part = None  # frees its memory first
                span, far = (first, min(self._prompt.stop, first + tokens)), self._far
                opened = _StagedPart(self._model, far, span, self._blocks, is_read=self._is_read)
                self._part = opened
            held = self._part
        return held.chunk(start, stop, layout)

    def upload(self, count: int, layers: Iterable[int] = ()) -> None:
        """Copy the last part's chunks among the prompt's first *count* to the device: *layers*, or
        all. Raises TierUnavailableError.
        """
        if self._part is not None:
            self._part.upload(self._prompt.end_of(count - 1), layers)

    def uploaded(self, layers: Generator[Layer, None, None]) -> Generator[Layer, None, None]:
        """Yield *layers*, of all chunks each, once they are on the device."""
        self.most = max(1, len(self._prompt.keys))
        with closing(layers):
            for layer in layers:
                if layer.tensors:
                    self.upload(len(layer.tensors), [layer.id])
                yield layer


class _StagedPart:
    """The tokens *span* of a prompt, in host memory: a copy of *far*, if it *is_read*.

    *far*: each layer's tensors of the prompt, or all pages, of which it has *blocks*.
    """

    def __init__(
        self,
        model: Model,
        far: Mapping[int, Sequence[Any]],
        span: Span,
        blocks: Blocks | None,
        *,
        is_read: bool,
    ) -> None:
        start, stop = span
        self.start = start
        self._axes = () if blocks is None else blocks.cache.axes
        self._size = size = 1 if blocks is None else blocks.cache.block_tokens
        self._ids: list[int] | None = None
        if blocks is None:
            far = {at: [one[:, start:stop] for one in some] for at, some in far.items()}
        else:
            self._ids = blocks.block_ids[start // size : -(-stop // size)].tolist()
        self._far = far
        self._first = start - start % size
        self._copies: dict[int, list[tuple[Any, Any]]] = {}
        with copying(*chain(*far.values())):
            buffers = {at: list(map(self._allocate, some)) for at, some in far.items()}
            for at, buffer in buffers.items():
                ends = (map(self._blocks_first, map(bits, some)) for some in (far[at], buffer))
                self._copies[at] = list(zip(*ends, strict=True))
            for one, other in chain.from_iterable(self._copies.values()) if is_read else ():
                other.copy_(one if self._ids is None else one[self._ids])
        self._held: WholeKV | Blocks
        if self._ids is None:
            self._held = WholeKV(model, _groups("kv", buffers, model))
        else:
            pages = [some[0] if "kv" in self._axes else some for some in buffers.values()]
            self._held = PagedCache(model, pages, " ".join(self._axes))[range(len(self._ids))]

    def chunk(self, start: int, stop: int, layout: KVLayout) -> Any:
        return self._held.chunk(start - self._first, stop - self._first, layout)

    def _allocate(self, far: Any) -> Any:
        if self._ids is None:
            return host_tensor(far.shape, far.dtype)
        at = self._axes.index("block")
        shape = [size for axis, size in enumerate(far.shape) if axis != at]
        return host_tensor((len(self._ids), *shape), far.dtype).movedim(0, at)

    def _blocks_first(self, tensor: Any) -> Any:
        return tensor if self._ids is None else tensor.movedim(self._axes.index("block"), 0)

    def upload(self, stop: int, layers: Iterable[int]) -> None:
        start, stop = self.start - self._first, stop - self._first
        with copying(*chain(*self._far.values())):
            for number in layers or self._copies:
                for far, near in self._copies[number]:
                    if self._ids is None:
                        far[:, :stop].copy_(near[:, :stop])
                    else:
                        self._scatter(self._ids, far, near, (start, stop))

    def _scatter(self, ids: list[int], far: Any, near: Any, tokens: tuple[int, int]) -> None:
        """Copy *tokens* of one tensor's pages, and no other slot of a block."""
        size, (start, stop) = self._size, tokens
        whole = range(-(-start // size), stop // size)
        if whole:
            some = ids[whole.start : whole.stop]
            there = far.new_empty((len(some), *far.shape[1:]))
            far[some] = there.copy_(near[whole.start : whole.stop])
        for at in sorted({start // size, stop // size} - set(whole)):
            slots = (max(start - at * size, 0), min(stop - at * size, size))
            if slots[0] < slots[1]:
                axis = [name for name in self._axes if name != "block"].index("token")
                cut = (slice(None),) * axis + (slice(*slots),)
                far[ids[at]][cut].copy_(near[at][cut])


AnyKV: TypeAlias = WholeKV | StagedKV | Blocks


def kv_of(name: str, kv: KV, model: Model, prompt: Prompt, *, is_target: bool) -> AnyKV:
    """Return *kv*, the argument *name*, checked to be KV of *model* for all of *prompt*.

    Raises LayoutMismatchError, and InvalidRequestError for a read-only target.
    """
    if isinstance(kv, Blocks) and kv.cache.model != model:
        raise LayoutMismatchError(name, kv.cache.model.model_id, "give a cache of this Model")
    found: AnyKV
    if any(map(is_on_device, tensors_in(kv.cache.far if isinstance(kv, Blocks) else kv))):
        found = StagedKV(name, kv, model, prompt, is_target=is_target)
    elif isinstance(kv, Blocks):
        found = kv
    else:
        found = WholeKV(model, _groups(name, kv, model))
    if found.tokens < prompt.least_tokens:
        fix = f"needs {prompt.least_tokens} tokens"
        raise LayoutMismatchError(name, found.tokens, fix)
    if is_target and not found.is_writable:
        raise InvalidRequestError(name, "read-only", "give writable memory")
    if is_target and not isinstance(kv, Blocks):  # a PagedCache has checked its pages
        check_apart(name, tensors_in(kv))
    return found


def _groups(name: str, kv: Any, model: Model) -> list[list[list[Part]]]:
    groups = model.layer_groups
    for group in groups:
        if group.kind is LayerKind.state:
            fix = "states have no token axis: use get_chunks and put_chunks"
            raise LayoutMismatchError(name, group.kind.name, fix)
    if isinstance(kv, Mapping):
        wanted = {layer for group in groups for layer in group.layer_ids}
        if set(kv) != wanted:
            raise LayoutMismatchError(name, list(kv), f"give the layers {sorted(wanted)}")
        return [[_parts(name, kv[layer], group) for layer in group.layer_ids] for group in groups]
    given = [kv] if hasattr(kv, "shape") else kv
    if not isinstance(given, Sequence) or len(given) != len(groups):
        fix = f"give a tensor for each of {len(groups)} layer groups, layers by number, or blocks"
        raise LayoutMismatchError(name, type(kv).__name__, fix)
    return [_layers(name, one, group) for one, group in zip(given, groups, strict=True)]


def _layers(name: str, tensor: Any, group: LayerGroup) -> list[list[Part]]:
    """Return the parts of each layer of one tensor, (layers, parts, kv_heads, tokens, head_dim)."""
    layers, shape = len(group.layer_ids), tuple(getattr(tensor, "shape", ()))
    if len(shape) != 5 or shape[:2] != (layers, group.parts):
        fix = f"give ({layers}, {group.parts}, {group.kv_heads}, tokens, {group.head_dim})"
        raise LayoutMismatchError(name, shape, fix)
    return [_parts(name, list(layer), group) for layer in group_array(name, tensor, group)]


def _parts(name: str, parts: Any, group: LayerGroup) -> list[Part]:
    if not isinstance(parts, Sequence) or len(parts) != group.parts:
        raise LayoutMismatchError(name, type(parts).__name__, f"give {group.parts} parts a layer")
    found = [group_array(name, part, group) for part in parts]
    for part in found:
        if part.ndim != 3 or (part.shape[0], part.shape[2]) != (group.kv_heads, group.head_dim):
            fix = f"give ({group.kv_heads}, tokens, {group.head_dim})"
            raise LayoutMismatchError(name, part.shape, fix)
    return found


def empty_kv(model: Model, tokens: int) -> Any:
    """Return new tensors for *tokens* tokens: one, or of hybrid models one for each layer group.

    They are numpy arrays, or torch tensors for types that numpy lacks.
    """
    found: list[Any] = []
    for group in model.layer_groups:
        shape = (len(group.layer_ids), group.parts, group.kv_heads, tokens, group.head_dim)
        if hasattr(np, group.dtype.name):
            found.append(np.empty(shape, group.dtype.name))
        else:
            import torch

            found.append(torch.empty(shape, dtype=getattr(torch, group.dtype.name)))
    return found[0] if len(found) == 1 else found


def first_tokens(kv: Any, tokens: int) -> Any:
    """Return the first *tokens* of the tensors of ``empty_kv``."""
    if isinstance(kv, list):
        return [first_tokens(one, tokens) for one in kv]
    return kv[:, :, :, :tokens]


class Prompt:
    """The chunks of one prompt, and the location of each one's KV.

    *tokens*: how many it has; None for a prompt given by its *keys*, whose last chunk may be short.
    Chunks that end within the first *start* tokens are left out.
    """

    def __init__(
        self, tokens: int | None, keys: Sequence[ChunkKey], start: int, chunk_tokens: int
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._exact = tokens is not None
        count = len(keys) * chunk_tokens if tokens is None else tokens
        if not is_whole(start) or not 0 <= start <= count:
            raise InvalidRequestError("start", start, f"give 0 to {count}, the prompt's tokens")
        whole = chunk_spans(count, chunk_tokens)
        first = sum(stop <= start for _, stop in whole)
        self.start: int = int(start)
        self.spans: Sequence[tuple[int, int]] = whole[first:]
        """First token, and the one after the last, of each chunk that is left."""
        self.keys: Sequence[ChunkKey] = keys[first:]
        self._every: Sequence[ChunkKey] = keys
        self._first: int = first
        self.stop: int = whole[-1][1] if whole else 0
        self._layouts: dict[int, KVLayout] = {}

    def target(self, held: AnyKV) -> Callable[[int, KVLayout], Any]:
        """Return the function from a chunk's index and layout to its tensors in *held*."""

        def target(index: int, layout: KVLayout) -> Any:
            start, stop = self.spans[index]
            is_short = not self._exact and stop == self.stop and layout.tokens < stop - start
            if layout.tokens != stop - start and not is_short:
                raise InvalidRequestError(
                    "keys", layout.tokens, f"chunks have {self.chunk_tokens} tokens"
                )
            self._layouts[index] = layout
            return held.chunk(start, start + layout.tokens, layout)

        return target

    def reached(self, chunks: int) -> int:
        """Return how many tokens the caller has once the first *chunks* left were read."""
        return max(self.start, self.end_of(chunks - 1) if chunks else 0)

    def usable(self, chunks: int, model: Model) -> int:
        """Return how many of the *chunks* that were read the model can continue from: the windows
        of the last tokens before that end were read, or the caller has them.
        """
        windows = [group for group in model.layer_groups if group.kind is LayerKind.window]
        while chunks and not all(self._has_window(group, chunks) for group in windows):
            chunks -= 1
        return chunks

    def _has_window(self, group: LayerGroup, chunks: int) -> bool:
        at = self.end_of(chunks - 1)
        needed = max(self.start, at - max(1, group.window_tokens - 1))
        for index in reversed(range(chunks)):
            if at <= needed:
                break
            if not self._layouts[index].has(LayerKind.window):
                return False
            at = kept_from(group, self.spans[index][0], at)
        return True

    def end_of(self, index: int) -> int:
        """Return where chunk *index* of those left ends; its layout must be known."""
        return self.spans[index][0] + self._layouts[index].tokens

    @property
    def chunks(self) -> Iterator[tuple[ChunkKey, ChainDigest, tuple[int, int]]]:
        """Key, parent digest and span of each chunk that is left."""
        before = parents(self._every)[self._first :]
        return zip(self.keys, before, self.spans, strict=True)

    @property
    def least_tokens(self) -> int:
        """The least tokens that KV of this prompt must have."""
        return self.stop if self._exact or not self.stop else self.stop - self.chunk_tokens + 1


def batches_to_put(model: Model, prompt: Prompt, held: AnyKV) -> Iterator[list[Chunk]]:
    """Yield the chunks of *prompt*, as many at a time as host memory is staged for."""
    named = list(prompt.chunks)
    most = held.most if isinstance(held, StagedKV) else max(1, len(named))
    for at in range(0, len(named), most):
        yield [  # no name keeps a chunk while the next ones are staged
            Chunk(key, held.chunk(first, stop, of), parent=parent, position=first, layout=of)
            for key, parent, (first, stop) in named[at : at + most]
            for of in [KVLayout.of(model, stop - first)]
        ]


@dataclass(frozen=True, slots=True)
class Hit:
    """The result of ``get``: the first ``tokens`` of the prompt, in ``chunks`` that were read.

    ``tiers``: the source of each chunk. ``kv``: the tensors, if no ``out`` was given.
    """

    tokens: int
    chunks: int
    tiers: tuple[str, ...]
    kv: Any = None
