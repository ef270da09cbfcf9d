"""What a call generates from: its settings, and prompts of a batch padded on the left."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
)

from kvstore.client.engines.transformers.cache import CacheShape, StatePiece, TokenShape
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.proto.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch *width* tokens wide, and which tokens end what is generated."""

    number: int
    width: int
    prompt: Sequence[int]
    stored_tokens: int
    ends: frozenset[int]
    is_lossy: bool = False
    """Whether its prefix is of a lossy copy, so that nothing behind it is stored."""

    @property
    def first(self) -> int:
        """The place of the prompt's first token."""
        return self.width - len(self.prompt)

    def until_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the *tokens* of the row up to what ended it: padding comes after that."""
        for place in range(len(self.prompt), len(tokens)):
            if tokens[place] in self.ends:
                return tokens[:place]
        return tokens


def ends_of(settings: GenerationConfig) -> frozenset[int]:
    """Return the tokens after which a prompt is not generated further."""
    ends: Any = settings.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(
        map(int, ends if isinstance(ends, list) else torch.as_tensor(ends, device="cpu").view(-1))
    )


def inputs_of(given: Any, mask: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return what a user gave as (prompts, tokens) on *device*, and its attention mask if any.

    *given*: a tensor, lists of token ids of one length, or what a tokenizer returned. Raises
    InvalidRequestError for anything else.
    """
    if isinstance(given, Mapping):
        other = sorted(set(given) - {"input_ids", "attention_mask", "token_type_ids"})
        if other or "input_ids" not in given:
            fix = "give input_ids, and attention_mask if prompts are padded: text alone is stored"
            raise InvalidRequestError("input_ids", ", ".join(other or map(str, given)), fix)
        given, mask = given["input_ids"], given.get("attention_mask") if mask is None else mask
    ids = _whole_numbers("input_ids", given, device)
    ids = ids[None] if ids.ndim == 1 else ids
    if mask is None:
        return ids, None
    mask = _whole_numbers("attention_mask", mask, device)
    return ids, mask[None] if mask.ndim == 1 else mask


def _whole_numbers(name: str, given: Any, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = f"give a tensor, lists of one length or what the tokenizer returned: {error}"
        raise InvalidRequestError(name, type(given).__name__, fix) from None
    if found.is_floating_point() or found.is_complex():
        raise InvalidRequestError(name, str(found.dtype), "give whole numbers: token ids")
    return found.long()


def checked_deadline(deadline_ms: int) -> int:
    """Return *deadline_ms*. Raises InvalidRequestError for one that is none."""
    if not 0 <= deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidRequestError("deadline_ms", deadline_ms, f"give 0 to {MAX_DEADLINE_MS}")
    return deadline_ms


def prompt_of(input_ids: Any, device: torch.device) -> list[int]:
    """Return the tokens of the one prompt of *input_ids*. Raises InvalidRequestError."""
    ids, _ = inputs_of(input_ids, None, device)
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise InvalidRequestError(
            "input_ids", tuple(ids.shape), "give one prompt, (1, tokens), not a batch"
        )
    tokens: list[int] = ids[0].tolist()
    return tokens


def prompts_of(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt of *input_ids*, (prompts, tokens), without the padding.

    Raises InvalidRequestError for padding that is not on the left, and for empty prompts.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        fix = "give prompts of (prompts, tokens)"
        raise InvalidRequestError("input_ids", tuple(input_ids.shape), fix)
    if mask is None:
        return input_ids.tolist()
    if mask.shape != input_ids.shape:
        raise InvalidRequestError(
            "attention_mask", tuple(mask.shape), f"give {tuple(input_ids.shape)}"
        )
    kept = mask.to(torch.bool)
    counts = kept.sum(1).tolist()
    for row, count in enumerate(counts):
        if not count or not bool(kept[row, -count:].all()):
            fix = "a row is zeros, then ones: pad on the left"
            raise InvalidRequestError("attention_mask", f"row {row}", fix)
    return [ids[-count:].tolist() for ids, count in zip(input_ids, counts, strict=True)]


def mask_of(input_ids: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return the attention mask of a batch."""
    mask = torch.ones_like(input_ids)
    for row in rows:
        mask[row.number, : row.first] = 0
    return mask


def joined(
    caches: Sequence[Cache], shape: CacheShape, config: PreTrainedConfig, device: torch.device
) -> DynamicCache:
    """Return one cache of all prompts on *device*, the shorter ones padded on the left with zeros.

    All of a prompt but its last token is in its cache, so the longest says how wide they are.
    """
    whole = DynamicCache(config=config)
    width = max(int(cache.get_seq_length(shape.tokens[0].layer)) for cache in caches)
    for tokens in shape.tokens:
        layers: list[Any] = [cache.layers[tokens.layer] for cache in caches]
        held = min(width, tokens.window - 1) if tokens.window else width
        keys, values = (
            torch.cat([_padded(getattr(layer, name), empty, held) for layer in layers])
            for name, empty in zip(("keys", "values"), _empty(tokens, device), strict=True)
        )
        target: Any = whole.layers[tokens.layer]
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
        if tokens.window:
            target.cumulative_length = width
    for state in shape.states:
        layers = [cache.layers[state.layer] for cache in caches]
        for piece in state.pieces:
            tensor = torch.cat([_state(layer, piece, device) for layer in layers])
            target = whole.layers[state.layer]
            target.lazy_initialization(**{piece.states: tensor, "state_idx": piece.number})
            getattr(target, piece.states)[piece.number].copy_(tensor)
            target.has_previous_state[piece.number] = True
    return whole


def _state(layer: Any, piece: StatePiece, device: torch.device) -> torch.Tensor:
    """Return one prompt's; before its first token it is zeros."""
    found: torch.Tensor | None = getattr(layer, piece.states).get(piece.number)
    if found is None:
        return torch.zeros((1, *piece.shape), dtype=piece.dtype, device=device)
    return found


def _empty(shape: TokenShape, device: torch.device) -> list[torch.Tensor]:
    """Return the keys and values of a prompt of one token, which has nothing in its cache."""
    sizes = [(1, shape.kv_heads, 0, dim) for dim in shape.dims]
    return [torch.empty(size, dtype=shape.dtype, device=device) for size in sizes]


def _padded(part: torch.Tensor | None, empty: torch.Tensor, held: int) -> torch.Tensor:
    part = empty if part is None or not part.numel() else part
    return pad(part, (0, 0, held - part.shape[2], 0))


def settings_of(
    model: GenerationMixin, config: GenerationConfig | None, stated: dict[str, Any]
) -> GenerationConfig:
    """Return *config*, or the model's own, with what was *stated* beside it."""
    if config is not None and "generation_config" in stated:
        raise InvalidRequestError("generation_config", "given twice", "give it once")
    given = stated.pop("generation_config", None) or config
    settings: GenerationConfig = copy.deepcopy(given or model.generation_config)
    for name, value in stated.items():
        if not hasattr(settings, name):
            fix = "give a setting of GenerationConfig: other arguments are not passed to the model"
            raise InvalidRequestError(name, value, fix)
        setattr(settings, name, value)
    _check_settings(settings)
    settings.return_dict_in_generate = True
    return settings


def _check_settings(settings: GenerationConfig) -> None:
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(settings, name) or 1) != 1:
            raise InvalidRequestError(name, getattr(settings, name), "one sequence at a time")
    if settings.use_cache is False:
        raise InvalidRequestError("use_cache", False, "without a cache there is nothing to store")
    if settings.cache_implementation not in (None, "dynamic", "hybrid", "static"):
        raise InvalidRequestError(
            "cache_implementation", settings.cache_implementation,
            "dynamic and static caches are stored: a quantised one would hold other numbers after "
            "a load than after a prefill, and an offloaded one is not where it is looked for",
        )  # fmt: skip
    if settings.token_healing:
        raise InvalidRequestError("token_healing", True, "it changes the prompt that is stored")
