"""Which rows are computed anew: what every selector answers, and how rows are picked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from kvstore.client.blend.plan import UNROTATED, BlendPlan


class Selector(Protocol):
    """Chooses rows of ``approx`` segments, as positions in the prompt that rise.

    One of two answers: rows known before a layer is computed (``static``), or rows found at
    check layers, up to which all rows are computed (``at_layer``).
    """

    name: str
    needs_attention: bool
    """Whether ``static`` wants to know what the prompt's own rows read of the stored ones."""

    def check_layers(self, plan: BlendPlan) -> tuple[int, ...]:
        """Return the layers at which ``at_layer`` is asked; none when the rows are static."""

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows to compute: (rows,), int64.

        *attention*: what each token gets of the prompt's own rows, (tokens,), float.
        """

    def at_layer(self, plan: BlendPlan, layer: int, deviation: Tensor, rows: Tensor) -> Tensor:
        """Return which of *rows* stay from check layer *layer* on.

        *deviation*: (tokens,), float, how far fresh KV is from stored; 0 elsewhere.
        """


def head_rows(plan: BlendPlan) -> Tensor:
    """Return the first ``head_tokens`` rows of each ``approx`` segment: (rows,)."""
    ends = [(s.start, min(s.end, s.start + plan.head_tokens)) for _, s in plan.of_kind("approx")]
    return _joined([torch.arange(start, end) for start, end in ends])


def wants_any(plan: BlendPlan) -> bool:
    """Return whether a selector is to choose any ``approx`` row."""
    shares = [plan.ratio if s.ratio is None else s.ratio for _, s in plan.of_kind("approx")]
    return bool(shares) and (max(shares) > 0 or plan.head_tokens > 0)


def sink_rows(plan: BlendPlan, count: int) -> Tensor:
    """Return the ``approx`` rows that are computed whatever a selector chooses: (rows,).

    The first *count* of the prompt. Where a selector is to choose any, also those that were the
    first *count* of their own prompt: they carry its sink, which is none here.
    """
    found, is_moved = [], wants_any(plan)
    for _, segment in plan.of_kind("approx"):
        head = count - segment.start
        if is_moved and segment.src_pos != UNROTATED:
            head = max(head, count - segment.src_pos)
        end = min(segment.end, segment.start + max(0, head))
        found.append(torch.arange(segment.start, end))
    return _joined(found)


def share_at(plan: BlendPlan, layer: int) -> float:
    """Return the share of rows that check layer *layer* leaves."""
    return plan.ratios[plan.check_layers.index(layer)] if plan.ratios else plan.ratio


def pick_share(plan: BlendPlan, score: Tensor, rows: Tensor, ratio: float) -> Tensor:
    """Return the best of *rows* by *score*, (tokens,): the heads, then *ratio* of the tokens.

    Segments with a ratio of their own keep to it; the others share theirs. Ties go to the
    lower position. On the device of *score*.
    """
    is_open = torch.zeros(len(plan.tokens), dtype=torch.bool, device=score.device)
    is_open[rows] = True
    is_head = torch.zeros_like(is_open)
    is_head[head_rows(plan).to(score.device)] = True
    found = []
    for spans, count in _pools(plan, ratio):
        places = _joined([torch.arange(*span, device=score.device) for span in spans])
        heads = places[is_head[places] & is_open[places]]
        rest = places[~is_head[places] & is_open[places]]
        found += [heads, pick(score, rest, count - heads.numel(), plan.granularity)]
    return _joined(found).sort().values


def pick(score: Tensor, rows: Tensor, count: int, granularity: int = 1) -> Tensor:
    """Return *count* of *rows* with the highest *score*, (tokens,); ties to the lower.

    With *granularity* whole blocks of so many tokens, by their sums, until *count* is reached.
    """
    if count <= 0 or not rows.numel():
        return rows[:0]
    if granularity == 1:
        best = torch.argsort(score[rows], descending=True, stable=True)[:count]
        return rows[best].sort().values
    blocks, member = torch.unique(rows // granularity, return_inverse=True)
    sums = torch.zeros(blocks.numel(), dtype=torch.float64, device=rows.device)
    sums.index_add_(0, member, score[rows].double())
    order = torch.argsort(sums, descending=True, stable=True)
    sizes = torch.bincount(member, minlength=blocks.numel())[order]
    is_taken = torch.zeros(blocks.numel(), dtype=torch.bool, device=rows.device)
    is_taken[order] = sizes.cumsum(0) - sizes < count
    return rows[is_taken[member]]


def all_rows(plan: BlendPlan) -> Tensor:
    """Return the positions of all ``approx`` tokens: (rows,)."""
    return _joined([torch.arange(s.start, s.end) for _, s in plan.of_kind("approx")])


def stored_scores(plan: BlendPlan) -> Tensor | None:
    """Return the scores that came with the plan, (tokens,), each segment's from 0 to 1.

    None when a segment has none; equal scores say nothing and count as 1.
    """
    scores = torch.zeros(len(plan.tokens))
    for _, segment in plan.of_kind("approx"):
        if segment.scores is None:
            return None
        stored = torch.tensor(segment.scores)
        low, high = float(stored.min()), float(stored.max())
        scores[segment.start : segment.end] = (stored - low) / (high - low) if high > low else 1.0
    return scores


def places_in_segments(plan: BlendPlan) -> Tensor:
    """Return how far into its segment each token lies: (tokens,), float."""
    return torch.cat([torch.arange(len(segment)) for segment in plan.segments]).float()


def _pools(plan: BlendPlan, ratio: float) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Yield spans that share a budget, and the budget in tokens."""
    shared = []
    for _, segment in plan.of_kind("approx"):
        if segment.ratio is None:
            shared.append((segment.start, segment.end))
        else:
            yield [(segment.start, segment.end)], math.ceil(segment.ratio * len(segment))
    if shared:
        yield shared, math.ceil(ratio * sum(end - start for start, end in shared) - 1e-9)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
