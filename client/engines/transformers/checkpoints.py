"""Where a prompt's prefill pauses, so that what is of the end of a prefix can be taken there.

A recurrent state is that of the last token, so it can be stored only while the model stands
there. As Marconi has it (Pan et al., MLSys 2025, section 4.2), two places of a prompt are worth
it: where it leaves what others asked, which the server knows, and where it ends. Both are ends
of chunks; so is every chunk_tokens-th token of what is generated, of which the last is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria

from kvstore.client.engines.prefix import Span
from kvstore.client.engines.transformers.cache import (
    CacheCheckpoint,
    CacheReader,
    CacheShape,
    PrefixBuffers,
    flat,
    forward,
    length,
    probe_ids,
)
from kvstore.proto.errors import ModelError
from kvstore.proto.types import MIN_CHUNK_TOKENS, Model

MAX_CHECKPOINTS = 4096
"""Of models that keep windows alone, which need one every so many tokens."""

_ROUNDINGS = 64
"""Of the largest number, what two ways to the same one may differ by in float32."""


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
    """Run *model* over a prompt's *tokens* from the end of *cache* to the last of *places*.

    Return what the cache has of its end at each.
    """
    if not places:
        return []
    ids, taken = torch.tensor([tokens], device=model.device), []
    for place in places:
        forward(model, ids[:, length(cache, shape) : place], cache)
        taken.append(CacheCheckpoint.of(cache, shape))
    return taken


def check_resumable(model: PreTrainedModel, shape: CacheShape, identity: Model) -> None:
    """Raise ModelError unless *model* goes on from a prefix that was stored and loaded
    as it would have gone on by itself.

    What it computes has to be the same but for rounding, and far less the same with a state left
    out: some models look at theirs for a single token only.
    """
    whole = forward(model, probe_ids(model), DynamicCache(config=model.config))

    def error(cache: DynamicCache) -> float:
        rest = probe_ids(model)[:, MIN_CHUNK_TOKENS:]
        return float((forward(model, rest, cache) - whole).abs().max())

    rounding, scale = torch.finfo(whole.dtype).eps, float(whole.abs().max())
    found = error(_restored(model, shape, identity))
    bound = min(_ROUNDINGS * rounding, math.sqrt(rounding)) * scale
    for name in {piece.states for state in shape.states for piece in state.pieces}:
        cache = _restored(model, shape, identity)
        for state in shape.states:
            for tensor in getattr(cache.layers[state.layer], name).values():
                if tensor is not None:
                    tensor.zero_()
        bound = min(bound, max(error(cache) / 8, 4 * rounding * scale))
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
    places, tensors = buffers.chunk(0, reader.layout(span)), reader.tensors(span)
    for place, part in zip(flat(places), flat(tensors), strict=True):
        place.copy_(part)
    buffers.move_into(again, span[1])
    return again


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
