"""Selectors of the rows to recompute, by name.

A selector returns rows of ``approx`` segments as ascending positions in the prompt. Some use a
measurement of each token by a pass, (tokens,); without it they select the first rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kvstore.client.blend.plan import BlendPlan
from kvstore.proto.errors import InvalidRequestError

CHECK_LAYER = 1
"""The layer where fresh values are compared with stored ones: layer 0 cannot deviate."""
_FLOOR = 0.05
"""The weight in ``hybrid`` of a row without deviation so far: scores age."""
Measure: TypeAlias = Literal["deviation", "attention"]


def first_k(plan: BlendPlan, measured: Tensor | None) -> Tensor:
    """Return the first ``ratio`` of each segment (LegoLink: EPIC, arXiv 2410.15332, section 4).

    A chunk prefilled alone has its own attention sink at its start, which it loses after other
    tokens. LegoLink recomputes a fixed k of at most 32; here k follows the ratio.
    """
    shares = plan.shares()
    return _ranges(
        (one.start, one.start + math.ceil(shares[index] * len(one) - 1e-9))
        for index, one in plan.of_kind("approx")
    )


def stored_priority(plan: BlendPlan, measured: Tensor | None) -> Tensor:
    """Return the rows with the highest stored scores; the first ones if there are none.

    Scores come from feedback (deviations and attention of requests computed in full), so no layer
    is computed to find the rows, and recomputed rows need not be transferred.
    """
    scores = _stored_scores(plan)
    return first_k(plan, measured) if scores is None else pick_share(plan, scores)


def most_measured(plan: BlendPlan, measured: Tensor | None) -> Tensor:
    """Return the rows with the highest measurement.

    Attention (``query_attention``, ProphetKV's idea, arXiv 2602.02579): attention from the
    prompt's own tokens. A first pass computes only the gaps and the suffix, over all stored rows
    unchanged, and sums the attention of its last tokens.

    Deviation (``hkvd``, CacheBlend, arXiv 2405.16444, section 4.3): the squared difference between
    fresh and stored values at the check layer. Departure: gaps and suffix do not compete.
    """
    return first_k(plan, None) if measured is None else pick_share(plan, measured)


def hybrid(plan: BlendPlan, measured: Tensor | None) -> Tensor:
    """Return half of the rows by attention times the stored scores, half by the scores alone.

    Attention shows which rows this prompt's own tokens read, but answers read others. The scores
    show which rows are wrong without their old context, for any question.
    """
    scores = _stored_scores(plan)
    if measured is None or scores is None:
        return most_measured(plan, measured)
    scores = scores.to(measured.device)
    chosen = torch.zeros_like(scores)
    chosen[pick_share(plan, measured * (_FLOOR + scores), of_ratio=0.5)] = 2.0  # over any score
    return pick_share(plan, scores + chosen)


SELECTORS: dict[str, Callable[[BlendPlan, Tensor | None], Tensor]] = {
    "hkvd": most_measured,
    "first_k": first_k,
    "stored_priority": stored_priority,
    "query_attention": most_measured,
    "hybrid": hybrid,
}
_MEASURES: dict[str, Measure] = {
    "hkvd": "deviation",
    "query_attention": "attention",
    "hybrid": "attention",
}


def check_selector(name: str) -> None:
    """Raise InvalidRequestError unless *name* is a selector."""
    if name not in SELECTORS:
        raise InvalidRequestError("selector", name, f"use one of {', '.join(SELECTORS)}")


def measure_of(plan: BlendPlan, n_layers: int) -> Measure | None:
    """Return the measurement the plan's selector needs; None: it needs none."""
    found = _MEASURES.get(plan.selector)
    return None if found == "deviation" and n_layers <= CHECK_LAYER else found


def chooses_any(plan: BlendPlan) -> bool:
    """Return whether the plan has a selector choose any ``approx`` rows."""
    return any(share > 0 for share in plan.shares().values())


def computed_rows(plan: BlendPlan, sinks: Tensor, measured: Tensor | None) -> Tensor:
    """Return the rows that are computed in all layers, on the CPU: (rows,)."""
    rows = [rows_of(plan, "miss"), sinks]
    if chooses_any(plan):
        is_deviation = _MEASURES.get(plan.selector) == "deviation"
        if measured is not None and is_deviation:  # sinks are always computed, outside the ratio
            measured = measured.index_fill(0, sinks.to(measured.device), -1.0)
        rows.append(SELECTORS[plan.selector](plan, measured).cpu())
    found: Tensor = torch.cat(rows).unique()
    return found


def sink_rows(plan: BlendPlan, count: int) -> Tensor:
    """Return the ``approx`` rows that are always computed, as attention sinks: (rows,).

    The first *count* of the prompt. If a selector chooses any, also those that were the first
    *count* of their own prompt: they carry its sink, which does not belong here.
    """
    found, is_moved = [], chooses_any(plan)
    for _, segment in plan.of_kind("approx"):
        head = count - segment.start
        if is_moved:
            head = max(head, count - segment.src_pos)
        found.append((segment.start, min(segment.end, segment.start + max(0, head))))
    return _ranges(found)


def pick_share(plan: BlendPlan, score: Tensor, of_ratio: float = 1.0) -> Tensor:
    """Return the plan's ratio of ``approx`` tokens with the highest *score*, (tokens,).

    Segments with a ratio of their own are ranked alone; the others together. Ties go to the lower
    position. On the device of *score*. *of_ratio* scales all ratios.
    """
    stored = [one for _, one in plan.of_kind("approx")]
    groups = [(one.ratio, [one]) for one in stored if one.ratio is not None]
    found = []
    for ratio, some in [(plan.ratio, [one for one in stored if one.ratio is None]), *groups]:
        places = _ranges((one.start, one.end) for one in some).to(score.device)
        count = math.ceil(of_ratio * ratio * len(places) - 1e-9)
        best = torch.argsort(score[places], descending=True, stable=True)[:count]
        found.append(places[best])
    return torch.cat(found).sort().values


def rows_of(plan: BlendPlan, *kinds: str) -> Tensor:
    """Return the positions of tokens of *kinds*, ascending: (rows,), int64."""
    return _ranges((s.start, s.end) for s in plan.segments if s.kind in kinds)


def _stored_scores(plan: BlendPlan) -> Tensor | None:
    """Return the plan's stored scores, (tokens,), scaled to 0 to 1 in each segment.

    None if a segment has none; equal scores count as 1.
    """
    scores = torch.zeros(len(plan.tokens))
    for _, segment in plan.of_kind("approx"):
        if segment.scores is None:
            return None
        stored = torch.tensor(segment.scores)
        low, high = float(stored.min()), float(stored.max())
        scores[segment.start : segment.end] = (stored - low) / (high - low) if high > low else 1.0
    return scores


def _ranges(spans: Iterable[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])
