"""The simulation's own media keep the contract, or what they prove would be worth nothing."""

from __future__ import annotations

from pathlib import Path

from contracts.chunks import make_info, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, put
from contracts.tier import TierContract
from simulation.tiers import SimDisk, SimRedis, no_faults
from typing_extensions import override

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
