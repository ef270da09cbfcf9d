"""Rows by two orders, from each its best: attention times the stored scores, and scores alone.

Attention says what this prompt needs, but only of what its own tokens read: answers read on, and
near rows get more of it than far ones whose context has changed more. The scores say which rows
are wrong without their old context, whatever is asked. Each alone misses rows the other finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.query_attention import QueryAttention
from kvstore.client.blend.selector import all_rows, pick_share, stored_scores

_FLOOR = 0.05
"""What a row without any deviation so far still counts: scores age."""


class Hybrid(QueryAttention):
    """The share with the best places: a row has the better of its places in the two orders."""

    name = "hybrid"

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the best places; those with the most attention without scores."""
        scores = stored_scores(plan)
        if attention is None or scores is None:
            return super().static(plan, attention)
        scores, rows = scores.to(attention.device), all_rows(plan).to(attention.device)
        rows = _best_first(attention, rows)  # equal scores, in which it is the attention that tells
        orders = [_best_first(one, rows) for one in (attention * (_FLOOR + scores), scores)]
        return pick_share(plan, len(rows) - _best_places(orders, attention), rows, plan.ratio)


def _best_first(score: Tensor, rows: Tensor) -> Tensor:
    """Return *rows* by *score*, (tokens,), falling; equal ones stay as they are."""
    return rows[torch.argsort(score[rows], descending=True, stable=True)]


def _best_places(orders: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the best place of each row in *orders*, from 0: (tokens,), as *like*."""
    places = torch.full_like(like, torch.inf)
    for rows in orders:
        found = torch.arange(len(rows), device=like.device).to(like.dtype)
        places[rows] = places[rows].minimum(found)
    return places
