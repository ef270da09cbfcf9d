"""An engine's pages on a device, by the names of their axes."""

from __future__ import annotations

import pytest
import torch
from prompts import SMALL

from kvstore.client.device_pages import DevicePages
from kvstore.client.paged_cache import PageAxes
from kvstore.proto.errors import LayoutMismatchError

NHD = PageAxes.parse("layer kv block token head dim")


@pytest.mark.parametrize(
    "names",
    [
        "layer kv block token head dim",
        "block layer kv head token dim",
        "kv token dim layer block head",
    ],
)
def test_pages_are_found_whatever_the_order_of_their_axes(names: str) -> None:
    sizes = {"layer": 2, "kv": 2, "block": 3, "token": 8, "head": 2, "dim": 8}
    order = names.split()
    tensor = torch.arange(2 * 2 * 3 * 8 * 2 * 8, dtype=torch.int16).view(torch.bfloat16)
    tensor = tensor.view([sizes[name] for name in order])
    if order[-1] != "dim":
        with pytest.raises(LayoutMismatchError, match="head_dim contiguous"):
            DevicePages(SMALL, tensor, PageAxes.parse(names))
        return
    (pages,) = DevicePages(SMALL, tensor, PageAxes.parse(names)).pages
    at = {"layer": 1, "kv": 1, "block": 2, "head": 1, "token": 5}
    row = tensor[tuple(at.get(name, slice(None)) for name in order)]
    assert torch.equal(pages.views[1][1][2, 1, 5], row)


def test_pages_without_what_the_model_needs_are_refused() -> None:
    good = torch.zeros(2, 2, 3, 8, 2, 8, dtype=torch.bfloat16)
    DevicePages(SMALL, list(good), NHD.drop("layer"))
    wrong: list[tuple[torch.Tensor | list[torch.Tensor], PageAxes]] = [
        (good[:1], NHD),
        (good[:, 0], NHD),
        (good[:, :1], NHD),
        (good[..., :4], NHD),
        (good, NHD.drop("layer")),
        (list(good), NHD),
    ]
    for tensors, axes in wrong:
        with pytest.raises(LayoutMismatchError):
            DevicePages(SMALL, tensors, axes)
