"""Cache-Craft's scores: how much of a chunk's KV has to be recomputed behind another prefix.

Agarwal et al., "Cache-Craft: Managing Chunk-Caches for Efficient Retrieval-Augmented
Generation", SIGMOD 2025 (arXiv 2502.15734), equations 3 to 12. Attention masses come from
engines; where none were reported, chunks count by their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNKNOWN_IMPACT = 1.0
"""The impact of a chunk of which nobody has reported: more than any measured one."""

NO_IMPACT = 0.5
"""That of a chunk that attends to nothing before it: the least that equation 11 gives."""

ALPHA = 1.0
"""Equation 12's factor, for ranking. The paper tunes it; here the gate's ratio is what is tuned."""


class Context(NamedTuple):
    """A chunk before another one: its content, its tokens, and the attention paid to it."""

    content: bytes
    tokens: int
    mass: float


def context_impact(context: Sequence[Context], intra_mass: float, tokens: int) -> float:
    """Return CCI of a chunk of *tokens* tokens, equations 9 to 11: 0.5 to 1.

    *intra_mass* is the attention that its tokens paid to one another.
    """
    outer = sum(one.mass / (tokens * one.tokens) for one in context)
    inner = intra_mass / (tokens * tokens)
    if not outer:
        return NO_IMPACT
    return 1.0 / (1.0 + math.exp(-min(outer / inner, 50.0))) if inner else 1.0


def prefix_overlap(context: Sequence[Context], places: Mapping[bytes, int], before: int) -> float:
    """Return beta' of equation 8: how much of *context* is there before place *before*, in order.

    *places* says where each content of the new prompt is first. A chunk that had nothing before
    it has all of that where nothing is before it, and else none.
    """
    if not context:
        return float(before == 0)
    whole = sum(one.mass for one in context)
    if not whole:
        return 0.0
    common = [
        (places[one.content], one.mass)
        for one in context
        if places.get(one.content, before) < before
    ]
    share = min(1.0, sum(mass for _, mass in common) / whole)
    return share * (1.0 - order_penalty([place for place, _ in common]))


def order_penalty(places: Sequence[int]) -> float:
    """Return gamma of equation 7: the share of pairs that stand in another order than before."""
    count = len(places)
    if count < 2:
        return 0.0
    discordant = sum(
        places[first] > places[second]
        for first in range(count)
        for second in range(first + 1, count)
    )
    return discordant / (count * (count - 1) / 2)


def fix_overhead(impact: float, overlap: float) -> float:
    """Return CFO of equation 12: the share of the chunk's tokens to recompute, 0 to 1."""
    return min(1.0, max(0.0, ALPHA * impact * (1.0 - overlap)))
