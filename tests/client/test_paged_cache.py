"""Page tensors as engines have them: what is taken, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from helpers.pages import AXES, engine_pages, rows_of

from kvstore.client.paged_cache import PagedCache, page_axes
from kvstore.codecs.block_part import BlockPart, to_dense
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import DType, LayerGroup, LayerKind

MODEL = make_representation(layers=3)


@pytest.mark.parametrize("axes", AXES)
def test_tensors_of_a_span_are_those_of_its_slots(axes: str) -> None:
    pages = engine_pages(MODEL, axes, 6, 8, np.random.default_rng(1))
    assert (pages.blocks, pages.block_tokens) == (6, 8)
    ids = [5, 0, 3, 4]
    rows = rows_of(pages, ids)
    (layers,) = pages[ids].chunk(3, 30)
    for layer, parts in enumerate(layers):
        for number, part in enumerate(parts):
            assert isinstance(part, BlockPart)
            assert np.array_equal(to_dense(part).view(np.int16), rows[layer, number, :, 3:30])


def test_axes_of_one_entry_may_be_left_out() -> None:
    group = LayerGroup(LayerKind.mla, DType.float16, (0, 1), 1, 24)
    mla = replace(MODEL, layer_groups=(group,))
    tensors = [np.zeros((5, 16, 24), np.float16) for _ in range(2)]
    pages = PagedCache(mla, tensors, "block token dim")
    (layers,) = pages[[1, 4]].chunk(0, 20)
    assert [part.shape for parts in layers for part in parts] == [(1, 20, 24)] * 2
    slots = [np.zeros((100, 2, 8), np.float32) for _ in range(6)]
    pairs = list(zip(slots[:3], slots[3:], strict=True))
    flat = PagedCache(make_representation(layers=3, dtype=DType.float32), pairs, "block head dim")
    assert (flat.blocks, flat.block_tokens) == (100, 1)


def test_axes_that_make_no_sense_are_refused() -> None:
    for names, message in (
        ("block token head", "axes='block token head': name block and dim at least"),
        ("block block dim", "use each of layer block kv token head dim once at most"),
        ("block dim page", "use each of layer block kv token head dim once at most"),
    ):
        with pytest.raises(LayoutMismatchError, match=message):
            page_axes(names)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


OTHERS: list[tuple[Any, str, str]] = [
    ([numbers(4, 2, 8, 2, 8)] * 2, "block kv token head dim", "layers=2: give pages of 3"),
    ([numbers(4, 8, 2, 8)] * 3, "block kv token head dim", r"does not name the axes of \(4"),
    ([numbers(4, 2, 8, 3, 8)] * 3, "block kv token head dim", "they need 2 heads of 8"),
    ([numbers(4, 2, 8, 2, 9)] * 3, "block kv token head dim", "they need 2 heads of 8"),
    ([numbers(0, 2, 8, 2, 8)] * 3, "block kv token head dim", "they need 2 heads of 8"),
    ([numbers(4, 3, 8, 2, 8)] * 3, "block kv token head dim", "kv=3: give 2 parts"),
    ([numbers(4, 8, 2, 8)] * 3, "block token head dim", "kv=1: give 2 parts"),
    ([(numbers(4, 2, 8, 2, 8),) * 2] * 3, "block kv token head dim", "leave kv out where"),
    (
        [numbers(4, 2, 8, 2, 8)] * 2 + [numbers(5, 2, 8, 2, 8)],
        "block kv token head dim", "all layers need as many blocks",
    ),
    (
        [numbers(4, 2, 8, 2, 8, dtype=torch.float16)] * 3,
        "block kv token head dim", "pages='float16': give bfloat16",
    ),
    ([np.zeros((4, 2, 8, 2, 8), np.uint8)] * 3, "block kv token head dim", "pages='uint8'"),
    (numbers(3, 4, 2, 8, 2, 8), "block kv token head dim", "name the layer axis"),
    ([numbers(4, 2, 8, 2, 8)] * 3, "layer block kv token head dim", "leave layer out where"),
    (numbers(3, 4, 2, 8, 2), "layer block kv token head dim", "does not name the axes"),
]  # fmt: skip


def test_pages_of_another_model_are_refused() -> None:
    for tensors, names, message in OTHERS:
        with pytest.raises(LayoutMismatchError, match=message):
            PagedCache(MODEL, tensors, names)


def test_pages_that_overlap_are_refused() -> None:
    whole = np.zeros((4, 2, 16, 3, 2, 8), np.uint16)  # block kv token layer head dim
    axes = "block kv token head dim"
    PagedCache(MODEL, [whole[:, :, :, layer] for layer in range(3)], axes)
    with pytest.raises(InvalidRequestError, match="pages='overlapping'"):
        PagedCache(MODEL, [whole[:, :, :, layer] for layer in (0, 1, 1)], axes)
    flat = np.zeros(2 * 16 * 2 * 8, np.uint16)
    strided = np.lib.stride_tricks.as_strided(flat, (4, 2, 16, 2, 8), (0, 512, 32, 16, 2))
    with pytest.raises(InvalidRequestError, match="pages="):
        PagedCache(MODEL, [strided.copy(), strided.copy(), strided], axes)
    with pytest.raises(LayoutMismatchError, match="byte order"):
        PagedCache(MODEL, [strided.astype(">u2")] * 3, axes)
