"""Rows that the prompt's own tokens look at (the idea of ProphetKV, arXiv 2602.02579).

A first pass computes the gaps and the suffix alone, over all stored rows as they are, and sums
what its last tokens attend to; the rows with the most attention are then computed anew, in a
second pass. It costs one more pass of few rows, and needs all layers before the second.
"""

from __future__ import annotations

from torch import Tensor

from kvstore.client.blend.first_k import FirstK
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selector import all_rows, pick_share


class QueryAttention(FirstK):
    """The share that gets the most attention of the prompt's own tokens."""

    name = "query_attention"
    needs_attention = True

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the most *attention*; the first ones without it."""
        if attention is None:
            return super().static(plan, attention)
        return pick_share(plan, attention, all_rows(plan).to(attention.device), plan.ratio)
