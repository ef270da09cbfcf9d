"""The component table: a layout as it stands in frames, index rows and messages."""

from __future__ import annotations

import struct
from functools import lru_cache

from kvstore.proto.errors import InvalidFrameError, LayoutMismatchError
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

MAX_COMPONENTS = 64
COMPONENT = struct.Struct("<BBBx3I5I12x")

assert COMPONENT.size == 48


def pack_components(layout: KVLayout) -> bytes:
    """Return the component table; this version's rectangles always cover the whole chunk."""
    return b"".join(
        COMPONENT.pack(
            c.kind, c.dtype, c.parts, c.layers, c.kv_heads, c.head_dim, c.tokens,
            0, c.layers, 0, c.kv_heads,
        )
        for c in layout.components
    )  # fmt: skip


@lru_cache(maxsize=1024)
def unpack_components(table: bytes) -> KVLayout:
    """Parse a component table; equal tables share one layout. Raises InvalidFrameError."""
    if not table or len(table) % COMPONENT.size or len(table) > MAX_COMPONENTS * COMPONENT.size:
        raise InvalidFrameError("components", len(table), f"a row has {COMPONENT.size} bytes")
    components = []
    for row in COMPONENT.iter_unpack(table):
        kind, dtype, parts, layers, kv_heads, head_dim, tokens, *rectangle = row
        if rectangle != [0, layers, 0, kv_heads]:
            raise InvalidFrameError("rectangle", rectangle, "this version takes whole chunks")
        try:
            component = Component(LayerKind(kind), DType(dtype), layers, kv_heads, head_dim, tokens)
        except (ValueError, LayoutMismatchError) as error:
            raise InvalidFrameError("component", row, str(error)) from None
        if parts != component.parts:
            raise InvalidFrameError("parts", parts, f"{component.kind.name} has {component.parts}")
        components.append(component)
    return KVLayout(tuple(components))
