"""Prefetch: loads begin at the lookup, within a budget, and stop where nobody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.proto.types import Match
from kvstore.server.security.sessions import Session

DISK_BYTES = 4 << 20


def make_core(prefetch_bytes: int, queue_limit: int = 1000) -> Core:
    config = settings(prefetch_bytes=prefetch_bytes)
    disk = SimDisk(DISK_BYTES, no_faults())
    return Core([disk], config=config, queue_limit=queue_limit, clock=FakeClock())


@pytest.fixture
def core() -> Iterator[Core]:
    with closing(make_core(1 << 20)) as core:
        yield core


def look(core: Core, session: Session, versions: list[Version], *, lease: bool = True) -> Match:
    return core.store.lookup(session, keys_of(versions), core.later(), lease=lease)


def put_on_disk(core: Core, session: Session, count: int) -> list[Version]:
    versions = prompt(count)
    core.put(session, versions)
    core.put(session, prompt(12, seed=9))
    return versions


def in_memory(core: Core, versions: list[Version]) -> int:
    return sum("cpu" in core.tiers_of(version) for version in versions)


def test_a_chain_that_was_leased_comes_up_before_its_get(core: Core) -> None:
    session = core.open_session()
    versions = put_on_disk(core, session, 4)
    match = look(core, session, versions)
    core.settle()
    assert in_memory(core, versions) == 4
    assert core.get(session, keys_of(versions)) == frames_of(versions)
    assert core.counters["prefetched_chunks"] == core.counters["prefetch_used_chunks"] == 4
    core.get(session, keys_of(versions))
    assert core.counters["prefetch_used_chunks"] == 4
    core.store.release(session, match.lease_id)


def test_a_lookup_without_a_lease_or_of_what_is_in_memory_loads_nothing(core: Core) -> None:
    session = core.open_session()
    versions = put_on_disk(core, session, 4)
    look(core, session, versions, lease=False)
    look(core, session, prompt(4, seed=9))
    core.settle()
    assert core.counters["prefetched_chunks"] == 0


def test_a_reader_of_files_in_place_is_left_to_read_them(core: Core) -> None:
    session = core.open_session()
    versions = put_on_disk(core, session, 4)
    session.is_attached = True
    look(core, session, versions)
    assert core.counters["prefetched_chunks"] == 0


def test_no_more_than_the_budget_is_under_way() -> None:
    size = prompt(1)[0].info.size_bytes
    with closing(make_core(3 * size)) as core:
        session = core.open_session()
        versions = put_on_disk(core, session, 6)
        for expected in (3, 3):
            look(core, session, versions)
            assert core.counters["prefetched_chunks"] == expected
        core.settle()
        look(core, session, versions)
        assert core.counters["prefetched_chunks"] == 6


def test_a_queue_that_is_half_full_belongs_to_the_gets() -> None:
    with closing(make_core(1 << 20, queue_limit=4)) as core:
        session = core.open_session()
        versions = put_on_disk(core, session, 6)
        look(core, session, versions)
        assert core.counters["prefetched_chunks"] == 3


def test_a_budget_of_nothing_loads_nothing() -> None:
    with closing(make_core(0)) as core:
        session = core.open_session()
        look(core, session, put_on_disk(core, session, 4))
        assert core.counters["prefetched_chunks"] == 0


def test_loads_that_nobody_reads_become_rare(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.tiering.prefetch.REMEMBERED", 8)
    session = core.open_session()
    begun = []
    for seed in range(20, 70):
        core.put(session, prompt(6, seed=seed))
    for seed in range(20, 66):
        before = core.counters["prefetched_chunks"]
        match = look(core, session, prompt(6, seed=seed))
        core.settle()
        core.store.release(session, match.lease_id)
        begun.append(core.counters["prefetched_chunks"] - before)
    assert begun[:5] == [6] * 5
    assert 0 < sum(map(bool, begun[-32:])) <= 2
