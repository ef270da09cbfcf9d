"""The server: one node that manages KV chunks over its tiers."""
