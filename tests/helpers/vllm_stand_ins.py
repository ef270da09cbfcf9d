"""Stand-ins for the few fields of vLLM's data types that the connector reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class FakeRequest:
    """vllm.v1.request.Request."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakeLora:
    """vllm.lora.request.LoRARequest."""

    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


def feature(identifier: str, offset: int, length: int) -> Any:
    """vllm.multimodal.inputs.MultiModalFeatureSpec."""
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def step(taken: Sequence[Sequence[int]] = (), /, **tokens: int) -> Any:
    """vllm.v1.core.sched.output.SchedulerOutput of a step with *tokens* of each request; *taken*:
    newly allocated blocks by table."""
    cached = SimpleNamespace(new_block_ids=[None, tuple(list(ids) for ids in taken)])
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )  # fmt: skip


@dataclass
class FullAttentionSpec:
    """vllm.v1.kv_cache_interface.FullAttentionSpec, recognised by name."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    head_size_v: int | None = None
    num_head_slots: int | None = None
    tokens_per_state: int = 1
    non_causal: bool = False


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    """vllm.v1.kv_cache_interface.SlidingWindowSpec."""

    sliding_window: int = 64


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """vllm.v1.kv_cache_interface.MLAAttentionSpec."""

    cache_dtype_str: str = "auto"
    model_version: str | None = None


@dataclass
class MambaSpec:
    """vllm.v1.kv_cache_interface.MambaSpec."""

    block_size: int = 32
    dtype: torch.dtype = torch.float32


def cache_config(*specs: Any, layers: int = 3) -> Any:
    """vllm.v1.kv_cache_interface.KVCacheConfig with a group for each of *specs*."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
    groups = [
        SimpleNamespace(layer_names=names[number :: len(specs)], kv_cache_spec=spec)
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


class FakeConfig(SimpleNamespace):
    """transformers' PreTrainedConfig of a Llama."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_config(model: Path | str, **changes: Any) -> Any:
    """vllm.config.VllmConfig of a small Llama; *changes* are of any of its parts."""
    hf = FakeConfig(
        num_attention_heads=4, hidden_size=32, head_dim=8, _commit_hash=None, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    hf.rope_parameters.update(changes.pop("rope", {}))
    for name in [name for name in changes if name.startswith("hf_")]:
        setattr(hf, name.removeprefix("hf_"), changes.pop(name))
    parts = {
        "model_config": SimpleNamespace(
            model=str(model), tokenizer=str(model), tokenizer_revision=None, dtype=torch.float32,
            quantization=None, quantization_config=None, multimodal_config=None,
            hf_config=hf, hf_text_config=hf, is_encoder_decoder=False, pooler_config=None,
            is_prefix_caching_supported=True,
            get_total_num_hidden_layers=lambda: 3, get_total_num_kv_heads=lambda: 2,
        ),
        "cache_config": SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True),
        "load_config": SimpleNamespace(load_format="auto"),
    }  # fmt: skip
    lora = changes.pop("lora_config", None)
    for name, value in changes.items():
        (holder,) = [part for part in parts.values() if hasattr(part, name)]
        setattr(holder, name, value)
    return SimpleNamespace(**parts, lora_config=lora)
