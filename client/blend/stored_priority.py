"""Rows by what was learned of them: the scores that the store keeps with a chunk.

They come from feedback (deviations and attention of requests that were computed in full), so
no layer is computed to find the rows, and what is computed anew need not be transferred.
"""

from __future__ import annotations

from torch import Tensor

from kvstore.client.blend.first_k import FirstK
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.selector import all_rows, pick_share, stored_scores


class StoredPriority(FirstK):
    """The share with the highest stored scores; the first rows while there are none."""

    name = "stored_priority"

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the highest scores."""
        scores = stored_scores(plan)
        if scores is None:
            return super().static(plan, attention)
        return pick_share(plan, scores, all_rows(plan), plan.ratio)
