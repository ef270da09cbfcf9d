"""Blending in transformers: the layers of Llama, Mistral, Qwen2 and Qwen3, some rows at a time.

    blender = Blender(TransformersAdapter(model))
    result = blender.blend(plan, source)
    output = model.generate(input_ids, past_key_values=BlendedCache.of(model, result))

One prompt at a time, on the CPU or one CUDA device. Written to be exact, not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel

from kvstore.client.blend.engine import BlendResult
from kvstore.client.blend.layer_pass import LayerKV, RopeSpec, reads
from kvstore.client.blend.plan import Origin
from kvstore.client.engines.transformers import identity
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import rope_parameters

BLOCK_ROWS = 128
"""Rows masked at once: a mask takes one byte per row and key."""


class TransformersAdapter:
    """An EngineAdapter for *model*. Raises ModelError for models it cannot blend.

    Sliding windows are respected. *adapter_digest*: digest of the model's adapter. A change of
    the weights in place is detected and changes the origin.
    """

    def __init__(self, model: PreTrainedModel, adapter_digest: str = "none") -> None:
        if model.config.model_type not in identity.MODEL_TYPES or not hasattr(model, "lm_head"):
            fix = f"give a causal language model of {', '.join(identity.MODEL_TYPES)}"
            raise ModelError("model", type(model).__name__, fix)
        identity.check_adapter(model, adapter_digest)
        identity.check_model(model)
        engine: Any = model
        self._model = engine.eval()
        config = model.config
        self._layers: Any = self._model.model.layers[: config.num_hidden_layers]
        self.n_layers = len(self._layers)
        self.head_dim = int(self._layers[0].self_attn.head_dim)
        self.kv_heads = int(config.num_key_value_heads)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._origin = Origin(rope_parameters(config), adapter_digest)
        self._watch = identity.WeightsWatch(model)
        rope = _rotation(self._model, self._origin, self.head_dim)
        self.rope: Sequence[RopeSpec | None] = (rope,) * self.n_layers
        if departures := identity.departures_of(model):
            fix = "blending computes transformers' own layers: give a model without it"
            raise ModelError("model", ", ".join(departures), fix)
        self._turned = (torch.empty(0),) * 3
        # Mistral has one for all layers, in its settings.
        stating = [config if config.model_type == "mistral" else x.self_attn for x in self._layers]
        self.window: Sequence[int | None] = [getattr(x, "sliding_window", None) for x in stating]

    @property
    def origin(self) -> Origin:
        """The origin of KV computed now: it changes whenever the weights do."""
        return replace(self._origin, weights=self._watch.current().name)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of *tokens*, (rows,): (rows, hidden)."""
        found: Tensor = self._model.model.embed_tokens(tokens)
        return found

    def qkv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V, (heads, rows, head_dim), Q and K rotated to *positions*."""
        block = self._layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        if self._turned[0] is not positions:  # consecutive layers share the tables
            tables = self._model.model.rotary_emb(normed[None], positions[None])
            self._turned = (positions, tables[0][0], tables[1][0])
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        return _rotated(query, *self._turned[1:]), _rotated(key, *self._turned[1:]), value

    def attend(self, layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """Return the attention output of the rows at *positions*, (rows, heads * head_dim).

        Contiguous rows from 0 on are one causal call; others run in blocks, each masked by its
        positions, over the keys that it reads.
        """
        window, at, found = self.window[layer], positions.tolist(), []
        head = next((row for row, place in enumerate(at) if row != place), len(at))
        if window is not None and head > window:
            head = 0
        if head:
            found.append(self._read(layer, query[:, :head], kv, (0, head), None))
        for first in range(head, len(at), BLOCK_ROWS):
            stop = min(first + BLOCK_ROWS, len(at))
            low = 0 if window is None else max(0, at[first] - window + 1)
            span = (low, at[stop - 1] + 1)
            mask = reads(positions[first:stop], *span, window)
            found.append(self._read(layer, query[:, first:stop], kv, span, mask))
        return (found[0] if len(found) == 1 else torch.cat(found)).flatten(1)

    def _read(
        self, layer: int, query: Tensor, kv: LayerKV, span: tuple[int, int], mask: Tensor | None
    ) -> Tensor:
        """Return the attention output of *query*'s rows: (rows, heads, head_dim)."""
        keys, values = (part[None, :, slice(*span)] for part in kv)
        return scaled_dot_product_attention(
            query[None],
            keys,
            values,
            mask,
            is_causal=mask is None and query.shape[1] > 1,
            scale=self._layers[layer].self_attn.scaling,
            enable_gqa=query.shape[0] != self.kv_heads,
        )[0].transpose(0, 1)

    def attention_mass(self, layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """Return the attention each key gets from *positions*: (tokens,), float32 or wider."""
        keys = kv[0].repeat_interleave(query.shape[0] // self.kv_heads, 0)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(wide) @ keys.to(wide).mT) * self._layers[layer].self_attn.scaling
        mask = reads(positions, 0, keys.shape[1], self.window[layer])
        found: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(-1).sum(0).mean(0)
        return found

    def post(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Return the layer's output, (rows, hidden)."""
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attention)
        found: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, (rows, vocabulary)."""
        found: Tensor = self._model.lm_head(self._model.model.norm(hidden))
        return found


class BlendedCache(DynamicCache):
    """A cache to generate from. The connector stores only plain DynamicCaches, not this one."""

    @classmethod
    def of(cls, model: PreTrainedModel, result: BlendResult) -> BlendedCache:
        """Return the KV of *result* but for its last token, which ``generate`` computes."""
        cache = cls(config=model.config)
        for layer, (keys, values) in enumerate(result.kv):
            cache.update(keys[None, :, :-1], values[None, :, :-1], layer)
        return cache


def _rotation(model: Any, origin: Origin, head_dim: int) -> RopeSpec:
    """Return the rotation of the model's tables. Raises ModelError if its settings differ."""
    named, table = RopeSpec.of(origin.rope, head_dim), model.model.rotary_emb
    own = RopeSpec(tuple(table.inv_freq.float().tolist()), float(table.attention_scaling))
    wanted = [] if named is None else [*named.frequencies, named.gain]
    numbers = [*own.frequencies, own.gain]
    if len(numbers) != len(wanted) or not np.allclose(numbers, wanted, rtol=1e-5, atol=0.0):
        fix = "the model's tables differ: load it with dtype=, do not cast it"
        raise ModelError("rope", origin.rope, fix)
    return own


def _rotated(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return *rows*, (heads, rows, head_dim), rotated bit-identically to transformers."""
    first, second = rows.chunk(2, -1)
    return rows * cosine + torch.cat((-second, first), -1) * sine
