"""The store: put, lookup, get, forget; what a breaker, a durable put, a drain and a restart do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.core_chunks import look_up
from helpers.disk_process import open_disk
from simulation.clock import FakeClock
from simulation.core import BREAKER_RETRY_S, Core, frames_of, keys_of, outcomes_of, prompt
from simulation.tiers import GatedDisk, SimDisk, no_faults
from simulation.universe import Version

from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    ShuttingDownError,
    TierUnavailableError,
)
from kvstore.proto.types import PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult
from kvstore.tiers.disk import DiskTier

DISK_BYTES = 2 << 20
PATIENCE_S = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk:
        yield disk


@pytest.fixture
def sim() -> SimDisk:
    return SimDisk(DISK_BYTES, no_faults())


def tiers(core: Core, versions: list[Version]) -> list[list[str]]:
    return [core.tiers_of(version) for version in versions]


# --- put, lookup, get


def test_what_was_put_is_found_and_read_back(core: Core, session: Session) -> None:
    versions = prompt(5)
    assert outcomes_of(core.put(session, versions)) == {PutOutcome.stored}
    match = look_up(core, session, versions)
    assert (match.ready, match.lease_id, match.lease_ttl_ms) == (5, 0, 0)
    match = look_up(core, session, versions, lease=True)
    assert (match.ready, match.pending, match.missing) == (5, 0, 0)
    assert match.tiers == ("cpu",) * 5
    assert match.lease_ttl_ms == core.config.lease_ttl_ms
    assert core.catalog.leases.pins.total() == 5
    assert core.get(session, keys_of(versions)) == frames_of(versions)
    assert core.store.release(session, match.lease_id)
    assert core.catalog.leases.pins.total() == 0


def test_a_burst_of_puts_into_a_small_memory_and_a_disk_loses_none(disk: DiskTier) -> None:
    """Real threads: puts, evictions, demotions and loads all at once."""
    prompts = [prompt(20, seed=seed) for seed in range(4)]
    with closing(Core([disk], workers=2, write="through")) as core:
        results: list[PutResult] = []

        def work(versions: list[Version]) -> None:
            results.extend(core.put(core.open_session(), versions))

        threads = [threading.Thread(target=work, args=(versions,)) for versions in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes_of(results) == {PutOutcome.stored}
        assert len(results) == 80
        session = core.open_session()
        for versions in prompts:
            assert core.get(session, keys_of(versions)) == frames_of(versions)
        assert core.counters["dropped_victims"] == 0
        assert core.catalog.leases.pins.total() == core.catalog.in_flight.writers.total() == 0
        assert core.cpu.stats().reservations == 0


def test_a_lease_opens_a_get_of_its_own_chunks_only(core: Core, session: Session) -> None:
    versions = prompt(4)
    core.put(session, versions)
    lease_id = look_up(core, session, versions[:2], lease=True).lease_id
    assert core.store.open_get(session, keys_of(versions[:2]), lease_id) == (lease_id, 2)
    with pytest.raises(InvalidRequestError, match=f"not under lease {lease_id}"):
        core.store.open_get(session, keys_of(versions), lease_id)
    with pytest.raises(LeaseExpiredError):
        core.store.open_get(core.open_session(), keys_of(versions[:2]), lease_id)


def test_an_expired_lease_opens_nothing_and_lets_its_chunks_go(
    core: Core, session: Session
) -> None:
    versions = prompt(3)
    core.put(session, versions)
    lease_id = look_up(core, session, versions, lease=True).lease_id
    core.clock.advance(core.config.lease_ttl_ms / 1000)  # type: ignore[attr-defined]
    with pytest.raises(LeaseExpiredError):
        core.store.open_get(session, keys_of(versions), lease_id)
    core.store.tick()
    assert core.counters["expired_leases"] == 1
    assert core.catalog.leases.pins.total() == 0
    assert not core.store.release(session, lease_id)


def test_leased_and_pinned_chunks_outlast_any_pressure(core: Core, session: Session) -> None:
    leased, pinned = prompt(2), prompt(2, seed=1)
    core.put(session, leased + pinned)
    look_up(core, session, leased, lease=True)
    assert core.catalog.pin(keys_of(pinned), 60.0) == 2
    core.put(session, prompt(30, seed=2))
    assert all("cpu" in core.tiers_of(version) for version in leased + pinned)
    assert core.catalog.unpin(keys_of(pinned)) == 2
    core.put(session, prompt(30, seed=3))
    assert all("cpu" not in core.tiers_of(version) for version in pinned)


def test_the_breaker_opens_after_three_failures_and_closes_again(sim: SimDisk) -> None:
    with closing(Core([sim], clock=FakeClock())) as core:
        session, versions = core.open_session(), prompt(1)
        core.put(session, versions)
        core.put(session, prompt(12, seed=90))
        assert tiers(core, versions) == [["disk"]]
        sim.faults.fail = 1.0
        assert core.get(session, keys_of(versions)) == []
        assert "fails on purpose" in core.slot("disk").reason
        asked = sim.faults.raised
        assert asked == 3
        core.put(session, prompt(12, seed=1))
        assert core.get(session, keys_of(versions)) == []
        assert sim.faults.raised == asked, "it is left alone"
        core.clock.advance(BREAKER_RETRY_S)  # type: ignore[attr-defined]
        assert core.get(session, keys_of(versions)) == []
        assert sim.faults.raised == asked + 1, "one attempt a period"
        sim.faults.end()
        core.clock.advance(BREAKER_RETRY_S)  # type: ignore[attr-defined]
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        assert [slot.reason for slot in core.store.tiers.slots.values()] == ["", ""]


# --- forgetting


def test_a_deleted_chunk_is_nowhere_and_one_that_is_read_is_not_deleted(
    core: Core, session: Session, disk: DiskTier
) -> None:
    versions = prompt(3)
    core.put(session, versions, durable=True)
    lease_id = look_up(core, session, versions[:1], lease=True).lease_id
    assert core.store.delete(keys_of(versions), core.later()) == (2, 1)
    assert core.get(session, keys_of(versions)) == frames_of(versions[:1])
    core.store.release(session, lease_id)
    assert core.store.delete(keys_of(versions), core.later()) == (1, 0)
    assert core.get(session, keys_of(versions)) == []
    assert core.cpu.stats().chunks == disk.stats().chunks == len(core.catalog) == 0
    assert outcomes_of(core.put(session, versions)) == {PutOutcome.stored}
    assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_a_delete_waits_for_moves_by_its_deadline_and_nothing_reappears(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        session, versions = core.open_session(), prompt(1)
        core.put(session, versions)
        gated.shut()
        core.moves.copy_to(versions[0].info.key, core.slot("disk"))
        assert gated.reached.wait(PATIENCE_S)
        assert core.store.delete(keys_of(versions), core.later(0.01)) == (0, 1)
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        answer: list[tuple[int, int]] = []

        def delete() -> None:
            answer.append(core.store.delete(keys_of(versions), core.later()))

        deleting = threading.Thread(target=delete)
        deleting.start()
        gated.gate.set()
        deleting.join(PATIENCE_S)
        assert answer == [(1, 0)]
        assert tiers(core, versions) == [[]]
        assert gated.stats().chunks == core.cpu.stats().chunks == 0


# --- durable puts, drains and restarts


def test_a_tenant_gets_room_on_a_disk_full_of_anothers_chunks(core: Core, disk: DiskTier) -> None:
    per_extent = (1 << 20) // 4096
    for tenant, chunks in (("red", 2 * per_extent + 8), ("blue", 8)):
        session = core.open_session(tenant)
        for seed in range(0, chunks, 8):
            versions = prompt(8, seed=1_000 * len(tenant) + seed)
            assert outcomes_of(core.put(session, versions, durable=True)) == {PutOutcome.stored}
    owners = [disk.tenant_of(info.key) for info in disk.scan()]
    assert owners.count("blue") == 8
    assert owners.count("red") == per_extent


def test_what_a_failed_flush_took_is_not_called_durable(sim: SimDisk) -> None:
    with closing(Core([sim], clock=FakeClock())) as core:
        session, versions = core.open_session(), prompt(2)
        core.put(session, versions)
        for version in versions:
            core.moves.copy_to(version.info.key, core.slot("disk"))
        core.settle()
        sim.faults.fail = 1.0
        with pytest.raises(TierUnavailableError):
            sim.flush()
        sim.faults.end()
        assert tiers(core, versions) == [["cpu", "disk"]] * 2
        results = core.put(session, versions, durable=True)
        lost = "not durable: lost before it was flushed"
        assert [result.reason for result in results] == [lost] * 2
        assert outcomes_of(core.put(session, versions, durable=True)) == {PutOutcome.exists}
        assert {info.key for info in sim.restarted().scan()} == set(keys_of(versions))


def test_of_a_batch_larger_than_the_disk_only_what_stays_is_called_durable() -> None:
    versions = prompt(6)
    disk = SimDisk(4 * versions[0].info.size_bytes, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        results = core.put(core.open_session(), versions, durable=True)
        accepted = [
            version.info.key
            for version, result in zip(versions, results, strict=True)
            if result.outcome is not PutOutcome.refused
        ]
        assert len(accepted) == 4
        assert {info.key for info in disk.restarted().scan()} == set(accepted)


def test_a_disk_that_hangs_refuses_durability_by_the_deadline(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        session, versions = core.open_session(), prompt(1)
        stored = core.put(session, versions)
        gated.shut()
        (result,) = core.store.harden(keys_of(versions), stored, core.later(0.01))
        assert result.outcome is PutOutcome.refused
        assert "not durable" in result.reason
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        gated.gate.set()


def test_a_drain_copies_what_only_memory_holds_and_a_restart_finds_it(tmp_path: Path) -> None:
    versions = prompt(8)
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk, closing(Core([disk])) as core:
        session = core.open_session()
        core.put(session, versions)
        assert disk.stats().chunks == 0
        assert core.store.drain(core.later()) is True
        with pytest.raises(ShuttingDownError):
            core.put(session, prompt(1, seed=1))
        assert core.get(session, keys_of(versions)) == frames_of(versions)
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk, closing(Core([disk])) as core:
        assert core.store.recover() == 8
        assert core.get(core.open_session(), keys_of(versions)) == frames_of(versions)


def test_a_drain_that_could_not_keep_everything_says_so() -> None:
    first, *rest = [prompt(1, seed=seed)[0] for seed in range(3)]
    disk = SimDisk(2 * first.info.size_bytes, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        session = core.open_session()
        core.put(session, [first], durable=True)
        core.put(session, rest)
        assert core.store.drain(core.later()) is False
        assert core.tiers_of(first) == ["cpu"], "the later copies pushed it off the disk"
        assert {info.key for info in disk.scan()} == set(keys_of(rest))
    with closing(Core([], clock=FakeClock())) as core:
        core.put(core.open_session(), [first])
        assert core.store.drain(core.later()) is False


def test_recovered_chunks_are_evicted_oldest_first(tmp_path: Path) -> None:
    versions, size_bytes = [prompt(1, seed=seed)[0] for seed in range(4)], 4 * 4096
    with closing(open_disk(tmp_path / "disk", size_bytes)) as disk, closing(Core([disk])) as core:
        core.put(core.open_session(), versions, durable=True)
    with closing(open_disk(tmp_path / "disk", size_bytes)) as disk, closing(Core([disk])) as core:
        assert core.store.recover() == 4
        core.put(core.open_session(), prompt(1, seed=9), durable=True)
        assert tiers(core, versions) == [[], ["disk"], ["disk"], ["disk"]]
