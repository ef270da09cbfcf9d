"""More rows computed under the exact mask are never worse, on each of three models.

The rows are nested, the most wrong first, as the true deviation of this very prompt has it: each
set repairs what the smaller one did, and more. No selector's luck is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest
from bench.blend.cases import (
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
from bench.blend.riddles import STORY, make_riddle

RATIOS = (0.0, 0.15, 0.5, 0.85, 1.0)


def riddles() -> Iterator[Case]:
    rng, engine = random.Random(5), designed_engine()
    return (riddle_case(engine, make_riddle(rng)) for _ in range(6))


def stories() -> Iterator[Case]:
    rng, engine = random.Random(5), riddle_engine()
    return (riddle_case(engine, make_riddle(rng, STORY)) for _ in range(6))


def documents() -> Iterator[Case]:
    """Questions about paragraphs, and running text."""
    engine, tokenizer = trained_engine()
    for cases in (question_cases, text_cases):
        yield from islice(cases(engine, tokenizer, random.Random(5)), 2)


def marks_of(case: Case) -> list[Mark]:
    case = case.with_true_scores()
    return [judge(case, case.blend(("stored_priority", ratio))) for ratio in RATIOS]


@pytest.mark.parametrize(
    "cases", [riddles, stories, documents], ids=["set-by-hand", "riddlelm", "tinylm"]
)
def test_divergence_falls_and_right_answers_rise_with_the_ratio(
    cases: Callable[[], Iterator[Case]],
) -> None:
    columns = list(zip(*map(marks_of, cases()), strict=True))
    divergence = [sum(mark.divergence for mark in column) for column in columns]
    assert all(more < less for less, more in pairwise(divergence) if less > 1e-9)
    assert divergence[-1] == 0
    right = [sum(mark.exact_match for mark in column) for column in columns]
    assert right[-1] == max(right)
    if cases is not documents:  # tinylm answers as well without
        assert right == sorted(right)
        assert right[0] < 0.7 * right[-1]
