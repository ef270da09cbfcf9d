"""Tiny models with random weights whose layers keep other kinds of KV than a Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench.lib.vllm_tiny_model import SEED, tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

WINDOW_TOKENS = 64

_SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def hybrid() -> PreTrainedModel:
    """Two window layers for each one of full attention: three of vLLM's KV cache groups."""
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    config = Gemma3TextConfig(
        **{**_SIZES, "tie_word_embeddings": True}, num_hidden_layers=len(kinds), layer_types=kinds,
        num_key_value_heads=2, head_dim=64, sliding_window=WINDOW_TOKENS, pad_token_id=0,
        query_pre_attn_scalar=4,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def sliding() -> PreTrainedModel:
    """Window layers only."""
    config = MistralConfig(
        **_SIZES, num_hidden_layers=3, num_key_value_heads=2, head_dim=64,
        sliding_window=WINDOW_TOKENS,
    )  # fmt: skip
    return MistralForCausalLM(config)


def latent() -> PreTrainedModel:
    """Multi-head latent attention, of the size that vLLM's CPU kernel has."""
    config = DeepseekV2Config(
        **_SIZES, num_hidden_layers=2, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=128,
        first_k_dense_replace=2, topk_method="greedy", n_group=1, topk_group=1,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(config)


def save(model: PreTrainedModel, folder: Path, embedding: float = 0.5) -> Path:
    """Write *model*, with weights that let what is attended to decide the next token."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0.0, embedding if "embed" in name else 0.08)
    model.float().save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer().save_pretrained(folder)
    return folder
