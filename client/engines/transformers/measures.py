"""What is measured while a model answers: time, which tokens matter, what lossy copies change.

Codecs that spend more bits on some tokens are given their importance (``Chunk.importance``). A
token that gets much attention is worth more (MiKV, Yang et al., arXiv 2402.18096, section 3), and
what the last tokens of a prompt look at is what is looked at behind them (SnapKV, Li et al.,
arXiv 2404.14469, section 3.2). It is the mean over the queries that see a token: a sum favours
those that more see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
)

from kvstore.client.blend.gate import compare
from kvstore.client.engines.base import Prefix
from kvstore.client.engines.transformers.cache import CacheShape, as_argument, notes_of
from kvstore.codecs.terms import Importance
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import accuracy_tag

QUERIES = 16
"""The last tokens of a prompt whose attention counts."""
LAYERS = 8
"""About as many layers are looked at, from the first one on. More are no better."""

COMPARED_TOKENS = 64
"""Of a prompt's end: what a comparison weighs most at."""

Attend = Callable[..., Any]
_WATCHED: dict[str, Attend] = {}
"""What is registered with transformers in place of its own implementations of attention."""
_FAULTS = (RuntimeError, MemoryError)
"""Of torch, which has no memory left for instance: nothing is noted then, and no request fails."""
_HERE = threading.local()
"""Its ``look`` is that of this thread, if there is one."""


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


# --- importance


@contextmanager
def noting_attention(
    model: PreTrainedModel, cache: Cache, shape: CacheShape, tokens: int
) -> Iterator[Sequence[StoppingCriteria]]:
    """Look at what *model* generates within, in this thread, from a prompt of so many *tokens*.

    What these get until the first token is there is noted in *cache*. Give ``generate`` the
    criteria that this yields: they end the look, and stop nothing. Nothing is noted of 0 *tokens*,
    in static caches and those with windows or states, nor of attention that a model computes
    without an implementation of transformers' (``eager``).
    """
    config: Any = model.config.get_text_config()
    is_seen = tokens and not shape.has_ends and not isinstance(cache, StaticCache)
    if not is_seen or not _is_watched(config._attn_implementation):
        yield []
        return
    look = _Look(tokens, max(1, len(shape.tokens) // LAYERS))
    with ExitStack() as stack:
        stack.callback(setattr, _HERE, "look", None)
        _HERE.look = look
        yield [FirstToken(lambda _: stack.close())]
    notes_of(cache).importance = look.weights()


def _is_watched(name: str) -> bool:
    """Have the implementation called *name* watched; return whether there is one."""
    own: Attend | None = AttentionInterface().get(name)  # type: ignore[no-untyped-call]
    if own is None:
        return False
    if own is not _WATCHED.get(name):
        _WATCHED[name] = _watched(own)
        AttentionInterface.register(name, _WATCHED[name])
    return True


def _watched(own: Attend) -> Attend:
    @wraps(own)
    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        # Compiled models have static caches, and cannot look at a thread.
        look = None if torch.compiler.is_compiling() else getattr(_HERE, "look", None)
        if look is not None:
            look.note(query, key, named.get("scaling"))
        return own(module, query, key, *more, **named)

    return attend


class _Look:
    """Collects what attention each of *tokens* gets, in every *step*-th layer."""

    def __init__(self, tokens: int, step: int) -> None:
        self._tokens = tokens
        self._step = step
        self._layers = 0
        self._found: list[torch.Tensor] | None = []

    def note(self, queries: torch.Tensor, keys: torch.Tensor, scale: float | None) -> None:
        """Take *queries*, (1, heads, some, dim), and *keys*, (1, kv_heads, tokens, dim)."""
        if keys.ndim != 4 or keys.shape[0] != 1 or keys.shape[2] != self._tokens:
            return
        is_looked_at, self._layers = self._layers % self._step == 0, self._layers + 1
        if is_looked_at and self._found is not None:
            try:
                with torch.no_grad():
                    self._found.append(mean_attention(queries[0, :, -QUERIES:], keys[0], scale))
            except _FAULTS:
                self._found = None

    def weights(self) -> Importance | None:
        """Return the weights, f32 (tokens,), positive; None where there is none to be had."""
        if not self._found:
            return None
        try:
            weights: Importance = torch.stack(self._found).mean(0).cpu().numpy()
        except _FAULTS:
            return None
        # 0 would say that a token is of no importance; that it got little does not.
        tiny = np.finfo(np.float32).tiny
        return np.maximum(weights, tiny) if np.isfinite(weights).all() else None


def mean_attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return the attention that each key gets, the mean over heads and who sees it: (tokens,).

    *queries* are those of the last tokens, (heads, some, dim), *keys* (kv_heads, tokens, dim).
    """
    (heads, count, dim), (kv_heads, tokens, _) = queries.shape, keys.shape
    grouped = queries.reshape(kv_heads, -1, dim) * (dim**-0.5 if scale is None else scale)
    hidden = torch.full((count, count), float("-inf"), dtype=keys.dtype, device=keys.device)
    hidden = hidden.triu(1)
    given = torch.zeros(tokens, dtype=torch.float32, device=keys.device)
    for own, key in zip(grouped, keys, strict=True):  # all heads at once would take much memory
        logits = (own @ key.T).view(-1, count, tokens)
        logits[:, :, -count:] += hidden
        given += logits.softmax(-1, dtype=torch.float32).sum((0, 1)) / heads
    # The first of the last tokens is seen by all of them, the last by itself alone.
    given[-count:] /= torch.arange(count, 0, -1, device=keys.device)
    given[:-count] /= count
    return given


# --- lossy copies, which open and close the gate of a model and a codec


def comparison(
    model: PreTrainedModel, tokens: Sequence[int], cache: Cache, prefix: Prefix
) -> pb.ReportReuseRequest:
    """Return the report on a prompt of which *cache* holds *prefix*, lossy by one codec.

    The logits of the last tokens behind *cache*, which is used up, are compared with those of a
    full prefill. So that there are enough, less of the cache is used, but half of what is lossy
    stays.
    """
    exact, held = prefix.exact_tokens, int(cache.get_seq_length())
    left = max(len(tokens) - COMPARED_TOKENS, exact + -(-(held - exact) // 2))
    if isinstance(cache, DynamicCache) and left < held:
        cache.crop(left - held)
        held = left
    rows = min(COMPARED_TOKENS, len(tokens) - held)
    full = _logits(model, tokens, DynamicCache(config=model.config), rows)
    found = compare(full, _logits(model, tokens[held:], cache, rows))
    (codec,) = prefix.codecs
    return pb.ReportReuseRequest(tag=accuracy_tag(codec), shadow=found.message())


def _logits(model: PreTrainedModel, tokens: Sequence[int], cache: Cache, rows: int) -> torch.Tensor:
    """Return the logits of the last *rows* of *tokens*: (rows, vocabulary)."""
    engine: Any = model
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        output = engine(ids, **as_argument(cache), use_cache=True, logits_to_keep=rows)
    found: torch.Tensor = output.logits[0, -rows:]
    return found
