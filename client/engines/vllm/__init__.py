"""The connector that vLLM loads by name, imported on first access: most files need no vLLM."""

from __future__ import annotations

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.client.engines.vllm.connector import KVStoreConnector

    return KVStoreConnector
