from __future__ import annotations

import math

import numpy as np
import pytest
from faults.trend import NO_TREND, floors, trend

MB = 1e6


def samples(percent_per_h: float, seed: int, length_s: int = 420) -> list[tuple[float, float]]:
    """150 MB with a trend, 0.2 MB of noise and buffers of 20 MB that come and go."""
    rng = np.random.default_rng(seed)
    times = np.arange(length_s, dtype=float)
    sizes = 150 * MB * (1 + percent_per_h / 100 * times / 3600) + rng.normal(0, 0.2 * MB, length_s)
    sizes += 20 * MB * (rng.random(length_s) < 0.3)
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


@pytest.mark.parametrize("percent_per_h", [0.0, 20.0, -20.0])
def test_the_trend_is_found_below_buffers_that_come_and_go(percent_per_h: float) -> None:
    hits = 0
    for seed in range(40):
        found = trend(samples(percent_per_h, seed))
        assert found.low <= found.slope <= found.high
        assert abs(found.slope - percent_per_h) < 3
        hits += found.low <= percent_per_h <= found.high
    assert hits >= 34


def test_the_floor_of_a_block_is_its_least_and_few_blocks_tell_nothing() -> None:
    assert floors([(100.0, 5.0), (105.0, 3.0), (111.0, 9.0)]) == [(5.0, 3.0), (15.0, 9.0)]
    assert math.isnan(trend(samples(0.0, 1, 70)).slope)
    assert trend([]) is NO_TREND or math.isnan(trend([]).slope)
