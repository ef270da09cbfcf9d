"""The asyncio client does what the blocking one does, awaited."""

from __future__ import annotations

import asyncio
import inspect
import socket
from contextlib import aclosing, suppress

import numpy as np
import pytest
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.pages import engine_pages
from helpers.prompts import SMALL, chunks_of, is_right, tokens

from kvstore.client import AsyncClient, Client, ClientOptions, PlannedChunk
from kvstore.client.options import TransportName
from kvstore.codecs.base import empty_tensors
from kvstore.proto.errors import KVStoreError, LeaseExpiredError
from kvstore.proto.types import KVLayout, PutOutcome


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_every_verb_works_awaited(server: LocalServer, transport: TransportName) -> None:
    options = ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)

    async def work() -> None:
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 64))
            puts = await client.put_chunks(chunks_of(client.sync, keys), durable=True)
            assert [put.outcome for put in puts] == [PutOutcome.stored] * 4
            assert (await client.lookup(keys=keys)).ready == 4
            found = await client.get_chunks(keys)
            assert all(is_right(client.sync, *p) for p in zip(keys, found, strict=True))
            room = [empty_tensors(KVLayout.of(SMALL, 16)) for _ in keys]
            assert len(await client.get_chunks(keys, room)) == 4
            assert all(is_right(client.sync, *p) for p in zip(keys, room, strict=True))
            async with client.lease(keys=keys) as lease:
                assert len(await asyncio.to_thread(lease.get)) == 4
            with pytest.raises(LeaseExpiredError):
                await asyncio.to_thread(lease.get)
            assert await client.pin(keys=keys, ttl=60.0) == 4
            assert await client.unpin(keys=keys) == 4
            assert len(await client.stat(keys=keys)) == len(await client.list()) == 4
            assert await client.delete(keys=keys[3:]) == 1
            assert (await client.status()).state == "serving"
            assert await client.clear() == 3
            assert await client.drain()

    asyncio.run(work())
    assert server.settled().leases == 0


def test_a_copy_for_another_process_is_a_client_of_its_own(server: LocalServer) -> None:
    async def work() -> None:
        options = ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS)
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 64))
            await client.put_chunks(chunks_of(client.sync, keys))
            kind, words = client.__reduce__()
        async with kind(*words) as other:  # as multiprocessing does
            assert (await other.lookup(keys=keys)).ready == 4

    asyncio.run(work())


def test_pages_and_layers_are_awaited(server: LocalServer) -> None:
    async def work() -> None:
        options = ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS)
        async with AsyncClient(server.address, SMALL, options) as client:
            keys = await client.keys(tokens(1, 32))
            right = chunks_of(client.sync, keys)
            planned = [PlannedChunk(chunk.key, 16, parent=chunk.parent) for chunk in right]
            async with client.put_chunk_layers(planned) as put:
                for layer in (0, 1):
                    parts = [chunk.tensors[0][layer] for chunk in right]
                    await asyncio.to_thread(put.layer, layer, parts)
            assert [one.outcome for one in put.results] == [PutOutcome.stored] * 2
            pages = engine_pages(SMALL, "block kv token head dim", 4, 8, np.random.default_rng(1))
            assert (await client.get(keys=keys, out=pages[range(4)])).tokens == 32
            puts = await client.put(tokens(1, 32), pages[range(4)])
            assert [one.outcome for one in puts] == [PutOutcome.exists] * 2
            async with aclosing(client.get_layers(keys=keys)) as layers:
                found = [(one.id, len(one.tensors)) async for one in layers]
            assert found == [(0, 2), (1, 2)]

    asyncio.run(work())


def test_asyncio_client_has_every_verb_of_the_blocking_one() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert verbs(AsyncClient) == verbs(Client)


def test_layers_of_a_server_that_is_silent_do_not_block_the_event_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        async def work() -> int:
            ticks = 0

            async def read() -> None:
                with suppress(KVStoreError):
                    async for _ in client.get_layers(tokens(1, 64)):
                        pass

            async with AsyncClient(address, SMALL, ClientOptions(deadline_ms=500)) as client:
                reading = asyncio.ensure_future(read())
                while not reading.done():
                    await asyncio.sleep(0.01)
                    ticks += 1
                await reading
            return ticks

        assert asyncio.run(work()) > 5
