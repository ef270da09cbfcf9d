"""Pain 18: calls that go on behind whoever cancelled them, or hold up others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, chunks_of, is_right, keys_of, parts_of, tokens

from kvstore.client import AsyncClient, Chunk, ClientOptions, PlannedChunk
from kvstore.client.options import TransportName
from kvstore.client.paged_cache import PagedCache
from kvstore.client.planning import PlanTerms, PrefillModel
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.types import ChunkKey, PutOutcome

CHUNKS = 128
WAYS = {"get_chunks": 250, "get_into": 250, "get": 250, "get_layers": 220, "get_levelled": 30}
"""How often each way of reading is cancelled: a thousand times in all."""
TERMS = PlanTerms(20.0, PrefillModel(0.0, 10.0))
MARK = 0xA5A5
SOON_S = 5.0
"""Long before a lease ends by its own time."""
WAITERS, WAIT_MS = 40, 8000

Call = Callable[[], Coroutine[Any, Any, object]]


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--tiers", "cpu")


def connect(server: LocalServer, transport: TransportName = "auto") -> AsyncClient:
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)
    return AsyncClient(server.address, SMALL, options)


async def stored(client: AsyncClient) -> list[ChunkKey]:
    keys = await client.keys(tokens(1, 16 * CHUNKS))
    await client.put_chunks(chunks_of(client.sync, keys))
    return keys


async def took_s(call: Call) -> float:
    started = time.monotonic()
    await call()
    return time.monotonic() - started


async def cancel(call: Call, delay_s: float) -> bool:
    """Whether *call* was cancelled before it came to its end."""
    task = asyncio.ensure_future(call())
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def soon(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON_S
    while not is_so() and time.monotonic() < until:
        await asyncio.sleep(0.01)
    return is_so()


class Memory:
    """Memory of a caller: as room for chunks, and as an engine's pages."""

    def __init__(self) -> None:
        self.bytes = np.empty((2, CHUNKS, 2, 16, 2, 8), np.uint16)
        """By layer, block, part, token, head and channel."""
        self.pages = PagedCache(SMALL, self.bytes, "layer block kv token head dim")
        self.room = [self.pages[range(CHUNKS)].chunk(16 * at, 16 * at + 16) for at in range(CHUNKS)]

    def reads(self, client: AsyncClient, keys: Sequence[ChunkKey]) -> dict[str, Call]:
        """Return every way of reading *keys* into it."""

        async def layers() -> None:
            async with aclosing(client.get_chunk_layers(keys, self.room)) as found:
                async for _ in found:
                    pass

        return {
            "get_chunks": lambda: client.get_chunks(keys, self.room),
            "get_into": lambda: client.get_chunks(keys, lambda index, _: self.room[index]),
            "get": lambda: client.get(keys=keys, out=self.pages[range(CHUNKS)]),
            "get_layers": layers,
            "get_levelled": lambda: client.get_levelled(keys, TERMS, self.room),
        }


@pytest.mark.parametrize("way", WAYS)
def test_vllm_49889_a_cancelled_read_writes_no_byte_after_it_was_cancelled(
    server: LocalServer, way: str
) -> None:
    """vllm#49889, vllm-ascend#16662, liburing#249: whoever cancelled a read used its memory for
    something else, and the read wrote into that."""

    async def work() -> None:
        async with connect(server) as client:
            keys = await stored(client)
            memories = [Memory(), Memory()]
            calls = [memory.reads(client, keys)[way] for memory in memories]
            usual_s = min([await took_s(calls[0]) for _ in range(3)])
            delays = np.random.default_rng(1).uniform(0, usual_s, WAYS[way]).tolist()
            cancelled = 0
            for number, delay_s in enumerate(delays):
                cancelled += await cancel(calls[number % 2], delay_s)
                memories[number % 2].bytes.fill(MARK)
                if number:
                    assert (memories[(number - 1) % 2].bytes == MARK).all(), number
            assert cancelled > WAYS[way] // 4
            assert (
                len(await client.get_chunks(keys, memories[0].room)) == CHUNKS
            )  # all of it still works

    asyncio.run(work())
    assert server.settled().leases == 0


def test_vllm_49889_a_cancelled_put_reads_its_tensors_no_more(server: LocalServer) -> None:
    """The other direction: what a caller then writes to its tensors is never stored."""

    async def work() -> None:
        async with connect(server, "grpc") as client:
            await stored(client)
            usual_s = await took_s(lambda: client.put_chunks(new_chunks(client, 99)))
            for seed, delay_s in enumerate(np.linspace(0, usual_s, 20).tolist()):
                chunks = new_chunks(client, seed)
                keys = [chunk.key for chunk in chunks]
                await cancel(lambda chunks=chunks: client.put_chunks(chunks), delay_s)  # type: ignore[misc]
                for chunk in chunks:
                    overwrite(chunk.tensors)
                found = await client.get_chunks(keys)
                pairs = zip(keys, found, strict=False)
                assert all(is_right(client.sync, *pair) for pair in pairs)
                await client.clear()

    asyncio.run(work())


def new_chunks(client: AsyncClient, seed: int) -> list[Chunk]:
    return chunks_of(client.sync, keys_of(client.sync, seed, CHUNKS))


def overwrite(tensors: Any) -> None:
    chunk: ChunkTensors = tensors
    for part in parts_of(chunk):
        part[...] = MARK


def test_vllm_49889_what_a_cancelled_call_held_is_released(server: LocalServer) -> None:
    """A lease, a layered put and a layered get that were cancelled hold nothing on the server."""

    async def leased(client: AsyncClient, keys: Sequence[ChunkKey]) -> None:
        async with client.lease(keys=keys):
            await asyncio.sleep(0.001)

    async def put(client: AsyncClient, chunks: Sequence[Any]) -> None:
        async with client.put_chunk_layers(chunks):
            await asyncio.sleep(60)

    async def work() -> None:
        async with connect(server) as client:
            keys = await stored(client)
            planned = [PlannedChunk(key, 16) for key in keys_of(client.sync, 2, 8)]
            for delay_s in np.linspace(0, 0.01, 100).tolist():
                await cancel(lambda: leased(client, keys), delay_s)
                await cancel(lambda: put(client, planned), delay_s)
            assert await soon(lambda: server.usage().leases == 0)
            assert await soon(lambda: server.usage().open_puts == 0)

    asyncio.run(work())


def test_a_read_that_was_cancelled_twice_has_ended_too(server: LocalServer) -> None:
    async def work() -> None:
        async with connect(server) as client:
            keys = await stored(client)
            memory = Memory()
            for _ in range(20):
                task = asyncio.ensure_future(client.get_chunks(keys, memory.room))
                await asyncio.sleep(0.002)
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                memory.bytes.fill(MARK)
                await asyncio.sleep(0.01)
                assert (memory.bytes == MARK).all()

    asyncio.run(work())


def test_turbovec_342_puts_go_ahead_of_the_lookups_that_wait_for_them(server: LocalServer) -> None:
    """turbovec#342: readers held every thread of a pool, waiting for writers that needed one."""

    async def work() -> None:
        async with connect(server) as client, connect(server) as writer:
            prompts = [keys_of(client.sync, seed, 2) for seed in range(WAITERS)]
            for keys in prompts:
                assert await writer.announce_puts(keys, within=60.0) == 2
            lookups = [
                asyncio.ensure_future(client.lookup(keys=keys, wait=WAIT_MS / 1000))
                for keys in prompts
            ]
            await asyncio.sleep(0.3)
            assert not any(lookup.done() for lookup in lookups)
            started = time.monotonic()
            for keys in prompts:
                puts = await client.put_chunks(chunks_of(client.sync, keys))
                assert [put.outcome for put in puts] == [PutOutcome.stored] * 2
            assert time.monotonic() - started < WAIT_MS / 4000
            assert [match.ready for match in await asyncio.gather(*lookups)] == [2] * WAITERS

    asyncio.run(work())


def test_a_lookup_waits_no_longer_than_it_was_told_to(server: LocalServer) -> None:
    async def work() -> None:
        async with connect(server) as client:
            keys = keys_of(client.sync, 1, 2)
            await client.announce_puts(keys, within=60.0)
            started = time.monotonic()
            match = await client.lookup(keys=keys, wait=0.7)
            assert (match.ready, match.pending) == (0, 2)
            assert 0.7 <= time.monotonic() - started < 3
            await client.announce_puts(keys, within=0.0)
            assert (await client.lookup(keys=keys, wait=60.0)).missing == 2  # at once

    asyncio.run(work())
