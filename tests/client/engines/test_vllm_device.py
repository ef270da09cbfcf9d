"""The vLLM connector with pages on a device whose work stands still until somebody waits for it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_frames import use_device
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.server_process import ServerProcess
from helpers.slow_device import SlowDevice
from helpers.vllm_pages import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    SHAPE,
    empty_pages,
    holds,
    ranks_of,
    representation,
    writer,
)
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import QUEUE_BYTES, Engine, options
from typing_extensions import override

from kvstore.cli.__main__ import main
from kvstore.client import Client
from kvstore.client.cuda import CudaClient
from kvstore.client.engines import base
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import worker as vllm_worker
from kvstore.client.engines.vllm.blocks import side_by_side
from kvstore.client.engines.vllm.device import DeviceSide
from kvstore.client.engines.vllm.messages import LoadSpec, StepPlan
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.proto.device import import_cupy
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChainDigest
from kvstore.tiers.cpu import CpuTier

Start = Callable[..., Engine]
PROMPT = prompt_tokens(1, 200)
CLIENTS = pytest.mark.parametrize("client", [Client, CudaClient], ids=["host", "straight"])


@pytest.fixture
def start(start: Start) -> Start:
    """Start engines with pages on a device of their own."""
    return partial(start, on_device=True)


def test_ranks_of_a_parallel_engine_store_and_load_their_shards(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2, (0, 1), (1, 3))
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
    for name, hit in (("a", 0), ("b", 192)):
        engine = start_at(near.address, on_device=True, client=CudaClient)
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


def test_chunks_of_several_steps_go_together_once_the_last_is_computed(
    near: LocalServer, start_at: Start
) -> None:
    where: dict[str, Any] = {"on_device": True, "client": CudaClient}
    engine, hold = start_at(near.address, **where), threading.Event()
    (worker,) = engine.workers
    worker._storer.submit(hold.wait)
    request, blocks = engine.arrived("a", PROMPT), engine.blocks(200)
    for tokens in (64, 136):
        engine.step(request, blocks, tokens)
    hold.set()
    assert worker.settled(20.0)
    assert start_at(near.address, **where).run("b", PROMPT) == 192


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
    engine.collect_reports()
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
        engine.collect_reports()
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


def test_registration_that_is_refused_costs_speed_alone(start: Start) -> None:
    class Refusing(SlowDevice):
        @override
        def register(self, memory: object, *, read_only: bool = False) -> None:
            return None

    start(device=Refusing()).run("a", PROMPT)
    assert start(device=Refusing(), client=CudaClient).run("b", PROMPT) == 192


# --- bad input: right tokens always, and a counted reason


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


# --- a server that is gone, or hangs


HANGS_S = 10.0
"""Half of the deadline of these engines."""


@pytest.fixture
def process(server_process: Callable[..., ServerProcess]) -> ServerProcess:
    made = server_process("--tiers", "cpu", "--cpu", "16MiB")
    made.start()
    return made


@pytest.fixture
def far(process: ServerProcess, start_at: Start) -> Start:
    """Start engines at that server, where PROMPT is stored."""
    far: Start = partial(
        start_at, process.address, on_device=True, opts=options(retry_after_ms=300)
    )
    far().run("a", PROMPT)
    return far


def finish(engine: Engine, request: FakeRequest, blocks: list[int], loaded: int) -> bool:
    """Compute what a load left; return whether the pages have what they had without a store."""
    request.num_computed_tokens = loaded
    engine.step(request, blocks, len(PROMPT) - loaded)
    engine.drain()
    return holds(engine.pages[0], side_by_side, PROMPT, blocks, SHAPE)


@CLIENTS
def test_a_server_that_is_killed_while_frames_come_costs_no_token(
    process: ServerProcess, far: Start, client: type[Client]
) -> None:
    engine = far(client=client)
    (worker,) = engine.workers
    came, once = list[bool](), threading.Lock()  # several threads note what came

    def arrived() -> None:
        came.append(True)
        if once.acquire(blocking=False):
            process.kill()

    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(len(PROMPT))
    worker._note_arrival = arrived
    failed = engine.load(request, blocks, 192)
    assert came
    loaded, lost = worker.counted["loaded_chunks"], worker.counted["lost_chunks"]
    assert loaded + lost == 3
    assert failed == set(blocks[2 * loaded : 6])
    assert finish(engine, request, blocks, loaded * CHUNK_TOKENS)


@CLIENTS
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "hanging"])
def test_a_server_that_is_killed_or_hangs_in_a_load_costs_a_hit_and_no_deadline(
    process: ServerProcess, far: Start, client: type[Client], is_killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = far(client=client)
    engine.run("warm", prompt_tokens(2, 100))  # so it is connected
    (worker,) = engine.workers
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(len(PROMPT))
    if is_killed:
        monkeypatch.setattr(vllm_worker, "QUIET_S", 60.0)  # it is not looked after: the end tells
    process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.2, process.kill)  # the load's question is on the way by then
    began_s = time.monotonic()
    try:
        if is_killed:
            killer.start()
        assert engine.load(request, blocks, 192) == set(blocks[:6])
    finally:
        if not is_killed:
            process.send_signal(signal.SIGCONT)
    assert time.monotonic() - began_s < HANGS_S
    assert worker.counted["lost_chunks"] == 3
    assert sum(worker._connector.stats().load_errors.values()) > 0
    assert engine.scheduler._desk.is_down
    assert finish(engine, request, blocks, 0)


# --- a request that is aborted


def test_nothing_writes_to_the_blocks_of_an_aborted_load_once_it_was_told_to_be_over(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    engine = start(client=CudaClient)
    (worker,) = engine.workers
    asked, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(len(PROMPT))
    gate, read = threading.Event(), worker._side.read

    def held(job: object) -> None:
        assert gate.wait(20.0)
        read(job)

    worker._side.read = held
    engine.scheduler.on_alloc(asked, 192, [blocks])
    plan = engine.scheduler.build_plan(step(), lambda _: [])
    worker.save_before_overwrite(plan)
    worker.load(plan)
    engine.scheduler.finished(asked)  # it is aborted; its blocks are not free yet
    assert worker.finished_loads(is_idle=True) == set()
    gate.set()
    done: set[str] = set()

    def is_told() -> bool:
        done.update(worker.finished_loads(is_idle=True))
        return bool(done)

    assert eventually(is_told)
    assert done == {"b"}
    assert worker.failed_blocks() == set()
    engine.wipe(blocks, value=7.0)  # of another request
    assert isinstance(engine.device, SlowDevice)
    for stream in (engine.device.compute, *engine.device.streams):
        stream.run()
    assert all((pages[blocks] == 7.0).all() for pages in engine.pages[0].values())


# --- pages that are refused


@pytest.fixture
def refusal(
    server: LocalServer, request: pytest.FixtureRequest
) -> Callable[[SlowDevice, dict[str, torch.Tensor], Any], str]:
    """Register pages that are refused; return why, once loads were seen to fail for it."""

    def register(device: SlowDevice, pages: dict[str, torch.Tensor], write: Any) -> str:
        client = CudaClient(server.address, representation(), options())
        worker = VllmWorker(Connector(client), SHAPE, QUEUE_BYTES, device=device)
        request.addfinalizer(worker.close)
        reason = worker.register(pages, write)
        plan = StepPlan((LoadSpec("a", (ChainDigest(bytes(32)),), ((3, 4),)),))
        worker.save_before_overwrite(plan)
        worker.load(plan)
        worker.store(plan)
        assert worker.settled(20.0)
        assert worker.finished_loads(is_idle=True) == {"a"}
        assert worker.failed_blocks() == {3, 4}
        assert worker.counted["lost_chunks"] == 1
        report = worker.report()
        assert report is not None
        assert report.refusal == reason
        return reason

    return register


Refusal = Callable[[SlowDevice, dict[str, torch.Tensor], Any], str]


def test_an_engine_without_cupy_is_told_what_to_install(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeedsCupy(SlowDevice):
        @override
        def allocate(self, size_bytes: int) -> torch.Tensor:
            import_cupy()
            return super().allocate(size_bytes)

    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = refusal(NeedsCupy(), empty_pages(), writer(side_by_side))
    assert "TierUnavailableError" in reason
    assert "install kvstore-server[gpu]" in reason


def test_a_ring_that_there_is_no_memory_for_leaves_none_behind(refusal: Refusal) -> None:
    class Small(SlowDevice):
        @override
        def allocate(self, size_bytes: int) -> torch.Tensor:
            if self._files:
                raise TierUnavailableError("gpu", "out of memory")
            return super().allocate(size_bytes)

    device = Small()
    assert "out of memory" in refusal(device, empty_pages(), writer(side_by_side))
    assert not device._files


def test_pages_on_several_devices_are_refused_by_name(refusal: Refusal) -> None:
    pages = empty_pages()
    last = next(iter(pages))
    pages[last] = pages[last].to("meta")
    reason = refusal(SlowDevice(), pages, writer(side_by_side))
    assert "['cpu', 'meta']" in reason
    assert "all pages must be on one device" in reason


def explained(address: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``kvstore explain`` prints of what engines said."""
    with pytest.raises(SystemExit):
        main(["explain", "--address", address, "--recent", "5"])
    return capsys.readouterr().out


@pytest.mark.parametrize("half", [VllmScheduler, VllmWorker])
def test_why_an_engine_has_no_store_is_explained_by_a_server_that_comes_later_too(
    process: ServerProcess, capsys: pytest.CaptureFixture[str], half: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(base, "REPORT_EVERY_S", 0.1)
    process.kill()
    opts = replace(options(), transport="grpc", name="vllm-half")
    connector = Connector(Client(process.address, representation(), opts))
    reason = "no state\x1b[2J\nlayers"
    side: Any
    if half is VllmScheduler:
        side = VllmScheduler(connector, SHAPE, refusal="state_layers")
        connector.report_refusal(reason)
    else:
        side = VllmWorker(connector, SHAPE, QUEUE_BYTES)
        side.refuse(reason)
    process.start()
    said = "vllm-half runs without the store: no state [2J layers"
    assert eventually(lambda: said in explained(process.address, capsys))
    process.kill()
    process.start()
    assert eventually(lambda: said in explained(process.address, capsys)), "to each that comes"
    side.close()
    assert eventually(lambda: "kvstore-refused" not in [one.name for one in threading.enumerate()])
