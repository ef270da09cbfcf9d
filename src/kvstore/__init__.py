"""kvstore: a multi-tier KV-cache store for LLM inference that may forget, but never lies."""

from kvstore.proto import __version__

__all__ = ["__version__"]
