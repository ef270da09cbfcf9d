"""Tier admission: the published rules by their tables, the value rule by its price."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.types import ChunkKey
from kvstore.server.tiering.admission import (
    ADMISSIONS,
    BURSTS_A_DAY,
    BY_VALUE,
    DAY_S,
    FIRST_PRICE,
    LEAST_CHANCE,
    LEAST_SHARE,
    MAX_AWAITED,
    MAX_REMEMBERED,
    CopyRequest,
    EvictionValue,
    Pressure,
    PromoteOnSecondHit,
    StateAdmission,
    Trigger,
    WriteBudget,
)

STORED, ASKED, LEAVING = Trigger.stored, Trigger.asked, Trigger.leaving


def test_each_rule_admits_at_its_moments() -> None:
    for name, moment, hits, is_admitted in [
        ("through", STORED, 1, True),
        ("through", ASKED, 9, False),
        ("through", LEAVING, 1, True),
        ("evict", STORED, 9, False),
        ("evict", ASKED, 9, False),
        ("evict", LEAVING, 1, True),
        ("selective", STORED, 1, False),
        ("selective", STORED, 2, True),
        ("selective", ASKED, 2, True),
        ("selective", LEAVING, 1, False),
        ("auto", STORED, 9, False),
        ("auto", ASKED, 9, False),
        ("auto", LEAVING, 1, True),
    ]:
        assert ADMISSIONS[name].admits(CopyRequest(moment, 100, hits), 0.0) is is_admitted


def test_nothing_is_stored_that_loads_as_long_as_it_computes() -> None:
    for name in ADMISSIONS:
        rule = ADMISSIONS[name]
        for moment in Trigger:
            assert not rule.admits(CopyRequest(moment, 100, 9, load_s=0.2, compute_s=0.2), 0.0)
        assert any(
            rule.admits(CopyRequest(moment, 100, 9, load_s=0.1, compute_s=0.2), 0.0)
            for moment in Trigger
        )


def test_an_unknown_speed_of_prefill_refuses_nothing() -> None:
    for name in ADMISSIONS:
        rule = ADMISSIONS[name]
        assert any(rule.admits(CopyRequest(moment, 100, 9, load_s=99.0), 0.0) for moment in Trigger)


def test_what_chunks_on_the_tier_continue_is_stored_at_any_price() -> None:
    for name in ADMISSIONS:
        hopeless = CopyRequest(
            LEAVING, 100, 1, chance=0.0, load_s=9.0, compute_s=1.0, is_needed=True
        )
        assert ADMISSIONS[name].admits(hopeless, 1.0)


def test_the_value_rule_weighs_the_chance_by_what_a_load_spares() -> None:
    rule = replace(BY_VALUE, least_value=0.2)
    assert rule.admits(CopyRequest(LEAVING, 100, chance=0.2), 0.0)
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=0.19), 0.0)
    assert rule.admits(CopyRequest(LEAVING, 100, chance=0.4, load_s=1.0, compute_s=2.0), 0.0)
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=0.39, load_s=1.0, compute_s=2.0), 0.0)


def test_the_price_rises_with_the_pressure_until_nothing_is_worth_it() -> None:
    rule = BY_VALUE
    prices = [rule.price(step / 10) for step in range(11)]
    assert prices == sorted(prices)
    assert prices[0] == LEAST_CHANCE
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=1.0), 1.0)
    assert rule.admits(CopyRequest(LEAVING, 100, chance=1.0), 0.9)
    assert not rule.admits(CopyRequest(LEAVING, 100, chance=0.5), 0.9)


def test_a_tier_that_writes_all_the_time_is_under_pressure_and_recovers() -> None:
    pressure = Pressure()
    assert pressure.level(0.0, 0.0) == 0.0
    for second in range(60):
        pressure.note(1.0, float(second))
    assert pressure.level(0.0, 60.0) > 0.8
    assert pressure.level(0.0, 120.0) == 0.0


def test_a_tier_ten_times_slower_is_under_pressure_where_it_was_not() -> None:
    quick, slow = Pressure(), Pressure()
    for second in range(60):
        quick.note(0.09, float(second))
        slow.note(0.9, float(second))
    assert quick.level(0.0, 60.0) == 0.0
    assert slow.level(0.0, 60.0) > 0.5


def test_a_full_queue_is_full_pressure_and_clocks_may_jump() -> None:
    pressure = Pressure()
    pressure.note(1.0, 100.0)
    pressure.note(-5.0, 50.0)
    assert pressure.level(1.0, 0.0) == 1.0
    assert 0.0 <= pressure.level(0.3, -10.0) <= 1.0


# --- promotion


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_a_chunk_is_due_at_its_second_read_and_then_every_other() -> None:
    reads = PromoteOnSecondHit(10)
    assert [reads.is_due(key(1)) for _ in range(5)] == [False, True, False, True, False]


def test_what_was_read_too_long_ago_is_forgotten() -> None:
    reads = PromoteOnSecondHit(3)
    for seed in range(4):
        assert not reads.is_due(key(seed))
    assert len(reads._once) == 3
    assert not reads.is_due(key(0)), "the first of four was forgotten"
    assert reads.is_due(key(3))


def test_a_tier_with_room_takes_everything_and_then_what_is_worth_more_than_its_victims() -> None:
    price = EvictionValue()
    assert price.takes(0.0)
    price.note_eviction(2.0)
    assert price.per_byte == 2.0
    assert price.takes(2.0 * LEAST_SHARE)
    assert not price.takes(1.9 * LEAST_SHARE)
    for _ in range(1000):
        price.note_eviction(1.0)
    assert price.takes(1.01 * LEAST_SHARE)


# --- the daily budget of writes

A_DAY = 24_000
BURST = A_DAY // BURSTS_A_DAY


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


# --- recurrent states


def test_a_state_is_kept_at_an_end_at_a_parting_and_the_second_time() -> None:
    states = StateAdmission()
    states.parted(key(3))
    assert [states.admits(key(n), is_end=n == 4) for n in range(5)] == [False] * 3 + [True] * 2
    assert states.has_turned_away(key(0))
    assert not states.has_turned_away(key(3))
    assert states.admits(key(0), is_end=False)
    assert not states.has_turned_away(key(0))
    assert not states.admits(key(0), is_end=False), "it was admitted for that one time"
    states.forget(key(1))
    assert not states.admits(key(1), is_end=False)


def test_no_more_states_are_remembered_than_the_limit() -> None:
    states = StateAdmission(limit=8)
    for number in range(100):
        states.parted(key(number))
        states.admits(key(1000 + number), is_end=False)
    assert len(states._partings) == len(states._turned_away) == 8
    assert states.admits(key(99), is_end=False), "the latest partings stay"
    assert not states.admits(key(1000), is_end=False), "the oldest are forgotten"
    assert MAX_REMEMBERED < 1 << 20
