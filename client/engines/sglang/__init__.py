"""SGLang's HiCache on this store: ``KVStoreStorage``, imported with SGLang on first access."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "KVStoreStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.client.engines.sglang.backend import KVStoreStorage

    return KVStoreStorage
