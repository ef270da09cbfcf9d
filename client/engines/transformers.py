"""The transformers connector: prefixes of Llama, Mistral, Qwen2 and Qwen3 models.

    client = Client(address, representation_of(model, tokenizer))
    output = TransformersConnector(client, model).generate(input_ids).output

One prompt at a time, in a DynamicCache whose layers all keep full attention.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvstore.client.client import Client
from kvstore.client.engines.base import Connector, Prefix, Span
from kvstore.client.engines.transformers_identity import (
    full_layers,
    layer_group,
    representation_of,
    rope_parameters,
)
from kvstore.client.tensors import LayerTensors
from kvstore.proto.errors import InvalidRequestError, RepresentationError
from kvstore.proto.types import LayerGroup

__all__ = ["Generation", "TransformersConnector", "representation_of"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``generate`` returned: transformers' own output, and the prompt tokens it skipped."""

    output: GenerateDecoderOnlyOutput
    hit_tokens: int


class TransformersConnector(Connector):
    """Loads and saves prefixes of one model. Thread-safe as far as the model is.

    *client* must have been made with ``representation_of`` this model: RepresentationError.
    """

    def __init__(self, client: Client, model: PreTrainedModel, *, durable: bool = False) -> None:
        self._group = layer_group(model)
        stated = (client.representation.layer_groups, client.representation.rope)
        if stated != ((self._group,), rope_parameters(model.config)):
            raise RepresentationError(
                "client", stated, "make it with representation_of(model, tokenizer)"
            )
        super().__init__(
            client,
            durable=durable,
            token_flops=2.0 * model.num_parameters(exclude_embeddings=True),
        )
        self._model = model

    def load(
        self, input_ids: torch.Tensor, extra: Sequence[bytes] = ()
    ) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored prefix, and how many tokens it holds.

        *input_ids*: (1, tokens). At least the last token is left to compute; a miss is an
        empty cache and 0. Pass the cache with all of *input_ids* to ``generate``, or with
        ``input_ids[:, hit_tokens:]`` to the model.
        """
        cache, prefix = self._load_cache(_prompt(input_ids), extra)
        return cache, prefix.hit_tokens

    def _load_cache(
        self, tokens: Sequence[int], extra: Sequence[bytes]
    ) -> tuple[DynamicCache, Prefix]:
        cache = DynamicCache(config=self._model.config)
        rooms: list[_PrefixRoom] = []

        def room(spans: Sequence[Span]) -> Sequence[LayerTensors]:
            rooms.append(_PrefixRoom(self._group, spans[-1][1], self._model.device))
            return [rooms[0].chunk(span) for span in spans]

        prefix = self.load_chunks(tokens, room, extra)
        if prefix.hit_tokens:
            rooms[0].move_into(cache, prefix.hit_tokens)
        return cache, prefix

    def save(
        self,
        input_ids: torch.Tensor,
        cache: Cache,
        from_token: int = 0,
        extra: Sequence[bytes] = (),
    ) -> int:
        """Store what *cache* holds of *input_ids*, (1, tokens); return how many chunks were new.

        *from_token*: what ``load`` said is stored. Raises RepresentationError for a cache of
        another kind.
        """
        tokens = _prompt(input_ids)
        return self._save(tokens[: cache.get_seq_length()], cache, from_token, extra)

    def _save(
        self, tokens: Sequence[int], cache: Cache, from_token: int, extra: Sequence[bytes]
    ) -> int:
        layers = [_parts(layer) for layer in full_layers(cache)] if tokens else []

        def source(span: Span) -> LayerTensors:
            start, stop = span
            return [[[part[0, :, start:stop].cpu() for part in parts] for parts in layers]]

        return self.store_chunks(tokens, source, from_token, extra)

    def generate(
        self,
        input_ids: torch.Tensor,
        config: GenerationConfig | None = None,
        extra: Sequence[bytes] = (),
    ) -> Generation:
        """Generate as the model does, from the longest stored prefix on; store what is new.

        *input_ids*: (1, tokens), without padding. *config* is the model's own when None; it
        keeps one sequence in a dynamic cache, or InvalidRequestError is raised. The prompt is
        stored to its last token, so that asking again hits all of it, and so is what was
        generated, but for the last token, whose KV nobody computed.
        """
        tokens = _prompt(input_ids)
        if not isinstance(self._model, GenerationMixin):
            name = type(self._model).__name__
            raise InvalidRequestError("model", name, "give one that generates")
        model: Any = self._model
        settings = copy.deepcopy(config or model.generation_config)
        _check_settings(settings)
        settings.return_dict_in_generate = True
        cache, prefix = self._load_cache(tokens, extra)
        output: GenerateDecoderOnlyOutput = model.generate(
            input_ids,
            generation_config=settings,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
        )
        sequence = output.sequences[0].tolist()[: cache.get_seq_length()]
        self._save(sequence[: len(tokens)], cache, prefix.stored_tokens, extra)
        if len(sequence) > len(tokens):
            chunk_tokens = self.client.options.chunk_tokens
            self._save(sequence, cache, len(tokens) // chunk_tokens * chunk_tokens, extra)
        return Generation(output, prefix.hit_tokens)


class _PrefixRoom:
    """Room for the KV of a prefix: per layer, K and V of (1, kv_heads, tokens, head_dim)."""

    def __init__(self, group: LayerGroup, tokens: int, device: torch.device) -> None:
        self._device = device
        shape = (1, group.kv_heads, tokens, group.head_dim)
        dtype = getattr(torch, group.dtype.name)
        # Tensors of their own, so that each is freed once its layer has grown past it.
        self._layers = [
            [torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(2)]
            for _ in group.layer_ids
        ]

    def chunk(self, span: Span) -> LayerTensors:
        """Return where the chunk at *span* is written: views, not copies."""
        start, stop = span
        return [[[part[0, :, start:stop] for part in parts] for parts in self._layers]]

    def move_into(self, cache: DynamicCache, tokens: int) -> None:
        """Make the first *tokens* the contents of an empty *cache*, on the CPU without a copy."""
        for layer, parts in zip(full_layers(cache), self._layers, strict=True):
            keys, values = (part[:, :, :tokens].to(self._device) for part in parts)
            # update() would concatenate, which copies.
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values


def _parts(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.shape[0] != 1:
        shape = None if keys is None else tuple(keys.shape)
        raise InvalidRequestError("cache", shape, "give one of (1, kv_heads, tokens, head_dim)")
    return keys, values


def _prompt(input_ids: torch.Tensor) -> list[int]:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise InvalidRequestError(
            "input_ids", tuple(input_ids.shape), "give one prompt, (1, tokens), not a batch"
        )
    tokens: list[int] = input_ids[0].tolist()
    return tokens


def _check_settings(settings: GenerationConfig) -> None:
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(settings, name) or 1) != 1:
            raise InvalidRequestError(name, getattr(settings, name), "one sequence at a time")
    if settings.use_cache is False:
        raise InvalidRequestError("use_cache", False, "without a cache there is nothing to store")
    if settings.cache_implementation not in (None, "dynamic"):
        raise InvalidRequestError(
            "cache_implementation", settings.cache_implementation, "only dynamic caches are stored"
        )
    if settings.token_healing:
        raise InvalidRequestError("token_healing", True, "it changes the prompt that is stored")
