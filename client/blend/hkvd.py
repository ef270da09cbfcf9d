"""CacheBlend's selector (arXiv 2405.16444, section 4.3): the rows whose KV deviates most.

Up to the first check layer, 1 in its released code, all rows are computed; there the rows with
the largest squared difference between fresh and stored values stay. With several check layers
and falling ratios each filters the rows that the one before left ("gradual filtering"), which
the released code does not do. Departures: gaps and suffix do not compete, heads come first.
"""

from __future__ import annotations

from torch import Tensor

from kvstore.client.blend.first_k import FirstK
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selector import pick_share, share_at


class Hkvd(FirstK):
    """Rows with high deviation at the plan's check layers; the first ones without a layer."""

    name = "hkvd"

    def check_layers(self, plan: BlendPlan) -> tuple[int, ...]:
        """Return the plan's."""
        return plan.check_layers

    def at_layer(self, plan: BlendPlan, layer: int, deviation: Tensor, rows: Tensor) -> Tensor:
        """Return the share of *rows* with the largest *deviation*."""
        return pick_share(plan, deviation, rows, share_at(plan, layer))
