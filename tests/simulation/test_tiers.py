"""The simulation's own media keep the contract, or what they prove would be worth nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, put
from contracts.tier import TierContract
from simulation.clock import FakeClock
from simulation.tiers import Faults, SimDisk, SimRedis, no_faults
from typing_extensions import override

from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.tiers.base import Tier


class TestSimDiskContract(TierContract):
    @override
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> SimDisk:
        return SimDisk(capacity_bytes, no_faults())

    @override
    def reopen(self, tier: Tier, tmp_path: Path) -> SimDisk:
        assert isinstance(tier, SimDisk)
        tier.close()
        return tier.restarted()


class TestSimRedisContract(TierContract):
    @override
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> SimRedis:
        return SimRedis(capacity_bytes, no_faults())

    @override
    def reopen(self, tier: Tier, tmp_path: Path) -> SimRedis:
        assert isinstance(tier, SimRedis)
        tier.close()
        return SimRedis(tier.capacity_bytes, no_faults(), tier.medium)


def test_a_power_cut_takes_what_was_not_flushed_and_brings_back_unflushed_deletes() -> None:
    disk = SimDisk(1 << 20, no_faults())
    kept, deleted, fresh = (make_info(seed, 100) for seed in range(3))
    put(disk, kept, payload(0, 100))
    put(disk, deleted, payload(1, 100))
    disk.flush()
    disk.delete(deleted.key)
    put(disk, fresh, payload(2, 100))
    again = disk.restarted()
    assert_holds(again, kept, payload(0, 100))
    assert_holds(again, deleted, payload(1, 100))
    assert_absent(again, fresh)
    assert_counts(again, [kept, deleted], [])


def test_a_flush_that_fails_loses_what_it_was_for() -> None:
    faults = no_faults()
    disk = SimDisk(1 << 20, faults)
    old, fresh = make_info(1, 100), make_info(2, 100)
    put(disk, old, payload(1, 100))
    disk.flush()
    put(disk, fresh, payload(2, 100))
    faults.fail = 1.0
    with pytest.raises(TierUnavailableError):
        disk.flush()
    faults.end()
    assert_holds(disk, old, payload(1, 100))
    assert_absent(disk, fresh)
    assert disk.lost == {fresh.key}


def test_failing_verbs_leave_no_reservation_and_every_verb_can_fail() -> None:
    faults = Faults(random.Random(0), FakeClock(), fail=1.0)
    disk = SimDisk(1 << 20, faults)
    info = make_info(1, 100)
    verbs = [
        lambda: disk.reserve(info),
        lambda: disk.find([info.key]),
        lambda: disk.delete(info.key),
        lambda: disk.read(info.key, payload(1, 100)),
        disk.flush,
    ]
    for verb in verbs:
        with pytest.raises(TierUnavailableError):
            verb()
    faults.fail = 0.0
    reservation = disk.reserve(info)
    faults.fail = 1.0
    with pytest.raises(TierUnavailableError):
        disk.write(reservation, payload(1, 100))
    with pytest.raises(TierUnavailableError):
        disk.seal(reservation)
    assert_counts(disk, [], [])
    assert faults.raised == len(verbs) + 2


def test_slow_verbs_take_time_of_the_clock_they_were_given_and_full_ones_refuse() -> None:
    clock = FakeClock(5.0)
    faults = Faults(random.Random(0), clock, slow=1.0, slow_s=2.0, full=1.0)
    disk = SimDisk(1 << 20, faults)
    with pytest.raises(TierFullError):
        disk.reserve(make_info(1, 100))
    assert 5.0 < clock.now <= 7.0


def test_a_flipped_bit_and_a_lost_chunk_are_remembered() -> None:
    disk = SimDisk(1 << 20, no_faults())
    info = make_info(1, 100)
    put(disk, info, payload(1, 100))
    disk.flip(info.key, 17)
    out = payload(2, 100)
    assert disk.read(info.key, out)
    assert (out != payload(1, 100)).sum() == 1
    disk.lose(info.key)
    assert_absent(disk, info)
    assert disk.lost == {info.key}
