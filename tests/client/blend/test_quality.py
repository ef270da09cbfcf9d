"""How right the answers of blends are: on the model set by hand, the shipped one, and tinylm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice, pairwise

import pytest
from bench.blend.cases import (
    RIDDLE_FOLDER,
    Case,
    Mark,
    designed_engine,
    judge,
    question_cases,
    riddle_case,
    riddle_engine,
    text_cases,
    trained_engine,
)
from bench.blend.riddles import STORY, answered, make_riddle

RATIOS = (0.0, 0.15, 0.5, 0.85, 1.0)


@lru_cache(maxsize=1)
def designed() -> tuple[Case, ...]:
    """Of the model set by hand, whose right answers need attention across chunks."""
    rng, engine = random.Random(5), designed_engine()
    return tuple(riddle_case(engine, make_riddle(rng), rng) for _ in range(6))


@lru_cache(maxsize=1)
def shipped() -> tuple[Case, ...]:
    """Of the shipped model, on which naive reuse hurts."""
    rng, engine = random.Random(8), riddle_engine()
    return tuple(riddle_case(engine, make_riddle(rng, STORY)) for _ in range(16))


def accuracy(cases: tuple[Case, ...], selector: str, ratio: float) -> float:
    right = []
    for case in cases:
        right += answered(case.blend((selector, ratio)).logits, case.riddle)
    return sum(right) / len(right)


# --- the model set by hand


def test_a_full_prefill_answers_everything_and_stored_chunks_as_they_are_far_less() -> None:
    for case in designed():
        full = case.engine.blender.prefill(case.tokens).logits
        assert all(answered(full[-len(case.riddle.question) :], case.riddle))
        assert not set(case.riddle.question) & set(case.riddle.answers)
    assert accuracy(designed(), "hybrid", 0.0) < 0.6


@pytest.mark.parametrize("selector", ["hkvd", "stored_priority", "query_attention", "hybrid"])
def test_more_rows_answer_no_less(selector: str) -> None:
    found = [accuracy(designed(), selector, ratio) for ratio in (0.0, 0.15, 0.5, 1.0)]
    assert found[-1] == 1.0
    assert all(more >= less - 0.02 for less, more in pairwise(found))


def test_the_default_selector_answers_more_than_the_deviation_of_a_shallow_layer() -> None:
    assert accuracy(designed(), "hybrid", 0.15) > accuracy(designed(), "hkvd", 0.15) + 0.2


# --- the shipped model


def test_stored_chunks_as_they_are_cost_half_of_the_right_answers_and_some_rows_repair_it() -> None:
    naive, some, full = (accuracy(shipped(), "query_attention", r) for r in (0.0, 0.3, 1.0))
    assert full >= 0.9
    assert naive <= 0.6 * full
    assert some - naive >= 0.75 * (full - naive)
    assert sum(file.stat().st_size for file in RIDDLE_FOLDER.iterdir()) < 2 << 20


def test_it_is_what_the_chunks_say_across_each_other_that_is_lost() -> None:
    """Names whose value never left its chunk are answered all the same."""
    lost = {True: 0, False: 0}
    asked = {True: 0, False: 0}
    for case in shipped():
        right = answered(case.blend(("first_k", 0.0)).logits, case.riddle)
        for depth, is_right in zip(case.riddle.depth, right, strict=True):
            asked[depth > 0] += 1
            lost[depth > 0] += not is_right
    assert lost[True] / asked[True] > lost[False] / asked[False] + 0.4


# --- more rows under the exact mask are never worse


def stories() -> Iterator[Case]:
    return islice(iter(shipped()), 6)


def documents() -> Iterator[Case]:
    """Questions about paragraphs, and running text."""
    engine, tokenizer = trained_engine()
    for cases in (question_cases, text_cases):
        yield from islice(cases(engine, tokenizer, random.Random(5)), 2)


def marks_of(case: Case) -> list[Mark]:
    case = case.with_true_scores()
    return [judge(case, case.blend(("stored_priority", ratio))) for ratio in RATIOS]


@pytest.mark.parametrize(
    "cases", [designed, stories, documents], ids=["set-by-hand", "shipped", "tinylm"]
)
def test_divergence_falls_and_right_answers_rise_with_the_ratio(
    cases: Callable[[], Iterator[Case]],
) -> None:
    """Nested sets of rows, the most wrong of this very prompt first: each repairs what the
    smaller one did, and no selector's luck is in it.
    """
    columns = list(zip(*map(marks_of, cases()), strict=True))
    divergence = [sum(mark.divergence for mark in column) for column in columns]
    assert all(more < less for less, more in pairwise(divergence) if less > 1e-9)
    assert divergence[-1] == 0
    right = [sum(mark.exact_match for mark in column) for column in columns]
    assert right[-1] == max(right)
    if cases is not documents:  # tinylm answers as well without
        assert right == sorted(right)
        assert right[0] < 0.7 * right[-1]
