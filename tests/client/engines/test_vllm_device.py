"""The vLLM connector with pages on a device whose work stands still until somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gpu_twin import use_device
from helpers.local_server import LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.slow_device import SlowDevice, SlowEvent
from helpers.vllm_pages import BLOCK_TOKENS, CHUNK_TOKENS, HYBRID, LATENT, SHAPE, SLIDING, holds
from helpers.vllm_steps import Engine
from typing_extensions import override

from kvstore.client import Client
from kvstore.client.chunk import Shard
from kvstore.client.cuda import CudaClient
from kvstore.client.engines.vllm import worker as vllm_worker
from kvstore.client.engines.vllm.blocks import one_after_the_other, side_by_side
from kvstore.client.engines.vllm.device import DeviceSide
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.codecs.paged import HostKernels
from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.cpu import CpuTier

Start = Callable[..., Engine]
PROMPT = prompt_tokens(1, 200)
CLIENTS = pytest.mark.parametrize("client", [Client, CudaClient], ids=["host", "straight"])


@pytest.fixture
def start(start: Start) -> Start:
    """Start engines with pages on a device of their own."""

    def make(**settings: object) -> Engine:
        return start(**{"packing": side_by_side, "device": SlowDevice(), **settings})

    return make


@pytest.mark.parametrize(
    ("client", "zeroes", "packing"),
    [
        (Client, False, side_by_side),
        (CudaClient, True, side_by_side),
        (Client, True, one_after_the_other),
        (CudaClient, False, one_after_the_other),
    ],
)
def test_what_one_engine_computed_another_loads(
    start: Start, client: type[Client], zeroes: bool, packing: object
) -> None:
    assert start(packing=packing, client=client, zeroes=zeroes).run("a", PROMPT) == 0
    assert start(packing=packing, client=client, zeroes=zeroes).run("b", PROMPT) == 192


@pytest.mark.parametrize("shape", [LATENT, HYBRID, SLIDING], ids=["latent", "hybrid", "sliding"])
def test_latents_and_windows_in_several_tables_are_stored_and_loaded(
    start: Start, shape: KVCacheShape
) -> None:
    assert start(shape=shape).run("a", PROMPT) == 0
    reader = start(shape=shape)
    assert reader.run("b", PROMPT) > 0
    assert not any(bool(pages[0].any()) for pages in reader.pages[0].values()), "null blocks"


def test_engines_on_cpus_and_on_devices_share(start: Start) -> None:
    start().run("a", PROMPT)
    assert start(device=None).run("b", PROMPT) == 192
    other = prompt_tokens(2, 200)
    start(device=None).run("c", other)
    assert start(client=CudaClient).run("d", other) == 192


@pytest.mark.parametrize(
    "ranks",
    [
        (Shard(kv_heads=((0, 1),)), Shard(kv_heads=((1, 2),))),
        (Shard(layers=(0, 1)), Shard(layers=(1, 3))),
    ],
    ids=["tensor", "pipeline"],
)
def test_ranks_of_a_parallel_engine_store_and_load_their_shards(
    start: Start, ranks: tuple[Shard, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ranks=ranks, client=CudaClient).run("a", PROMPT)
    engine = start(ranks=ranks, client=CudaClient)
    monkeypatch.setattr(DeviceSide, "_through_host", lambda *_: 0)
    assert engine.run("b", PROMPT) == 192, "straight into the pages of each rank"
    monkeypatch.undo()
    assert start().run("c", PROMPT) == 192, "and so does an engine of one rank"


# --- a server whose gpu tier is on the engine's device


@pytest.fixture
def near(
    make_server: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> LocalServer:
    use_device(monkeypatch, tmp_path, SlowDevice())
    return make_server("--tiers", "gpu,cpu", "--gpu", "8MiB")


def test_chunks_go_into_the_servers_gpu_memory_and_come_out_of_it_without_the_host(
    near: LocalServer, start_at: Start
) -> None:
    straight = {"packing": side_by_side, "device": SlowDevice(), "client": CudaClient}
    for name, hit in (("a", 0), ("b", 192)):
        engine = start_at(near.address, **straight)
        assert engine.run(name, PROMPT) == hit
        (worker,) = engine.workers
        assert worker.counted["lost_chunks"] == 0
    gpu = near.node.store.tiers.gpu_tier
    assert gpu is not None
    assert gpu.stats().chunks == 3
    side = worker._side
    assert isinstance(side, DeviceSide)
    assert sum(side._down.copied) == 0, "nothing came down"  # type: ignore[attr-defined]
    assert sum(side.reader.copies.copied) == 0, "and nothing went up"  # type: ignore[attr-defined]


def test_what_the_gpu_tier_has_no_room_for_goes_through_host_memory(
    make_server: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    start_at: Start,
) -> None:  # fmt: skip
    use_device(monkeypatch, tmp_path, SlowDevice(), 4096)
    address = make_server("--tiers", "gpu,cpu", "--gpu", "8MiB").address
    for name, hit in (("a", 0), ("b", 192)):
        straight = {"packing": side_by_side, "device": SlowDevice(), "client": CudaClient}
        assert start_at(address, **straight).run(name, PROMPT) == hit


# --- spec


def test_blocks_may_be_overwritten_as_soon_as_the_step_has_ended(start: Start) -> None:
    engine = start()
    request, blocks = engine.computed("a", PROMPT)
    engine.wipe(blocks, value=9.0)
    engine.scheduler.finished(request)
    assert engine.workers[0].settled(20.0)
    assert start().run("b", PROMPT) == 192


class Watched(SlowDevice):
    """Counts launches and copies, and who waits for the device in the engine's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.allocated = 0
        self._engine = threading.get_ident()

    @override
    def allocate(self, size_bytes: int) -> torch.Tensor:
        self.allocated += 1
        return super().allocate(size_bytes)

    def note_wait(self) -> None:
        self.waits += threading.get_ident() == self._engine


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    device = Watched()
    synchronize = SlowEvent.synchronize

    def noted(self: SlowEvent) -> None:
        device.note_wait()
        synchronize(self)

    monkeypatch.setattr(SlowEvent, "synchronize", noted)
    return device


def test_a_step_is_one_launch_a_chunk_one_copy_and_no_hook_waits_or_allocates(
    start: Start, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(device=watched)
    (worker,) = engine.workers
    launches: list[int] = []
    move = HostKernels.move

    def noted(self: HostKernels, *given: Any, **more: Any) -> None:
        launches.append(len(given[1]))
        move(self, *given, **more)

    monkeypatch.setattr(HostKernels, "move", noted)
    copies = [len(stream.copied) for stream in watched.streams]
    allocated = watched.allocated
    engine.computed("a", PROMPT)
    assert watched.waits == 0
    assert worker.settled(20.0)
    assert launches == [3], "all chunks of the step in one launch"
    after = [len(stream.copied) for stream in watched.streams]
    assert sum(after) - sum(copies) == 3, "one copy a chunk"
    assert watched.allocated == allocated


def test_a_load_waits_for_the_engines_stream_on_the_device_alone(
    start: Start, watched: Watched
) -> None:
    start().run("a", PROMPT)
    engine = start(device=watched, client=CudaClient)
    request = engine.arrived("b", PROMPT, hit=192)
    blocks = engine.blocks(len(PROMPT))
    engine.wipe(blocks, value=5.0)  # zeroing, or a step that still writes to these blocks
    before = watched.waits
    assert engine.load(request, blocks, 192) == set()
    assert watched.waits == before
    assert holds(engine.pages[0], side_by_side, PROMPT[:192], blocks)


# --- room


def test_what_finds_no_slot_before_its_blocks_are_given_away_is_dropped_and_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "DEVICE_RING_BYTES", 1)
    engine = start(zeroes=True)
    (worker,) = engine.workers
    prompt = prompt_tokens(4, 4 * CHUNK_TOKENS)
    request, blocks = engine.computed("a", prompt)
    engine.scheduler.finished(request)
    assert worker.settled(20.0)
    engine.computed("b", prompt_tokens(5, 10), blocks[-1:])  # its block is of the last chunk
    assert worker.settled(20.0)
    assert worker.counted["gone_chunks"] == 1
    assert worker.counted["stored_chunks"] == 3
    engine.tell()
    assert engine.run("c", prompt) == 3 * CHUNK_TOKENS
    assert start().run("d", prompt) == 4 * CHUNK_TOKENS, "computed again, it is stored"


def test_a_prompt_that_is_computed_before_anything_was_sent_is_stored_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in its pages, and no further request has to come for it."""
    monkeypatch.setattr(vllm_worker, "DEVICE_RING_BYTES", 1)  # two slots, the least
    engine, hold = start(queue_bytes=1, zeroes=True), threading.Event()
    (worker,) = engine.workers
    worker._storer.submit(hold.wait)
    prompt = prompt_tokens(6, 8 * CHUNK_TOKENS)
    request, blocks = engine.arrived("a", prompt), engine.blocks(len(prompt))
    for _ in range(2):
        engine.step(request, blocks, len(prompt) // 2)
        engine.tell()
    engine.scheduler.finished(request)
    assert engine.scheduler.has_stores_waiting, "the engine steps on without a request"
    hold.set()
    while engine.scheduler.has_stores_waiting:
        assert worker.settled(20.0)
        engine.idle()
    engine.wipe(blocks, value=9.0)  # after the last hook nothing reads them
    assert worker.settled(20.0)
    assert worker.counted["stored_chunks"] == 8
    assert worker.counted["dropped_chunks"] == 0
    assert start().run("b", prompt) == len(prompt)


def test_an_engine_does_not_step_on_for_a_store_that_is_down(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "DEVICE_RING_BYTES", 1)
    engine = start()
    engine.computed("a", prompt_tokens(7, 4 * CHUNK_TOKENS))
    engine.tell()
    assert engine.scheduler.has_stores_waiting
    engine.scheduler._desk.note_down()
    assert not engine.scheduler.has_stores_waiting


def test_a_device_with_little_memory_has_a_smaller_ring(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(SlowDevice):
        @override
        def allocate(self, size_bytes: int) -> torch.Tensor:
            if size_bytes > 1 << 20:
                raise TierUnavailableError("gpu", "out of memory")
            return super().allocate(size_bytes)

    start(device=Small()).run("a", PROMPT)
    assert start().run("b", PROMPT) == 192


# --- bad input: right tokens always, and a counted reason


def test_registration_that_is_refused_costs_speed_alone(start: Start) -> None:
    class Refusing(SlowDevice):
        @override
        def register(self, memory: object, *, read_only: bool = False) -> None:
            return None

    start(device=Refusing()).run("a", PROMPT)
    assert start(device=Refusing(), client=CudaClient).run("b", PROMPT) == 192


def test_a_device_that_fails_loses_hits_and_no_token(start: Start) -> None:
    start().run("a", PROMPT)
    device = SlowDevice()
    engine = start(device=device, client=CudaClient)
    request = engine.arrived("b", PROMPT, hit=192)
    blocks = engine.blocks(len(PROMPT))
    device.fails = True
    assert engine.load(request, blocks, 192) == set(blocks[: 192 // BLOCK_TOKENS])
    (worker,) = engine.workers
    assert worker.counted["lost_chunks"] == 3
    assert worker._connector.stats().load_errors["TierUnavailableError"]
    device.fails = False


@CLIENTS
def test_a_damaged_frame_is_computed_again(
    start: Start, server: LocalServer, client: type[Client]
) -> None:
    engine = start()
    engine.run("a", PROMPT)
    second = engine.client.keys(PROMPT)[1]
    tier = server.node.store.tiers.cpu.tier
    assert isinstance(tier, CpuTier)
    place = tier.locate(second)
    assert place is not None
    tier._slabs[place.number].bytes[place.offset + place.size_bytes - 1] ^= 1
    other = start(client=client)
    request = other.arrived("b", PROMPT, hit=192)
    blocks = other.blocks(len(PROMPT))
    failed = other.load(request, blocks, 192)
    wanted = set(blocks[CHUNK_TOKENS // BLOCK_TOKENS : 192 // BLOCK_TOKENS])
    assert failed in (wanted, set()), "unless a sound copy below is read in its place"
    right = 192 if not failed else CHUNK_TOKENS
    assert holds(other.pages[0], side_by_side, PROMPT[:right], blocks, SHAPE)
