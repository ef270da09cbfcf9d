"""Lossy copies compared with a full prefill: what opens and closes the gate
of a model and a codec."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvstore.client.blend.gate import compare
from kvstore.client.engines.prefix import Prefix
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import accuracy_tag

COMPARED_TOKENS = 64
"""Of a prompt's end: what a comparison weighs most at."""

ALWAYS_COMPARED = 8
COMPARED_EVERY = 200
"""Prompts of a connector behind copies without a bound: the first ones, then one in so many."""


class Comparisons:
    """Which prompts of a connector are compared with a full prefill. Any thread may call."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def next(self, prefix: Prefix, cache: Cache) -> Cache | None:
        """Return a copy of *cache*, which holds *prefix* alone, to compare once there is time.

        None where no copy without a bound is in it, where several codecs made such ones, as nobody
        could say whose fault it were, and for most prompts.
        """
        if len(prefix.codecs) != 1:
            return None
        number = next(self._numbers)
        is_compared = number < ALWAYS_COMPARED or number % COMPARED_EVERY == 0
        return copy.deepcopy(cache) if is_compared else None


def comparison(
    model: PreTrainedModel, tokens: Sequence[int], cache: Cache, prefix: Prefix
) -> pb.ReportReuseRequest:
    """Return what the gate is told of a prompt of which *cache* holds *prefix*, lossy by one codec.

    The logits of the last tokens behind *cache*, which is used up, are compared with those of a
    full prefill. So that there are enough, less of the cache is used, but half of what is lossy
    stays.
    """
    exact, held = prefix.exact_tokens, int(cache.get_seq_length())
    left = max(len(tokens) - COMPARED_TOKENS, exact + -(-(held - exact) // 2))
    if isinstance(cache, DynamicCache) and left < held:
        cache.crop(left - held)
        held = left
    ids = torch.tensor([tokens], device=model.device)
    rows = min(COMPARED_TOKENS, len(tokens) - held)
    full = _logits(model, ids, DynamicCache(config=model.config), rows)
    lossy = _logits(model, ids[:, held:], cache, rows)
    found = compare(full, lossy)
    shadow = pb.ShadowResult(
        divergence=found.divergence, agreement=found.agreement, tokens=found.tokens
    )
    (codec,) = prefix.codecs
    return pb.ReportReuseRequest(tag=accuracy_tag(codec), shadow=shadow)


def _logits(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, rows: int) -> torch.Tensor:
    """Return the logits of the last *rows* of *ids*, (1, tokens): (rows, vocabulary)."""
    engine: Any = model
    with torch.inference_mode():
        output = engine(ids, **as_argument(cache), use_cache=True, logits_to_keep=rows)
    found: torch.Tensor = output.logits[0, -rows:]
    return found
