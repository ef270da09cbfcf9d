"""Copies down and up, room that is won by evicting, and media that misbehave."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from simulation.clock import FakeClock
from simulation.core import BREAKER_RETRY_S, TOKENS, Core, frames_of, keys_of, prompt
from simulation.tiers import GatedDisk, SimDisk, SimRedis
from simulation.universe import Version, make_template

from kvstore.codecs.base import REMOVED, codec_by_name
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    TierUnavailableError,
)
from kvstore.proto.frame import NO_ASSET, FrameWriter, check_frame, parse_header
from kvstore.proto.keys import tokens_le32
from kvstore.proto.types import ROOT, Accuracy, ChunkInfo, PutOutcome
from kvstore.server.store.reservations import PutResult


def load(core: Core, version: Version, tier: str = "disk") -> object:
    ticket = core.moves.load(version.info.key, core.slot(tier), "red")
    assert ticket is not None
    return core.work_queue.wait(ticket, core.later())


def drop_from_cpu(core: Core, version: Version) -> None:
    """Evict one chunk from CPU memory, whatever the policy would say."""
    assert core.catalog.drop_copy("cpu", version.info.key)
    core.moves.eviction.delete_from(core.moves.tiers.cpu, version.info.key)


def write_on(disk: SimDisk | SimRedis, info: ChunkInfo, frame: Bytes) -> None:
    """Lay a frame on a medium past the store, as a fault or another node would."""
    disk.delete(info.key)
    reservation = disk.reserve(info)
    disk.write(reservation, frame)
    assert disk.seal(reservation)


def test_a_copy_is_transcoded_to_the_codec_of_its_slot(disk: SimDisk) -> None:
    with closing(Core([disk], codec="lossless")) as core:
        versions = prompt(3, tokens=120)
        core.put(versions)
        for version in versions:
            assert core.copy_down(version) is True
            stored = core.catalog.copies(version.info.key)["disk"]
            assert stored.codec_id == codec_by_name("lossless").codec_id
            assert stored.size_bytes < version.info.size_bytes
            drop_from_cpu(core, version)
        assert core.get(versions) == frames_of(versions)


@pytest.mark.parametrize("verb", ["reserve", "write", "seal"])
def test_a_write_that_fails_leaves_no_room_taken(
    core: Core, disk: SimDisk, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (version,) = prompt(1)
    core.put([version])
    usual = getattr(disk, verb)

    def fail(*args: object) -> object:
        disk.faults.fail = 1.0
        try:
            return usual(*args)
        finally:
            disk.faults.fail = 0.0

    monkeypatch.setattr(disk, verb, fail)
    for _ in range(3):
        with pytest.raises(TierUnavailableError):
            core.copy_down(version)
    assert core.slot("disk").breaker.is_open, "failures of the medium open its breaker"
    monkeypatch.undo()
    assert disk.stats().used_bytes == disk.stats().reservations == 0
    assert core.catalog.leases.pins.total() == 0
    core.clock.advance(2 * BREAKER_RETRY_S)  # type: ignore[attr-defined]
    assert core.copy_down(version) is True


def test_a_chunk_that_goes_bad_in_memory_is_not_copied_but_dropped(
    core: Core, disk: SimDisk
) -> None:
    (version,) = prompt(1)
    core.put([version])
    frame = core.cpu.peek(version.info.key)
    assert frame is not None
    frame.flags.writeable = True
    frame[-1] ^= 1
    assert core.copy_down(version) is False
    assert core.tiers_of(version) == []
    assert core.counters["corrupt_chunks"] == 1
    assert core.put([version])[0].reason == ""
    assert core.copy_down(version) is True
    assert core.get([version]) == frames_of([version])


def test_what_a_medium_does_not_delete_is_deleted_before_the_next_copy(
    core: Core, disk: SimDisk
) -> None:
    old, fresh = prompt(2)
    core.put([old])
    core.copy_down(old)
    disk.faults.fail = 1.0
    core.store.delete(keys_of([old]), core.later())
    disk.faults.end()
    assert core.tiers_of(old) == []
    assert core.catalog.orphans["disk"] == {old.info.key}
    assert disk.stats().chunks == 1
    core.put([fresh])
    core.copy_down(fresh)
    assert core.catalog.orphans["disk"] == set()
    assert [info.key for info in disk.scan()] == [fresh.info.key]


def test_a_delete_that_comes_late_spares_what_was_put_since(core: Core, disk: SimDisk) -> None:
    (version,) = prompt(1)
    core.put([version])
    core.copy_down(version)
    core.store.delete(keys_of([version]), core.clock())
    assert core.work_queue.depth()["store-disk"] == 1, "its time was up before the disk was asked"
    results = core.put([version], durable=True)
    assert [result.reason for result in results] == [""]
    core.settle()
    assert core.tiers_of(version) == ["cpu", "disk"]
    assert [info.key for info in disk.scan()] == keys_of([version])
    assert [info.key for info in disk.restarted().scan()] == keys_of([version])


def test_the_deletion_of_a_damaged_copy_spares_the_one_that_replaces_it(
    core: Core, disk: SimDisk
) -> None:
    version = on_disk_only(core)
    disk.flip(version.info.key, 8 * 700)
    with pytest.raises(ChunkCorruptError):
        load(core, version)
    assert core.work_queue.depth()["store-disk"] == 1, "the damaged copy is yet to be deleted"
    results = core.put([version], durable=True)
    assert [result.reason for result in results] == [""]
    core.settle()
    assert core.tiers_of(version) == ["cpu", "disk"]
    assert [info.key for info in disk.scan()] == keys_of([version])
    assert [info.key for info in disk.restarted().scan()] == keys_of([version])


def test_a_disk_that_keeps_what_it_should_delete_gets_no_copy_of_it(
    core: Core, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (version,) = prompt(1)
    core.put([version])
    write_on(disk, version.info, version.frame)
    with pytest.raises(TierUnavailableError, match="did not release"):
        core.copy_down(version)
    assert core.tiers_of(version) == ["cpu"]
    assert disk.stats().reservations == 0


def test_what_another_node_sealed_first_is_taken_for_our_copy(redis: SimRedis) -> None:
    with closing(Core([redis])) as core:
        (version,) = prompt(1)
        core.put([version])
        redis.others_put(version.packed_info, version.packed)
        assert core.copy_down(version, "redis") is True
        assert core.catalog.copies(version.info.key)["redis"] == version.packed_info
        drop_from_cpu(core, version)
        assert core.get([version]) == frames_of([version])


def unreadable(codec_id: int, asset: bytes = NO_ASSET) -> tuple[ChunkInfo, Bytes]:
    """The first chunk of a prompt in a frame with right checksums over what no codec reads."""
    frame = np.zeros(4_000, np.uint8)
    writer = FrameWriter(make_template("red", ROOT, tokens_le32([1000] * TOKENS)), frame)
    writer.reserve(50)[:] = 0xAA
    writer.commit(50)
    info = writer.finish(codec_id, 1, Accuracy.exact, asset=asset).info()
    return info, frame[: info.size_bytes]


def on_disk_only(core: Core) -> Version:
    (version,) = prompt(1)
    core.put([version])
    core.copy_down(version)
    drop_from_cpu(core, version)
    return version


def test_right_checksums_over_what_its_codec_cannot_read_are_damage_all_the_same(
    core: Core, disk: SimDisk
) -> None:
    version = on_disk_only(core)
    info, frame = unreadable(codec_by_name("lossless").codec_id)
    assert info.key == version.info.key
    assert check_frame(frame, info.key).info() == info
    core.catalog.forget("disk", info.key)
    write_on(disk, info, frame)
    core.catalog.note_sealed("disk", info)
    with pytest.raises(ChunkCorruptError):
        load(core, version)
    core.settle()
    assert core.tiers_of(version) == []
    assert disk.stats().chunks == core.cpu.stats().used_bytes == 0


def test_a_shared_copy_that_only_others_can_read_is_left_to_them(redis: SimRedis) -> None:
    """Another server has tables that this one has not; it may yet use what it wrote."""
    with closing(Core([redis], clock=FakeClock())) as core:
        info, frame = unreadable(codec_by_name("cachegen").codec_id, b"not known here..")
        write_on(redis, info, frame)
        core.catalog.note_sealed("redis", info)
        (version,) = prompt(1)
        with pytest.raises(ChunkCorruptError):
            load(core, version, "redis")
        core.settle()
        assert core.tiers_of(version) == []
        assert redis.stats().chunks == 1
        assert (core.counters["unreadable_chunks"], core.counters["corrupt_chunks"]) == (1, 0)


def test_a_stored_frame_of_a_removed_codec_is_a_miss_that_says_so(
    core: Core, disk: SimDisk
) -> None:
    (version,) = prompt(1)
    for count, codec_id in enumerate(REMOVED, 1):
        info, frame = unreadable(codec_id)
        write_on(disk, info, frame)
        core.catalog.note_sealed("disk", info)
        with pytest.raises(ChunkCorruptError):
            load(core, version)
        core.settle()
        assert core.tiers_of(version) == []
        assert disk.stats().chunks == 0, "no later version reads it either"
        assert (core.counters["unreadable_chunks"], core.counters["corrupt_chunks"]) == (count, 0)
        outcome = core.moves.catalog.outcomes.of(version.info.key)
        assert outcome is not None
        assert (outcome.fate.value, outcome.detail) == ("codec_removed", REMOVED[codec_id])


@pytest.mark.parametrize("first", ["raw", "lossless"])
def test_a_shared_copy_that_others_replaced_is_no_error(redis: SimRedis, first: str) -> None:
    """Its size is another now, so what the catalog knows of it is of no use."""
    with closing(Core([redis], clock=FakeClock())) as core:
        (version,) = prompt(1)
        variants = [(version.info, version.frame), (version.packed_info, version.packed)]
        if first == "lossless":
            variants.reverse()
        redis.others_put(*variants[0])
        assert core.look_up([version], lease=False).ready
        redis.others_put(*variants[1])
        assert core.get([version]) == []
        core.settle()
        assert core.tiers_of(version) == []


def test_a_frame_too_large_for_cpu_memory_is_still_delivered(disk: SimDisk) -> None:
    (version,) = prompt(1, tokens=400)
    write_on(disk, version.packed_info, version.packed)
    with closing(Core([disk])) as core:
        assert version.packed_info.size_bytes < core.cpu.max_frame_bytes < len(version.frame)
        assert core.store.recover() == 1
        (frame,) = core.get([version])
        assert parse_header(np.frombuffer(frame, np.uint8)).key == version.info.key
        assert frame == version.packed.tobytes()


def test_an_evicted_chunk_goes_to_the_next_lower_tier_and_comes_back_the_same(
    core: Core, disk: SimDisk
) -> None:
    versions = prompt(30)
    core.put(versions)
    evicted = [version for version in versions if core.tiers_of(version) == ["disk"]]
    assert len(evicted) == disk.stats().chunks == 30 - core.cpu.stats().chunks
    assert core.get(versions) == frames_of(versions)
    with closing(Core()) as alone:  # without a lower tier they are dropped, and counted
        alone.put(versions)
        kept = alone.cpu.stats().chunks
        assert alone.counters["dropped_victims"] == alone.counters["evicted_chunks"] == 30 - kept
        assert len(alone.catalog) == kept


def test_scattered_room_is_won_by_emptying_one_slab() -> None:
    """Chunks in the order of use lie in eight slabs in turn: freeing them one by one empties
    a slab only when nearly all are gone.
    """
    with closing(Core(slabs=8, clock=FakeClock())) as core:
        small = [prompt(1, seed=seed, tokens=40)[0] for seed in range(32)]
        core.put(small)
        assert core.cpu.stats().chunks == 32
        for at in range(4):
            for version in small[at::4]:
                core.store.lookup(core.session, [version.info.key], core.later(), lease=False)
        (large,) = prompt(1, seed=99, tokens=200)
        assert core.put([large])[0].reason == ""
        assert core.counters["evicted_chunks"] <= 20
        assert core.get([large]) == frames_of([large])


def test_a_demotion_that_takes_too_long_refuses_the_put_and_loses_nothing(gated: GatedDisk) -> None:
    with closing(Core([gated], workers=1)) as core:
        versions = prompt(12)
        core.put(versions)
        gated.shut()
        (late,) = prompt(1, seed=1)
        begun = core.store.writes.begin_all(core.session, [late.info], core.later(0.01))[0]
        assert isinstance(begun, PutResult)
        assert begun.outcome is PutOutcome.refused
        assert core.cpu.stats().chunks == 12
        gated.gate.set()
        assert core.get(versions) == frames_of(versions)
        assert core.put([late])[0].outcome is PutOutcome.stored
