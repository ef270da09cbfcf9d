"""More rows computed under the exact mask are never worse, on each of three models.

The rows are nested, the most wrong first, as the true deviation of this very prompt has it: each
set repairs what the smaller one did, and more. No selector's luck is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest
from bench.blend_cases import (
    Case,
    bare_case,
    designed_engine,
    question_cases,
    riddle_engine,
    text_cases,
    trained_engine,
)
from bench.blend_designed import make_riddle
from bench.blend_quality import Mark, judge_riddle, judge_text
from bench.blend_stories import make_story

RATIOS = (0.0, 0.15, 0.5, 0.85, 1.0)


def riddles() -> Iterator[Case]:
    rng, engine = random.Random(5), designed_engine()
    return (bare_case(engine, make_riddle(rng)) for _ in range(6))


def stories() -> Iterator[Case]:
    rng, engine = random.Random(5), riddle_engine()
    return (bare_case(engine, make_story(rng).riddle) for _ in range(6))


def documents() -> Iterator[Case]:
    """Questions about paragraphs, and running text."""
    engine, tokenizer = trained_engine()
    for cases in (question_cases, text_cases):
        yield from islice(cases(engine, tokenizer, "score", random.Random(5)), 2)


def marks_of(case: Case) -> list[Mark]:
    found = []
    for ratio in RATIOS:
        plan = case.plan(ratio, "stored_priority", scores=case.true_scores)
        result = case.engine.blender.blend(plan, case.source)
        assert not result.report.failure
        found.append((judge_riddle if case.secret else judge_text)(case, result))
    return found


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
