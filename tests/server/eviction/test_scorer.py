"""The scorer's sums, and what is refused of its weights."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.scorer import FEATURES, MAX_STUMPS, Stump, StumpScorer
from kvstore.server.eviction.scorer_weights import WEIGHTS

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)
STUMPS = st.builds(Stump, st.integers(0, 5), NUMBERS, NUMBERS, NUMBERS)


def test_a_score_is_the_sum_of_what_each_stump_says() -> None:
    scorer = StumpScorer([Stump(0, 10.0, 1.0, -2.0), Stump(2, 1.0, 0.0, 4.0)])
    features = np.zeros((4, len(FEATURES)))
    features[:, 0] = [10.0, 10.5, 3.0, math.inf]
    features[:, 2] = [1.0, 1.0, 2.0, 2.0]
    assert scorer.score(features).tolist() == [1.0, -2.0, 5.0, 2.0]


@given(st.lists(STUMPS, min_size=1, max_size=5))
def test_weights_come_back_from_their_text(stumps: list[Stump]) -> None:
    scorer = StumpScorer(stumps)
    again = StumpScorer.from_json(scorer.to_json())
    assert again.stumps == scorer.stumps
    assert again.to_json() == scorer.to_json()


def test_the_weights_that_are_shipped_can_be_read_and_tell_chunks_apart() -> None:
    scorer = StumpScorer.from_json(WEIGHTS)
    assert scorer.to_json().strip() == WEIGHTS.strip()
    features = np.full((2, len(FEATURES)), 1.0)
    features[:, 0] = [20.0, 20.0]
    features[:, 2] = [1.0, 5.0]
    once, often = scorer.score(features)
    assert once < often


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(WEIGHTS), **fields})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "weights"),
        ("[1]", "weights"),
        ("[" * 100_000, "weights"),
        (changed(version=2), "version"),
        (changed(features=["age_s"]), "features"),
        (changed(stumps=[[0, 1.0, 2.0, 3.0]]), "sha256"),
        (changed(sha256=None), "sha256"),
    ],
)
def test_weights_that_are_not_as_they_were_written_are_refused(text: str, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        StumpScorer.from_json(text)


@pytest.mark.parametrize(
    "stump", [(6, 0.0, 0.0, 0.0), (-1, 0.0, 0.0, 0.0), (0, math.nan, 0.0, 0.0), (0, 0, 0, math.inf)]
)
def test_a_stump_that_asks_for_nothing_there_is_is_refused(
    stump: tuple[int, float, float, float],
) -> None:
    with pytest.raises(InvalidRequestError):
        Stump(*stump)


@pytest.mark.parametrize("count", [0, MAX_STUMPS + 1])
def test_the_number_of_stumps_has_a_limit(count: int) -> None:
    with pytest.raises(InvalidRequestError, match="stumps"):
        StumpScorer([Stump(0, 0.0, 0.0, 0.0)] * count)
