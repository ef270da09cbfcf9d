"""A Llama with random weights: ``python -m bench.engines_gpu_model FOLDER SIZE``.

Its attention is peaked, so that damage to KV shows in what is generated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.engines_gpu_sizes import HEAD_DIM, KV_HEADS, SIZES, VOCABULARY

SHARP, PLAIN = 1.7, 1.0
LOUD = 2.0
"""Gains of weights: queries and keys, most others, and what attention brings."""


def config_of(size: str) -> dict[str, Any]:
    """Return what a ``config.json`` says of a model of *size*."""
    hidden, inner, layers, heads = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": min(KV_HEADS, heads),
        "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    }  # fmt: skip


class Weights:
    """Makes random weights on the device, if there is one, and counts what it wrote."""

    def __init__(self, folder: Path, hidden: int) -> None:
        import torch

        torch.manual_seed(11)
        self._folder = folder
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._hidden = hidden
        self.files: dict[str, str] = {}
        self.total = 0

    def noise(self, rows: int, columns: int, gain: float) -> Any:
        """Return a matrix whose products have the variance of its input, times *gain* squared."""
        import torch

        made = torch.randn(rows, columns, device=self._device, dtype=torch.bfloat16)
        return (made * (gain / columns**0.5)).cpu()

    def ones(self) -> Any:
        """Return the weights of a norm."""
        import torch

        return torch.ones(self._hidden, dtype=torch.bfloat16)

    def save(self, name: str, tensors: dict[str, Any]) -> None:
        """Write one file."""
        from safetensors.torch import save_file

        save_file(tensors, self._folder / name, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(tensors, name))
        self.total += sum(one.nbytes for one in tensors.values())


def write(folder: Path, size: str) -> int:
    """Write the model; return the bytes of its weights. Its ``config.json`` comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(size)
    hidden, inner, layers, heads = SIZES[size]
    kv = config["num_key_value_heads"] * HEAD_DIM
    made = Weights(folder, hidden)
    noise = made.noise
    made.save("model-ends.safetensors", {
        "model.embed_tokens.weight": noise(VOCABULARY, hidden, hidden**0.5),
        "lm_head.weight": noise(VOCABULARY, hidden, LOUD), "model.norm.weight": made.ones(),
    })  # fmt: skip
    for number in range(layers):
        at = f"model.layers.{number}"
        made.save(f"model-{number:02}.safetensors", {
            f"{at}.self_attn.q_proj.weight": noise(heads * HEAD_DIM, hidden, SHARP),
            f"{at}.self_attn.k_proj.weight": noise(kv, hidden, SHARP),
            f"{at}.self_attn.v_proj.weight": noise(kv, hidden, LOUD),
            f"{at}.self_attn.o_proj.weight": noise(hidden, heads * HEAD_DIM, PLAIN),
            f"{at}.mlp.gate_proj.weight": noise(inner, hidden, PLAIN),
            f"{at}.mlp.up_proj.weight": noise(inner, hidden, PLAIN),
            f"{at}.mlp.down_proj.weight": noise(hidden, inner, PLAIN),
            f"{at}.input_layernorm.weight": made.ones(),
            f"{at}.post_attention_layernorm.weight": made.ones(),
        })  # fmt: skip
    index = {"metadata": {"total_size": made.total}, "weight_map": made.files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return made.total


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
