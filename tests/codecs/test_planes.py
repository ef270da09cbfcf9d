from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.planes import numpy_splitter

from kvstore.codecs.base import codec_by_name
from kvstore.codecs.lossless import (
    best_splitter,
    block_count,
    flat_rows,
    gather_rows,
    kind_of,
    native_splitter,
    row_blocks,
    scatter_rows,
)
from kvstore.proto.native import paths
from kvstore.proto.types import Component, DType, LayerKind

KINDS = ["bfloat16", "float16", "float32", "bytes"]
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "bytes": 1}


def by_hand(kind: str, word: int) -> list[int]:
    """Return the planes' bytes of *word*, plane 0 first, as docs/format.md has them."""
    match kind:
        case "bfloat16":
            return [word >> 7 & 0xFF, word >> 8 & 0x80 | word & 0x7F]
        case "float16":
            return [word >> 8, word & 0xFF]
        case "float32":
            return [*by_hand("bfloat16", word >> 16), *by_hand("float16", word & 0xFFFF)]
        case _:
            return [word]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [*paths(), "best", "numpy"])
def test_planes_are_those_of_the_format_page(kind: str, chosen: str) -> None:
    splitter = numpy_splitter(kind)
    if chosen == "best":
        splitter = best_splitter(kind)
    elif chosen != "numpy" and kind != "bytes":
        splitter = native_splitter(kind, chosen)
    width = WIDTHS[kind]
    words = np.random.default_rng(0).integers(0, 1 << 8 * width, 70_001, f"u{width}")
    planes = np.empty((width, len(words)), np.uint8)
    splitter.split(words, planes)
    expected = np.array([by_hand(kind, int(word)) for word in words[:4000]]).T
    assert np.array_equal(planes[:, :4000], expected)
    joined = np.zeros_like(words)
    splitter.join(joined, planes)
    assert np.array_equal(joined, words)


def test_all_types_of_one_byte_are_split_alike() -> None:
    assert {kind_of(dtype) for dtype in DType} == set(KINDS)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 100))
def test_rows_are_gathered_and_scattered_in_order(
    heads: int, tokens: int, dim: int, block_items: int
) -> None:
    component = Component(LayerKind.mla, DType.float16, 1, heads, dim, tokens)
    values = np.arange(heads * tokens * dim, dtype=np.uint16)
    dense = values.reshape(heads, tokens, dim)
    strided = np.empty((tokens, dim, heads), np.uint16).transpose(2, 0, 1)
    strided[...] = dense
    back = np.zeros_like(strided)
    scratch = np.empty(len(values), np.uint16)
    assert block_count(component, block_items) == len(list(row_blocks(component, block_items)))
    found = []
    for start, stop in row_blocks(component, block_items):
        assert stop - start == 1 or (stop - start) * dim <= block_items
        found.append(gather_rows(strided, start, stop, scratch).copy())
        scatter_rows(back, start, stop, found[-1])
        run = flat_rows(dense, start, stop)
        assert run is not None
        assert np.array_equal(run, found[-1])
        assert np.may_share_memory(run, dense)
    assert np.array_equal(np.concatenate(found), values)
    assert np.array_equal(back, dense)


def test_rows_that_are_no_run_have_no_flat_view() -> None:
    assert flat_rows(np.zeros((4, 6, 2), np.uint16).transpose(1, 0, 2), 0, 3) is None


def test_bounds_of_layers_that_no_machine_holds_are_found_at_once() -> None:
    most = (1 << 24) - 1
    for dim in (1, most):
        component = Component(LayerKind.attention, DType.float32, most, most, dim, most)
        bound = codec_by_name("lossless").max_segment_bytes(component)
        assert component.layer_bytes <= bound < 1.1 * component.layer_bytes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32, DType.uint8])
def test_nothing_is_decoded_into_memory_that_is_read_only(dtype: DType) -> None:
    splitter = best_splitter(kind_of(dtype))
    words = np.zeros(64, f"u{dtype.item_bytes}")
    planes = np.ones((dtype.item_bytes, 64), np.uint8)
    words.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        splitter.join(words, planes)
    assert not words.any()
