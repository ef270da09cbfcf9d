"""The vLLM connector in an engine that runs a real model out of pages on a device.

The device is late: what is queued runs when somebody waits for it, and a CUDA device sleeps before
each step. So a wait that is missing in the connector is seen (tests/mutation/mutants.toml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decode_graph import GraphEngine
from helpers.device_frames import use_device
from helpers.local_server import LocalServer
from helpers.paged_engine import BLOCKS, TOKEN_IDS, PagedEngine
from helpers.server_process import ServerProcess
from helpers.slow_device import DelayedDevice, SlowDevice

from kvstore.client import Client
from kvstore.client.cuda import CudaClient, CudaTransport

Start = Callable[..., PagedEngine]
ServerMaker = Callable[..., LocalServer]
On = Callable[[], SlowDevice | DelayedDevice]
Right = list[dict[str, list[int]]]
NEW = 50
LENGTHS = {"a": 150, "b": 90, "c": 200, "d": 130}
HITS = {"a": 192, "b": 128, "c": 192, "d": 128}
"""Of these prompts and their new tokens, some of which decode steps computed."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize(
    "on", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])], indirect=True
)


def prompt(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, TOKEN_IDS, (count,), generator=generator).tolist()
    return ids


PROMPTS = {name: prompt(at, count) for at, (name, count) in enumerate(LENGTHS.items())}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Iterator[On]:
    """Return what makes the device of an engine."""
    if getattr(request, "param", "cpu") == "cpu":
        yield SlowDevice
        return
    device = DelayedDevice()
    with torch.cuda.stream(device.engine_stream):
        yield lambda: device


@lru_cache
def _right(kind: str) -> Right:
    device = DelayedDevice() if kind == "cuda" else SlowDevice()
    stream = device.engine_stream if isinstance(device, DelayedDevice) else None
    with torch.cuda.stream(stream):  # does nothing without one
        first = PagedEngine(None, device=device).generate(PROMPTS, NEW)
        return [first, PagedEngine(None, device=device).generate(longer(first), NEW)]


@pytest.fixture
def right(on: On) -> Right:
    """What the model says to the prompts, and to those with what it said: without a store."""
    return _right("cpu" if on is SlowDevice else "cuda")


def longer(told: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: [*PROMPTS[name], *told[name]] for name in PROMPTS}


@pytest.fixture
def serve(on: On, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerMaker]:
    """Start servers in this process, where CUDA leaves files open and threads behind."""
    if on is SlowDevice:
        yield request.getfixturevalue("make_server")
        return
    with ExitStack() as stack:

        def make(*flags: str) -> LocalServer:
            return stack.enter_context(closing(LocalServer(tmp_path, *flags)))

        yield make


@pytest.fixture
def server(serve: ServerMaker) -> LocalServer:
    return serve()


@pytest.fixture
def start(serve: ServerMaker, on: On, request: pytest.FixtureRequest) -> Start:
    """Start engines, closed before their servers."""

    def make(
        address: str | None, client: type[Client] = Client, kind: type[PagedEngine] = PagedEngine,
        **more: Any,
    ) -> PagedEngine:  # fmt: skip
        engine = kind(address, client, **{"device": on(), **more})
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.fixture
def near(
    on: On, serve: ServerMaker, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> LocalServer | ServerProcess:  # fmt: skip
    """A server whose gpu tier is on the engines' device: a CUDA device's is another process."""
    flags, more = ("--tiers", "gpu,cpu", "--gpu", "8MiB"), ("--gpu", "64MiB", "--cpu", "64MiB")
    if on is SlowDevice:
        use_device(monkeypatch, tmp_path, SlowDevice())
        return serve(*flags)
    process: ServerProcess = request.getfixturevalue("server_process")(*flags, *more)
    process.start()
    return process


def are_equal(reader: PagedEngine, writer: PagedEngine) -> bool:
    """Whether all that was loaded is bit for bit what was computed."""
    return all(
        torch.equal(one[:hit], other[:hit])
        for name, hit in reader.hits.items()
        for one, other in zip(reader.kept[name], writer.kept[name], strict=True)
    )


# --- with the store as without


def through_the_store(
    start: Start, address: str, client: type[Client], **more: Any
) -> tuple[PagedEngine, PagedEngine]:
    """Compute all prompts in one engine and go on with them in another; return both."""
    writer = start(address, client, **more)
    told = writer.generate(PROMPTS, NEW)
    writer.release()
    reader = start(address, client, **more)
    reader.generate(longer(told), NEW)
    reader.release()
    return writer, reader


def check(writer: PagedEngine, reader: PagedEngine, right: Right) -> None:
    assert [writer.outputs, reader.outputs] == right
    assert reader.hits == HITS
    assert are_equal(reader, writer)
    assert min(writer.given, reader.given) > BLOCKS, "blocks were used again"


def is_late(engine: PagedEngine) -> bool:
    """Whether the device was behind: only then is it seen that somebody does not wait."""
    return engine.late_steps > NEW


@DEVICES
@pytest.mark.parametrize(
    ("client", "zeroes_first", "stores_last"),
    [
        (Client, False, False), (Client, True, True), (CudaClient, True, False),
        (CudaClient, False, True),
    ],
)  # fmt: skip
def test_tokens_and_pages_are_those_of_an_engine_without_a_store(
    start: Start, server: LocalServer, client: type[Client], zeroes_first: bool,
    stores_last: bool, right: Right,
) -> None:  # fmt: skip
    more = {"zeroes_first": zeroes_first, "stores_last": stores_last}
    writer, reader = through_the_store(start, server.address, client, **more)
    check(writer, reader, right)
    assert is_late(writer)
    assert is_late(reader)


@DEVICES
def test_so_they_are_where_the_servers_gpu_tier_is_on_the_engines_device(
    start: Start, near: LocalServer | ServerProcess, right: Right
) -> None:
    more = {"zeroes_first": True, "stores_last": True}
    writer, reader = through_the_store(start, near.address, CudaClient, **more)
    check(writer, reader, right)
    transport = reader.side._connector.client._link.connected()
    assert isinstance(transport, CudaTransport)
    assert transport.arena is not None, transport.without_arena
    if isinstance(near, LocalServer):
        gpu = near.node.store.tiers.gpu_tier
        assert gpu is not None
        assert gpu.stats().chunks


@DEVICES
def test_so_they_are_where_decode_steps_are_replayed_over_memory_that_stays(
    start: Start, server: LocalServer, right: Right
) -> None:
    more = {"zeroes_first": False, "stores_last": False, "kind": GraphEngine}
    writer, reader = through_the_store(start, server.address, CudaClient, **more)
    check(writer, reader, right)
    for engine in (writer, reader):
        assert isinstance(engine, GraphEngine)
        assert engine.replays > NEW
        assert is_late(engine)
