"""A server's life: draining under load, kills and restarts that lose nothing."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ProcessMaker
from golden.history_samples import OLDER, PATH
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import LARGE, SMALL, assert_reads, chunks_of, keys_of, outcomes, store

from kvstore.client import Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.store.saved_state import FILE_NAME

OPTIONS = ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS, retry_after_ms=20)


def put_until_refused(client: Client, seed: int, stored: list[ChunkKey]) -> str:
    """Put prompts until the server takes no more; return its last word."""
    while True:
        seed += 1
        try:
            keys = keys_of(client, seed, 4)
            for key, put in zip(keys, client.put_chunks(chunks_of(client, keys)), strict=True):
                if put.outcome is PutOutcome.stored:
                    stored.append(key)
        except KVStoreError as error:
            return type(error).__name__


def test_server_told_to_stop_under_load_saves_what_it_acknowledged_and_ends_with_0(
    server_process: ProcessMaker,
) -> None:
    process = server_process("--cpu", "64MiB", "--disk", "128MiB:disk", "--write", "evict")
    process.start()
    transports: tuple[TransportName, ...] = ("shm", "grpc", "shm", "grpc")
    clients = [
        Client(process.address, SMALL, ClientOptions(name, 16, DEADLINE_MS, retry_after_ms=20))
        for name in transports
    ]
    stored: list[list[ChunkKey]] = [[] for _ in clients]
    threads = [
        threading.Thread(target=put_until_refused, args=(client, 5000 * number, stored[number]))
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: min(map(len, stored)) > 40)
    status = process.terminate()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert status == 0
    assert process.output.endswith("stopped clean=true\n")
    process.start()
    everything = [key for keys in stored for key in keys]
    assert process.recovered_chunks >= len(everything)
    with Client(process.address, SMALL, OPTIONS) as client:
        for key in everything:
            assert_reads(client, [key])


@pytest.mark.parametrize(
    ("history", "lines"),
    [(PATH.read_bytes(), 0), (OLDER.read_bytes(), 1)],
    ids=["of today", "of the version before"],
)
def test_a_server_starts_clean_over_whatever_history_an_earlier_one_saved(
    server_process: ProcessMaker, history: bytes, lines: int
) -> None:
    process = server_process(
        *("--cpu", "16MiB", "--disk", "32MiB:disk", "--log-level", "warning", "--insecure")
    )
    path = process.socket_path.parent / "disk" / FILE_NAME
    path.parent.mkdir(mode=0o700)
    path.write_bytes(history)
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        assert_reads(client, store(client, 1, 4))
    assert process.terminate() == 0
    said = process.errors.splitlines()
    assert [line for line in said if "what was learned is lost" in line] == said
    assert len(said) == lines


@pytest.mark.parametrize("stored", [0, 1])
def test_server_of_memory_alone_stops_clean_unless_it_loses_something(
    server_process: ProcessMaker, stored: int
) -> None:
    process = server_process("--tiers", "cpu", "--cpu", "16MiB")
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        store(client, 1, stored)
        assert client.drain() is (stored == 0)
    assert process.terminate() == 0
    assert process.output.endswith(f"stopped clean={str(stored == 0).lower()}\n")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_client_of_a_killed_server_gets_errors_of_the_store_and_finds_the_next_one(
    server_process: ProcessMaker, transport: TransportName
) -> None:
    process = server_process("--cpu", "16MiB", "--disk", "32MiB:disk")
    process.start()
    options = ClientOptions(transport, 16, 5000, retry_after_ms=20)

    def is_reached() -> bool:
        with suppress(KVStoreError):
            return client.status().state == "serving"
        return False

    with Client(process.address, SMALL, options) as client:
        keys = keys_of(client, 1, 4)
        client.put_chunks(chunks_of(client, keys), durable=True)
        boot_id, lease = client.boot_id, client.lease(keys=keys)
        process.kill()
        for call in (lambda: client.get_chunks(keys), lambda: client.lookup(keys=keys), lease.get):
            with pytest.raises(KVStoreError):
                call()
        lease.release()
        process.start()
        assert process.recovered_chunks == 4
        assert eventually(is_reached)
        assert_reads(client, keys)
        assert client.boot_id != boot_id
        assert client.transport_name == transport


@pytest.mark.slow
def test_burst_of_two_thousand_chunks_of_a_megabyte_loses_none(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    if shutil.disk_usage(tmp_path).free < 4 << 30:
        pytest.skip("needs 4 GiB of disk")
    process = server_process("--cpu", "128MiB", "--disk", "2560MiB:disk")
    process.start()
    with Client(process.address, LARGE, ClientOptions("shm", 128, 60_000)) as client:
        prompts = [keys_of(client, seed, 20) for seed in range(100)]
        for keys in prompts:
            assert outcomes(client, chunks_of(client, keys)) == [PutOutcome.stored] * 20
        for keys in prompts:
            assert_reads(client, keys)
        counters = client.status().counters
        assert counters["put_stored_chunks"] == counters["get_chunks"] == 2000
        assert counters["dropped_victims"] == counters["put_refused_chunks"] == 0
        assert counters["evicted_chunks"] >= 2000 - 128  # reading evicts nothing
    assert process.terminate() == 0
