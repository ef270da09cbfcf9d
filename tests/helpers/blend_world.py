"""Small models of four classes for tests of blending, and prompts with stored chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvstore.client import ClientOptions
from kvstore.client.blend.engine import Blender, MemorySource
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model, RopeParameters

VOCABULARY = 512
LAYERS = 5
SUFFIX = 12
WINDOW = 48
SINK = 7

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-linear": {"rope_parameters": LINEAR},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen2-window": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    },
    "qwen3": {},
}  # fmt: skip
_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


OPTIONS = ClientOptions(chunk_tokens=16, deadline_ms=30_000)
GROUP = LayerGroup(LayerKind.attention, DType.float32, tuple(range(LAYERS)), 2, 16)
STORED = Model("tiny", "a" * 40, "none", "none", (GROUP,), RopeParameters(1e4, 16), "tokens")
"""The identity of the model "llama" in float32."""


def random_tokens(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=draw).tolist()


def make_model(name: str = "llama", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model of MODELS with random weights, large enough for visible attention."""
    torch.manual_seed(0)
    config_class, model_class = _CLASSES[name.partition("-")[0]]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        **MODELS[name],
    )
    model = model_class(config)
    table = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype).eval()
    model.model.rotary_emb.inv_freq = table  # float32, as from_pretrained leaves it
    found: PreTrainedModel = model
    return found


@dataclass(frozen=True, slots=True)
class World:
    """A prompt of a prefix, three chunks from other contexts and a suffix."""

    model: Any
    blender: Blender
    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    stored: dict[int, list[LayerKV]]

    def plan(self, ratio: float = 0.15, **settings: Any) -> BlendPlan:
        return BlendPlan(self.tokens, self.segments, ratio=ratio, **settings)

    @property
    def source(self) -> MemorySource:
        return MemorySource(self.stored)

    def full_logits(self) -> Tensor:
        """Return the model's logits of the suffix; other rows sum in another order on some CPUs."""
        return self.own_logits(SUFFIX)

    def own_logits(self, count: int) -> Tensor:
        """Return the model's logits of the prompt's last *count* tokens; 0: of all."""
        with torch.inference_mode():
            ids = torch.tensor([self.tokens])
            found: Tensor = self.model(ids, logits_to_keep=count).logits[0]
        return found

    def approx(self) -> list[int]:
        spans = [(s.start, s.end) for s in self.segments if s.kind == "approx"]
        return [position for span in spans for position in range(*span)]


def make_world(
    name: str = "llama",
    dtype: torch.dtype = torch.float64,
    chunks: Sequence[int] = (48, 40, 56),
    kinds: Sequence[str] = ("approx", "approx", "approx"),
) -> World:
    model = make_model(name, dtype)
    blender = Blender(TransformersAdapter(model))
    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    tokens = some(16)
    stored = {0: blender.compile(tokens, sink=())}
    segments = [Segment(0, 16, "exact", src_pos=0)]
    for size, kind in zip(chunks, kinds, strict=True):
        chunk, start = some(size), len(tokens)
        tokens += chunk
        if kind == "miss":
            segments.append(Segment(start, start + size, "miss"))
            continue
        stored[len(segments)] = blender.compile(chunk, sink=some(SINK))
        segments.append(Segment(start, start + size, "approx", src_pos=SINK))
    segments.append(Segment(len(tokens), len(tokens) + SUFFIX, "miss"))
    return World(model, blender, (*tokens, *some(SUFFIX)), tuple(segments), stored)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max())
