"""A server killed with SIGKILL again and again under load: what it acknowledged is never wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from helpers.local_server import eventually
from helpers.prompts import SMALL, chunks_of, is_right, keys_of
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey, PutOutcome

ProcessMaker = Callable[..., ServerProcess]

TRANSPORTS: tuple[TransportName, ...] = ("shm", "grpc")
CHUNKS = 4
LOAD_S = 0.4
OPTIONS = {name: ClientOptions(name, 16, 5000, retry_after_ms=20) for name in TRANSPORTS}


@dataclass
class Oracle:
    """What the writers were told, and every read that contradicts it."""

    durable: list[list[ChunkKey]] = field(default_factory=list)
    stored: list[list[ChunkKey]] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    reads: int = 0
    errors: int = 0

    def check(self, client: Client, keys: list[ChunkKey]) -> int:
        """Read a prompt; note every chunk that is wrong. Return how many were right."""
        found = client.get_chunks(keys)
        for key, one in zip(keys, found, strict=False):
            self.reads += 1
            if not is_right(client, key, one):
                self.lies.append(f"{client.transport_name}: {key.hex()} is not what was put")
        return len(found)


def write(client: Client, oracle: Oracle, seeds: Iterator[int], stop: threading.Event) -> None:
    """Put prompts until told to stop, every other one durable."""
    while not stop.is_set():
        seed = next(seeds)
        try:
            keys = keys_of(client, seed, CHUNKS)
            oracle.stored.append(keys)
            puts = client.put_chunks(chunks_of(client, keys), durable=bool(seed % 2))
        except KVStoreError:
            oracle.errors += 1
            time.sleep(0.005)
            continue
        if seed % 2 and all(put.outcome is not PutOutcome.refused for put in puts):
            oracle.durable.append(keys)


def read(client: Client, oracle: Oracle, draw: random.Random, stop: threading.Event) -> None:
    """Read prompts that somebody put, or tried to, until told to stop."""
    while not stop.is_set():
        try:
            client.keys([])
            if oracle.stored:
                oracle.check(client, draw.choice(oracle.stored))
        except KVStoreError:
            oracle.errors += 1
            time.sleep(0.005)


@contextmanager
def load(address: str, oracle: Oracle, seed: int) -> Iterator[None]:
    """Two writers and two readers, one of each through each transport."""
    stop = threading.Event()
    clients = [Client(address, SMALL, OPTIONS[name]) for name in (*TRANSPORTS, *TRANSPORTS)]
    threads = []
    for number, client in enumerate(clients):
        if number < len(TRANSPORTS):
            seeds = iter(range(10_000 * seed + 5000 * number, 10_000 * (seed + 1)))
            work = threading.Thread(target=write, args=(client, oracle, seeds, stop))
        else:
            draw = random.Random(seed)
            work = threading.Thread(target=read, args=(client, oracle, draw, stop))
        threads.append(work)
        work.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()


def assert_kept(address: str, oracle: Oracle, prompts: list[list[ChunkKey]]) -> None:
    """Fail unless every durable prompt among *prompts* is whole, through both transports."""
    for name in TRANSPORTS:
        with Client(address, SMALL, OPTIONS[name]) as client:
            assert client.status().leases == 0
            lost = [keys for keys in prompts if oracle.check(client, keys) < CHUNKS]
            assert lost == []
    assert oracle.lies == []


def is_reached(client: Client) -> bool:
    with suppress(KVStoreError):
        return client.status().state == "serving"
    return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_server_keeps_what_was_durable_and_never_lies_about_the_rest(
    server_process: ProcessMaker, request: pytest.FixtureRequest
) -> None:
    loops = request.config.getoption("--kill-loops")
    process = server_process("--cpu", "32MiB", "--disk", "256MiB:disk")
    process.start()
    oracle = Oracle()
    for loop in range(loops):
        draw = random.Random(loop)
        before = len(oracle.durable)
        with load(process.address, oracle, loop):
            assert eventually(lambda before=before: len(oracle.durable) > before + 5)  # type: ignore[misc]
            time.sleep(draw.random() * LOAD_S)
            process.kill()
        process.start()
        assert process.recovered_chunks >= CHUNKS * len(oracle.durable)
        older = draw.sample(oracle.durable, min(20, before))
        assert_kept(process.address, oracle, oracle.durable[before:] + older)
        with Client(process.address, SMALL, OPTIONS["shm"]) as client:
            for keys in oracle.stored[-50:]:
                oracle.check(client, keys)
        assert oracle.lies == []
    assert_kept(process.address, oracle, oracle.durable)
    assert oracle.reads > 100 * loops
    assert oracle.errors > 0
    assert process.terminate() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_client_of_a_killed_server_gets_errors_of_the_store_and_finds_the_next_one(
    server_process: ProcessMaker, transport: TransportName
) -> None:
    process = server_process("--cpu", "16MiB", "--disk", "32MiB:disk")
    process.start()
    with Client(process.address, SMALL, OPTIONS[transport]) as client:
        keys = keys_of(client, 1, CHUNKS)
        client.put_chunks(chunks_of(client, keys), durable=True)
        boot_id = client.boot_id
        lease = client.lease(keys=keys)
        process.kill()
        for call in (lambda: client.get_chunks(keys), lambda: client.lookup(keys=keys), lease.get):
            with pytest.raises(KVStoreError):
                call()
        lease.release()
        process.start()
        assert process.recovered_chunks == CHUNKS
        assert eventually(lambda: is_reached(client))
        found = client.get_chunks(keys)
        assert [is_right(client, *pair) for pair in zip(keys, found, strict=True)] == [
            True
        ] * CHUNKS
        assert client.boot_id != boot_id
        assert client.transport_name == transport
