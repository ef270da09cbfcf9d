"""vLLM on this store: the connector that vLLM loads by name, in a file a subject.

What vLLM loads is imported with the first use: most of the files need no vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.client.engines.vllm.connector import KVStoreConnector

    return KVStoreConnector
