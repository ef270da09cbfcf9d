"""An engine's paged cache on a device, as the engine has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.client.paged_cache import PageAxes
from kvstore.codecs.paged import Paged, Pages
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import LayerGroup, Model

_CANONICAL = ("block", "head", "token", "dim")


class DevicePages:
    """Page tensors of every layer on one device, checked at birth.

    *tensors*: one tensor with a ``layer`` axis, or one a layer in the order of the
    Model's groups; *axes* as in ``PageAxes``, with a ``kv`` axis where a layer keeps
    K and V. Raises LayoutMismatchError for anything that is not the Model's KV.
    """

    def __init__(
        self,
        representation: Model,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        axes: PageAxes,
    ) -> None:
        if isinstance(tensors, torch.Tensor):
            if "layer" not in axes.names:
                raise LayoutMismatchError("axes", " ".join(axes.names), "name the layer axis")
            tensors = tensors.unbind(axes.names.index("layer"))
            axes = axes.drop("layer")
        count = sum(len(group.layer_ids) for group in representation.layer_groups)
        if len(tensors) != count:
            raise LayoutMismatchError("layers", len(tensors), f"give pages of {count} layers")
        entries = iter(tensors)
        self.pages = tuple(
            Pages(tuple(_parts(next(entries), axes, group) for _ in group.layer_ids))
            for group in representation.layer_groups
        )
        for pages, group in zip(self.pages, representation.layer_groups, strict=True):
            if len(pages.views[0]) != group.parts:
                raise LayoutMismatchError("kv", len(pages.views[0]), f"give {group.parts}")

    def of(self, block_ids: Sequence[int]) -> Paged:
        """Return a request's place in the pages."""
        return Paged(self.pages, [block_ids])


def _parts(tensor: torch.Tensor, axes: PageAxes, group: LayerGroup) -> tuple[torch.Tensor, ...]:
    if tensor.dim() != len(axes.names):
        raise LayoutMismatchError(
            "axes", " ".join(axes.names), f"does not name the axes of {tuple(tensor.shape)}"
        )
    if "kv" not in axes.names:
        return (_ordered(tensor, axes, group),)
    parts = tensor.unbind(axes.names.index("kv"))
    return tuple(_ordered(part, axes.drop("kv"), group) for part in parts)


def _ordered(tensor: torch.Tensor, axes: PageAxes, group: LayerGroup) -> torch.Tensor:
    """Return (blocks, kv_heads, block_tokens, head_dim), what is not named being 1."""
    view = tensor.permute([axes.names.index(name) for name in _CANONICAL if name in axes.names])
    for at, name in enumerate(_CANONICAL):
        if name not in axes.names:
            view = view.unsqueeze(at)
    if (view.shape[1], view.shape[3]) != (group.kv_heads, group.head_dim):
        raise LayoutMismatchError(
            "pages", tuple(tensor.shape),
            f"as {' '.join(axes.names)} they need {group.kv_heads} heads of {group.head_dim}",
        )  # fmt: skip
    return view
