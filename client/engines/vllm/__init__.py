"""vLLM on this store: the connector that vLLM loads by name.

It is imported on first access: most of the files do not need vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.client.engines.vllm.connector import KVStoreConnector

    return KVStoreConnector
