"""Tier admission: the published rules by their tables, the value rule by its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.server.tiering.admission import (
    ADMISSIONS,
    BY_VALUE,
    LEAST_CHANCE,
    CopyRequest,
    Pressure,
    Trigger,
)

STORED, ASKED, LEAVING = Trigger.stored, Trigger.asked, Trigger.leaving


@pytest.mark.parametrize(
    ("name", "moment", "hits", "is_admitted"),
    [
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
    ],
)
def test_each_rule_admits_at_its_moments(
    name: str, moment: Trigger, hits: int, is_admitted: bool
) -> None:
    assert ADMISSIONS[name].admits(CopyRequest(moment, 100, hits), 0.0) is is_admitted


def test_a_second_sighting_admits_what_was_evicted_in_between() -> None:
    rule = ADMISSIONS["selective"]
    assert not rule.admits(CopyRequest(STORED, 100, hits=1), 0.0)
    assert rule.admits(CopyRequest(STORED, 100, hits=2), 0.0)  # stored anew, remembered as a ghost


@pytest.mark.parametrize("name", ADMISSIONS)
def test_nothing_is_stored_that_loads_as_long_as_it_computes(name: str) -> None:
    rule = ADMISSIONS[name]
    for moment in Trigger:
        assert not rule.admits(CopyRequest(moment, 100, 9, load_s=0.2, compute_s=0.2), 0.0)
    assert any(
        rule.admits(CopyRequest(moment, 100, 9, load_s=0.1, compute_s=0.2), 0.0)
        for moment in Trigger
    )


@pytest.mark.parametrize("name", ADMISSIONS)
def test_an_unknown_speed_of_prefill_refuses_nothing(name: str) -> None:
    rule = ADMISSIONS[name]
    assert any(rule.admits(CopyRequest(moment, 100, 9, load_s=99.0), 0.0) for moment in Trigger)


@pytest.mark.parametrize("name", ADMISSIONS)
def test_what_chunks_on_the_tier_continue_is_stored_at_any_price(name: str) -> None:
    hopeless = CopyRequest(LEAVING, 100, 1, chance=0.0, load_s=9.0, compute_s=1.0, is_needed=True)
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
