"""Eviction inside allocate: whoever needs room evicts that much, and loses nothing for it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt
from simulation.tiers import GatedDisk, SimDisk, SimRedis

from kvstore.proto.errors import (
    InvalidRequestError,
)
from kvstore.proto.types import PutOutcome
from kvstore.server.store.reservations import PutResult
from kvstore.server.tiering.tier_slot import SpaceRequest
from kvstore.tiers.base import DEFAULT_TENANT


def test_an_evicted_chunk_goes_to_the_next_lower_tier_and_comes_back_the_same(
    core: Core, disk: SimDisk
) -> None:
    session = core.open_session()
    versions = prompt(30)
    core.put(session, versions)
    evicted = [version for version in versions if core.tiers_of(version) == ["disk"]]
    assert len(evicted) == disk.stats().chunks == 30 - core.cpu.stats().chunks
    assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_without_a_lower_tier_victims_are_dropped_and_counted() -> None:
    with closing(Core()) as core:
        session = core.open_session()
        versions = prompt(20)
        core.put(session, versions)
        kept = core.cpu.stats().chunks
        assert core.counters["dropped_victims"] == core.counters["evicted_chunks"] == 20 - kept
        assert len(core.catalog) == kept


def test_eviction_cascades_from_tier_to_tier(disk: SimDisk, redis: SimRedis) -> None:
    disk.capacity_bytes = 6 * disk.allocated_bytes(prompt(1)[0].info.size_bytes)
    with closing(Core([disk, redis])) as core:
        session = core.open_session()
        versions = prompt(30)
        core.put(session, versions)
        assert disk.stats().chunks == 6
        assert redis.stats().chunks == 30 - 6 - core.cpu.stats().chunks
        assert core.counters["dropped_victims"] == 0
        assert all(len(core.tiers_of(version)) == 1 for version in versions)


def test_a_victim_that_lies_lower_already_is_not_copied_again(core: Core, disk: SimDisk) -> None:
    session = core.open_session()
    versions = prompt(12)
    core.put(session, versions)
    for version in versions:
        core.copy_down(version)
    core.put(session, prompt(4, seed=1))
    assert core.counters["evicted_chunks"] == 4
    assert core.counters["copied_chunks"] == 12
    assert disk.stats().chunks == 12


def test_scattered_room_is_won_by_emptying_one_slab() -> None:
    """Chunks in the order of use lie in eight slabs in turn: freeing them one by one empties
    a slab only when nearly all are gone.
    """
    with closing(Core(slabs=8, clock=FakeClock())) as core:
        session = core.open_session()
        small = [prompt(1, seed=seed, tokens=40)[0] for seed in range(32)]
        core.put(session, small)
        assert core.cpu.stats().chunks == 32
        for at in range(4):
            for version in small[at::4]:
                core.store.lookup(session, [version.info.key], core.later(), lease=False)
        (large,) = prompt(1, seed=99, tokens=200)
        assert core.put(session, [large])[0].reason == ""
        assert core.counters["evicted_chunks"] <= 20
        assert core.get(session, keys_of([large])) == frames_of([large])


def test_a_frame_larger_than_the_tier_is_refused_before_anything_is_evicted(core: Core) -> None:
    session = core.open_session()
    (version,) = prompt(1)
    core.put(session, [version])
    info = replace(version.info, size_bytes=core.cpu.max_frame_bytes + 1)
    request = SpaceRequest(info, DEFAULT_TENANT, core.later())
    with pytest.raises(InvalidRequestError, match=r"frame_bytes=\d+: tier 'cpu' takes"):
        core.moves.eviction.reserve(core.moves.tiers.cpu, request)
    assert core.tiers_of(version) == ["cpu"]


def test_a_demotion_that_takes_too_long_refuses_the_put_and_loses_nothing(
    gated: GatedDisk,
) -> None:
    with closing(Core([gated], workers=1)) as core:
        session = core.open_session()
        versions = prompt(12)
        core.put(session, versions)
        gated.shut()
        (late,) = prompt(1, seed=1)
        begun = core.store.writes.begin_all(session, [late.info], core.later(0.01))[0]
        assert isinstance(begun, PutResult)
        assert begun.outcome is PutOutcome.refused
        assert core.cpu.stats().chunks == 12
        gated.gate.set()
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        assert core.put(session, [late])[0].outcome is PutOutcome.stored


def test_a_victim_goes_even_if_the_lower_tier_fails(core: Core, disk: SimDisk) -> None:
    session = core.open_session()
    core.put(session, prompt(12))
    disk.faults.fail = 1.0
    assert core.put(session, prompt(1, seed=1))[0].reason == ""
    assert core.counters["dropped_victims"] == 1
    assert disk.stats().reservations == 0
