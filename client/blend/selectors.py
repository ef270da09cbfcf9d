"""Which rows are computed anew: selectors by name, and how rows are picked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvstore.client.blend.plan import UNROTATED, BlendPlan
from kvstore.proto.errors import InvalidRequestError

# Which rows are computed anew: what every selector answers, and how rows are picked.


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


# LegoLink (EPIC, arXiv 2410.15332, section 4): the first rows of each segment.
#
# A chunk prefilled alone has an attention sink of its own at its beginning, which it loses
# behind other tokens. LegoLink computes a fixed k of at most 32; here k follows the ratio.


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


# CacheBlend's selector (arXiv 2405.16444, section 4.3): the rows whose KV deviates most.
#
# Up to the first check layer, 1 in its released code, all rows are computed; there the rows with
# the largest squared difference between fresh and stored values stay. With several check layers
# and falling ratios each filters the rows that the one before left ("gradual filtering"), which
# the released code does not do. Departures: gaps and suffix do not compete, heads come first.


class Hkvd(FirstK):
    """Rows with high deviation at the plan's check layers; the first ones without a layer."""

    name = "hkvd"

    def check_layers(self, plan: BlendPlan) -> tuple[int, ...]:
        """Return the plan's."""
        return plan.check_layers

    def at_layer(self, plan: BlendPlan, layer: int, deviation: Tensor, rows: Tensor) -> Tensor:
        """Return the share of *rows* with the largest *deviation*."""
        return pick_share(plan, deviation, rows, share_at(plan, layer))


# Rows by what was learned of them: the scores that the store keeps with a chunk.
#
# They come from feedback (deviations and attention of requests that were computed in full), so
# no layer is computed to find the rows, and what is computed anew need not be transferred.


class StoredPriority(FirstK):
    """The share with the highest stored scores; the first rows while there are none."""

    name = "stored_priority"

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the highest scores."""
        scores = stored_scores(plan)
        if scores is None:
            return super().static(plan, attention)
        return pick_share(plan, scores, all_rows(plan), plan.ratio)


# Rows that the prompt's own tokens look at (the idea of ProphetKV, arXiv 2602.02579).
#
# A first pass computes the gaps and the suffix alone, over all stored rows as they are, and sums
# what its last tokens attend to; the rows with the most attention are then computed anew, in a
# second pass. It costs one more pass of few rows, and needs all layers before the second.


class QueryAttention(FirstK):
    """The share that gets the most attention of the prompt's own tokens."""

    name = "query_attention"
    needs_attention = True

    def static(self, plan: BlendPlan, attention: Tensor | None) -> Tensor:
        """Return the rows with the most *attention*; the first ones without it."""
        if attention is None:
            return super().static(plan, attention)
        return pick_share(plan, attention, all_rows(plan).to(attention.device), plan.ratio)


# Half of the rows by attention of the prompt's own rows times the stored scores, half by scores.
#
# Attention says what this prompt needs, but only of what its own tokens read: answers read on, and
# near rows get more of it than far ones whose context has changed more. The scores say which rows
# are wrong without their old context, whatever is asked. Each alone misses rows the other finds.

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


SELECTORS: dict[str, Selector] = {
    selector.name: selector
    for selector in (Hkvd(), FirstK(), StoredPriority(), QueryAttention(), Hybrid())
}


def selector_of(name: str) -> Selector:
    """Return the selector called *name*. Raises InvalidRequestError."""
    found = SELECTORS.get(name)
    if found is None:
        raise InvalidRequestError("selector", name, f"use one of {', '.join(SELECTORS)}")
    return found
