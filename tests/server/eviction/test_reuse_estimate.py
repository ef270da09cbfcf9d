"""The chance of another asking, against counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.reuse_statistics import AGE_BINS, ReuseForecast, bins_of, reuse_chance


def hits(**ages_s: float) -> NDArray[np.float64]:
    """Return hits by bin: ``_5`` of five seconds and so on."""
    found = np.zeros(AGE_BINS)
    for age, count in ages_s.items():
        found[bins_of(np.array([float(age[1:])]))] += count
    return found


def test_a_kind_that_always_comes_again_is_likely_to_and_one_that_never_does_is_not() -> None:
    assert reuse_chance(1000.0, hits(_5=1000), 0.0) > 0.99
    assert reuse_chance(1000.0, hits(), 0.0) < 0.01


def test_what_has_waited_past_the_usual_age_is_unlikely_to_come() -> None:
    half = hits(_5=500)
    assert reuse_chance(1000.0, half, 0.0) == pytest.approx(0.5, abs=0.01)
    assert reuse_chance(1000.0, half, 100.0) < 0.01


def test_only_hits_before_the_tier_gives_a_chunk_up_count() -> None:
    late = hits(_1000=100)
    assert reuse_chance(100.0, late, 0.0, 10.0) < 0.02
    assert reuse_chance(100.0, late, 0.0, 5000.0) > 0.98


@given(
    st.lists(st.integers(0, 9), min_size=AGE_BINS, max_size=AGE_BINS),
    st.integers(0, 400),
    st.floats(-10, 1e9),
    st.floats(0, 1e9),
)
def test_a_chance_is_one_whatever_was_counted(
    counts: list[int], requests: int, age_s: float, stay_s: float
) -> None:
    found = np.array(counts, np.float64)
    assert 0.0 <= reuse_chance(requests, found, age_s, age_s + stay_s) <= 1.0
    assert 0.0 <= reuse_chance(requests, found, age_s) <= 1.0


def ask(forecast: ReuseForecast, rows: list[int], now_s: float) -> None:
    """Look a prompt up and store what is missing of it, whose last chunk is not full."""
    history = forecast.history
    new = next((at for at, row in enumerate(rows) if not forecast.history.hits_of(row)), len(rows))
    known = np.array(rows[:new], np.intp)
    forecast.requested(known, len(rows), now_s)
    history.requested(known, len(rows), now_s)
    parent = rows[new - 1] if new else NO_ROW
    for row in rows[new:]:
        facts = InsertInfo(tokens_full=row != rows[-1])
        history.seen_chain(np.array([row]), parent, facts, now_s)
        forecast.seen(row, parent, facts, now_s)
        parent = row


def test_a_forecast_learns_that_prompts_are_continued_but_their_ends_are_not() -> None:
    forecast = ReuseForecast(AccessHistory())
    for at in range(200):
        body = [10 * at + 1, 10 * at + 2]
        ask(forecast, [*body, 10 * at + 3], 10.0 * at)
        ask(forecast, [*body, 10 * at + 4], 10.0 * at + 5)
    ask(forecast, [9001, 9002, 9003], 3000.0)
    assert forecast.chance(9001, 3000.0) > 0.9
    assert forecast.chance(9003, 3000.0) < 0.1
    assert (forecast.history.hits_of(1), forecast.history.hits_of(9001)) == (2, 1)


def test_a_tier_that_keeps_chunks_for_long_makes_late_hits_count() -> None:
    forecast = ReuseForecast(AccessHistory())
    for at in range(100):
        ask(forecast, [2 * at + 1, 2 * at + 2], 10.0 * at)
        ask(forecast, [2 * at + 1, 2 * at + 1000], 10.0 * at + 500.0)
    ask(forecast, [9000, 9001], 3000.0)
    late = forecast.chance(9000, 3000.0)
    for _ in range(1000):
        forecast.evicted(9000, 3010.0)  # ten seconds after it was asked for
    assert forecast.chance(9000, 3000.0) < 0.1 < late


def test_rows_that_nothing_is_known_of_may_come() -> None:
    forecast = ReuseForecast(AccessHistory())
    forecast.requested(np.array([7, 99], np.intp), 2, 0.0)
    forecast.evicted(7, 0.0)
    assert forecast.chance(7, 0.0) == 1.0
    assert forecast.history.hits_of(10**6) == 0


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=5, unique=True), st.floats(-9, 9))))
def test_clocks_that_jump_leave_chances(prompts: list[tuple[list[int], float]]) -> None:
    forecast = ReuseForecast(AccessHistory())
    for rows, now_s in prompts:
        ask(forecast, rows, now_s)
        assert all(0.0 <= forecast.chance(row, -now_s) <= 1.0 for row in range(10))
        forecast.evicted(1, now_s)
    assert math.isfinite(forecast.chance(1, 0.0))
