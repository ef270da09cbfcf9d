"""What a Chunk is checked for before anything is sent, and arrays over tensors of engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from contracts.chunks import make_representation
from helpers.prompts import SMALL, tensors_of

from kvstore.client import Chunk, PlannedChunk
from kvstore.client.chunk import arrays_of, dtype_of, to_array, to_torch
from kvstore.client.chunk_puts import layout_of
from kvstore.codecs.base import AnyTensors
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError, ModelError
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


def test_wrong_tensors_are_refused_by_what_is_wrong() -> None:
    for given, message in WRONG.values():
        with pytest.raises(LayoutMismatchError, match=message):
            arrays_in(Chunk(KEY, given), SMALL)


def test_bytes_stand_for_fp8() -> None:
    model = make_representation(dtype=DType.float8_e4m3fn)
    assert arrays_in(Chunk(KEY, tensors(dtype="u1")), model)[0].tokens == 16
    with pytest.raises(LayoutMismatchError, match="dtype='int8': give float8_e4m3fn"):
        arrays_in(Chunk(KEY, tensors(dtype="i1")), model)


def test_chunk_is_checked_at_its_birth() -> None:
    for field, values, fix in (
        ("parent", (b"short",), "give 16 bytes"),
        ("content", (bytes(17),), "give 16 bytes"),
        ("position", (-1, 1 << 32), "a token index is in 0..2^32-1"),
        ("prefill_flops", (-1.0, float("inf"), float("nan")), "must be finite, not negative"),
    ):
        for value in values:
            naming: dict[str, Any] = {field: value}
            with pytest.raises(InvalidRequestError) as caught:
                Chunk(KEY, tensors(), **naming)
            assert str(caught.value) == f"{field}={value!r}: {fix}"
            assert caught.value.field == field
            with pytest.raises(InvalidRequestError):
                PlannedChunk(KEY, 16, **naming)


def test_chunk_at_the_start_of_a_prompt_needs_no_more_than_key_and_tensors() -> None:
    chunk = Chunk(KEY, tensors())
    assert (chunk.parent, chunk.position, chunk.prefill_flops) == (ROOT, 0, 0.0)


SHAPE = (2, 6, 8)


def test_arrays_and_torch_tensors_of_every_dtype_share_their_memory() -> None:
    for dtype in DType:
        tensor = torch.zeros(SHAPE, dtype=getattr(torch, dtype.name))
        array = to_array(tensor)
        assert (array.shape, array.dtype.itemsize) == (SHAPE, dtype.item_bytes)
        assert dtype_of(tensor) is dtype
        array.view(np.uint8)[...] = 0x3C
        back = to_torch(array, dtype)
        assert (back.dtype, tuple(back.shape)) == (tensor.dtype, SHAPE)
        for one in (tensor, back):
            assert bool((one.view(torch.uint8) == 0x3C).all())


def test_an_array_of_a_strided_view_writes_through_to_the_tensor() -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    for part in (tensor.transpose(0, 1), tensor[:, ::2], tensor[1:, :, 3:]):
        array = to_array(part)
        assert array.shape == tuple(part.shape)
        array[...] = np.ones((), array.dtype)
        written = tensor.detach().view(torch.uint8).numpy().view("u2")
        assert written.astype(bool).sum() == part.numel()
        written[...] = 0


def test_what_is_no_tensor_of_ours_is_refused() -> None:
    given: list[Any] = [[1.0, 2.0], "text", None, 3]
    for what in given:
        with pytest.raises(LayoutMismatchError, match="give numpy or torch tensors"):
            to_array(what)
    for bad in (torch.zeros(SHAPE, device="meta"), torch.zeros(SHAPE).to_sparse()):
        with pytest.raises(LayoutMismatchError, match="copy it to a dense tensor on the CPU"):
            to_array(bad)
    with pytest.raises(ModelError, match=r"dtype='torch\.float64': use one of bfloat16"):
        dtype_of(torch.zeros(1, dtype=torch.float64))
