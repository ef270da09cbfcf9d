"""Components of a chunk's end in component tables: the written example, and rows that lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden.samples import vectors

from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import (
    COMPONENT,
    header_bytes,
    pack_components,
    raw_frame_bytes,
    unpack_table,
)
from kvstore.proto.messages import layout_from_message, layout_to_message
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

ATTENTION = Component(LayerKind.attention, DType.bfloat16, 2, 2, 8, 16)
WINDOW = Component(LayerKind.window, DType.bfloat16, 1, 2, 8, 11, 16)
STATE = Component(LayerKind.state, DType.uint8, 2, 1, 203, 1, 16)
LAYOUT = KVLayout((ATTENTION, WINDOW, STATE))


def test_the_table_of_the_format_page_is_what_the_code_writes() -> None:
    assert pack_components(LAYOUT).hex() == vectors()["end_components"]
    assert unpack_table(bytes.fromhex(vectors()["end_components"]))[0] == LAYOUT


def test_messages_say_the_same() -> None:
    assert layout_from_message(layout_to_message(LAYOUT)) == (LAYOUT, None)


def test_a_layout_is_as_long_as_its_chunk_and_as_large_as_what_is_kept() -> None:
    assert LAYOUT.tokens == 16
    assert LAYOUT.raw_bytes == 2 * 2 * 2 * 16 * 8 * 2 + 2 * 2 * 11 * 8 * 2 + 2 * 203
    assert raw_frame_bytes(LAYOUT) > header_bytes(LAYOUT) + LAYOUT.raw_bytes - 1
    assert KVLayout((STATE,)).tokens == KVLayout((WINDOW,)).tokens == 16


def row(component: Component, chunk_tokens: int, **fields: int) -> bytes:
    """Return the row of *component* with other numbers in it."""
    c = component
    rectangle = (0, c.layers, 0, c.kv_heads)
    tokens = fields.get("tokens", c.tokens)
    return COMPONENT.pack(
        c.kind, c.dtype, c.parts, c.layers, c.kv_heads, c.head_dim, tokens, *rectangle,
        chunk_tokens,
    )  # fmt: skip


def test_rows_that_keep_more_or_less_than_their_kind_are_refused() -> None:
    for table in [
        row(ATTENTION, 32),
        row(replace(ATTENTION, kind=LayerKind.mla), 17),
        row(WINDOW, 10),
        row(WINDOW, 1 << 24),
        row(STATE, (1 << 32) - 1),
        row(STATE, 16, tokens=0),
    ]:
        with pytest.raises(InvalidFrameError):
            unpack_table(table)


def test_a_row_that_says_twice_that_all_is_kept_is_the_same_component() -> None:
    whole = replace(WINDOW, tokens=16, chunk_tokens=0)
    assert unpack_table(row(whole, 16)) == unpack_table(row(whole, 0))
