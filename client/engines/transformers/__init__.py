"""The transformers connector: ``TransformersConnector``, loaded when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.client.engines.transformers.connector import Generation as Generation
    from kvstore.client.engines.transformers.connector import (
        TransformersConnector as TransformersConnector,
    )
    from kvstore.client.engines.transformers.identity import representation_of as representation_of

__all__ = ["Generation", "TransformersConnector", "representation_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.client.engines.transformers import connector

    return getattr(connector, name)
