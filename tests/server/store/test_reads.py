"""Gets: in order, from the fastest holder that proves right, and never beyond the deadline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.tiers import GatedDisk, SimDisk, SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import ROW_BYTES, Place, Reach, unpack_places
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import (
    IN_MEMORY,
    LOADS_AHEAD_CHUNKS,
    NO_REACH,
    READ_AHEAD_CHUNKS,
    ReadTerms,
)

TIER_BYTES = 1 << 20
PATIENCE_S = 20.0


def put_low(core: Core, session: Session, versions: list[Version], tier: str = "disk") -> None:
    """Put chunks so that only a lower tier has them."""
    core.put(session, versions)
    for version in versions:
        ticket = core.moves.copy_to(version.info.key, core.slot(tier), urgent=True)
        assert ticket is not None
        assert core.work_queue.wait(ticket, core.later())
        assert core.catalog.cast_out("cpu", version.info.key)
        core.moves.eviction.delete_from(core.moves.tiers.cpu, version.info.key)
        assert core.tiers_of(version) == [tier]


def fill_with_leases(core: Core, session: Session) -> list[int]:
    """Lease all of CPU memory; return the leases."""
    versions = prompt(12, seed=50)
    core.put(session, versions)
    assert all("cpu" in core.tiers_of(version) for version in versions)
    return [core.store.open_get(session, keys_of(versions), 0)[0]]


def test_chunks_arrive_in_order_and_whole(core: Core, session: Session) -> None:
    versions = prompt(5)
    core.put(session, versions)
    lease_id, known = core.store.open_get(session, keys_of(versions), 0)
    results = list(
        core.store.reads.get(keys_of(versions)[:known], ReadTerms(session, core.later()))
    )
    assert [result.chunk for result in results] == [0, 1, 2, 3, 4]
    assert [result.data.tobytes() for result in results] == frames_of(versions)
    assert {result.tier for result in results} == {"cpu"}
    assert not any(result.data.flags.writeable for result in results)
    placed = core.store.reads.get(
        keys_of(versions), ReadTerms(session, core.later(), reach=IN_MEMORY)
    )
    rows = core.cpu.place_rows(keys_of(versions))
    assert [result.place for result in placed] == unpack_places(rows)
    core.store.release(session, lease_id)
    assert core.counters["get_chunks"] == 10
    assert core.counters["get_bytes"] == 2 * sum(map(len, frames_of(versions)))


def test_a_hit_below_is_promoted_and_says_where_it_came_from(core: Core, session: Session) -> None:
    versions = prompt(4)
    put_low(core, session, versions)
    lease_id, _ = core.store.open_get(session, keys_of(versions), 0)
    for origin in ("disk", "cpu"):
        results = list(core.store.reads.get(keys_of(versions), ReadTerms(session, core.later())))
        assert [result.tier for result in results] == [origin] * 4
        assert [result.data.tobytes() for result in results] == frames_of(versions)
    assert core.counters["promoted_chunks"] == 4
    core.store.release(session, lease_id)


def test_loads_run_ahead_of_the_reader_but_not_without_bound() -> None:
    with closing(Core([SimDisk(TIER_BYTES, no_faults())], slabs=12, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2 * LOADS_AHEAD_CHUNKS)
        put_low(core, session, versions)
        lease_id, _ = core.store.open_get(session, keys_of(versions), 0)
        results = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later()))
        depths = []
        for index in range(LOADS_AHEAD_CHUNKS):
            assert next(results).chunk == index
            depths.append(core.work_queue.depth()["load-disk"])
        assert max(depths) == LOADS_AHEAD_CHUNKS
        assert min(depths) >= LOADS_AHEAD_CHUNKS // 2
        results.close()  # type: ignore[attr-defined]
        core.store.release(session, lease_id)


def test_a_get_ends_before_the_first_chunk_that_is_lost(
    core: Core, session: Session, disk: SimDisk
) -> None:
    versions = prompt(4)
    put_low(core, session, versions)
    disk.lose(versions[2].info.key)
    assert core.get(session, keys_of(versions)) == frames_of(versions[:2])
    assert core.counters["get_missed_chunks"] == 2
    assert core.counters["lost_chunks"] == 1


def test_a_damaged_copy_is_a_miss_and_can_be_put_again_at_once(
    core: Core, session: Session, disk: SimDisk
) -> None:
    (version,) = prompt(1)
    put_low(core, session, [version])
    disk.flip(version.info.key, 8 * 900)
    assert core.get(session, keys_of([version])) == []
    assert core.put(session, [version])[0].reason == ""
    assert core.get(session, keys_of([version])) == frames_of([version])


def test_a_damaged_copy_is_made_up_for_by_a_slower_tier(disk: SimDisk, redis: SimRedis) -> None:
    with closing(Core([disk, redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3)
        put_low(core, session, versions)
        for version in versions:
            redis.others_put(version.info, version.frame)
            core.catalog.note_sealed("redis", version.info)
        disk.flip(versions[0].info.key, 8 * 900)
        disk.lose(versions[1].info.key)
        assert core.get(session, keys_of(versions)) == frames_of(versions)
        assert core.tiers_of(versions[0]) == core.tiers_of(versions[1]) == ["cpu", "redis"]
        assert core.tiers_of(versions[2]) == ["cpu", "disk", "redis"]


def test_a_tier_that_is_left_alone_is_a_miss_and_not_waited_for(
    core: Core, session: Session, disk: SimDisk
) -> None:
    (version,) = prompt(1)
    put_low(core, session, [version])
    disk.faults.fail = 1.0
    assert core.get(session, keys_of([version])) == []
    assert core.slot("disk").breaker.is_open
    raised = disk.faults.raised
    assert core.get(session, keys_of([version])) == []
    assert disk.faults.raised == raised
    assert core.tiers_of(version) == ["disk"]


def test_a_full_queue_is_a_miss(disk: SimDisk) -> None:
    with closing(Core([disk], queue_limit=0, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2)
        put_low(core, session, versions)
        assert core.get(session, keys_of(versions)) == []
        assert core.counters["get_missed_chunks"] == 2


def test_what_memory_full_of_leases_cannot_take_is_read_past_it(
    core: Core, session: Session
) -> None:
    versions = prompt(3)
    put_low(core, session, versions)
    leases = fill_with_leases(core, session)
    lease_id, _ = core.store.open_get(session, keys_of(versions), 0)
    results = list(core.store.reads.get(keys_of(versions), ReadTerms(session, core.later())))
    assert [result.data.tobytes() for result in results] == frames_of(versions)
    assert [result.place for result in results] == [None] * 3
    assert core.counters["read_throughs"] == 3
    assert core.cpu.stats().chunks == 12
    for lease in (*leases, lease_id):
        assert core.store.release(session, lease)


def test_reading_past_memory_has_a_bound_that_readers_give_back(disk: SimDisk) -> None:
    versions = prompt(3)
    config = settings(max_frame_bytes=2 * versions[0].info.size_bytes)
    with closing(Core([disk], config=config, clock=FakeClock())) as core:
        session = core.open_session()
        put_low(core, session, versions)
        fill_with_leases(core, session)
        readers = []
        for version in versions:
            core.store.open_get(session, keys_of([version]), 0)
            reader = core.store.reads.get(keys_of([version]), ReadTerms(session, core.later()))
            readers.append((reader, next(reader, None)))
        assert [result is None for _, result in readers] == [False, False, True]
        readers[0][0].close()  # type: ignore[attr-defined]
        assert next(readers[1][0], None) is None
        again = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later()))
        assert sum(1 for _ in again) == 3, "one at a time, each given back before the next"


def test_a_get_that_is_given_up_counts_what_it_delivered(core: Core, session: Session) -> None:
    versions = prompt(4)
    core.put(session, versions)
    core.store.open_get(session, keys_of(versions), 0)
    results = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later()))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert core.counters["get_chunks"] == 1
    assert core.counters["get_missed_chunks"] == 3


def test_a_get_after_its_deadline_delivers_what_needs_no_load(core: Core, session: Session) -> None:
    here, low = prompt(2)
    core.put(session, [here])
    put_low(core, session, [low])
    assert core.get(session, keys_of([here, low]), seconds=0.0) == frames_of([here])
    assert core.counters["get_late_chunks"] == 1


def test_a_load_that_hangs_is_late_and_not_waited_for(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=2)) as core:
        session = core.open_session()
        versions = prompt(3)
        core.put(session, versions[:1])
        put_low(core, session, versions[1:])
        gated.shut()
        # The gate stays shut: a get that waited for the disk would never end.
        assert core.get(session, keys_of(versions), seconds=0.05) == frames_of(versions[:1])
        assert gated.reached.wait(PATIENCE_S)
        assert core.counters["get_late_chunks"] == 1
        gated.gate.set()
        assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_a_disk_that_hangs_does_not_hold_up_another_tier(gated: GatedDisk, redis: SimRedis) -> None:
    with closing(Core([gated, redis], workers=2)) as core:
        session = core.open_session()
        on_disk, on_redis = prompt(2, seed=1), prompt(2, seed=2)
        put_low(core, session, on_disk)
        put_low(core, session, on_redis, "redis")
        gated.shut()
        assert core.get(session, keys_of(on_disk), seconds=0.01) == []
        assert core.get(session, keys_of(on_redis)) == frames_of(on_redis)
        gated.gate.set()


def test_in_reach_means_without_a_load(core: Core, session: Session) -> None:
    here, low, nowhere = prompt(3)
    core.put(session, [here])
    put_low(core, session, [low])
    terms = ReadTerms(session, core.later(), reach=IN_MEMORY)
    reach = [core.store.reads.in_reach(one.info.key, terms) for one in (here, low, nowhere)]
    assert reach == [True, False, False]


class AheadDisk(SimDisk):
    """Notes what it is told of the chain."""

    reads_ahead = True

    def __init__(self) -> None:
        super().__init__(TIER_BYTES, no_faults())
        self.told: list[ChunkKey] = []

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self.told += keys


def test_the_disk_is_told_what_of_the_chain_comes_next() -> None:
    disk = AheadDisk()
    with closing(Core([disk], slabs=12, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3 * READ_AHEAD_CHUNKS)
        put_low(core, session, versions)
        keys = keys_of(versions)
        ticket = core.moves.load(keys[2], core.slot("disk"), session.tenant)
        assert ticket is not None
        assert core.work_queue.wait(ticket, core.later())
        lease_id, _ = core.store.open_get(session, keys, 0)
        results = list(core.store.reads.get(keys, ReadTerms(session, core.later())))
        assert len(results) == len(keys)
        core.settle()
        assert disk.told == [keys[1], *keys[3:]]
        core.store.release(session, lease_id)


@pytest.mark.parametrize("reach", [IN_MEMORY, IN_MEMORY | {Reach.file}])
def test_only_who_opens_files_is_told_of_one(
    core: Core, session: Session, monkeypatch: pytest.MonkeyPatch, reach: frozenset[Reach]
) -> None:
    versions = prompt(2)
    core.put(session, versions, durable=True)
    # The catalog knows both copies; the one in memory goes before anybody looks where it is.
    monkeypatch.setattr(core.cpu, "place_rows", lambda keys: bytes(ROW_BYTES * len(keys)))
    monkeypatch.setattr(core.cpu, "locate", lambda key: None)
    disk = core.slot("disk").tier
    monkeypatch.setattr(disk, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
    rows = core.store.reads.in_place(
        keys_of(versions), ReadTerms(session, core.later(), reach=reach)
    )
    assert rows["reach"].tolist() == [Reach.file] * (2 if Reach.file in reach else 0)
    assert core.counters["get_chunks"] == len(rows)


def test_a_copy_that_is_found_damaged_in_the_midst_of_a_get_is_given_to_nobody(
    core: Core, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = prompt(6)
    put_low(core, session, versions)
    disk = core.slot("disk")
    monkeypatch.setattr(disk.tier, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
    # It stays where it was until the store queue comes to it.
    monkeypatch.setattr(core.moves.eviction, "delete_from", lambda *_, **__: None)
    lease_id, _ = core.store.open_get(session, keys_of(versions), 0)
    reach = IN_MEMORY | {Reach.file}
    results = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later(), reach=reach))
    assert next(results).tier == "disk"
    core.moves.eviction.drop_corrupt(disk, versions[3].info.key)
    assert [result.chunk for result in results] == [1, 2]
    core.store.release(session, lease_id)


def test_a_get_asks_for_no_load_of_what_came_into_memory_meanwhile() -> None:
    disk = SimDisk(TIER_BYTES, no_faults())
    with closing(Core([disk], slabs=60, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2 * LOADS_AHEAD_CHUNKS)
        keys = keys_of(versions)
        put_low(core, session, versions)
        lease_id, _ = core.store.open_get(session, keys, 0)
        slow = core.store.reads.get(keys, ReadTerms(session, core.later()))
        next(slow)
        assert len(list(core.store.reads.get(keys, ReadTerms(session, core.later())))) == len(keys)
        core.settle()
        rest = [result.tier for result in slow]
        assert rest[-1] == "cpu", "it was brought there by the other get"
        core.store.release(session, lease_id)


@pytest.mark.parametrize("reach", [NO_REACH, IN_MEMORY])
def test_a_full_queue_of_loads_is_a_miss_and_not_a_file_for_who_opens_none(
    monkeypatch: pytest.MonkeyPatch, reach: frozenset[Reach]
) -> None:
    disk = SimDisk(TIER_BYTES, no_faults())
    with closing(Core([disk], slabs=60, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3)
        put_low(core, session, versions)
        monkeypatch.setattr(disk, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
        monkeypatch.setattr(core.moves, "load", lambda *_, **__: None)
        lease_id, _ = core.store.open_get(session, keys_of(versions), 0)
        terms = ReadTerms(session, core.later(), reach=reach)
        assert list(core.store.reads.get(keys_of(versions), terms)) == []
        core.store.release(session, lease_id)
