"""The daily budget of writes: what it lets through, and what it makes of clocks that jump."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.types import ChunkKey
from kvstore.server.tiering.admission import (
    BURSTS_A_DAY,
    DAY_S,
    FIRST_PRICE,
    MAX_AWAITED,
    WriteBudget,
)

A_DAY = 24_000
BURST = A_DAY // BURSTS_A_DAY


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_an_hours_share_may_be_written_at_once_and_comes_back_in_an_hour() -> None:
    budget = WriteBudget(A_DAY, 0.0)
    budget.admitted(key(1), BURST)
    assert (budget.left_bytes(0.0), budget.price(0.0)) == (0.0, FIRST_PRICE)
    assert budget.left_bytes(1800.0) == BURST / 2
    assert budget.left_bytes(10 * DAY_S) == BURST


def test_the_price_rises_with_debt_until_nothing_is_worth_it() -> None:
    budget = WriteBudget(A_DAY, 0.0)
    prices = []
    for number in range(9):
        prices.append(budget.price(0.0))
        budget.note_write(key(number), BURST // 4)
    assert prices == [0.0] * 4 + [0.5, 0.625, 0.75, 0.875, 1.0]
    assert budget.price(0.0) > 1
    assert budget.price(3600.0) == 0.625


def test_a_copy_is_paid_for_once_and_at_what_it_took() -> None:
    budget = WriteBudget(A_DAY, 0.0)
    budget.admitted(key(1), 100)
    budget.admitted(key(1), 120)
    assert budget.left_bytes(0.0) == BURST - 120
    budget.note_write(key(1), 60)
    assert budget.left_bytes(0.0) == BURST - 60
    budget.admitted(key(2), 10)
    budget.note_write(key(2), 0)
    budget.note_write(key(3), 0)
    assert budget.left_bytes(0.0) == BURST - 60
    for number in range(2 * MAX_AWAITED):
        budget.admitted(key(number), 0)
    assert len(budget._awaited) == MAX_AWAITED


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 2 * BURST)), max_size=60))
def test_no_clock_lets_more_through_than_the_time_that_passed(
    steps: list[tuple[float, int]],
) -> None:
    budget, now, forward, written = WriteBudget(A_DAY, 0.0), 0.0, 0.0, 0
    for step, size in steps:
        now += step
        forward += max(0.0, step)
        if budget.price(now) == 0:
            budget.admitted(key(0), size)
            budget.note_write(key(0), size)
            written += size
    assert written <= BURST + forward * A_DAY / DAY_S + 2 * BURST + 1
