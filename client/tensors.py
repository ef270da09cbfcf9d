"""Between an engine's tensors and the arrays that codecs take, without copying.

numpy has no bfloat16 and no fp8: such tensors become unsigned integers of the same size.
torch is imported only by who already has a tensor of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvstore.codecs.base import AnyPart, AnyTensors, Part, check_tensors
from kvstore.codecs.block_part import BlockPart
from kvstore.codecs.block_stack import BlockStack
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import DType, KVLayout, LayerGroup

if TYPE_CHECKING:
    import torch

    TensorLike: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
else:
    TensorLike = Any

_MAX_WORK: Any = 10_000
"""What finding out whether two interleaved tensors overlap may cost: some milliseconds."""

LayerTensors: TypeAlias = Sequence[Sequence[Sequence[TensorLike | BlockPart]]]
"""Components, then layers, then parts (K and V), each (kv_heads, tokens, head_dim)."""


def to_array(tensor: TensorLike) -> Part:
    """Return an array over the memory of *tensor*, numpy's or torch's on the CPU.

    Raises LayoutMismatchError for anything else.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.dtype.isnative:
            raise LayoutMismatchError("dtype", str(tensor.dtype), "give this machine's byte order")
        return tensor
    if not type(tensor).__module__.startswith("torch"):
        raise LayoutMismatchError("tensor", type(tensor).__name__, "give numpy or torch tensors")
    import torch

    if tensor.device.type != "cpu":
        raise LayoutMismatchError("device", str(tensor.device), "copy the tensor to the CPU first")
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    array: Part = tensor.numpy()
    return array


def check_apart(name: str, tensors: Iterable[TensorLike]) -> None:
    """Raise InvalidRequestError when elements of *tensors*, the argument *name*, share memory.

    Of tensors whose memory is interleaved those are compared that begin one after another.
    """
    arrays = [array for array in map(to_array, tensors) if array.size]
    spans = sorted((*_span(name, array), number) for number, array in enumerate(arrays))
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end and _share(arrays[one], arrays[other]):
            raise InvalidRequestError(name, "overlapping", "give each tensor memory of its own")


def _span(name: str, array: Part) -> tuple[int, int]:
    """Return the bytes that *array* lies in."""
    start, size = array.__array_interface__["data"][0], array.itemsize
    axes = list(zip(array.strides, array.shape, strict=True))
    for stride, count in sorted((abs(stride), count) for stride, count in axes):
        if count > 1:
            if stride < size:
                fix = "give memory where no two elements are at one place"
                raise InvalidRequestError(name, array.strides, fix)
            size += (count - 1) * stride
    before = sum((count - 1) * min(0, stride) for stride, count in axes)
    return start + before, start + before + size


def _share(one: Part, other: Part) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return False


def to_arrays(tensors: LayerTensors) -> AnyTensors:
    """Return the arrays of a whole chunk's tensors; what lies in an engine's blocks stays there."""
    return [
        layers if isinstance(layers, BlockStack) else [layer_arrays(parts) for parts in layers]
        for layers in tensors
    ]


def layer_arrays(
    parts: Sequence[TensorLike | BlockPart], dtype: DType | None = None
) -> list[AnyPart]:
    """Return the arrays of one layer's tensors.

    Raises LayoutMismatchError for what is no tensor, or states that it is not of *dtype*.
    """
    found: list[AnyPart] = []
    for part in parts:
        if dtype is not None:
            if not hasattr(part, "dtype"):
                fix = "give numpy or torch tensors"
                raise LayoutMismatchError("tensors", type(part).__name__, fix)
            stated = stated_dtype(part.dtype)
            if stated is not None and stated is not dtype:
                raise LayoutMismatchError("dtype", stated.name, f"give {dtype.name}")
        found.append(part if isinstance(part, BlockPart) else to_array(part))
    return found


def arrays_of(layout: KVLayout, tensors: LayerTensors) -> AnyTensors:
    """Return the arrays of a chunk's tensors.

    Raises LayoutMismatchError unless *layout* is theirs.
    """
    if len(tensors) != len(layout.components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(layout.components)}")
    found: list[Any] = []
    for component, layers in zip(layout.components, tensors, strict=True):
        if isinstance(layers, BlockStack):  # whose layers are alike
            for parts in layers[:1]:
                layer_arrays(parts, component.dtype)
            found.append(layers)
        else:
            found.append([layer_arrays(parts, component.dtype) for parts in layers])
    check_tensors(layout, found)
    return found


@lru_cache(maxsize=64)
def stated_dtype(dtype: Hashable) -> DType | None:
    """Return the element type that numpy's or torch's *dtype* names, if it names one of ours.

    Unsigned integers name none: they stand for the types that numpy lacks.
    """
    name = str(dtype).removeprefix("torch.")
    return DType.__members__.get(name) if name != "uint8" else None


def group_array(name: str, tensor: Any, group: LayerGroup) -> Part:
    """Return the array of *tensor*, the argument *name*, once it is of the dtype of *group*.

    Raises LayoutMismatchError.
    """
    if not hasattr(tensor, "dtype"):
        raise LayoutMismatchError(name, type(tensor).__name__, "give numpy or torch tensors")
    stated = stated_dtype(tensor.dtype)
    if stated is not None and stated is not group.dtype:
        raise LayoutMismatchError(name, stated.name, f"give {group.dtype.name}")
    try:
        array = to_array(tensor)
    except LayoutMismatchError as error:
        fix = "give a tensor on the CPU, in its byte order"
        raise LayoutMismatchError(name, str(error), fix) from None
    if array.dtype.itemsize != group.dtype.item_bytes or array.dtype.kind not in "uif":
        raise LayoutMismatchError(name, str(array.dtype), f"give {group.dtype.name}")
    return array


def dtype_of(tensor: TensorLike) -> DType:
    """Return the element type that *tensor* states. Raises ModelError."""
    return DType.parse(str(tensor.dtype))


def to_torch(array: Part, dtype: DType) -> torch.Tensor:
    """Return a torch tensor over the memory of *array*, whose elements are of *dtype*."""
    import torch

    signed = array.view(f"i{array.dtype.itemsize}") if array.dtype.itemsize > 1 else array
    return torch.from_numpy(signed).view(getattr(torch, dtype.name))
