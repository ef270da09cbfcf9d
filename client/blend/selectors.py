"""The selectors by name."""

from __future__ import annotations

from kvstore.client.blend.first_k import FirstK
from kvstore.client.blend.hkvd import Hkvd
from kvstore.client.blend.hybrid import Hybrid
from kvstore.client.blend.query_attention import QueryAttention
from kvstore.client.blend.selector import Selector
from kvstore.client.blend.stored_priority import StoredPriority
from kvstore.proto.errors import InvalidRequestError

SELECTORS: dict[str, Selector] = {
    selector.name: selector
    for selector in (Hkvd(), FirstK(), StoredPriority(), QueryAttention(), Hybrid())
}


def selector_of(name: str) -> Selector:
    """Return the selector called *name*. Raises InvalidRequestError."""
    found = SELECTORS.get(name)
    if found is None:
        raise InvalidRequestError("selector", name, f"use one of {', '.join(SELECTORS)}")
    return found
