"""FLOPs a byte beside the mean."""

from __future__ import annotations

import pytest

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import Facts, History
from kvstore.server.eviction.flop_density import LEAST_DENSITY, MOST_DENSITY, FlopDensity


def test_a_density_is_a_multiple_of_the_mean_so_far() -> None:
    history = History()
    for row, flops in ((1, 1e9), (2, 3e9), (3, 2e9)):
        history.seen(row, NO_ROW, Facts(flops=flops), 0.0)
    density = FlopDensity(history)
    assert density.of(1, 100) == 1.0
    assert density.of(2, 100) == 1.5
    assert density.of(3, 200) == pytest.approx(1e7 / (5e7 / 3))


def test_what_is_not_known_counts_as_the_mean_and_changes_nothing() -> None:
    history = History()
    history.seen(1, NO_ROW, Facts(), 0.0)
    history.seen(2, NO_ROW, Facts(flops=500.0), 0.0)
    density = FlopDensity(history)
    assert density.of(1, 100) == density.of(99, 100) == density.of(2, 0) == 1.0
    assert density.of(2, 100) == 1.0


def test_a_number_that_cannot_be_is_held_within_bounds() -> None:
    history = History()
    for row, flops in ((1, 1e9), (2, 1e300), (3, 2.0)):
        history.seen(row, NO_ROW, Facts(flops=flops), 0.0)
    density = FlopDensity(history)
    for _ in range(200):
        density.of(1, 100)
    assert density.of(2, 100) == MOST_DENSITY
    assert density.of(3, 100) == LEAST_DENSITY


@pytest.mark.parametrize("flops", [1e308, 1.0, 5e-324])
def test_a_lie_about_one_chunk_does_not_last(flops: float) -> None:
    history = History()
    history.seen(1, NO_ROW, Facts(flops=flops), 0.0)
    history.seen(2, NO_ROW, Facts(flops=1e9), 0.0)
    density = FlopDensity(history)
    assert LEAST_DENSITY <= density.of(1, 1) <= MOST_DENSITY
    for _ in range(400_000):
        density.of(2, 100)
    assert density.of(2, 100) == pytest.approx(1.0, rel=0.01)
    for _ in range(10):
        assert LEAST_DENSITY <= density.of(1, 1 << 50) <= MOST_DENSITY
    assert 0.2 < density.of(2, 100) < 5.0
