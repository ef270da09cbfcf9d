"""LegoLink (EPIC, arXiv 2410.15332, section 4): the first rows of each segment.

A chunk prefilled alone has an attention sink of its own at its beginning, which it loses
behind other tokens. LegoLink computes a fixed k of at most 32; here k follows the ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selector import all_rows


class FirstK:
    """The first ``ratio`` of each segment, and its ``head_tokens`` at least."""

    name = "first_k"
    needs_attention = False

    def check_layers(self, plan: BlendPlan) -> tuple[int, ...]:
        """Return none."""
        del plan
        return ()

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the first rows of each segment."""
        del attention
        found = [all_rows(plan)[:0]]
        for _, segment in plan.of_kind("approx"):
            ratio = plan.ratio if segment.ratio is None else segment.ratio
            count = max(plan.head_tokens, math.ceil(ratio * len(segment) - 1e-9))
            found.append(torch.arange(segment.start, min(segment.end, segment.start + count)))
        return torch.cat(found)

    def at_layer(self, plan: BlendPlan, layer: int, deviation: Tensor, rows: Tensor) -> Tensor:
        """Return *rows*: there is no check layer."""
        del plan, layer, deviation
        return rows
