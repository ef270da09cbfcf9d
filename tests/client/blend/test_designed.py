"""Quality on the model set by hand, whose right answers need attention across chunks."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from bench.blend.cases import Case, Engine, riddle_case
from bench.blend.riddles import answered, make_designed, make_riddle

RIDDLES = 6
RATIOS = (0.0, 0.15, 0.5, 1.0)


@lru_cache(maxsize=1)
def engine() -> Engine:
    return Engine.of(make_designed())


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    rng = random.Random(5)
    return tuple(riddle_case(engine(), make_riddle(rng), rng) for _ in range(RIDDLES))


def accuracy(selector: str, ratio: float) -> float:
    right = []
    for case in cases():
        result = case.blend((selector, ratio))
        right += answered(result.logits, case.riddle)
    return sum(right) / len(right)


def test_a_full_prefill_answers_everything() -> None:
    for case in cases():
        logits = engine().blender.prefill(case.tokens).logits[-len(case.riddle.question) :]
        assert all(answered(logits, case.riddle))


def test_stored_chunks_as_they_are_answer_far_less() -> None:
    assert accuracy("hybrid", 0.0) < 0.6


@pytest.mark.parametrize("selector", ["hkvd", "stored_priority", "query_attention", "hybrid"])
def test_more_rows_answer_no_less(selector: str) -> None:
    found = [accuracy(selector, ratio) for ratio in RATIOS]
    assert found[-1] == 1.0
    assert all(more >= less - 0.02 for less, more in pairwise(found))


def test_the_default_selector_answers_more_than_the_deviation_of_a_shallow_layer() -> None:
    assert accuracy("hybrid", 0.15) > accuracy("hkvd", 0.15) + 0.2


def test_rows_forced_by_true_deviation_are_monotone_with_the_exact_mask() -> None:
    """Nested sets of rows, the most wrong first: each repairs what the smaller one did."""
    found = []
    for ratio in RATIOS:
        total = 0.0
        for case in cases():
            logits = case.with_true_scores().blend(("stored_priority", ratio)).logits
            total += sum(answered(logits, case.riddle))
        found.append(total)
    assert found == sorted(found)


def test_the_riddles_question_holds_no_answer() -> None:
    for case in cases():
        assert not set(case.riddle.question) & set(case.riddle.answers)
        assert torch.tensor(case.riddle.depth).max() <= 2
