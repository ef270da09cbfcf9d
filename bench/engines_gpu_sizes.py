"""What ``bench.engines_gpu`` runs: its models, its prompts, and the room that their KV takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

HEAD_DIM, KV_HEADS, VOCABULARY = 128, 8, 32000
SIZES = {
    # hidden, intermediate, layers, heads
    "tiny": (512, 1024, 2, 4),  # for a CPU
    "small": (2048, 5632, 24, 16),  # 1.2 B parameters, 96 KiB of KV a token
    "8b": (4096, 14336, 32, 32),  # Llama 3's 8 B, 128 KiB of KV a token
}
CHUNK_TOKENS = 256
WARM_UP_TOKENS = 4096
DECODE_REQUESTS, DECODE_ROUNDS = 8, 8
"""The first round warms up."""
DECODE_PROMPT, DECODE_FIRST, DECODE_STEPS = 257, 8, 512
"""Tokens of a prompt, steps that are not timed, and steps that are."""
DECODE_CHUNKS = (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS - 1) // CHUNK_TOKENS


def prompt(tokens: int, seed: int) -> list[int]:
    """Return tokens of noise."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def token_bytes(size: str) -> int:
    """Bytes of KV of a token, in bfloat16."""
    _, _, layers, heads = SIZES[size]
    return 2 * 2 * layers * min(KV_HEADS, heads) * HEAD_DIM


def room_bytes(size: str, lengths: Sequence[int]) -> int:
    """Bytes that hold all that one engine stores, and half as much again."""
    decoded = DECODE_REQUESTS * DECODE_ROUNDS * (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS)
    tokens = sum(lengths) + min(lengths) + 2 * WARM_UP_TOKENS + decoded
    return tokens * token_bytes(size) * 3 // 2 + (512 << 20)


def model_bytes(size: str) -> int:
    """Bytes of a model's weights, norms aside."""
    hidden, inner, layers, heads = SIZES[size]
    attention = 2 * hidden * HEAD_DIM * (heads + min(KV_HEADS, heads))
    return 2 * (2 * VOCABULARY * hidden + layers * (attention + 3 * hidden * inner))
