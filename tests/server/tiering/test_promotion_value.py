"""Promotion by value: the price of a tier."""

from __future__ import annotations

from kvstore.server.tiering.admission import LEAST_SHARE, EvictionValue


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
