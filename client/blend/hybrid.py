"""Half of the rows by attention of the prompt's own rows times the stored scores, half by scores.

Attention says what this prompt needs, but only of what its own tokens read: answers read on, and
near rows get more of it than far ones whose context has changed more. The scores say which rows
are wrong without their old context, whatever is asked. Each alone misses rows the other finds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.query_attention import QueryAttention
from kvstore.client.blend.selector import all_rows, pick_share, stored_scores

_FLOOR = 0.05
"""What a row without any deviation so far still counts: scores age."""
_CHOSEN = 2.0
"""More than any score: of rows that the first half has."""


class Hybrid(QueryAttention):
    """Half of the share by the highest products, then the highest scores of the rows left."""

    name = "hybrid"

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows of both halves; those with the most attention without scores."""
        scores = stored_scores(plan)
        if attention is None or scores is None:
            return super().static(plan, attention)
        scores, rows = scores.to(attention.device), all_rows(plan).to(attention.device)
        half = _halved(plan)
        best = pick_share(half, attention * (_FLOOR + scores), rows, half.ratio)
        chosen = torch.zeros_like(scores)
        chosen[best] = _CHOSEN
        return pick_share(plan, scores + chosen, rows, plan.ratio)


def _halved(plan: BlendPlan) -> BlendPlan:
    """Return *plan* with half of every share."""
    segments = tuple(
        one if one.ratio is None else replace(one, ratio=one.ratio / 2) for one in plan.segments
    )
    return replace(plan, segments=segments, ratio=plan.ratio / 2)
