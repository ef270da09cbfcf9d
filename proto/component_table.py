"""The component table: a layout as it stands in frames, index rows and messages."""

from __future__ import annotations

import struct
from functools import lru_cache

from kvstore.proto.errors import InvalidFrameError, LayoutMismatchError
from kvstore.proto.types import Component, DType, Extent, KVLayout, LayerKind, Portion

MAX_COMPONENTS = 64
COMPONENT = struct.Struct("<BBBx3I6I8x")

_NOTHING = (0, 0, 0, 0)
"""The rectangle of a component that a frame has nothing of."""

assert COMPONENT.size == 48


def pack_components(layout: KVLayout, portion: Portion | None = None) -> bytes:
    """Return the component table of *layout*, or of the *portion* that a frame covers of it."""
    whole = layout if portion is None else portion.whole
    extents = [Extent.whole(c) for c in layout.components] if portion is None else portion.extents
    return b"".join(
        COMPONENT.pack(
            c.kind, c.dtype, c.parts, c.layers, c.kv_heads, c.head_dim, c.tokens,
            *(_NOTHING if extent is None else _numbers(extent)), c.chunk_tokens,
        )
        for c, extent in zip(whole.components, extents, strict=True)
    )  # fmt: skip


def _numbers(extent: Extent) -> tuple[int, int, int, int]:
    return extent.first_layer, extent.layer_stop, extent.first_head, extent.head_stop


@lru_cache(maxsize=1024)
def unpack_components(table: bytes) -> KVLayout:
    """Parse the component table of a whole chunk; equal tables share one layout.

    Raises InvalidFrameError, also for a rectangle of one.
    """
    layout, portion = unpack_table(table)
    if portion is not None:
        raise InvalidFrameError("rectangle", portion.extents, "whole chunks are taken here")
    return layout


@lru_cache(maxsize=1024)
def unpack_table(table: bytes) -> tuple[KVLayout, Portion | None]:
    """Parse a component table; equal tables share one layout.

    Return the layout of what is covered, and which portion of the chunk that is; None: all of
    it. Raises InvalidFrameError.
    """
    if not table or len(table) % COMPONENT.size or len(table) > MAX_COMPONENTS * COMPONENT.size:
        raise InvalidFrameError("components", len(table), f"a row has {COMPONENT.size} bytes")
    components, extents = [], []
    for row in COMPONENT.iter_unpack(table):
        kind, dtype, parts, layers, kv_heads, head_dim, tokens, *rectangle, chunk_tokens = row
        try:
            component = Component(
                LayerKind(kind), DType(dtype), layers, kv_heads, head_dim, tokens, chunk_tokens
            )
        except (ValueError, LayoutMismatchError) as error:
            raise InvalidFrameError("component", row, str(error)) from None
        if parts != component.parts:
            raise InvalidFrameError("parts", parts, f"{component.kind.name} has {component.parts}")
        components.append(component)
        extents.append(None if tuple(rectangle) == _NOTHING else Extent(*rectangle))
    whole = KVLayout(tuple(components))
    try:
        portion = Portion(whole, tuple(extents))
    except LayoutMismatchError as error:
        raise InvalidFrameError("rectangle", extents, str(error)) from None
    return (whole, None) if portion.is_whole else (portion.layout, portion)
