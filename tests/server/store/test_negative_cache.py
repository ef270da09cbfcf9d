"""What shared tiers have just said they do not have."""

from __future__ import annotations

from contracts.policy import key
from simulation.clock import FakeClock

from kvstore.proto.types import ChunkKey
from kvstore.server.store.lookup import MAX_NEGATIVE_KEYS, NEGATIVE_TTL_S, NegativeCache


def test_a_key_is_absent_for_a_moment_after_it_was_noted() -> None:
    clock = FakeClock()
    absent = NegativeCache(clock)
    assert key(1) not in absent
    absent.note(key(1))
    assert key(1) in absent
    assert key(2) not in absent
    clock.advance(NEGATIVE_TTL_S)
    assert key(1) not in absent
    assert len(absent) == 0


def test_noting_again_starts_the_moment_anew() -> None:
    clock = FakeClock()
    absent = NegativeCache(clock)
    absent.note(key(1))
    clock.advance(NEGATIVE_TTL_S * 0.75)
    absent.note(key(1))
    clock.advance(NEGATIVE_TTL_S * 0.75)
    assert key(1) in absent
    assert len(absent) == 1


def test_no_more_keys_are_remembered_than_the_limit_and_the_oldest_go() -> None:
    absent = NegativeCache(FakeClock())
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(MAX_NEGATIVE_KEYS + 2)]
    for one in keys:
        absent.note(one)
    assert len(absent) == MAX_NEGATIVE_KEYS
    assert [one in absent for one in keys[:3]] == [False, False, True]
    assert keys[-1] in absent
