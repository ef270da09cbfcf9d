"""Placement by value in the server: where victims go, and what is worth memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt
from simulation.tiers import SimDisk, SimRedis, no_faults

from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.index.hints import ChunkMetadata


def make_core(rule: str) -> Core:
    history = AccessHistory()
    return Core(
        [SimDisk(1 << 20, no_faults()), SimRedis(1 << 20, no_faults())],
        admissions={"disk": rule, "redis": rule},
        metadata=ChunkMetadata(history, forecast=ReuseForecast(history)),
        clock=FakeClock(),
    )


@pytest.fixture(params=["auto", "evict"])
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    core = make_core(request.param)
    yield core
    core.close()


def below(core: Core, name: str) -> int:
    return core.slot(name).tier.stats().chunks


def evict(core: Core) -> None:
    """Have memory evict a prompt that was asked for a few times."""
    session, versions = core.open_session(), prompt(6)
    core.put(session, versions)
    for _ in range(3):
        core.store.lookup(session, keys_of(versions), core.later(), lease=False)
    core.put(session, prompt(12, seed=9))


def test_victims_go_to_the_nearest_tier(core: Core) -> None:
    evict(core)
    assert below(core, "disk") > 0
    assert below(core, "redis") == 0


def test_victims_that_are_weighed_go_where_they_would_load_from_soonest(core: Core) -> None:
    core.slot("disk").bytes_per_s = 1e6  # a disk that has become slow
    evict(core)
    by_value = core.admissions["disk"] == "auto"
    assert (below(core, "redis") > 0) == by_value
    assert (below(core, "disk") > 0) == (not by_value)


def test_memory_takes_everything_until_it_gave_up_something_worth_more() -> None:
    core = make_core("auto")
    session, placement = core.open_session(), core.moves.placement
    disk, cpu = core.slot("disk"), core.slot("cpu")
    loved, once = prompt(2, seed=1), prompt(2, seed=2)
    for _ in range(40):  # asked for again and again: a kind with a high chance
        core.store.lookup(session, keys_of(loved), core.later(), lease=False)
        core.put(session, loved)
        core.clock.advance(5.0)  # type: ignore[attr-defined]
    for seed in range(40):  # and one that never comes again
        core.put(session, prompt(2, seed=100 + seed))
        core.clock.advance(5.0)  # type: ignore[attr-defined]
    core.put(session, once)
    lovely, single = keys_of(loved)[0], keys_of(once)[0]
    price = placement._prices["cpu"]
    assert price.per_byte is not None, "memory gave up what came before"
    assert placement.promotes(lovely, disk, cpu)
    for _ in range(400):
        price.note_eviction(placement._value(lovely, disk))
    assert not placement.promotes(single, disk, cpu)
    assert placement.promotes(lovely, disk, cpu)
    assert placement._value(keys_of(prompt(1, seed=999))[0], disk) == 0.0
    core.close()


def test_where_nothing_is_weighed_all_that_is_read_twice_comes_up() -> None:
    core = make_core("evict")
    disk, cpu = core.slot("disk"), core.slot("cpu")
    core.put(core.open_session(), prompt(20))
    assert core.moves.placement.promotes(keys_of(prompt(1))[0], disk, cpu)
    assert core.moves.placement._prices["cpu"].per_byte is None
    core.close()
