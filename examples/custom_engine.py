"""A custom engine on kvstore, on one page: ``python examples/custom_engine.py ADDRESS``.

Its model is a stand-in whose KV depends on all earlier tokens; a real one computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import kvstore

LAYERS, HEADS, DIM, BLOCKS, BLOCK_TOKENS = 4, 2, 64, 128, 16
MODEL = kvstore.Model.uniform(
    "example/engine", "8f2c1d4", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16"
)


class Engine:
    """Serves prompts from a paged cache, and puts the KV it computes into the store."""

    def __init__(self, client: kvstore.Client) -> None:
        self.client = client
        self.pages = torch.zeros(LAYERS, BLOCKS, 2, BLOCK_TOKENS, HEADS, DIM, dtype=torch.bfloat16)
        self.cache = kvstore.PagedCache(MODEL, self.pages, "layer block kv token head dim")

    def serve(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill the blocks with the KV of a prompt; return how many tokens the store had.

        A store that is unreachable or late costs the request its timeout at most.
        """
        blocks = self.cache[block_ids]
        try:
            hit = self.client.get(tokens, out=blocks, timeout=0.5).tokens
        except kvstore.KVStoreError:
            hit = 0
        hit = min(hit, len(tokens) - 1)  # an engine computes the last token: it needs its output
        self.prefill(tokens, block_ids, hit)
        try:
            self.client.put(tokens, blocks, start=hit)
        except kvstore.KVStoreError as error:
            print(f"not stored: {error}", file=sys.stderr)
        return hit

    def prefill(self, tokens: Sequence[int], block_ids: Sequence[int], start: int) -> None:
        """Compute the KV of *tokens* from *start* on."""
        sums = torch.tensor(tokens).cumsum(0)
        for at in range(start, len(tokens)):
            block, slot = block_ids[at // BLOCK_TOKENS], at % BLOCK_TOKENS
            self.pages[:, block, :, slot] = float(sums[at] % 251)


def main(address: str) -> None:
    """Serve the same prompt twice, the second time in other blocks."""
    tokens = list(range(600))
    with kvstore.Client(address, MODEL) as client:
        engine = Engine(client)
        for block_ids in (range(38), range(60, 98)):
            hit = engine.serve(tokens, block_ids)
            print(f"{hit} of {len(tokens)} tokens came from the store")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:7420"])
