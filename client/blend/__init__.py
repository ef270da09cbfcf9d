"""Reuse of non-prefix chunks: their KV is moved to new positions and partly recomputed."""
