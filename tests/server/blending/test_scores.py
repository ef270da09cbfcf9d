"""Cache-Craft's scores, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from kvstore.server.blending.scores import (
    NO_IMPACT,
    Context,
    context_impact,
    fix_overhead,
    order_penalty,
    prefix_overlap,
)

A, B, C, D = (bytes([number]) * 16 for number in range(1, 5))


def test_impact_is_the_logistic_of_outer_over_inner_attention_a_pair_of_tokens() -> None:
    context = [Context(A, 20, 4.0), Context(B, 10, 1.0)]
    outer = 4.0 / (10 * 20) + 1.0 / (10 * 10)
    inner = 5.0 / (10 * 10)
    assert context_impact(context, 5.0, 10) == pytest.approx(1 / (1 + math.exp(-outer / inner)))


def test_a_chunk_that_looks_at_nothing_before_it_has_the_least_impact() -> None:
    assert context_impact([], 10.0, 10) == NO_IMPACT
    assert context_impact([Context(A, 20, 0.0)], 10.0, 10) == NO_IMPACT


def test_a_chunk_that_looks_only_before_it_has_the_most() -> None:
    assert context_impact([Context(A, 20, 10.0)], 0.0, 10) == 1.0
    assert context_impact([Context(A, 1, 10.0)], 1e-30, 10) == pytest.approx(1.0)


def test_overlap_is_the_share_of_the_attention_that_is_there_again() -> None:
    context = [Context(A, 16, 3.0), Context(B, 16, 1.0)]
    assert prefix_overlap(context, {A: 0}, before=2) == pytest.approx(0.75)
    assert prefix_overlap(context, {A: 0, B: 1}, before=2) == 1.0
    assert prefix_overlap(context, {C: 0}, before=1) == 0.0


def test_what_comes_behind_the_chunk_does_not_count() -> None:
    context = [Context(A, 16, 3.0), Context(B, 16, 1.0)]
    assert prefix_overlap(context, {A: 5, B: 0}, before=3) == pytest.approx(0.25)


def test_another_order_takes_away_its_share_of_pairs() -> None:
    assert order_penalty([0, 1, 2]) == 0.0
    assert order_penalty([2, 1, 0]) == 1.0
    assert order_penalty([1, 0, 2]) == pytest.approx(1 / 3)
    context = [Context(A, 16, 1.0), Context(B, 16, 1.0), Context(C, 16, 2.0)]
    assert prefix_overlap(context, {B: 0, A: 1, C: 2}, before=3) == pytest.approx(2 / 3)


def test_a_chunk_that_began_its_prompt_fits_only_where_one_begins() -> None:
    assert prefix_overlap([], {}, before=0) == 1.0
    assert prefix_overlap([], {A: 0}, before=1) == 0.0


def test_overhead_is_impact_times_what_is_missing_of_the_context() -> None:
    assert fix_overhead(0.8, 0.25) == pytest.approx(0.6)
    assert fix_overhead(1.0, 0.0) == 1.0
    assert fix_overhead(1.0, 1.0) == 0.0
