"""Inputs of generation, and measurements during it: token importance, the error of lossy copies."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
)

from kvstore.client.blend.gate import compare
from kvstore.client.engines.prefix import Prefix, Span
from kvstore.client.engines.transformers import cache as caches
from kvstore.client.engines.transformers.cache import CacheShape, Held, length
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.proto.blend import ReuseReport, accuracy_tag
from kvstore.proto.errors import InvalidRequestError, is_whole

PASSED = (
    "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer",
)  # fmt: skip
"""Arguments of ``model.generate`` that select or emit tokens: no KV depends on them."""
MAX_ENDS = 4096
"""Limit for models that keep only windows, which need an end at regular intervals."""
QUERIES = 16
"""How many of a prompt's last tokens measure attention."""
LAYERS = 8
"""About how many layers, evenly spaced, are measured. More are no better."""
COMPARED_TOKENS = 64
"""Limit of tokens compared, at a prompt's end."""
_WATCHED: dict[str, Callable[..., Any]] = {}
"""Wrappers registered with transformers in place of its attention implementations."""
_FAULTS = (RuntimeError, MemoryError)
"""Errors of torch, such as out of memory: nothing is measured then, and no request fails."""
_THREAD = threading.local()
"""Its ``note`` measures a layer's attention in this thread, if it is to be measured."""


# --- prompts, padded on the left in a batch, and settings


def inputs_of(given: Any, mask: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return a user's input as (prompts, tokens) on *device*, and its attention mask if any.

    *given*: a tensor, lists of token ids of one length, or a tokenizer's output. Raises
    InvalidRequestError for anything else.
    """
    if isinstance(given, Mapping):
        other = sorted(set(given) - {"input_ids", "attention_mask", "token_type_ids"})
        if other or "input_ids" not in given:
            fix = "give input_ids, and attention_mask if prompts are padded: text alone is stored"
            raise InvalidRequestError("input_ids", ", ".join(other or map(str, given)), fix)
        kinds = given.get("token_type_ids")
        if kinds is not None and bool(_whole_numbers("token_type_ids", kinds, device).any()):
            raise InvalidRequestError("token_type_ids", "not 0", "give one text without types")
        given, mask = given["input_ids"], given.get("attention_mask") if mask is None else mask
    ids = _whole_numbers("input_ids", given, device)
    return ids, None if mask is None else _whole_numbers("attention_mask", mask, device)


def _whole_numbers(name: str, given: Any, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = f"give a tensor, lists of one length or a tokenizer's output: {error}"
        raise InvalidRequestError(name, type(given).__name__, fix) from None
    if found.is_floating_point() or found.is_complex():
        raise InvalidRequestError(name, str(found.dtype), "give integers: token ids")
    return (found[None] if found.ndim == 1 else found).long()


def prompt_of(input_ids: Any, device: torch.device) -> list[int]:
    """Return the tokens of the only prompt of *input_ids*. Raises InvalidRequestError."""
    ids, mask = inputs_of(input_ids, None, device)
    if mask is not None and not bool(mask.all()):
        raise InvalidRequestError("attention_mask", "zeros", "give the prompt without padding")
    if ids.ndim != 2 or ids.shape[0] != 1:
        fix = "give one prompt, (1, tokens), not a batch"
        raise InvalidRequestError("input_ids", tuple(ids.shape), fix)
    return ids[0].tolist()


def prompts_of(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt of *input_ids*, (prompts, tokens), without padding.

    Raises InvalidRequestError for padding that is not on the left, and for empty prompts.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        fix = "give prompts of (prompts, tokens)"
        raise InvalidRequestError("input_ids", tuple(input_ids.shape), fix)
    if mask is None:
        return input_ids.tolist()
    if mask.shape != input_ids.shape:
        fix = f"give {tuple(input_ids.shape)}"
        raise InvalidRequestError("attention_mask", tuple(mask.shape), fix)
    kept = mask.to(torch.bool)
    counts = kept.sum(1).tolist()
    for row, count in enumerate(counts):
        if not count or not bool(kept[row, -count:].all()):
            fix = "a row is zeros, then ones: pad on the left"
            raise InvalidRequestError("attention_mask", f"row {row}", fix)
    return [ids[-count:].tolist() for ids, count in zip(input_ids, counts, strict=True)]


def until_end(tokens: Sequence[int], start: int, settings: GenerationConfig) -> Sequence[int]:
    """Return *tokens* up to the first end token from *start* on: padding follows it."""
    ends = _ends(settings)
    return next((tokens[:at] for at in range(start, len(tokens)) if tokens[at] in ends), tokens)


def mask_of(ids: Tensor, settings: GenerationConfig) -> Tensor | None:
    """Return the mask that the model infers of *ids* where none is given; None: all are tokens."""
    pad: Any = settings.pad_token_id
    return None if pad is None or pad in _ends(settings) else ids.ne(pad).long()


def _ends(settings: GenerationConfig) -> list[int]:
    given: Any = settings.eos_token_id
    return [] if given is None else torch.as_tensor(given, device="cpu").reshape(-1).tolist()


def checked_deadline(deadline_ms: int) -> int:
    """Return *deadline_ms*. Raises InvalidRequestError if out of range."""
    if not is_whole(deadline_ms) or not 0 <= deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidRequestError("deadline_ms", deadline_ms, f"give 0 to {MAX_DEADLINE_MS}")
    return deadline_ms


def settings_of(
    model: GenerationMixin, config: GenerationConfig | None, stated: dict[str, Any]
) -> GenerationConfig:
    """Return *config*, or the model's own, updated with the settings *stated*.

    Raises InvalidRequestError for unknown settings, and for those whose caches cannot be stored.
    """
    if config is not None and "generation_config" in stated:
        raise InvalidRequestError("generation_config", "given twice", "give it once")
    given = stated.pop("generation_config", None) or config
    settings: GenerationConfig = copy.deepcopy(given or model.generation_config)
    for name, value in stated.items():
        if not hasattr(settings, name):
            fix = f"give a setting of GenerationConfig, or one of {', '.join(PASSED)}"
            raise InvalidRequestError(name, value, fix)
        setattr(settings, name, value)

    def whole(name: str) -> Any:  # what is not stated is the model's own, as when it generates
        value = getattr(settings, name, None)
        return getattr(model.generation_config, name, None) if value is None else value

    stored = "use a dynamic or static cache: quantised KV changes in a load, offloaded is elsewhere"
    drafted = "with drafts a prompt is computed again behind what was loaded, and its KV is wrong"
    for name, taken, fix in (
        ("num_beams", (None, 0, 1), "one sequence at a time"),
        ("num_return_sequences", (None, 0, 1), "one sequence at a time"),
        ("use_cache", (None, True), "without a cache there is nothing to store"),
        ("cache_implementation", (None, "dynamic", "hybrid", "static"), stored),
        ("token_healing", (None, False), "it changes the prompt that is stored"),
        ("prompt_lookup_num_tokens", (None,), drafted),
        ("assistant_early_exit", (None,), drafted),
        ("use_mtp", (None, False), drafted),
    ):
        if whole(name) not in taken:
            raise InvalidRequestError(name, whole(name), fix)
    for name in ("pad_token_id", "eos_token_id", "cache_implementation", "output_attentions"):
        setattr(settings, name, whole(name))
    settings.return_dict_in_generate = True
    return settings


def pauses(shape: CacheShape, span: Span, shared_tokens: int, chunk_tokens: int) -> list[int]:
    """Return the token counts to pause a prefill at, ascending: at the prompt's end and where it
    diverges from other prompts (Marconi, Pan et al., MLSys 2025, section 4.2).

    *span*: the tokens in the cache, and those of the prompt, the last of which is left to
    generate from. *shared_tokens*: the length of the prefix shared with others.
    """
    start, stop = span
    windows = {s.window - 1 for s in shape.windows}
    wanted = {end // chunk_tokens * chunk_tokens for end in (stop - 1, shared_tokens)}
    for first in [end - kept for end in wanted for kept in windows]:
        if first > 0 and first % chunk_tokens:  # the window covers part of a chunk
            wanted.add((first // chunk_tokens + 1) * chunk_tokens)
    if not shape.keeps_all:
        step = max(chunk_tokens, min(windows, default=0) // chunk_tokens * chunk_tokens)
        wanted.update(range(start // chunk_tokens * chunk_tokens + step, stop, step))
    return sorted(place for place in wanted if start < place < stop)


class Watch(StoppingCriteria):
    """Observes a model generating from one prompt into *cache*; never stops it.

    For models with windows or states it copies ``ends`` of the cache at chunk boundaries: as many
    as the longest window spans, or up to MAX_ENDS for models that keep only windows.
    """

    def __init__(self, cache: Cache, shape: CacheShape, chunk_tokens: int) -> None:
        self.ends: list[Held] = []
        self.on_first: Callable[[], object] | None = None
        """Called once the first token is generated."""
        self._cache = cache
        self._shape = shape
        self._step = chunk_tokens
        longest = max((layer.window - 1 for layer in shape.windows), default=1)
        self._limit = -(-longest // chunk_tokens) if shape.keeps_all else MAX_ENDS

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Inspect the cache after *input_ids*, (1, tokens), the last of which is not in it."""
        on_first, self.on_first = self.on_first, None
        if on_first is not None:
            int(input_ids[0, -1])  # waits for work queued on a device
            on_first()
        if self._shape.has_ends and length(self._cache, self._shape) % self._step == 0:
            taken = Held.of_end(self._cache, self._shape, self._step)
            self.ends = [*self.ends, taken][-self._limit :]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


# --- importance: the mean attention that a token gets from a prompt's last ones (SnapKV, Li et
# al., arXiv 2404.14469, section 3.2). Codecs spend more bits on important tokens (MiKV, Yang et
# al., arXiv 2402.18096, section 3).


@contextmanager
def noting_attention(
    model: PreTrainedModel, cache: Cache, shape: CacheShape, tokens: int
) -> Iterator[Callable[[], None]]:
    """Record in *cache*'s notes the attention that each of a prompt's *tokens* tokens gets.

    Records in this thread, until the yielded function is called: once the first token is there.
    Records nothing for 0 *tokens*, static caches, caches with windows or states, or attention
    that is not a registered implementation of transformers (``eager``).
    """
    config: Any = model.config.get_text_config()
    is_seen = tokens and not shape.has_ends and not isinstance(cache, StaticCache)
    if not is_seen or not _watch(config._attn_implementation):
        yield lambda: None
        return
    step, layers, found = max(1, len(shape.tokens) // LAYERS), itertools.count(), list[Tensor]()

    def stop() -> None:
        _THREAD.note = None

    def note(queries: Tensor, keys: Tensor, scale: float | None) -> None:
        """Measure *queries*, (1, heads, some, dim), and *keys*, (1, kv_heads, tokens, dim)."""
        if keys.ndim != 4 or (keys.shape[0], keys.shape[2]) != (1, tokens) or next(layers) % step:
            return
        try:
            with torch.no_grad():
                found.append(mean_attention(queries[0, :, -QUERIES:], keys[0], scale))
        except _FAULTS:
            found.clear()
            stop()

    _THREAD.note = note
    try:
        yield stop
    finally:
        stop()
    with suppress(*_FAULTS):  # torch stacks no empty list
        weights = torch.stack(found).mean(0).cpu().numpy()
        if np.isfinite(weights).all():  # 0 would mean no importance; underflow does not
            caches.notes_of(cache).importance = np.maximum(weights, np.finfo(np.float32).tiny)


def _watch(name: str) -> bool:
    """Wrap the attention implementation called *name*; return whether it exists."""
    own: Any = AttentionInterface().get(name)  # type: ignore[no-untyped-call]
    if own is None or own is _WATCHED.get(name):
        return own is not None

    @wraps(own)
    def attend(module: Any, query: Tensor, key: Tensor, *more: Any, **named: Any) -> Any:
        # Compiled models have static caches, and cannot read thread-local state.
        note = None if torch.compiler.is_compiling() else getattr(_THREAD, "note", None)
        if note is not None:
            note(query, key, named.get("scaling"))
        return own(module, query, key, *more, **named)

    _WATCHED[name] = attend
    AttentionInterface.register(name, attend)
    return True


def mean_attention(queries: Tensor, keys: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention that each key gets, the mean over heads and its queries: (tokens,).

    A sum would favour keys that more queries attend to. *queries* are those of the last tokens,
    (heads, some, dim), *keys* (kv_heads, tokens, dim).
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
    # All of the last tokens attend to the first of them, only the last one to itself.
    given[-count:] /= torch.arange(count, 0, -1, device=keys.device)
    given[:-count] /= count
    return given


# --- measuring lossy copies, to open and close the gate of a model and a codec


def comparison(
    model: PreTrainedModel, tokens: Sequence[int], cache: Cache, prefix: Prefix
) -> ReuseReport:
    """Return the report on a prompt whose *cache* holds *prefix*, lossy by one codec.

    Compares the last tokens' logits after *cache*, which is consumed, with those of a full
    prefill. To compare enough tokens the cache may be cropped, by at most half of its lossy part.
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
    return ReuseReport(accuracy_tag(codec), shadow=found.reported)


def _logits(model: PreTrainedModel, tokens: Sequence[int], cache: Cache, rows: int) -> Tensor:
    """Return the logits of the last *rows* of *tokens*: (rows, vocabulary)."""
    engine: Any = model
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        output = engine(ids, **caches.as_argument(cache), use_cache=True, logits_to_keep=rows)
    found: Tensor = output.logits[0, -rows:]
    return found
