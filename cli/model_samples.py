"""A transformers model's own KV as samples for calibration. Loads torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from kvstore.cli.kv_dumps import Sample, Samples, cut
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.engines.transformers.identity import representation_of
from kvstore.client.tensors import to_array
from kvstore.codecs.base import Part
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import MIN_CHUNK_TOKENS, Component, LayerKind

CONTEXT_TOKENS = 1024


def load_model(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model in *folder* and its tokenizer. Raises InvalidRequestError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise InvalidRequestError("model", str(folder), str(error).splitlines()[0]) from None
    return model, tokenizer


def run_model(folder: Path, text: str, tokens: int, chunk_tokens: int) -> Samples:
    """Return the KV that the model in *folder* computes of the first *tokens* of *text*.

    The model runs as its configuration says, in prompts of CONTEXT_TOKENS at most. Raises
    InvalidRequestError for a folder or a text that will not do, ModelError for a
    model whose KV cannot be stored.
    """
    model, tokenizer = load_model(folder)
    representation = representation_of(model, tokenizer)
    (group, *others) = representation.layer_groups
    if others or group.kind is not LayerKind.attention:
        raise ModelError("layers", group.kind.name, "only full-attention layers are stored")
    ids = tokenizer(text)["input_ids"][:tokens]
    if len(ids) < MIN_CHUNK_TOKENS:
        raise InvalidRequestError("text", len(ids), f"give at least {MIN_CHUNK_TOKENS} tokens")
    component = Component(
        group.kind, group.dtype, len(group.layer_ids), group.kv_heads, group.head_dim, chunk_tokens
    )
    chunks = list(_chunks(model, ids, chunk_tokens))
    return Samples(representation_digest(representation), component, chunks, representation.rope)


def _chunks(model: PreTrainedModel, ids: Sequence[int], chunk_tokens: int) -> Iterator[Sample]:
    limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT_TOKENS
    context = max(min(CONTEXT_TOKENS, limit), MIN_CHUNK_TOKENS)
    for start in range(0, len(ids), context):
        prompt = ids[start : start + context]
        if len(prompt) >= MIN_CHUNK_TOKENS:
            yield from cut(_layers(model, prompt), len(prompt), chunk_tokens)


def _layers(model: PreTrainedModel, prompt: Sequence[int]) -> list[list[Part]]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt], device=model.device), **as_argument(cache), use_cache=True)
    found = []
    layers: Sequence[Any] = cache.layers
    for layer in layers:
        parts = []
        for tensor in (layer.keys, layer.values):
            array = to_array(tensor[0].cpu().contiguous())
            parts.append(array.view(f"<u{array.dtype.itemsize}"))
        found.append(parts)
    return found
