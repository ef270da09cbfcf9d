"""The shipped model on which naive reuse hurts: how much, and that all rows repair it."""

from __future__ import annotations

import random

import pytest
from bench.blend.cases import RIDDLE_FOLDER, Case, Engine, riddle_case, riddle_engine
from bench.blend.riddles import STORY, answered, make_riddle

STORIES = 16


@pytest.fixture(scope="module")
def engine() -> Engine:
    return riddle_engine()


@pytest.fixture(scope="module")
def cases(engine: Engine) -> list[Case]:
    rng = random.Random(8)
    return [riddle_case(engine, make_riddle(rng, STORY)) for _ in range(STORIES)]


def accuracy(cases: list[Case], ratio: float) -> float:
    right: list[bool] = []
    for case in cases:
        result = case.blend(("query_attention", ratio))
        right += answered(result.logits, case.riddle)
    return sum(right) / len(right)


def test_stored_chunks_as_they_are_cost_half_of_the_right_answers(cases: list[Case]) -> None:
    full, naive = accuracy(cases, 1.0), accuracy(cases, 0.0)
    assert full >= 0.9
    assert naive <= 0.6 * full


def test_some_rows_repair_most_of_it(cases: list[Case]) -> None:
    full, naive = accuracy(cases, 1.0), accuracy(cases, 0.0)
    assert accuracy(cases, 0.3) - naive >= 0.75 * (full - naive)


def test_it_is_what_the_chunks_say_across_each_other_that_is_lost(cases: list[Case]) -> None:
    """Names whose value never left its chunk are answered all the same."""
    lost = {True: 0, False: 0}
    asked = {True: 0, False: 0}
    for case in cases:
        result = case.blend(("first_k", 0.0))
        for depth, is_right in zip(
            case.riddle.depth, answered(result.logits, case.riddle), strict=True
        ):
            asked[depth > 0] += 1
            lost[depth > 0] += not is_right
    assert lost[True] / asked[True] > lost[False] / asked[False] + 0.4


def test_the_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in RIDDLE_FOLDER.iterdir()) < 2 << 20
