"""Attention of the prompt's own rows times the stored scores, and the heads of the segments.

Attention says what this prompt needs; the scores say which rows are wrong without their old
context; heads mend the sinks that chunks lose. Each alone misses rows that another finds.
"""

from __future__ import annotations

from torch import Tensor

from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.query_attention import QueryAttention
from kvstore.client.blend.selector import stored_scores

_FLOOR = 0.05
"""What a row without any deviation so far still counts: scores age."""


class Hybrid(QueryAttention):
    """The share with the highest product of attention and score."""

    name = "hybrid"

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the highest products."""
        scores = stored_scores(plan)
        if attention is None or scores is None:
            return super().static(plan, attention)
        return super().static(plan, attention * (_FLOOR + scores.to(attention.device)))
