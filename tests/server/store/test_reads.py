"""Gets: in order, from the fastest holder that proves right, and never beyond the deadline."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import cast

import pytest
from helpers.core_chunks import leased, put_low
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.tiers import GatedDisk, SimDisk, no_faults

from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import ROW_BYTES, Place, Reach
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import (
    IN_MEMORY,
    LOADS_AHEAD_CHUNKS,
    NO_REACH,
    READ_AHEAD_CHUNKS,
    LayerPart,
    ReadTerms,
)

TIER_BYTES = 1 << 20
PATIENCE_S = 20.0


def results_of(
    core: Core, session: Session, keys: list[ChunkKey], reach: frozenset[Reach] = NO_REACH
) -> Generator[LayerPart, None, None]:
    found = core.store.reads.get(keys, ReadTerms(session, core.later(), reach=reach))
    return cast("Generator[LayerPart, None, None]", found)


def fill_with_leases(core: Core, session: Session) -> None:
    """Lease all of CPU memory."""
    versions = prompt(12, seed=50)
    core.put(session, versions)
    assert all("cpu" in core.tiers_of(version) for version in versions)
    core.store.open_get(session, keys_of(versions), 0)


def test_loads_run_ahead_of_the_reader_but_not_without_bound(disk: SimDisk) -> None:
    with closing(Core([disk], slabs=12, clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2 * LOADS_AHEAD_CHUNKS)
        put_low(core, session, versions)
        with (
            leased(core, session, versions) as keys,
            closing(results_of(core, session, keys)) as results,
        ):
            depths = []
            for index in range(LOADS_AHEAD_CHUNKS):
                assert next(results).chunk == index
                depths.append(core.work_queue.depth()["load-disk"])
            half = LOADS_AHEAD_CHUNKS // 2
            assert max(depths) == LOADS_AHEAD_CHUNKS
            assert min(depths) == half
            begun = [later - depth + 1 for depth, later in pairwise(depths)]
            assert set(begun) == {0, half + 1}, "many begin at once: a shared tier batches them"


def test_a_damaged_copy_is_a_miss_and_can_be_put_again_at_once(
    core: Core, session: Session, disk: SimDisk
) -> None:
    (version,) = prompt(1)
    put_low(core, session, [version])
    disk.flip(version.info.key, 8 * 900)
    assert core.get(session, keys_of([version])) == []
    assert core.put(session, [version])[0].reason == ""
    assert core.get(session, keys_of([version])) == frames_of([version])


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
            reader = results_of(core, session, keys_of([version]))
            readers.append((reader, next(reader, None)))
        assert [result is None for _, result in readers] == [False, False, True]
        readers[0][0].close()
        assert next(readers[1][0], None) is None
        again = results_of(core, session, keys_of(versions))
        assert sum(1 for _ in again) == 3, "one at a time, each given back before the next"


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
        with leased(core, session, versions):
            assert len(list(results_of(core, session, keys))) == len(keys)
            core.settle()
            assert disk.told == [keys[1], *keys[3:]]


def test_only_who_opens_files_is_told_of_one(
    core: Core, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = prompt(2)
    core.put(session, versions, durable=True)
    # The catalog knows both copies; the one in memory goes before anybody looks where it is.
    monkeypatch.setattr(core.cpu, "place_rows", lambda keys: bytes(ROW_BYTES * len(keys)))
    monkeypatch.setattr(core.cpu, "locate", lambda key: None)
    disk = core.slot("disk").tier
    monkeypatch.setattr(disk, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
    for reach, count in ((IN_MEMORY, 0), (IN_MEMORY | {Reach.file}, 2)):
        terms = ReadTerms(session, core.later(), reach=reach)
        rows = core.store.reads.in_place(keys_of(versions), terms)
        assert rows["reach"].tolist() == [Reach.file] * count
        assert core.counters["get_chunks"] == count


def test_a_copy_that_is_found_damaged_in_the_midst_of_a_get_is_given_to_nobody(
    core: Core, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = prompt(6)
    put_low(core, session, versions)
    disk = core.slot("disk")
    monkeypatch.setattr(disk.tier, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
    # It stays where it was until the store queue comes to it.
    monkeypatch.setattr(core.moves.eviction, "delete_from", lambda *_, **__: None)
    with leased(core, session, versions) as keys:
        results = results_of(core, session, keys, IN_MEMORY | {Reach.file})
        assert next(results).tier == "disk"
        core.moves.eviction.drop_corrupt(disk, keys[3])
        assert [result.chunk for result in results] == [1, 2]
