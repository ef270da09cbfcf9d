"""Cache-Craft's scores, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.server.blending.scores import (
    NO_IMPACT,
    OVERHEAD_BYTES,
    Context,
    Scores,
    TokenPriorities,
    context_impact,
    fix_overhead,
    prefix_overlap,
    ranks,
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
    context = [Context(A, 16, 1.0), Context(B, 16, 1.0), Context(C, 16, 2.0)]
    assert prefix_overlap(context, {B: 0, A: 1, C: 2}, before=3) == pytest.approx(2 / 3)
    assert prefix_overlap(context, {C: 0, B: 1, A: 2}, before=3) == 0.0


def test_a_chunk_that_began_its_prompt_fits_only_where_one_begins() -> None:
    assert prefix_overlap([], {}, before=0) == 1.0
    assert prefix_overlap([], {A: 0}, before=1) == 0.0


def test_overhead_is_impact_times_what_is_missing_of_the_context() -> None:
    assert fix_overhead(0.8, 0.25) == pytest.approx(0.6)
    assert fix_overhead(1.0, 0.0) == 1.0
    assert fix_overhead(1.0, 1.0) == 0.0


NAME = b"n" * 32


def scores(*values: float) -> Scores:
    return np.array(values, np.float32)


def levels(known: TokenPriorities, name: bytes = NAME) -> list[int]:
    return list(known.levels(name))


def test_scores_become_ranks_whatever_their_unit() -> None:
    assert ranks(scores(5.0, 0.0, 100.0, 7.0)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(5e-9, 0.0, 1e-7, 7e-9)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(3.0)).tolist() == [0]


def test_reports_enter_a_moving_mean() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0))
    known.note(NAME, scores(1.0, 0.0))
    assert levels(known) == [64, 191]
    for _ in range(60):
        known.note(NAME, scores(1.0, 0.0))
    assert levels(known) == [254, 2]


def test_tokens_that_were_not_measured_keep_what_they_had() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0, 2.0, 3.0))
    before = levels(known)
    known.note(NAME, scores(-1.0, 9.0, -1.0, 4.0))
    after = levels(known)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] > before[1]
    assert after[3] < before[3]


def test_a_partial_report_says_nothing_of_a_content_that_is_new() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(-1.0, 9.0))
    assert levels(known) == []


def test_scores_of_another_length_are_passed_over() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0))
    known.note(NAME, scores(0.0, 1.0, 2.0))
    assert levels(known) == [0, 255]


def test_the_limit_holds_and_the_longest_unreported_goes() -> None:
    room = 3 * (16 + OVERHEAD_BYTES)
    known = TokenPriorities(room)
    names: Sequence[bytes] = [bytes([number]) * 32 for number in range(4)]
    for name in names[:3]:
        known.note(name, np.arange(16, dtype=np.float32))
    known.note(names[0], np.arange(16, dtype=np.float32))
    known.note(names[3], np.arange(16, dtype=np.float32))
    assert known.size_bytes <= room
    assert [bool(known.levels(name)) for name in names] == [True, False, True, True]
