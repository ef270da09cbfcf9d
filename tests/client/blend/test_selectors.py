"""Which rows each selector chooses, on numbers set by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.blend.selectors import SELECTORS, check_selector, measure_of, pick_share
from kvstore.proto.errors import InvalidRequestError


def plan(ratio: float = 0.2, **settings: Any) -> BlendPlan:
    """4 tokens of prefix, chunks of 10 and 10, 2 to compute."""
    segments = (
        Segment(0, 4, "exact", src_pos=0),
        Segment(4, 14, "approx", scores=settings.pop("first_scores", None)),
        Segment(14, 24, "approx", scores=settings.pop("second_scores", None)),
        Segment(24, 26, "miss"),
    )
    return BlendPlan(tuple(range(26)), segments, ratio=ratio, **settings)


def numbers(**at: float) -> torch.Tensor:
    found = torch.zeros(26)
    for place, value in at.items():
        found[int(place[1:])] = value
    return found


def test_hkvd_keeps_the_rows_that_deviate_most() -> None:
    deviation = numbers(p5=1, p9=4, p15=3, p20=2, p23=9)
    assert SELECTORS["hkvd"](plan(), deviation).tolist() == [9, 15, 20, 23]


def test_first_rows_are_taken_by_first_k_and_where_nothing_is_known_to_choose_by() -> None:
    some = plan(first_scores=tuple(float(i) for i in range(10)))  # the second segment has none
    for name, one in (("first_k", plan()), ("hkvd", plan()), ("stored_priority", some)):
        assert SELECTORS[name](one, None).tolist() == [4, 5, 14, 15]
    assert measure_of(plan(selector="hkvd"), 1) is None
    assert measure_of(plan(selector="hkvd"), 2) == "deviation"


def test_stored_priority_takes_the_highest_scores() -> None:
    rising = tuple(float(i) for i in range(10))
    found = plan(first_scores=rising, second_scores=rising[::-1])
    assert SELECTORS["stored_priority"](found, None).tolist() == [12, 13, 14, 15]


def test_query_attention_takes_what_is_looked_at() -> None:
    attention = numbers(p2=99, p7=2, p11=5, p19=4, p22=1, p25=99)
    found = SELECTORS["query_attention"](plan(), attention)
    assert found.tolist() == [7, 11, 19, 22]


def test_hybrid_weighs_attention_by_the_scores() -> None:
    scores = tuple(1.0 if i == 3 else 0.0 for i in range(10))
    found = plan(0.1, first_scores=scores, second_scores=scores)
    attention = numbers(p7=2, p11=5, p17=3, p22=4)
    assert SELECTORS["query_attention"](found, attention).tolist() == [11, 22]
    assert SELECTORS["hybrid"](found, attention).tolist() == [7, 17]
    assert SELECTORS["hybrid"](plan(0.1), attention).tolist() == [11, 22]


def test_hybrid_takes_rows_of_high_scores_that_the_question_hardly_looks_at() -> None:
    """Near rows get most of its attention; a far one may be what its answer reads."""
    far = tuple(1.0 if i == 2 else 0.0 for i in range(10))
    near = tuple(0.9 if i in (5, 6, 7) else 1.0 if i == 0 else 0.0 for i in range(10))
    found = plan(0.15, first_scores=far, second_scores=near)
    attention = numbers(p6=0.1, p14=0.2, p19=5, p20=4, p21=3)
    assert SELECTORS["hybrid"](found, attention).tolist() == [6, 19, 20]


def test_a_segment_with_a_ratio_of_its_own_keeps_to_it() -> None:
    scores = tuple(i / 10 for i in range(10))
    segments = (
        Segment(0, 10, "approx", ratio=0.4, scores=scores),
        Segment(10, 20, "approx", scores=scores),
        Segment(20, 21, "miss"),
    )
    own = BlendPlan(tuple(range(21)), segments, ratio=0.2)
    attention = torch.zeros(21)
    attention[[1, 2, 11, 12]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert SELECTORS["hybrid"](own, attention).tolist() == [1, 2, 8, 9, 11, 19]
    assert pick_share(own, torch.arange(21.0)).tolist() == [6, 7, 8, 9, 18, 19]


@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=40), ratio=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_picked_rows_rise_and_none_left_is_better(scores: list[int], ratio: float) -> None:
    size = len(scores)
    segments = (Segment(0, size, "approx"), Segment(size, size + 1, "miss"))
    own = BlendPlan(tuple(range(size + 1)), segments, ratio=ratio)
    found = pick_share(own, torch.tensor([*scores, 9.0])).tolist()
    assert found == sorted(set(found))
    assert len(found) == math.ceil(ratio * size - 1e-9)
    left = set(range(size)) - set(found)
    if found and left:
        assert max(scores[i] for i in left) <= min(scores[i] for i in found)


def test_a_selector_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"oracle.*hkvd.*hybrid"):
        check_selector("oracle")
