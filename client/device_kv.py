"""Tensors of a GPU that callers hand over: they pass through memory of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.proto.errors import LayoutMismatchError, TierUnavailableError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def is_on_device(tensor: object) -> bool:
    """Whether it is a torch tensor in memory of a GPU."""
    return getattr(getattr(tensor, "device", None), "type", "cpu") == "cuda"


def twin(tensor: Any) -> Any:
    """Return a tensor of the host of the shape and dtype of a GPU's *tensor*, with memory of one
    element, to be checked; anything else as it is. Raises LayoutMismatchError.
    """
    if not is_on_device(tensor):
        return tensor
    import torch

    if tensor.layout is not torch.strided:
        raise LayoutMismatchError("layout", str(tensor.layout), "give dense tensors")
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def place_of(tensor: Any) -> NDArray[Any]:
    """Return an array at the addresses of a GPU's *tensor*, to be compared and never read."""

    class Place:
        __array_interface__ = {  # noqa: RUF012
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.element_size() * stride for stride in tensor.stride()),
            "typestr": f"|u{tensor.element_size()}",
            "version": 3,
        }

    return np.asarray(Place())


def host_room(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of the host that a GPU copies to and from."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* as integers of its size, of which every operation knows."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])


@contextmanager
def copying(tensor: torch.Tensor) -> Iterator[None]:
    """Copy from or to *tensor*'s GPU: all that its streams were given is over before, and the
    copies are over behind it, whichever thread and stream the caller is on.

    Raises TierUnavailableError for what torch raises, want of memory too.
    """
    import torch

    def settle() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(tensor.device)

    try:
        with torch.inference_mode():  # or the tensors of an engine could not be written to
            settle()
            yield
            settle()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TierUnavailableError("cuda", f"{type(error).__name__}: {reason}") from error


def to_host(tensor: Any) -> Any:
    """Return a copy of a GPU's *tensor* in the host's memory; anything else as it is."""
    if not is_on_device(tensor):
        return tensor
    with copying(tensor):
        return tensor.cpu()
