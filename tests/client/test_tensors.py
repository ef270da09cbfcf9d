"""Arrays over engines' tensors: the same memory, whatever the dtype and strides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvstore.client.chunk import dtype_of, to_array, to_arrays, to_torch
from kvstore.proto.errors import LayoutMismatchError, ModelError
from kvstore.proto.types import DType

SHAPE = (2, 6, 8)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_array_shares_the_memory_of_a_torch_tensor(dtype: DType) -> None:
    tensor = torch.zeros(SHAPE, dtype=getattr(torch, dtype.name))
    array = to_array(tensor)
    assert (array.shape, array.dtype.itemsize) == (SHAPE, dtype.item_bytes)
    array.view(np.uint8)[...] = 0x3C
    assert bool((tensor.view(torch.uint8) == 0x3C).all())
    assert dtype_of(tensor) is dtype


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "view",
    [lambda t: t.transpose(0, 1), lambda t: t[:, ::2], lambda t: t[1:, :, 3:]],
    ids=["transposed", "every other", "slice"],
)
def test_array_of_a_strided_view_writes_through_to_the_tensor(
    dtype: DType, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.zeros(SHAPE, dtype=getattr(torch, dtype.name))
    part = view(tensor)
    array = to_array(part)
    assert array.shape == tuple(part.shape)
    array[...] = np.ones((), array.dtype)
    written = tensor.view(torch.uint8).numpy().view(f"u{dtype.item_bytes}").astype(bool)
    assert written.sum() == part.numel()


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_torch_tensor_over_an_array_shares_its_memory(dtype: DType) -> None:
    array = np.zeros(SHAPE, f"u{dtype.item_bytes}")
    tensor = to_torch(array, dtype)
    assert tensor.dtype is getattr(torch, dtype.name)
    assert tuple(tensor.shape) == SHAPE
    tensor.view(torch.uint8).fill_(7)
    assert bool((array.view(np.uint8) == 7).all())
    assert np.shares_memory(to_array(tensor), array)


def test_numpy_array_is_taken_as_it_is() -> None:
    array = np.zeros(SHAPE, np.float16)
    assert to_array(array) is array
    nested = to_arrays([[[array, array]]])
    assert nested[0][0][1] is array


def test_tensor_that_needs_a_gradient_is_taken_too() -> None:
    tensor = torch.zeros(SHAPE, requires_grad=True)
    assert to_array(tensor).shape == SHAPE


@pytest.mark.parametrize("what", [[1.0, 2.0], "text", None, 3])
def test_what_is_no_tensor_is_refused(what: object) -> None:
    with pytest.raises(LayoutMismatchError, match="give numpy or torch tensors"):
        to_array(what)  # type: ignore[arg-type]


def test_tensor_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="device='meta': copy the tensor to the CPU"):
        to_array(torch.zeros(SHAPE, device="meta"))


def test_element_type_that_frames_do_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match=r"dtype='torch\.float64': use one of bfloat16"):
        dtype_of(torch.zeros(1, dtype=torch.float64))
