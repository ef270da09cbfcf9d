"""The engine's cost model, the link's estimate, and how much of a prefix is worth loading."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.planning import SAMPLES_KEPT, LinkMeter, PrefillModel, chunks_worth_loading

ENGINE = PrefillModel(0.01, 1e-4, 1e-8)


def spans(count: int, tokens: int = 256) -> list[tuple[int, int]]:
    return [(at * tokens, (at + 1) * tokens) for at in range(count)]


def test_prefill_has_a_start_a_linear_and_a_context_term() -> None:
    assert ENGINE.seconds(0, 10**6) == 0
    assert ENGINE.seconds(100, 1000) == pytest.approx(0.01 + 0.01 + 0.001)


def test_fast_loads_are_all_worth_it_and_slow_ones_none() -> None:
    assert chunks_worth_loading([100] * 8, spans(8), 2100, ENGINE) == 8
    assert chunks_worth_loading([10**6] * 8, spans(8), 2100, ENGINE) == 0
    assert chunks_worth_loading([], [], 300, ENGINE) == 0


def test_a_slow_tail_is_computed_instead() -> None:
    assert chunks_worth_loading([100] * 5 + [10**6] * 3, spans(8), 2100, ENGINE) == 5


def test_loads_that_a_later_fast_chunk_makes_up_for_are_worth_it() -> None:
    assert chunks_worth_loading([40_000, 100, 100], spans(3), 800, ENGINE) == 3


@given(st.lists(st.integers(0, 10**6), max_size=12), st.integers(0, 300))
def test_no_other_count_ends_sooner(loads: list[int], more: int) -> None:
    total = 256 * len(loads) + more
    if not total:
        return

    def ends_s(count: int) -> float:
        rest = max(1, total - 256 * count) if count else total
        return sum(loads[:count]) / 1e6 + ENGINE.seconds(rest, total - rest)

    found = chunks_worth_loading(loads, spans(len(loads)), total, ENGINE)
    best = min(map(ends_s, range(len(loads) + 1)))
    assert ends_s(found) == pytest.approx(best)


def test_a_link_is_what_was_told_until_it_was_measured() -> None:
    meter = LinkMeter(1e9)
    assert meter.estimate().mean_bytes_per_s == meter.estimate().p20_bytes_per_s == 1e9
    meter.observe(0, 1.0)
    assert meter.estimate().mean_bytes_per_s == 1e9
    meter.observe(1000, 1.0)
    assert meter.estimate().mean_bytes_per_s == pytest.approx(1000)


def test_four_out_of_five_transfers_were_as_fast_as_the_cautious_estimate() -> None:
    meter, draw = LinkMeter(1.0), random.Random(1)
    seen = [draw.uniform(1e6, 1e9) for _ in range(3 * SAMPLES_KEPT)]
    for speed in seen:
        meter.observe(int(speed), 1.0)
    last = seen[-SAMPLES_KEPT:]
    estimate = meter.estimate()
    slower = sum(speed < estimate.p20_bytes_per_s - 1 for speed in last)
    assert 0.15 * SAMPLES_KEPT <= slower <= 0.2 * SAMPLES_KEPT
    assert min(last) < estimate.mean_bytes_per_s < max(last)


def test_a_transfer_that_took_no_time_says_that_it_was_fast() -> None:
    meter = LinkMeter(1.0)
    meter.observe(10**6, 0.0)
    assert meter.estimate().p20_bytes_per_s >= 1e12
