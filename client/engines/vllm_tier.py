"""Where vLLM's settings find the tier: see ``kvstore.client.engines.vllm.tier``."""

from kvstore.client.engines.vllm.tier import KVStoreTier, StoreTieringSpec

__all__ = ["KVStoreTier", "StoreTieringSpec"]
