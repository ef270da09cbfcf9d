"""What the store promises to keep: durable puts, drains and restarts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.disk_process import open_disk
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, outcomes_of, prompt
from simulation.tiers import GatedDisk, SimDisk, no_faults

from kvstore.proto.errors import (
    InvalidRequestError,
    ShuttingDownError,
    TierUnavailableError,
)
from kvstore.proto.types import PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.tiers.disk import DiskTier

DISK_BYTES = 2 << 20
PATIENCE_S = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk:
        yield disk


def test_a_durable_put_survives_the_process(tmp_path: Path) -> None:
    versions = prompt(6)
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk, closing(Core([disk])) as core:
        session = core.open_session()
        assert core.store.durable is core.slot("disk")
        assert outcomes_of(core.put(session, versions, durable=True)) == {PutOutcome.stored}
        assert [core.tiers_of(version) for version in versions] == [["cpu", "disk"]] * 6
    with closing(open_disk(tmp_path / "disk", DISK_BYTES)) as disk, closing(Core([disk])) as core:
        assert core.store.recover() == 6
        assert core.get(core.open_session(), keys_of(versions)) == frames_of(versions)


def test_chunks_on_disk_lie_in_extents_of_the_tenant_who_put_them(
    core: Core, disk: DiskTier
) -> None:
    red, blue = prompt(2, seed=1), prompt(2, seed=2)
    core.put(core.open_session("red"), red, durable=True)
    core.put(core.open_session("blue"), blue, durable=True)
    for versions, tenant in ((red, "red"), (blue, "blue")):
        for version in versions:
            assert disk.tenant_of(version.info.key) == tenant
            place = disk.file_place(version.info.key)
            assert place is not None
            os.close(disk.extent_file(place.number, tenant))


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


def test_a_durable_put_of_what_exists_hardens_it(core: Core, session: Session) -> None:
    versions = prompt(2)
    core.put(session, versions)
    results = core.put(session, versions, durable=True)
    assert outcomes_of(results) == {PutOutcome.exists}
    assert [core.tiers_of(version) for version in versions] == [["cpu", "disk"]] * 2


def test_durable_puts_are_refused_by_name_without_a_disk() -> None:
    with closing(Core()) as core:
        assert core.store.durable is None
        session = core.open_session()
        with pytest.raises(InvalidRequestError, match="disk tier"):
            core.put(session, prompt(1), durable=True)


def test_what_a_failed_flush_took_is_not_called_durable() -> None:
    disk = SimDisk(DISK_BYTES, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2)
        core.put(session, versions)
        for version in versions:
            core.moves.copy_to(version.info.key, core.slot("disk"))
        core.settle()
        disk.faults.fail = 1.0
        with pytest.raises(TierUnavailableError):
            disk.flush()
        disk.faults.end()
        assert [core.tiers_of(version) for version in versions] == [["cpu", "disk"]] * 2
        results = core.put(session, versions, durable=True)
        assert [result.reason for result in results] == [
            "not durable: lost before it was flushed"
        ] * 2
        assert outcomes_of(core.put(session, versions, durable=True)) == {PutOutcome.exists}
        assert {info.key for info in disk.restarted().scan()} == set(keys_of(versions))


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
        session = core.open_session()
        versions = prompt(1)
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


def test_a_drain_that_could_not_copy_everything_says_so() -> None:
    size_bytes = prompt(1)[0].info.size_bytes
    for disk in (SimDisk(2 * size_bytes, no_faults()), None):
        with closing(Core([disk] if disk else [], clock=FakeClock())) as core:
            core.put(core.open_session(), prompt(6))
            assert core.store.drain(core.later()) is False


def test_recovered_chunks_are_evicted_oldest_first(tmp_path: Path) -> None:
    versions = [prompt(1, seed=seed)[0] for seed in range(4)]
    capacity_bytes = 4 * 4096
    with (
        closing(open_disk(tmp_path / "disk", capacity_bytes)) as disk,
        closing(Core([disk])) as core,
    ):
        core.put(core.open_session(), versions, durable=True)
    with (
        closing(open_disk(tmp_path / "disk", capacity_bytes)) as disk,
        closing(Core([disk])) as core,
    ):
        assert core.store.recover() == 4
        fresh = prompt(1, seed=9)
        core.put(core.open_session(), fresh, durable=True)
        assert [core.tiers_of(version) for version in versions] == [
            [],
            ["disk"],
            ["disk"],
            ["disk"],
        ]


def test_a_drain_that_pushed_an_earlier_copy_off_the_disk_is_not_clean() -> None:
    first, *rest = [prompt(1, seed=seed)[0] for seed in range(3)]
    disk = SimDisk(2 * first.info.size_bytes, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        session = core.open_session()
        core.put(session, [first], durable=True)
        core.put(session, rest)
        assert core.store.drain(core.later()) is False
        assert core.tiers_of(first) == ["cpu"]
        assert {info.key for info in disk.scan()} == set(keys_of(rest))
