"""Where a prompt's prefill pauses, so that what is of the end of a prefix can be taken there.

A recurrent state is that of the last token, so it can be stored only while the model stands
there. As Marconi has it (Pan et al., MLSys 2025, section 4.2), two places of a prompt are worth
it: where it leaves what others asked, which the server knows, and where it ends. Both are ends
of chunks; so is every chunk_tokens-th token of what is generated, of which the last is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

from kvstore.client.engines.prefix import Span
from kvstore.client.engines.transformers.cache import CacheShape, forward, probe_ids
from kvstore.client.engines.transformers.ends import EndSource, PrefixRoom, Snapshot, length
from kvstore.proto.errors import ModelError
from kvstore.proto.types import MIN_CHUNK_TOKENS, Model

MAX_SNAPSHOTS = 4096
"""Of models that keep windows alone, which need one every so many tokens."""

_ROUNDINGS = 64
"""Of the largest number, what two ways to the same one may differ by in float32."""


def pauses(shape: CacheShape, span: Span, shared_tokens: int, chunk_tokens: int) -> list[int]:
    """Return after which tokens of a prompt to pause, ascending.

    *span*: the tokens that are in the cache already, and those of the prompt, the last of which
    is left to generate from. *shared_tokens*: how far others went the same way.
    """
    start, stop = span
    ends = {(stop - 1) // chunk_tokens * chunk_tokens, shared_tokens // chunk_tokens * chunk_tokens}
    wanted = {place for end in ends for place in (end, *_straddled(shape, end, chunk_tokens))}
    if not shape.keeps_all:
        step = max(chunk_tokens, shape.shortest_window // chunk_tokens * chunk_tokens)
        wanted.update(range(start // chunk_tokens * chunk_tokens + step, stop, step))
    return sorted(place for place in wanted if start < place < stop)


def _straddled(shape: CacheShape, end: int, chunk_tokens: int) -> Iterator[int]:
    """Yield the ends of chunks that a window before *end* reaches into and does not cover."""
    for kept in {layer.window - 1 for layer in shape.tokens if layer.window}:
        first = end - kept
        if first > 0 and first % chunk_tokens:
            yield (first // chunk_tokens + 1) * chunk_tokens


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    shape: CacheShape,
    places: Sequence[int],
) -> list[Snapshot]:
    """Run *model* over *input_ids*, (1, tokens), from the end of *cache* to the last of *places*.

    Return what the cache has of its end at each.
    """
    snapshots = []
    start = length(cache, shape) if places else 0
    for place in places:
        forward(model, input_ids[:, start:place], cache)
        snapshots.append(Snapshot.of(cache, shape))
        start = place
    return snapshots


def continues(model: PreTrainedModel, shape: CacheShape, representation: Model) -> None:
    """Raise ModelError unless *model* goes on from a prefix that was stored and loaded
    as it would have gone on by itself.

    What it computes has to be the same but for rounding, and far less the same with a state left
    out: some models look at theirs for a single token only.
    """
    ids = probe_ids(model)
    whole = forward(model, ids, DynamicCache(config=model.config))
    rounding, scale = torch.finfo(whole.dtype).eps, float(whole.abs().max())
    error = _error(model, _restored(model, shape, representation), whole)
    bound = min(_ROUNDINGS * rounding, math.sqrt(rounding)) * scale
    for name in {piece.states for state in shape.states for piece in state.pieces}:
        cache = _restored(model, shape, representation)
        for state in shape.states:
            for tensor in getattr(cache.layers[state.layer], name).values():
                if tensor is not None:
                    tensor.zero_()
        bound = min(bound, max(_error(model, cache, whole) / 8, 4 * rounding * scale))
    if not error <= bound:
        fix = f"behind a stored prefix it is {error:.2g} off, more than the {bound:.2g} allowed"
        raise ModelError("model", type(model).__name__, fix)


def _restored(model: PreTrainedModel, shape: CacheShape, representation: Model) -> DynamicCache:
    """Return a cache of the first tokens of the probe, through a chunk and back."""
    span = (0, MIN_CHUNK_TOKENS)
    cache, again = (DynamicCache(config=model.config) for _ in range(2))
    forward(model, probe_ids(model)[:, : span[1]], cache)
    source = EndSource(representation, shape, cache, [Snapshot.of(cache, shape)])
    room = PrefixRoom(shape, [span], model.device)
    pairs = zip(room.chunk(0, source.layout(span)), source.tensors(span), strict=True)
    for places, tensors in pairs:
        for to, parts in zip(places, tensors, strict=True):
            for place, part in zip(to, parts, strict=True):
                place.copy_(part)  # type: ignore[arg-type]
    room.move_into(again, span[1])
    return again


def _error(model: PreTrainedModel, cache: DynamicCache, whole: torch.Tensor) -> float:
    rest = probe_ids(model)[:, MIN_CHUNK_TOKENS:]
    return float((forward(model, rest, cache) - whole).abs().max())


class Watch(StoppingCriteria):
    """Takes snapshots while a model generates, at ends of chunks; stops nothing.

    Each has the windows of its chunk alone. As many are kept as the longest window reaches over,
    or all of them for models that keep windows alone.
    """

    def __init__(self, cache: Cache, shape: CacheShape, chunk_tokens: int) -> None:
        self.snapshots: list[Snapshot] = []
        self._cache = cache
        self._shape = shape
        self._step = chunk_tokens
        longest = max((layer.window - 1 for layer in shape.tokens if layer.window), default=1)
        self._limit = -(-longest // chunk_tokens) if shape.keeps_all else MAX_SNAPSHOTS

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Look at the cache behind *input_ids*, (1, tokens), the last of which is not in it."""
        if length(self._cache, self._shape) % self._step == 0:
            taken = Snapshot.of(self._cache, self._shape, self._step)
            self.snapshots = [*self.snapshots, taken][-self._limit :]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class FirstToken(StoppingCriteria):
    """Tells *note* when the first token came, in seconds from its birth on; stops nothing."""

    def __init__(self, note: Callable[[float], None]) -> None:
        self._note: Callable[[float], None] | None = note
        self._began_s = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Look at the clock, once what was queued on a device is done."""
        note, self._note = self._note, None
        if note is not None:
            int(input_ids[0, -1])
            note(time.perf_counter() - self._began_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Beside:
    """Computes chunks of a prompt into *cache* while others load; what it raises is in ``error``.

    The last token is left to generate from. *note* is told how many tokens took how many seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        tokens: Sequence[int],
        chunk_tokens: int,
        note: Callable[[int, float], None],
    ) -> None:
        self._model, self._cache, self._note = model, cache, note
        self._ids = torch.tensor([tokens], device=model.device)
        self._chunk_tokens = chunk_tokens
        self.error: Exception | None = None

    def __call__(self, chunks: range) -> None:
        """Compute *chunks*, those behind what the cache has."""
        start = chunks.start * self._chunk_tokens
        some = self._ids[:, start : min(chunks.stop * self._chunk_tokens, self._ids.shape[1] - 1)]
        began_s = time.perf_counter()
        try:
            last = forward(self._model, some, self._cache)
            float(last[0, 0])  # the next is begun once this is done, on a device, too
        except Exception as error:
            self.error = error
            raise
        self._note(some.shape[1], time.perf_counter() - began_s)
