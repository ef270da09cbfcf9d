"""What a Chunk is checked for before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from helpers.prompts import SMALL, tensors_of

from kvstore.client import Chunk
from kvstore.client.chunk import arrays_of
from kvstore.client.chunk_puts import layout_of
from kvstore.codecs.base import AnyTensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import ROOT, ChunkKey, DType, KVLayout, Model

KEY = ChunkKey(bytes(32))


def tensors(shape: tuple[int, ...] = (2, 16, 8), dtype: str = "u2") -> list[list[list[Any]]]:
    """Return tensors for two layers of the small model."""
    return [[[np.zeros(shape, dtype) for _ in range(2)] for _ in range(2)]]


def arrays_in(chunk: Chunk, model: Model) -> tuple[KVLayout, AnyTensors]:
    layout = layout_of(chunk, model)
    return layout, arrays_of(layout, chunk.tensors)


def test_right_chunk_says_its_layout_and_shares_its_memory() -> None:
    given = tensors_of(KEY, SMALL, 20)
    layout, arrays = arrays_in(Chunk(KEY, given), SMALL)
    assert layout.tokens == 20
    assert arrays[0][1][1] is given[0][1][1]


WRONG: dict[str, tuple[Any, str]] = {
    "too few tokens": (tensors((2, 15, 8)), "tokens=15: a chunk has 16 to 8192 tokens"),
    "too many tokens": (tensors((2, 8193, 8)), "tokens=8193: a chunk has"),
    "another number of heads": (tensors((3, 16, 8)), r"shape=\(3, 16, 8\): give \(2, 16, 8\)"),
    "another head size": (tensors((2, 16, 9)), r"shape=\(2, 16, 9\): give \(2, 16, 8\)"),
    "two dimensions": (tensors((2, 16)), r"shape=\(2, 16\): give \(2, 16, 8\)"),
    "one dimension": (tensors((2,)), "tensors='list': give components, layers, parts"),
    "wider elements": (tensors(dtype="f4"), "dtype='float32': give bfloat16"),
    "elements of another kind": (tensors(dtype="f2"), "dtype='float16': give bfloat16"),
    "narrower elements": (tensors(dtype="u1"), "dtype='uint8': give bfloat16"),
    "a layer less": ([tensors()[0][:1]], "layers=1: give 2"),
    "a layer more": ([tensors()[0] * 2], "layers=4: give 2"),
    "a component more": (tensors() * 2, "components=2: give 1"),
    "a part less": ([[parts[:1] for parts in tensors()[0]]], "parts=1: give 2"),
    "nothing": ([], "tensors='list': give components, layers, parts"),
    "no layers": ([[]], "tensors='list': give components, layers, parts"),
    "numbers": ([[[1, 2]]], "tensors='list': give components, layers, parts"),
    "lists": ([[[[1.0], [2.0]]]], "tensors='list': give components, layers, parts"),
    "a list behind an array": (
        [[[np.zeros((2, 16, 8), "u2"), [1]], tensors()[0][1]]], "tensors='list': give numpy or",
    ),
    "a torch tensor of another dtype": (
        [[[torch.zeros(2, 16, 8, dtype=torch.float16)] * 2] * 2], "dtype='float16': give bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors_are_refused_by_what_is_wrong(what: str) -> None:
    given, message = WRONG[what]
    with pytest.raises(LayoutMismatchError, match=message):
        arrays_in(Chunk(KEY, given), SMALL)


@pytest.mark.parametrize("stated", ["u1", "i1"])
def test_bytes_stand_for_fp8(stated: str) -> None:
    model = make_representation(dtype=DType.float8_e4m3fn)
    if stated == "i1":
        with pytest.raises(LayoutMismatchError, match="dtype='int8': give float8_e4m3fn"):
            arrays_in(Chunk(KEY, tensors(dtype=stated)), model)
    else:
        assert arrays_in(Chunk(KEY, tensors(dtype=stated)), model)[0].tokens == 16


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("parent", b"short", "give 16 bytes"),
        ("content", bytes(17), "give 16 bytes"),
        ("position", -1, "a token index is in 0..2^32-1"),
        ("position", 1 << 32, "a token index is in 0..2^32-1"),
        ("prefill_flops", -1.0, "must be finite, not negative"),
        ("prefill_flops", float("inf"), "must be finite, not negative"),
        ("prefill_flops", float("nan"), "must be finite, not negative"),
    ],
)
def test_chunk_is_checked_at_its_birth(field: str, value: Any, fix: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Chunk(KEY, tensors(), **{field: value})
    assert (caught.value.field, str(caught.value)) == (field, f"{field}={value!r}: {fix}")


def test_chunk_at_the_start_of_a_prompt_needs_no_more_than_key_and_tensors() -> None:
    chunk = Chunk(KEY, tensors())
    assert (chunk.parent, chunk.position, chunk.prefill_flops) == (ROOT, 0, 0.0)
