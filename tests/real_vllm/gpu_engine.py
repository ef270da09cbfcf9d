"""One vLLM engine on a CUDA device, in a process of its own: fp8 pages, latents, our tier.

``python -m real_vllm.gpu_engine KIND FOLDER [ADDRESS]`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.child import Engine, Store, Weights, apart, transfer_of, write
from bench.gpu.engines import VOCABULARY, prompt, token_bytes

SHAPES = {
    # kv_cache_dtype, attention backend
    "bf16": ("auto", "TRITON_ATTN"),
    "fp8": ("fp8", "TRITON_ATTN"),
    "mla": ("auto", "TRITON_MLA"),
}
TOKENS, NEW, BEST = 2048, 16, 20
"""Of a prompt, which has one more; of an answer; log probabilities of its first token."""
ROOM_CHUNKS = TOKENS // 256 + 4
"""Of vLLM's offload memory: one prompt fits as a whole, a second does not beside it."""
HIDDEN, HEADS, LATENT, ROPE, NOPE, VALUE, INNER = 1024, 16, 512, 64, 128, 128, 2048
WITHIN_S = 20.0


def write_mla(folder: Path) -> None:
    """Write a DeepSeek V2 of two dense layers with random weights."""
    folder.mkdir(parents=True)
    made = Weights(folder, HIDDEN)
    noise, ones = made.noise, made.ones
    for at in range(2):
        name = f"model.layers.{at}"
        made.save(f"model-{at}.safetensors", {
            f"{name}.self_attn.q_proj.weight": noise(HEADS * (NOPE + ROPE), HIDDEN, 1.7),
            f"{name}.self_attn.kv_a_proj_with_mqa.weight": noise(LATENT + ROPE, HIDDEN, 1.7),
            f"{name}.self_attn.kv_a_layernorm.weight": ones()[:LATENT].clone(),
            f"{name}.self_attn.kv_b_proj.weight": noise(HEADS * (NOPE + VALUE), LATENT, 1.7),
            f"{name}.self_attn.o_proj.weight": noise(HIDDEN, HEADS * VALUE, 1.0),
            f"{name}.mlp.gate_proj.weight": noise(INNER, HIDDEN, 1.0),
            f"{name}.mlp.up_proj.weight": noise(INNER, HIDDEN, 1.0),
            f"{name}.mlp.down_proj.weight": noise(HIDDEN, INNER, 1.0),
            f"{name}.input_layernorm.weight": ones(),
            f"{name}.post_attention_layernorm.weight": ones(),
        })  # fmt: skip
    made.save("model-ends.safetensors", {
        "model.embed_tokens.weight": noise(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": noise(VOCABULARY, HIDDEN, 2.0), "model.norm.weight": ones(),
    })  # fmt: skip
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": None,
        "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 2,
        "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    index = {"metadata": {"total_size": made.total}, "weight_map": made.files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def start(folder: Path, transfer: dict[str, Any], dtype: str, backend: str) -> Any:
    """Start vLLM over the model in *folder*."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
    return LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, seed=0, max_num_seqs=8,
        dtype="bfloat16", kv_cache_dtype=dtype, attention_config={"backend": backend},
        compilation_config=graphs, max_model_len=4096, max_num_batched_tokens=8192,
        enable_prefix_caching=True, gpu_memory_utilization=0.2,
        kv_transfer_config=KVTransferConfig(**transfer),
    )  # fmt: skip


def ask_shape(name: str, folder: Path) -> dict[str, Any]:
    """Return what a prompt's answers are: computed, from vLLM's cache twice, and from ours."""
    if name == "mla":
        write_mla(folder / "model")
    else:
        write(folder / "model", "tiny")
    store = Store("cpu", 1 << 30, folder)
    store.start()
    try:
        transfer = transfer_of({"engine": "kvstore"}, store)
        assert transfer is not None
        engine = Engine(start(folder, transfer, *SHAPES[name]), store)
        if engine.worker._refusal:
            return {"refusal": engine.worker._refusal}
        ids = prompt(TOKENS + 1, 1)
        engine.generate(ids, NEW, BEST)
        engine.settle()
        own, again = (engine.generate(ids, NEW, BEST) for _ in range(2))
        engine.settle()
        engine.reset()
        hit = engine.generate(ids, NEW, BEST)
        control = engine.generate(prompt(512, 77) + ids[512:], 1, BEST)
        return {
            "refusal": "", "cached": [own.cached, hit.cached], "tokens": [own.tokens, hit.tokens],
            "apart": apart(own.best, hit.best), "noise": apart(own.best, again.best),
            "control": apart(own.best, control.best),
        }  # fmt: skip
    finally:
        store.stop()


def ask_tier(folder: Path, address: str) -> dict[str, Any]:
    """Return what a prompt's answer is, and how many of its chunks our tier gave.

    What is there is stored, and more: other prompts drive it out of vLLM's offload memory.
    """
    from kvstore.client.engines.vllm_tier import KVStoreTier

    made: list[Any] = []
    begin = KVStoreTier.__init__

    def note(tier: Any, *more: Any, **settings: Any) -> None:
        begin(tier, *more, **settings)
        made.append(tier)

    KVStoreTier.__init__ = note  # type: ignore[method-assign, assignment]
    tier = {
        "type": "KVStoreTier", "address": address, "model_revision": "5eed0f0e",
        "deadline_ms": 10_000, "lookup_deadline_ms": 2000, "retry_after_ms": 100,
    }  # fmt: skip
    extra = {
        "spec_name": "StoreTieringSpec", "spec_module_path": "kvstore.client.engines.vllm_tier",
        "block_size": 256, "cpu_bytes_to_use": ROOM_CHUNKS * 256 * token_bytes("tiny"),
        "secondary_tiers": [tier],
    }  # fmt: skip
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    words = {**transfer, "kv_connector_extra_config": extra}
    engine = Engine(start(folder, words, "auto", "TRITON_ATTN"), None)
    (ours,) = made
    loaded: list[int] = []
    inner = ours._end

    def end(job: Any, done: Any, **more: Any) -> None:
        loaded.append(len(done) if job.is_promotion else 0)
        inner(job, done, **more)

    ours._end = end
    answer = engine.generate(prompt(TOKENS + 1, 1), NEW, BEST)
    for number in range(3):
        settle(engine, ours)
        engine.generate(prompt(TOKENS + 1, 100 + number), 1)
    settle(engine, ours)
    engine.reset()
    return {"tokens": answer.tokens, "cached": answer.cached, "loaded": sum(loaded)}


def settle(engine: Engine, tier: Any) -> None:
    """Step until no job is under way."""
    until = time.monotonic() + WITHIN_S
    for _ in range(8):
        engine.step()
        tier.drain_jobs()
        time.sleep(0.05)
    while tier.has_pending_work() and time.monotonic() < until:
        engine.step()
        tier.drain_jobs()


def main() -> None:
    """Do what the arguments say."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    kind, folder = sys.argv[1], Path(sys.argv[2])
    found = ask_tier(folder, sys.argv[3]) if kind == "tier" else ask_shape(kind, folder)
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)  # threads of engines may hang at the end; everything is written


if __name__ == "__main__":
    main()
