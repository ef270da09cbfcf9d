"""The example of a router, between real stores and engines that say who they are."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, store, tokens

from kvstore.client import Client, ClientOptions
from kvstore.client.server_state import ChunkEvent, EventPage
from kvstore.proto.types import Accuracy, ChunkKey

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "prefix_router" / "router.py"
OPTIONS = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS, retry_after_ms=1)


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("prefix_router", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prefix_router"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prefix_router"]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[LocalServer]]:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir(mode=0o700)
        made.append(LocalServer(tmp_path / name, "--tiers", "cpu"))
    yield made
    for server in made:
        server.close()


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@asynccontextmanager
async def engine(name: str) -> AsyncIterator[str]:
    """An engine that answers with its name and what it was asked; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        assert b"Connection: close" in head
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + name.encode() + b" " + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def routed(program: Any, stores: list[LocalServer]) -> AsyncIterator[tuple[Any, int]]:
    """A router before two engines, that hears from both stores; yields it and its port."""
    async with engine("a") as first, engine("b") as second:
        pairs = zip(stores, (first, second), strict=True)
        nodes = [program.Node(server.address, address) for server, address in pairs]
        router = program.Router(nodes, SMALL, OPTIONS)
        port = await router.start("127.0.0.1", 0)
        try:
            await eventually(lambda: all(node.is_followed for node in nodes))
            yield router, port
        finally:
            await router.close()


async def ask(port: int, body: bytes) -> tuple[bytes, bytes]:
    """Post *body*; return the status line and what came behind the head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
    writer.write(asked.encode() + b"Connection: keep-alive\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], rest


async def complete(port: int, seed: int, chunks: int) -> str:
    """Ask for a prompt whose chunks are those of *seed*; return who answered."""
    prompt = [*tokens(seed, 16 * chunks), 1, 2, 3]
    body = json.dumps({"prompt": prompt}).encode()
    _, answer = await ask(port, body)
    name, _, echo = answer.partition(b" ")
    assert echo == body
    return name.decode()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_a_prompt_goes_where_its_prefix_is(program: Any, stores: list[LocalServer]) -> None:
    a, b = (server.connect("grpc", options=OPTIONS) for server in stores)

    async def work() -> None:
        async with routed(program, stores) as (router, port):
            await asyncio.to_thread(store, a, 1, 3)
            await asyncio.to_thread(store, b, 2, 3)
            await eventually(lambda: len(router.places) == 6)
            for _ in range(3):
                assert [await complete(port, seed, 3) for seed in (1, 2)] == ["a", "b"]
            assert {await complete(port, 9, 3) for _ in range(4)} == {"a", "b"}

    run(work)


def test_an_engine_that_does_not_answer_is_passed_over(
    program: Any, stores: list[LocalServer]
) -> None:
    a = stores[0].connect("grpc", options=OPTIONS)

    async def work() -> None:
        async with routed(program, stores) as (router, port):
            await asyncio.to_thread(store, a, 1, 1)
            await eventually(lambda: len(router.places) == 1)
            router.nodes[0].engine = "127.0.0.1:1"
            assert await complete(port, 1, 1) == "b"
            router.nodes[1].engine = "127.0.0.1:1"
            for body in (b"{}", b"", b"[]", b'{"prompt": [-1, true]}', b"[" * 100_000):
                status, _ = await ask(port, body)
                assert status == b"HTTP/1.1 503 Service Unavailable"
            assert [node.running for node in router.nodes] == [0, 0]

    run(work)


def test_a_restart_clears_what_was_known_of_a_node(
    program: Any, stores: list[LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "RETRY_S", 0.05)

    async def work() -> None:
        async with routed(program, stores) as (router, port):
            with Client(stores[0].address, SMALL, OPTIONS) as a:
                await asyncio.to_thread(store, a, 1, 3)
            await eventually(lambda: len(router.places) == 3)
            await asyncio.to_thread(stores[0].close)
            await eventually(lambda: not router.nodes[0].is_followed)
            assert {await complete(port, 1, 3) for _ in range(4)} == {"a", "b"}
            again = ("--tiers", "cpu", "--listen", stores[0].address)
            stores[0] = LocalServer(tmp_path / "a", *again)
            await eventually(lambda: router.nodes[0].is_followed)
            await eventually(lambda: len(router.places) == 0)

    run(work)


def page(*events: ChunkEvent, cleared: bool = False) -> EventPage:
    return EventPage(events, 1, cleared, None)


def test_what_is_known_is_bounded_and_counts_copies_by_tier(program: Any) -> None:
    node, places = program.Node("s", "e"), program.Places(limit=2)
    keys = [ChunkKey(bytes(16) + bytes([number]) * 16) for number in range(3)]
    stored = [ChunkEvent(key, None, 16, "cpu", Accuracy.exact) for key in keys]
    places.apply(node, page(stored[0], stored[0]._replace(tier="disk")))
    gone = stored[0]._replace(tokens=0, accuracy=Accuracy.approximate)
    places.apply(node, page(gone))
    assert places.prefix([keys[0][16:]], node) == 1
    places.apply(node, page(gone._replace(tier="disk")))
    assert len(places) == 0
    places.apply(node, page(stored[0]._replace(accuracy=Accuracy.bounded)))
    assert len(places) == 0
    places.apply(node, page(*stored))
    assert len(places) == 2
    assert places.prefix([keys[0][16:]], node) == 0
    places.apply(node, page(cleared=True))
    assert len(places) == 0
