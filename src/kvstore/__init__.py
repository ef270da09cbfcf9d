"""kvstore: a multi-tier KV-cache store for LLM inference that may forget, but never lies."""

__version__ = "0.1.0"
