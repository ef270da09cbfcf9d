"""The store: puts on their way in, leases, deletes, durable puts, drains, restarts and gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from contracts.chunks import make_frame, make_representation
from helpers.core_chunks import leased, put_low
from helpers.disk_process import open_disk
from helpers.local_server import eventually
from simulation.clock import FakeClock
from simulation.core import TOKENS, Core, frames_of, keys_of, outcomes_of, prompt, settings
from simulation.tiers import GatedDisk, SimDisk, no_faults
from simulation.universe import REPRESENTATION, Version, make_template, write_frame
from structlog.testing import capture_logs

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.keys import tokens_le32
from kvstore.proto.types import ROOT, ChunkKey, KVLayout, PutOutcome
from kvstore.proto.unix_socket import Place, Reach
from kvstore.server.store.reads import (
    IN_MEMORY,
    LOADS_AHEAD_CHUNKS,
    NO_REACH,
    READ_AHEAD_CHUNKS,
    LayerPart,
    ReadTerms,
)
from kvstore.server.store.reservations import PutTicket

STORED = PutOutcome.stored


def begin(core: Core, version: Version) -> PutTicket:
    ticket = core.store.writes.begin_all(core.session, [version.info], core.later())[0]
    assert isinstance(ticket, PutTicket)
    return ticket


def finish(core: Core, ticket: PutTicket, frame: Bytes) -> PutOutcome:
    writes = core.store.writes
    claimed = writes.claim(ticket.session, ticket.ticket_id)
    assert claimed.buffer is not None
    claimed.buffer[:] = frame
    return writes.commit(claimed).outcome


def assert_nothing_left(core: Core) -> None:
    assert len(core.store.writes) == len(core.catalog.in_flight.writers) == len(core.catalog) == 0
    assert core.cpu.stats().used_bytes == core.cpu.stats().reservations == 0


def flipped(frame: Bytes, at: int) -> Bytes:
    spoilt = frame.copy()
    spoilt[at] ^= 1
    return spoilt


def other_parent(version: Version) -> Bytes:
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    return write_frame(replace(template, parent=version.info.key[:16]), 1)  # type: ignore[arg-type]


def other_layout(version: Version) -> Bytes:
    """Write a frame of another layout of the same size."""
    wide = KVLayout.of(make_representation(1, 2, 2), TOKENS)
    assert wide.raw_bytes == version.info.layout.raw_bytes
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    return write_frame(replace(template, key=version.info.key, layout=wide), 1)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda v: flipped(v.frame, 100), InvalidFrameError),
        (lambda v: flipped(v.frame, header_bytes(v.info.layout)), ChunkCorruptError),
        (lambda _: prompt(1, seed=5)[0].frame, ChunkCorruptError),
        (lambda v: v.restored, InvalidRequestError),
        (other_parent, InvalidRequestError),
        (other_layout, InvalidRequestError),
    ],
    ids=["header", "payload", "other key", "restored", "other parent", "other layout"],
)
def test_a_frame_that_is_not_what_was_reserved_leaves_nothing(
    core: Core, spoil: Callable[[Version], Bytes], error: type[KVStoreError]
) -> None:
    (version,) = prompt(1)
    ticket = begin(core, version)
    with pytest.raises(error):
        finish(core, ticket, spoil(version))
    assert_nothing_left(core)
    assert core.counters["put_invalid_chunks"] == 1
    assert core.put([version])[0].outcome is STORED


def test_a_bad_frame_of_a_batch_leaves_those_before_it(core: Core) -> None:
    versions = prompt(3)
    tickets = [begin(core, version) for version in versions]
    claimed = [core.store.writes.claim(core.session, ticket.ticket_id) for ticket in tickets]
    frames = [version.frame for version in versions]
    frames[1] = flipped(frames[1], len(frames[1]) - 1)
    core.store.writes.commit(claimed[0], frame=frames[0])
    with pytest.raises(ChunkCorruptError):
        core.store.writes.commit(claimed[1], frame=frames[1])
    core.store.writes.discard(claimed[2])
    assert [core.tiers_of(version) for version in versions] == [["cpu"], [], []]
    assert core.catalog.in_flight.writers.total() == core.cpu.stats().reservations == 0


def test_a_frame_that_no_empty_tier_holds_is_refused_as_invalid(core: Core) -> None:
    info, _ = make_frame(1, 250, representation=REPRESENTATION)
    assert info.size_bytes > core.cpu.max_frame_bytes
    with pytest.raises(InvalidRequestError, match="frame_bytes"):
        core.store.writes.begin_all(core.session, [info], core.later())[0]
    assert_nothing_left(core)


def test_puts_leave_the_headroom_to_loads() -> None:
    disk = SimDisk(1 << 20, no_faults())
    core = Core([disk], slabs=4, config=settings(load_headroom_percent=50), write="through")
    versions = prompt(24)
    core.put(versions)
    core.settle()
    assert core.cpu.stats().used_bytes <= core.cpu.capacity_bytes // 2
    assert core.get(versions) == frames_of(versions)
    assert core.cpu.stats().used_bytes > core.cpu.capacity_bytes // 2
    core.close()


def test_write_through_queues_a_copy_to_each_lower_tier_and_counts_what_it_cannot() -> None:
    disk = SimDisk(1 << 20, no_faults())
    core = Core([disk], queue_limit=2, write="through")
    versions = prompt(3)
    core.put(versions)
    assert core.work_queue.depth()["store-disk"] == 2
    assert core.counters["skipped_copies"] == 1
    core.settle()
    assert [core.tiers_of(v) for v in versions] == [["cpu", "disk"], ["cpu", "disk"], ["cpu"]]
    core.close()


# --- leases


DISK_BYTES = 2 << 20
PATIENCE_S = 20.0


@pytest.fixture
def sim() -> SimDisk:
    return SimDisk(DISK_BYTES, no_faults())


def tiers(core: Core, versions: list[Version]) -> list[list[str]]:
    return [core.tiers_of(version) for version in versions]


def test_a_lease_opens_a_get_of_its_own_chunks_and_an_expired_one_nothing(core: Core) -> None:
    versions = prompt(3)
    core.put(versions)
    lease_id = core.look_up(versions[:2], lease=True).lease_id
    assert core.store.open_get(core.session, keys_of(versions[:2]), lease_id) == (lease_id, 2)
    with pytest.raises(InvalidRequestError, match=f"not under lease {lease_id}"):
        core.store.open_get(core.session, keys_of(versions), lease_id)
    with pytest.raises(LeaseExpiredError):
        core.store.open_get(core.open_session(), keys_of(versions[:2]), lease_id)
    core.clock.advance(core.config.lease_ttl_ms / 1000)  # type: ignore[attr-defined]
    with pytest.raises(LeaseExpiredError):
        core.store.open_get(core.session, keys_of(versions[:2]), lease_id)
    core.store.tick()
    assert core.counters["expired_leases"] == 1
    assert core.catalog.leases.pins.total() == 0
    assert not core.store.release(core.session, lease_id)


def test_leased_and_pinned_chunks_outlast_any_pressure(core: Core) -> None:
    leased, pinned = prompt(2), prompt(2, seed=1)
    core.put(leased + pinned)
    core.look_up(leased, lease=True)
    assert core.catalog.pin(keys_of(pinned), 60.0) == 2
    core.put(prompt(30, seed=2))
    assert all("cpu" in core.tiers_of(version) for version in leased + pinned)
    assert core.catalog.unpin(keys_of(pinned)) == 2
    core.put(prompt(30, seed=3))
    assert all("cpu" not in core.tiers_of(version) for version in pinned)


# --- forgetting


def test_a_delete_waits_for_moves_by_its_deadline_and_nothing_reappears(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        versions = prompt(1)
        core.put(versions)
        gated.shut()
        core.moves.copy_to(versions[0].info.key, core.slot("disk"))
        assert gated.reached.wait(PATIENCE_S)
        assert core.store.delete(keys_of(versions), core.later(0.01)) == (0, 1)
        assert core.get(versions) == frames_of(versions)
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


def test_a_tenant_gets_room_on_a_disk_full_of_anothers_chunks(tmp_path: Path) -> None:
    per_extent = (1 << 20) // 4096
    with closing(open_disk(tmp_path, DISK_BYTES)) as disk, closing(Core([disk])) as core:
        for tenant, chunks in (("red", 2 * per_extent + 8), ("blue", 8)):
            session = core.open_session(tenant)
            for seed in range(0, chunks, 8):
                versions = prompt(8, seed=1_000 * len(tenant) + seed)
                assert outcomes_of(core.put(versions, session, durable=True)) == {STORED}
        owners = [disk.tenant_of(info.key) for info in disk.scan()]
        assert owners.count("blue") == 8
        assert owners.count("red") == per_extent


def test_what_a_failed_flush_took_is_not_called_durable(sim: SimDisk) -> None:
    with closing(Core([sim], clock=FakeClock())) as core:
        versions = prompt(2)
        core.put(versions)
        for version in versions:
            core.moves.copy_to(version.info.key, core.slot("disk"))
        core.settle()
        sim.faults.fail = 1.0
        with pytest.raises(TierUnavailableError):
            sim.flush()
        sim.faults.end()
        assert tiers(core, versions) == [["cpu", "disk"]] * 2
        results = core.put(versions, durable=True)
        lost = "not durable: lost before it was flushed"
        assert [result.reason for result in results] == [lost] * 2
        assert outcomes_of(core.put(versions, durable=True)) == {PutOutcome.exists}
        assert {info.key for info in sim.restarted().scan()} == set(keys_of(versions))


def test_a_disk_that_hangs_refuses_durability_by_the_deadline(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        versions = prompt(1)
        stored = core.put(versions)
        gated.shut()
        (result,) = core.store.harden(keys_of(versions), stored, core.later(0.01))
        assert result.outcome is PutOutcome.refused
        assert "not durable" in result.reason
        assert core.get(versions) == frames_of(versions)
        gated.gate.set()


def test_a_drain_that_could_not_keep_everything_says_so() -> None:
    first, *rest = [prompt(1, seed=seed)[0] for seed in range(3)]
    disk = SimDisk(2 * first.info.size_bytes, no_faults())
    with closing(Core([disk], clock=FakeClock())) as core:
        core.put([first], durable=True)
        core.put(rest)
        with capture_logs() as logs:
            assert core.store.drain(core.later()) is False
        assert core.tiers_of(first) == ["cpu"], "the later copies pushed it off the disk"
        assert {info.key for info in disk.scan()} == set(keys_of(rest))
        assert [(one["unsaved"], one["reasons"]) for one in logs] == [
            (1, {"disk evicted it for another": 1})
        ]
    with closing(Core([], clock=FakeClock())) as core:
        core.put([first])
        with capture_logs() as logs:
            assert core.store.drain(core.later()) is False
        assert logs[0]["reasons"] == {"no disk tier": 1}


def test_a_drain_of_a_full_disk_with_room_for_memory_saves_all_of_it() -> None:
    versions, others = ([prompt(1, seed=at + n)[0] for n in range(12)] for at in (0, 50))
    size = versions[0].info.size_bytes
    disk = SimDisk(18 * size, no_faults())
    with closing(Core([disk], slabs=12, clock=FakeClock())) as core:
        core.put(versions[:6], durable=True)
        core.put(others, durable=True)
        for version in others:
            core.catalog.drop_copy("cpu", version.info.key)
            core.moves.eviction.delete_from(core.slot("cpu"), version.info.key)
        core.put(versions[6:])
        assert disk.stats().used_bytes == disk.capacity_bytes
        assert core.store.drain(core.later()) is True
        assert {info.key for info in disk.scan()} >= set(keys_of(versions))


def test_chunks_are_loaded_from_disk_while_a_drain_saves_a_full_memory(
    sim: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Core([sim], clock=FakeClock())) as core:
        (below,) = prompt(1)
        core.put([below], durable=True)
        core.put([prompt(1, seed=seed)[0] for seed in range(1, 13)])
        assert core.tiers_of(below) == ["disk"]
        flush, holders = sim.flush, list[str]()

        def load_and_flush() -> None:
            assert core.get([below]) == frames_of([below])
            holders.extend(core.tiers_of(below))
            flush()

        monkeypatch.setattr(sim, "flush", load_and_flush)
        assert core.store.drain(core.later()) is True
        assert holders == ["cpu", "disk"]


def test_a_chunk_that_ends_while_a_drain_copies_it_is_not_one_that_it_could_not_save(
    gated: GatedDisk,
) -> None:
    with closing(Core([gated], workers=1)) as core:
        gone, kept = prompt(2)
        core.put([gone, kept])
        gated.shut()
        core.moves.copy_to(kept.info.key, core.slot("disk"))
        assert gated.reached.wait(PATIENCE_S)
        answer: list[bool] = []
        draining = threading.Thread(target=lambda: answer.append(core.store.drain(core.later())))
        draining.start()
        assert eventually(lambda: core.work_queue.depth()["store-disk"] > 0)
        assert core.catalog.drop_copy("cpu", gone.info.key)
        core.moves.eviction.delete_from(core.slot("cpu"), gone.info.key)
        gated.gate.set()
        draining.join(PATIENCE_S)
        assert answer == [True]


def test_a_drain_queues_few_copies_at_a_time_and_none_once_its_time_is_up(
    sim: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.store.store.DRAINED_AT_ONCE", 2)
    with closing(Core([sim], clock=FakeClock())) as core:
        core.put(prompt(5))
        depths, submit = [], core.work_queue.submit

        def count(queue: str, *terms: Any, **more: Any) -> Any:
            depths.append(core.work_queue.depth()[queue])
            return submit(queue, *terms, **more)

        monkeypatch.setattr(core.work_queue, "submit", count)
        with capture_logs() as logs:
            assert core.store.drain(core.clock()) is False
        assert logs[0]["reasons"] == {"not copied by the deadline": 5}
        depths.clear()
        assert core.store.drain(core.later()) is True
        assert max(depths) <= 2


def test_a_put_begun_for_a_session_that_has_ended_leaves_no_room_taken(core: Core) -> None:
    core.sessions.close(core.session.session_id)
    (version,) = prompt(1)
    with pytest.raises(LeaseExpiredError, match="open a session"):
        core.store.writes.begin_all(core.session, [version.info], core.later())[0]
    assert core.cpu.stats().used_bytes == 0
    assert core.catalog.in_flight.writers.total() == 0


# --- gets


def results_of(
    core: Core, keys: list[ChunkKey], reach: frozenset[Reach] = NO_REACH
) -> Generator[LayerPart, None, None]:
    found = core.store.reads.get(keys, ReadTerms(core.session, core.later(), reach=reach))
    return cast("Generator[LayerPart, None, None]", found)


def fill_with_leases(core: Core) -> None:
    """Lease all of CPU memory."""
    versions = prompt(12, seed=50)
    core.put(versions)
    assert all("cpu" in core.tiers_of(version) for version in versions)
    core.store.open_get(core.session, keys_of(versions), 0)


def test_loads_run_ahead_of_the_reader_but_not_without_bound(disk: SimDisk) -> None:
    with closing(Core([disk], slabs=12, clock=FakeClock())) as core:
        versions = prompt(2 * LOADS_AHEAD_CHUNKS)
        put_low(core, versions)
        with (
            leased(core, versions) as keys,
            closing(results_of(core, keys)) as results,
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


def test_a_damaged_copy_is_a_miss_and_can_be_put_again_at_once(core: Core, disk: SimDisk) -> None:
    (version,) = prompt(1)
    put_low(core, [version])
    disk.flip(version.info.key, 8 * 900)
    assert core.get([version]) == []
    assert core.put([version])[0].reason == ""
    assert core.get([version]) == frames_of([version])


def test_reading_past_memory_has_a_bound_that_readers_give_back(disk: SimDisk) -> None:
    versions = prompt(3)
    config = settings(max_frame_bytes=2 * versions[0].info.size_bytes)
    with closing(Core([disk], config=config, clock=FakeClock())) as core:
        put_low(core, versions)
        fill_with_leases(core)
        readers = []
        for version in versions:
            core.store.open_get(core.session, keys_of([version]), 0)
            reader = results_of(core, keys_of([version]))
            readers.append((reader, next(reader, None)))
        assert [result is None for _, result in readers] == [False, False, True]
        readers[0][0].close()
        assert next(readers[1][0], None) is None
        again = results_of(core, keys_of(versions))
        assert sum(1 for _ in again) == 3, "one at a time, each given back before the next"


def test_a_load_that_hangs_is_late_and_not_waited_for(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=2)) as core:
        versions = prompt(3)
        core.put(versions[:1])
        put_low(core, versions[1:])
        gated.shut()
        # The gate stays shut: a get that waited for the disk would never end.
        assert core.get(versions, seconds=0.05) == frames_of(versions[:1])
        assert gated.reached.wait(PATIENCE_S)
        assert core.counters["get_late_chunks"] == 1
        gated.gate.set()
        assert core.get(versions) == frames_of(versions)


class AheadDisk(SimDisk):
    """Notes what it is told of the chain."""

    reads_ahead = True

    def __init__(self) -> None:
        super().__init__(DISK_BYTES, no_faults())
        self.told: list[ChunkKey] = []

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self.told += keys


def test_the_disk_is_told_what_of_the_chain_comes_next() -> None:
    disk = AheadDisk()
    with closing(Core([disk], slabs=12, clock=FakeClock())) as core:
        versions = prompt(3 * READ_AHEAD_CHUNKS)
        put_low(core, versions)
        keys = keys_of(versions)
        ticket = core.moves.load(keys[2], core.slot("disk"), core.session.tenant)
        assert ticket is not None
        assert core.work_queue.wait(ticket, core.later())
        with leased(core, versions):
            assert len(list(results_of(core, keys))) == len(keys)
            core.settle()
            assert disk.told == [keys[1], *keys[3:]]


def test_a_copy_that_is_found_damaged_in_the_midst_of_a_get_is_given_to_nobody(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = prompt(6)
    put_low(core, versions)
    disk = core.slot("disk")
    monkeypatch.setattr(disk.tier, "file_place", lambda key: Place(7, Reach.file, 0, 4096, 100, 0))
    # It stays where it was until the store queue comes to it.
    monkeypatch.setattr(core.moves.eviction, "delete_from", lambda *_, **__: None)
    with leased(core, versions) as keys:
        results = results_of(core, keys, IN_MEMORY | {Reach.file})
        assert next(results).tier == "disk"
        core.moves.eviction.drop_corrupt(disk, keys[3])
        assert [result.chunk for result in results] == [1, 2]
