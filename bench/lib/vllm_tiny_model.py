"""A tiny Llama with random weights for a real vLLM.

``python -m bench.lib.vllm_tiny_model FOLDER SCALE``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<unk>", "<s>", "</s>")
SEED = 20_26


def make(folder: Path, scale: int = 1) -> None:
    """Write the model, 2.6 million parameters in float32, and a byte-level tokenizer.

    *scale* multiplies its width, its heads and its layers: 2 makes it about eight times as large.
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256 * scale, intermediate_size=512 * scale,
        num_hidden_layers=4 * scale,
        num_attention_heads=4 * scale, num_key_value_heads=2 * scale, head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:  # wide enough that the attended tokens decide the next one
                weights.normal_(0.0, 0.5 if "embed" in name else 0.08)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bytes_only, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
