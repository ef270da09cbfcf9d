"""The store over CPU memory and a real disk: put, lookup, get, forget, and survive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.disk_process import open_disk
from simulation.clock import FakeClock
from simulation.core import BREAKER_RETRY_S, Core, frames_of, keys_of, outcomes_of, prompt
from simulation.tiers import GatedDisk, SimDisk, no_faults
from simulation.universe import Version

from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
)
from kvstore.proto.types import PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier

DISK_BYTES = 2 << 20
PATIENCE_S = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk:
        yield disk


def evict_from_cpu(core: Core, versions: list[Version]) -> None:
    """Let newer chunks push these out of CPU memory."""
    core.put(core.open_session(), prompt(12, seed=90))
    assert all("cpu" not in core.tiers_of(version) for version in versions)


# --- put, lookup, get


def test_what_was_put_is_found_and_read_back(core: Core, session: Session) -> None:
    versions = prompt(5)
    assert outcomes_of(core.put(session, versions)) == {PutOutcome.stored}
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    assert (match.ready, match.pending, match.missing) == (5, 0, 0)
    assert match.tiers == ("cpu",) * 5
    assert match.lease_ttl_ms == core.config.lease_ttl_ms
    assert core.catalog.leases.pins.total() == 5
    assert core.get(session, keys_of(versions)) == frames_of(versions)
    assert core.store.release(session, match.lease_id)
    assert core.catalog.leases.pins.total() == 0


def test_a_miss_is_an_answer_without_a_lease(core: Core, session: Session) -> None:
    match = core.store.lookup(session, keys_of(prompt(3)), core.later(), lease=True)
    assert (match.ready, match.pending, match.missing, match.lease_id) == (0, 0, 3, 0)
    assert len(core.catalog.leases) == 0


def test_a_lookup_without_a_lease_holds_nothing(core: Core, session: Session) -> None:
    versions = prompt(3)
    core.put(session, versions)
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=False)
    assert (match.ready, match.lease_id, match.lease_ttl_ms) == (3, 0, 0)
    assert core.catalog.leases.pins.total() == 0


def test_a_slower_tier_promises_a_longer_load(core: Core, session: Session) -> None:
    low = prompt(2)
    core.put(session, low)
    evict_from_cpu(core, low)
    high = prompt(1, seed=5)
    core.put(session, high)
    of_low = core.store.lookup(session, keys_of(low), core.later(), lease=False)
    of_high = core.store.lookup(session, keys_of(high), core.later(), lease=False)
    assert (of_low.tiers, of_high.tiers) == (("disk", "disk"), ("cpu",))
    assert min(of_low.load_us) > of_high.load_us[0]


def test_a_hit_on_disk_is_promoted(core: Core, session: Session) -> None:
    versions = prompt(4)
    core.put(session, versions)
    evict_from_cpu(core, versions)
    assert core.get(session, keys_of(versions)) == frames_of(versions)
    assert [core.tiers_of(version) for version in versions] == [["cpu", "disk"]] * 4


@pytest.mark.parametrize("codec", ["raw", "zplane"])
def test_a_demoted_chunk_comes_back_byte_for_byte(disk: DiskTier, codec: str) -> None:
    with closing(Core([disk], codec=codec, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(4, tokens=200)
        core.put(session, versions)
        evict_from_cpu(core, versions)
        stored = [core.catalog.copies(key)["disk"] for key in keys_of(versions)]
        raw_bytes = versions[0].info.size_bytes
        assert {info.size_bytes < raw_bytes for info in stored} == {codec == "zplane"}
        assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_a_burst_of_puts_into_a_small_memory_and_a_disk_loses_none(disk: DiskTier) -> None:
    """Real threads: puts, evictions, demotions and loads all at once."""
    prompts = [prompt(20, seed=seed) for seed in range(4)]
    with closing(Core([disk], workers=2, write="through")) as core:
        results: list[PutResult] = []

        def work(versions: list[Version]) -> None:
            session = core.open_session()
            results.extend(core.put(session, versions))

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
    lease_id = core.store.lookup(session, keys_of(versions[:2]), core.later(), lease=True).lease_id
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
    lease_id = core.store.lookup(session, keys_of(versions), core.later(), lease=True).lease_id
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
    core.store.lookup(session, keys_of(leased), core.later(), lease=True)
    assert core.catalog.pin(keys_of(pinned), 60.0) == 2
    core.put(session, prompt(30, seed=2))
    assert all("cpu" in core.tiers_of(version) for version in leased + pinned)
    assert core.catalog.unpin(keys_of(pinned)) == 2
    core.put(session, prompt(30, seed=3))
    assert all("cpu" not in core.tiers_of(version) for version in pinned)


def test_a_session_that_ends_gives_its_leases_back(core: Core, session: Session) -> None:
    versions = prompt(3)
    core.put(session, versions)
    core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    core.sessions.close(session.session_id)
    assert core.catalog.leases.pins.total() == len(core.catalog.leases) == 0


# --- trouble with the disk


def test_the_breaker_opens_after_three_failures_and_closes_again() -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(1)
        core.put(session, versions)
        evict_from_cpu(core, versions)
        disk.faults.fail = 1.0
        assert core.get(session, keys_of(versions)) == []
        assert "fails on purpose" in core.slot("disk").reason
        asked = disk.faults.raised
        assert asked == 3
        core.put(session, prompt(12, seed=1))
        assert core.get(session, keys_of(versions)) == []
        assert disk.faults.raised == asked, "it is left alone"
        core.clock.advance(BREAKER_RETRY_S)  # type: ignore[attr-defined]
        assert core.get(session, keys_of(versions)) == []
        assert disk.faults.raised == asked + 1, "one attempt a period"
        disk.faults.end()
        core.clock.advance(BREAKER_RETRY_S)  # type: ignore[attr-defined]
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        assert [slot.reason for slot in core.store.tiers.slots.values()] == ["", ""]


def test_puts_go_on_without_the_disk() -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    disk.faults.fail = 1.0
    with closing(Core([disk], write="through", clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(30)
        assert outcomes_of(core.put(session, versions)) == {PutOutcome.stored}
        last = versions[-1:]
        assert core.get(session, keys_of(last)) == frames_of(last)
        core.settle()
        assert core.catalog.leases.pins.total() == 0


# --- forgetting


def test_a_deleted_chunk_is_nowhere_and_can_be_put_again(
    core: Core, session: Session, disk: DiskTier
) -> None:
    versions = prompt(3)
    core.put(session, versions, durable=True)
    assert core.store.delete(keys_of(versions), core.later()) == (3, 0)
    assert core.get(session, keys_of(versions)) == []
    assert core.cpu.stats().chunks == disk.stats().chunks == len(core.catalog) == 0
    assert outcomes_of(core.put(session, versions)) == {PutOutcome.stored}
    assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_a_chunk_that_is_read_is_not_deleted(core: Core, session: Session) -> None:
    versions = prompt(3)
    core.put(session, versions)
    lease_id = core.store.lookup(session, keys_of(versions[:1]), core.later(), lease=True).lease_id
    assert core.store.delete(keys_of(versions), core.later()) == (2, 1)
    assert core.get(session, keys_of(versions)) == frames_of(versions[:1])
    core.store.release(session, lease_id)
    assert core.store.delete(keys_of(versions), core.later()) == (1, 0)


def test_a_delete_waits_for_moves_and_nothing_reappears(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        session = core.open_session()
        versions = prompt(1)
        core.put(session, versions)
        gated.shut()
        core.moves.copy_to(versions[0].info.key, core.slot("disk"))
        assert gated.reached.wait(PATIENCE_S)
        answer: list[tuple[int, int]] = []

        def delete() -> None:
            answer.append(core.store.delete(keys_of(versions), core.later()))

        deleting = threading.Thread(target=delete)
        deleting.start()
        gated.gate.set()
        deleting.join(PATIENCE_S)
        assert answer == [(1, 0)]
        assert core.tiers_of(versions[0]) == []
        assert gated.stats().chunks == core.cpu.stats().chunks == 0


def test_a_delete_whose_time_is_up_leaves_a_moving_chunk_alone(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        session = core.open_session()
        versions = prompt(1)
        core.put(session, versions)
        gated.shut()
        core.moves.copy_to(versions[0].info.key, core.slot("disk"))
        assert gated.reached.wait(PATIENCE_S)
        assert core.store.delete(keys_of(versions), core.later(0.01)) == (0, 1)
        gated.gate.set()
        assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_clear_forgets_the_own_namespace_only(core: Core, session: Session) -> None:
    blue = core.open_session("blue")
    theirs = prompt(2, seed=7, tenant="blue")
    core.put(session, prompt(4))
    core.put(blue, theirs)
    assert core.store.delete(core.catalog.queries.keys_from(session.namespace), core.later()) == (
        4,
        0,
    )
    assert core.catalog.queries.page(session.namespace) == []
    assert [h.key for h in core.catalog.queries.page(blue.namespace)] == keys_of(theirs)
    assert core.get(blue, keys_of(theirs)) == frames_of(theirs)


def test_stat_names_what_exists(core: Core, session: Session) -> None:
    versions = prompt(3)
    core.put(session, versions[:1], durable=True)
    core.put(session, versions[2:])
    held = [core.catalog.queries.details(key) for key in keys_of(versions)]
    assert [(h.key, set(h.copies)) for h in held if h is not None] == [
        (versions[0].info.key, {"cpu", "disk"}),
        (versions[2].info.key, {"cpu"}),
    ]


def test_the_manager_lives_as_long_as_its_workers(disk: Tier) -> None:
    core = Core([disk], workers=1)
    assert core.work_queue.is_alive()
    core.close()
    assert not core.work_queue.is_alive()
