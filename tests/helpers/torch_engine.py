"""Helpers of transformers connector tests: reference results of the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from helpers.local_server import DEADLINE_MS
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from kvstore.client import ClientOptions
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.cache import as_argument

OPTIONS = ClientOptions(chunk_tokens=64, deadline_ms=DEADLINE_MS, retry_after_ms=1)


def greedy(new_tokens: int = 12) -> GenerationConfig:
    """Return deterministic settings: tokens depend on the logits only."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=1, pad_token_id=1
    )


def ids_of(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens])


def plain_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> list[int]:
    engine: Any = model
    output = engine.generate(
        input_ids, generation_config=greedy(), attention_mask=torch.ones_like(input_ids)
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def stored_tokens(
    connector: TransformersConnector, input_ids: torch.Tensor, deadline_ms: int | None = None
) -> list[int]:
    found = connector.generate(input_ids, greedy(), deadline_ms=deadline_ms)
    tokens: list[int] = found.output.sequences[0].tolist()
    return tokens


def kept(cache: Any) -> list[torch.Tensor]:
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def prefill(model: PreTrainedModel, input_ids: torch.Tensor) -> DynamicCache:
    with torch.inference_mode():
        return cast(DynamicCache, model(input_ids).past_key_values)


def logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        return cast(torch.Tensor, model(input_ids, **as_argument(cache)).logits)


def random_ids(tokens: int, vocabulary: int = 4096, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (1, tokens), generator=generator)


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    batch = torch.ones((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(prompts):
        batch[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return batch, mask
