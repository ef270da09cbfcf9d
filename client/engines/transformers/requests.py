"""What a call generates from: its prompts, in a batch padded on the left, and its settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.proto.errors import InvalidRequestError

PASSED = (
    "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer",
)  # fmt: skip
"""Arguments of ``model.generate`` that choose or hand out tokens: no KV depends on them."""


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
    return ids, None if mask is None else _whole_numbers("attention_mask", mask, device)


def _whole_numbers(name: str, given: Any, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = f"give a tensor, lists of one length or what the tokenizer returned: {error}"
        raise InvalidRequestError(name, type(given).__name__, fix) from None
    if found.is_floating_point() or found.is_complex():
        raise InvalidRequestError(name, str(found.dtype), "give whole numbers: token ids")
    return (found[None] if found.ndim == 1 else found).long()


def prompt_of(input_ids: Any, device: torch.device) -> list[int]:
    """Return the tokens of the one prompt of *input_ids*. Raises InvalidRequestError."""
    ids, _ = inputs_of(input_ids, None, device)
    if ids.ndim != 2 or ids.shape[0] != 1:
        fix = "give one prompt, (1, tokens), not a batch"
        raise InvalidRequestError("input_ids", tuple(ids.shape), fix)
    tokens: list[int] = ids[0].tolist()
    return tokens


def prompts_of(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt of *input_ids*, (prompts, tokens), without the padding.

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
    """Return *tokens* up to the first from *start* on that ends a prompt: padding follows that."""
    given: Any = settings.eos_token_id
    ends = [] if given is None else torch.as_tensor(given, device="cpu").reshape(-1).tolist()
    return next((tokens[:at] for at in range(start, len(tokens)) if tokens[at] in ends), tokens)


def checked_deadline(deadline_ms: int) -> int:
    """Return *deadline_ms*. Raises InvalidRequestError for one that is none."""
    if not 0 <= deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidRequestError("deadline_ms", deadline_ms, f"give 0 to {MAX_DEADLINE_MS}")
    return deadline_ms


def settings_of(
    model: GenerationMixin, config: GenerationConfig | None, stated: dict[str, Any]
) -> GenerationConfig:
    """Return *config*, or the model's own, with what was *stated* beside it.

    Raises InvalidRequestError for what is no setting, and for those that cannot be stored from.
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
    caches = (
        "dynamic and static caches are stored: a quantised one would hold other numbers after "
        "a load than after a prefill, and an offloaded one is not where it is looked for"
    )
    for name, taken, fix in (
        ("num_beams", (None, 0, 1), "one sequence at a time"),
        ("num_return_sequences", (None, 0, 1), "one sequence at a time"),
        ("use_cache", (None, True), "without a cache there is nothing to store"),
        ("cache_implementation", (None, "dynamic", "hybrid", "static"), caches),
        ("token_healing", (None, False), "it changes the prompt that is stored"),
    ):
        if getattr(settings, name) not in taken:
            raise InvalidRequestError(name, getattr(settings, name), fix)
    settings.return_dict_in_generate = True
    return settings
