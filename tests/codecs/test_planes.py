from __future__ import annotations

import numpy as np
import pytest
from oracles.sieve import NUMPY

from kvstore.codecs.base import codec_by_name
from kvstore.codecs.lossless import (
    Loops,
    kind_of,
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
    loops = NUMPY if chosen == "numpy" else Loops(None if chosen == "best" else chosen)
    width = WIDTHS[kind]
    words = np.random.default_rng(0).integers(0, 1 << 8 * width, 70_001, f"u{width}")
    planes = np.empty((width, len(words)), np.uint8)
    loops.split(kind, words, planes)
    expected = np.array([by_hand(kind, int(word)) for word in words[:4000]]).T
    assert np.array_equal(planes[:, :4000], expected)
    joined = np.zeros_like(words)
    loops.join(kind, joined, planes)
    assert np.array_equal(joined, words)


def test_all_types_of_one_byte_are_split_alike() -> None:
    assert {kind_of(dtype) for dtype in DType} == set(KINDS)


def test_bounds_of_layers_that_no_machine_holds_are_found_at_once() -> None:
    most = (1 << 24) - 1
    for dim in (1, most):
        component = Component(LayerKind.attention, DType.float32, most, most, dim, most)
        bound = codec_by_name("lossless").max_segment_bytes(component)
        assert component.layer_bytes <= bound < 1.1 * component.layer_bytes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32, DType.uint8])
def test_nothing_is_decoded_into_memory_that_is_read_only(dtype: DType) -> None:
    words = np.zeros(64, f"u{dtype.item_bytes}")
    planes = np.ones((dtype.item_bytes, 64), np.uint8)
    words.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Loops().join(kind_of(dtype), words, planes)
    assert not words.any()
