"""How right the answers of blends are, on the model set by hand, where chunks read each other."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from bench.blend.cases import Case, designed_engine, judge, riddle_case
from bench.blend.riddles import answered, make_riddle

from kvstore.client.blend.gate import deviations

RATIOS = (0.0, 0.15, 0.5, 0.85, 1.0)


@lru_cache(maxsize=1)
def designed() -> tuple[Case, ...]:
    rng, engine = random.Random(5), designed_engine()
    return tuple(riddle_case(engine, make_riddle(rng), rng) for _ in range(6))


def with_true_scores(case: Case) -> Case:
    """Return *case* with the scores of this prompt itself, which no selector has."""
    parts = []
    for segment, part in zip(case.plan(0.0, "hybrid").segments, case.parts, strict=False):
        span = slice(segment.start, segment.end)
        full = [(k[:, span], v[:, span]) for k, v in case.full.kv]
        parts.append(replace(part, scores=tuple(deviations(full, part.kv).tolist())))
    return replace(case, parts=tuple(parts))


def accuracy(selector: str, ratio: float) -> float:
    right = []
    for case in designed():
        right += answered(case.blend((selector, ratio)).logits, case.riddle)
    return sum(right) / len(right)


def test_the_default_selector_answers_more_than_the_deviation_of_a_shallow_layer() -> None:
    assert accuracy("hybrid", 0.15) > accuracy("hkvd", 0.15) + 0.2


def test_divergence_falls_and_right_answers_rise_with_the_ratio() -> None:
    """Nested sets of rows, the most wrong of this very prompt first: each repairs what the
    smaller one did, and no selector's luck is in it.
    """
    scored = [with_true_scores(case) for case in designed()]
    marks = [[judge(one, one.blend(("stored_priority", at))) for at in RATIOS] for one in scored]
    columns = list(zip(*marks, strict=True))
    divergence = [sum(mark.divergence for mark in column) for column in columns]
    assert all(more < less for less, more in pairwise(divergence) if less > 1e-9)
    assert divergence[-1] == 0
    right = [sum(mark.exact_match for mark in column) for column in columns]
    assert right == sorted(right)
    assert right[0] < 0.7 * right[-1]
