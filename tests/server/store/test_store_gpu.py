"""The store with a gpu tier above CPU memory, its device being the CPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from helpers.core_chunks import drop
from helpers.device_frames import frame_on_device
from helpers.slow_device import SlowDevice
from simulation.clock import FakeClock
from simulation.core import BREAKER_RETRY_S, Core, frames_of, keys_of, prompt
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.proto.device import HostDevice
from kvstore.proto.unix_socket import Reach
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import LayerPart, ReadTerms
from kvstore.tiers.gpu import GpuTier

DISK_BYTES = 1 << 20
FRAMES = 4
"""What the gpu tier of these tests holds, of a CPU tier of twelve."""


def arena_bytes(frames: int) -> int:
    (version,) = prompt(1)
    return frames * (-(-version.info.size_bytes // 256) * 256 + 256)


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def gpu(device: SlowDevice) -> Iterator[GpuTier]:
    with closing(GpuTier(arena_bytes(FRAMES), device, 512)) as gpu:
        yield gpu
        device.fails = False


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(DISK_BYTES, no_faults())


@pytest.fixture
def core(gpu: GpuTier, disk: SimDisk) -> Iterator[Core]:
    with closing(Core([disk], [gpu], clock=FakeClock())) as core:
        yield core


def warm(core: Core, versions: list[Version], session: Session | None = None) -> None:
    """Put chunks and read them often enough for a place in GPU memory."""
    core.put(versions, session)
    for _ in range(2):
        assert core.get(versions, session) == frames_of(versions)
    core.settle()


def get_on_device(core: Core, session: Session, versions: list[Version]) -> list[LayerPart]:
    lease_id, known = core.store.open_get(session, keys_of(versions), 0)
    terms = ReadTerms(session, core.later(), reach={Reach.memory, Reach.device})
    found = list(core.store.reads.get(keys_of(versions)[:known], terms))
    assert core.store.release(session, lease_id)
    return found


def test_damage_in_gpu_memory_is_found_and_the_chunk_is_a_miss(core: Core, gpu: GpuTier) -> None:
    versions = prompt(2)
    warm(core, versions)
    drop(core, versions)
    frame_on_device(gpu, versions[1].info.key)[-1] ^= 1
    assert core.get(versions) == frames_of(versions[:1])
    core.settle()
    assert core.counters["corrupt_chunks"] == 1
    assert core.tiers_of(versions[1]) == []
    assert gpu.stats().chunks == 1


def test_a_victim_without_another_copy_goes_down_to_a_slab_of_its_tenant_in_cpu_memory(
    core: Core, gpu: GpuTier
) -> None:
    blue = core.open_session("blue")
    old, new = prompt(FRAMES, tenant="blue"), prompt(FRAMES, seed=5)
    warm(core, old, blue)
    assert gpu.tenant_of(old[0].info.key) == "blue"
    drop(core, old)
    warm(core, new)
    assert [core.tiers_of(version) for version in new] == [["gpu", "cpu"]] * FRAMES
    assert [core.tiers_of(version) for version in old] == [["cpu"]] * FRAMES
    assert core.get(old, blue) == frames_of(old)
    assert core.counters["dropped_victims"] == 0
    assert gpu.stats().chunks == FRAMES
    place = core.cpu.locate(old[0].info.key)
    assert place is not None
    os.close(core.cpu.slab_file(place.number, "blue"))  # refused unless it is blue's
    copied = core.counters["copied_chunks"]
    warm(core, prompt(2, seed=6))
    assert core.counters["copied_chunks"] == copied, "what CPU memory has, too, is dropped"


# --- a device that fails, and the end


def test_a_device_that_fails_is_left_alone_and_tried_again(
    core: Core, gpu: GpuTier, device: SlowDevice
) -> None:
    versions = prompt(5)
    device.fails = True
    warm(core, versions[:FRAMES])
    assert "fails on purpose" in core.slot("gpu").reason
    assert core.counters["failed_copies"] == FRAMES
    assert gpu.stats().used_bytes == 0
    assert core.get(versions[:1]) == frames_of(versions[:1])
    device.fails = False
    assert isinstance(core.clock, FakeClock)
    core.clock.advance(BREAKER_RETRY_S)
    warm(core, versions[4:])
    assert core.tiers_of(versions[4]) == ["gpu", "cpu"]
    device.fails = True
    match = core.look_up(versions[4:])
    assert match.tiers == ("cpu",), "CPU memory serves what both have"
    assert core.get(versions[4:]) == frames_of(versions[4:])
    drop(core, versions[4:])
    assert core.get(versions[4:]) == []
    assert core.catalog.leases.pins.total() == 0


def test_a_drain_saves_what_only_gpu_memory_holds(core: Core, disk: SimDisk) -> None:
    both, alone = prompt(2), prompt(1, seed=5)
    warm(core, [*both, *alone])
    drop(core, alone)
    assert core.store.drain(core.later())
    assert {info.key for info in disk.scan()} == set(keys_of([*both, *alone]))


def test_any_schedule_returns_right_frames_and_leaks_nothing() -> None:
    for seed in range(12):
        run_schedule(random.Random(seed))


def run_schedule(draw: random.Random) -> None:
    gpu = GpuTier(arena_bytes(draw.choice((1, 2, 5))), HostDevice(), 512)
    disk = SimDisk(draw.choice((3_000, DISK_BYTES)), no_faults())
    lower = draw.choice(([], [disk]))
    slabs = draw.choice((1, 2, 4))
    with closing(gpu), closing(Core(lower, [gpu], slabs=slabs, clock=FakeClock())) as core:
        sessions = {tenant: core.open_session(tenant) for tenant in ("red", "blue")}
        prompts = [(t, prompt(4, seed=s, tenant=t)) for s, t in enumerate(("red", "blue", "red"))]
        for _ in range(150):
            tenant, versions = draw.choice(prompts)
            session, some = sessions[tenant], versions[: draw.randrange(1, 5)]
            step = draw.choice(("put", "get", "get", "get", "device", "move", "delete"))
            if step == "put":
                core.put(some, session)
            elif step == "get":
                got = core.get(some, session)
                assert got == frames_of(some)[: len(got)]
            elif step == "device":
                check_in_place(core, gpu, session, some)
            elif step == "move":
                core.work_queue.step()
            elif draw.random() < 0.2:
                core.store.delete(keys_of(some), core.later())
        core.settle()
        assert core.counters["corrupt_chunks"] == core.catalog.leases.pins.total() == 0
        for name, slot in core.moves.tiers.slots.items():
            found = {info.key for info in slot.tier.scan()}
            known = {v.info.key for _, p in prompts for v in p if name in core.tiers_of(v)}
            assert found - core.catalog.orphans[name] == known
            assert slot.tier.stats().reservations == 0


def check_in_place(core: Core, gpu: GpuTier, session: Session, versions: list[Version]) -> None:
    """What a client of the device is pointed to is the frame."""
    for result, version in zip(get_on_device(core, session, versions), versions, strict=False):
        if result.tier == "gpu":
            on_device = frame_on_device(gpu, version.info.key)
            assert np.array_equal(on_device.numpy(), version.frame)
        else:
            frame = core.cpu.peek(version.info.key) if result.place else result.data
            assert frame is not None
            assert np.array_equal(frame, version.frame)
