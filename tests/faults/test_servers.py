"""Rows 1, 11, 12, 13 and 15: what happens to servers, from kills to clocks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from conftest import ProcessMaker
from faults.oracle import OracleFile, verified
from faults.tools import faketime_environment, join, kills, memory_limit, set_clock
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import LARGE, SMALL, chunks_of, keys_of, store
from helpers.redis_process import RedisProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChunkKey, PutOutcome

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = 4
OPTIONS = ClientOptions("grpc", 16, DEADLINE_MS, retry_after_ms=20)
HOUR_S = 3600

WRITE = """
import sys
from pathlib import Path
from faults.oracle import OracleFile
from helpers.prompts import SMALL, chunks_of, keys_of
from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import PutOutcome

address, path, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
oracle = OracleFile(path)
client = Client(address, SMALL, ClientOptions("grpc", 16, 5000, retry_after_ms=20))
for seed in range(first, first + 100_000):
    try:
        keys = keys_of(client, seed, 4)
        puts = client.put_chunks(chunks_of(client, keys), durable=bool(seed % 2))
    except KVStoreError:
        continue
    if all(put.outcome is not PutOutcome.refused for put in puts):
        oracle.note(seed, is_durable=bool(seed % 2))
"""


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@contextmanager
def reading(address: str, oracle: OracleFile) -> Iterator[list[int]]:
    """Read over shared memory what was put, whoever dies meanwhile; yield the counts of hits."""
    stop, hits, draw = threading.Event(), [0], random.Random(1)
    options = replace(OPTIONS, transport="shm")

    def read(client: Client) -> None:
        while not stop.is_set():
            with suppress(KVStoreError):
                for seed in draw.choices(oracle.seeds() or [0], k=20):
                    hits[0] += verified(client, keys_of(client, seed, CHUNKS))

    with Client(address, SMALL, options) as client, ThreadPoolExecutor(1) as pool:
        work = pool.submit(read, client)
        try:
            yield hits
        finally:
            stop.set()
            work.result()


def test_a_server_killed_under_load_keeps_what_the_oracle_was_told_and_no_stray_file(
    server_process: ProcessMaker, oracle: OracleFile, tmp_path: Path,
    amount: Callable[[int, int], int],
) -> None:  # fmt: skip
    disk = tmp_path / "disk"
    process = server_process("--cpu", "16MiB", "--disk", f"64MiB:{disk}")
    process.start()
    files = files_below(disk)
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    checked = 0
    for loop in range(amount(1, 200)):
        told = len(oracle.seeds(durable=True))
        command = [sys.executable, "-c", WRITE, process.address, str(tmp_path / "oracle.jsonl")]
        with (
            subprocess.Popen(
                [*command, str(100_000 * loop)], env={**os.environ, "PYTHONPATH": paths}
            ) as writer,
            reading(process.address, oracle) as hits,
        ):
            assert eventually(lambda told=told: len(oracle.seeds(durable=True)) > told + 10)  # type: ignore[misc]
            assert eventually(lambda hits=hits: hits[0] > 0)  # type: ignore[misc]
            process.kill()
            writer.kill()
        process.start()
        with Client(process.address, SMALL, OPTIONS) as client:
            owed = oracle.seeds(durable=True)
            for seed in owed[checked:] if loop % 20 else owed[-200:]:
                assert verified(client, keys_of(client, seed, CHUNKS)) == CHUNKS
            for seed in oracle.seeds()[-40:]:
                verified(client, keys_of(client, seed, CHUNKS))
            checked = len(owed)
        assert {name for name in files_below(disk) - files if "history" not in name} <= {"LOCK"}


def p99_s(client: Client, prompts: list[list[ChunkKey]], gets: int) -> float:
    """Return what the slowest of a hundred gets of one chunk takes, anywhere in the working set."""
    draw, took_s = random.Random(1), [0.0]
    for _ in range(gets):
        key = draw.choice(draw.choice(prompts))
        started = time.perf_counter()
        client.get_chunks([key])
        took_s.append(time.perf_counter() - started)
    return sorted(took_s)[99 * len(took_s) // 100]


def test_a_server_in_little_memory_serves_four_times_as_much_and_is_not_killed(
    server_process: ProcessMaker, amount: Callable[[int, int], int]
) -> None:
    limit, working_set = amount(320, 512) << 20, amount(640, 2048) << 20
    chunk = 1 << 20
    process = server_process("--cpu", "64MiB", "--disk", f"{2 * working_set >> 20}MiB:disk")
    process.start()
    with memory_limit(f"kvstore-{os.getpid()}", limit) as group:
        join(group, process.pid)
        options = ClientOptions("grpc", 128, DEADLINE_MS)
        with Client(process.address, LARGE, options) as client:
            prompts = [keys_of(client, seed, 16) for seed in range(working_set // chunk // 16)]
            some = chunks_of(client, prompts[0])
            for keys in prompts:
                chunks = some if keys is prompts[0] else chunks_of(client, keys)
                for put in client.put_chunks(chunks):
                    assert put.outcome is PutOutcome.stored
            there = sum(verified(client, keys) for keys in prompts[:: amount(8, 2)])
            assert there >= 16
            squeezed_s = p99_s(client, prompts, amount(0, 1000))
        assert kills(group) == 0
        (group.parent / "cgroup.procs").write_text(str(process.pid))
        with Client(process.address, LARGE, options) as client:
            free_s = p99_s(client, prompts, amount(0, 1000))
        assert squeezed_s <= 3 * free_s, (squeezed_s, free_s)
        print(f"p99 of a get of 1 MiB: {1000 * squeezed_s:.2f} ms, free {1000 * free_s:.2f} ms")
        assert process.terminate() == 0
        process.kill()


def test_a_clock_that_jumps_an_hour_ends_no_lease_early_and_no_lifetime_late(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    process = server_process(
        *("--cpu", "16MiB", "--disk", "32MiB:disk"),
        *("--lease-ttl-ms", "60000", "--limits", "session_ttl_ms=60000"),
    )
    process.environment = faketime_environment(tmp_path)
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        keys = store(client, 1, CHUNKS)
        stored_at = time.monotonic()
        short = store(client, 2, CHUNKS, Hints(ttl_ms=3000))
        with client.lease(keys=keys) as lease:
            for ahead_s in (HOUR_S, -HOUR_S, 0):
                set_clock(tmp_path, ahead_s)
                time.sleep(0.3)  # more than a tick
                assert len(lease.get()) == CHUNKS
                assert client.status().leases == 1
                if time.monotonic() - stored_at < 1.5:
                    assert client.lookup(keys=short).ready == CHUNKS
            assert eventually(lambda: client.lookup(keys=short).ready == 0)
            assert time.monotonic() - stored_at > 2.9
        set_clock(tmp_path, -HOUR_S)
    assert process.terminate() == 0
    set_clock(tmp_path, HOUR_S)
    process.start()
    with Client(process.address, SMALL, OPTIONS) as client:
        assert verified(client, keys) == CHUNKS
    assert process.terminate() == 0
    assert "died" not in process.errors


@pytest.mark.slow
@pytest.mark.usefixtures("only_long")
def test_a_folder_goes_to_an_older_build_and_back(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    older = older_build(tmp_path / "older")
    disk = tmp_path / "disk"
    for build in (ROOT, older, ROOT, older, ROOT):
        process = server_process("--cpu", "16MiB", "--disk", f"32MiB:{disk}")
        process.environment = {"PYTHONPATH": str(build / "src")}
        process.start()
        with Client(process.address, SMALL, OPTIONS) as client:
            for seed in range(3):
                assert verified(client, keys_of(client, seed, CHUNKS)) in (0, CHUNKS)
                client.put_chunks(chunks_of(client, keys_of(client, seed, CHUNKS)), durable=True)
                assert verified(client, keys_of(client, seed, CHUNKS)) == CHUNKS
        assert process.terminate() == 0
        process.kill()


def older_build(folder: Path) -> Path:
    """Return the tree as it was some commits ago; skip where the history is not here."""
    command = ["git", "-C", str(ROOT), "archive", "HEAD~20"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("no history to build an older version from: this is no full clone")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run([sys.executable, folder / "proto/native/build.py"], cwd=folder, check=True)
    return folder


def test_servers_restarted_in_turn_cost_their_clients_no_wrong_byte_and_end_with_0(
    server_process: ProcessMaker, own_redis: RedisProcess, amount: Callable[[int, int], int]
) -> None:
    own_redis.start()
    flags = (
        *("--tiers", "cpu,disk,redis", "--cpu", "16MiB"),
        *("--redis", own_redis.url, "--redis-timeout-ms", "20000"),
    )
    processes = [server_process(*flags, "--disk", "32MiB:disk") for _ in range(2)]
    for process in processes:
        process.start()
    stop, wrong, reads = threading.Event(), [], [0]
    addresses = [process.address for process in processes]

    def use(number: int) -> None:
        with Client(addresses[number], SMALL, OPTIONS) as client:
            while not stop.is_set():
                try:
                    keys = keys_of(client, reads[0] % 20, CHUNKS)
                    client.put_chunks(chunks_of(client, keys))
                    reads[0] += verified(client, keys)
                except KVStoreError:
                    time.sleep(0.01)
                except AssertionError as error:
                    wrong.append(str(error))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert eventually(lambda: reads[0] > 100)
        for turn in range(amount(2, 40)):
            process = processes[turn % 2]
            before = reads[0]
            assert process.terminate() == 0
            assert "stopped clean=true" in process.output
            process.kill()
            process.start()
            assert process.recovered_chunks
            assert eventually(lambda before=before: reads[0] > before)  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
