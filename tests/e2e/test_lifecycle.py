"""A server's life: draining under load, kills, restarts, and traces that real servers play."""

from __future__ import annotations

import json
import os
import random
import select
import threading
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import ProcessMaker
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import SMALL, assert_reads, chunks_of, keys_of, store
from helpers.redis_process import free_port
from helpers.server_process import ServerProcess

from kvstore.cli.__main__ import main
from kvstore.cli.bench import record, replay_trace
from kvstore.cli.server import fetch_status
from kvstore.cli.simulate import make_blocks, read_trace, replay_blocks
from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError, LeaseExpiredError
from kvstore.proto.types import ChunkKey, PutOutcome

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


@pytest.mark.parametrize("disk_write", ["through", "evict"])
def test_server_told_to_stop_under_load_saves_what_it_acknowledged_and_ends_with_0(
    server_process: ProcessMaker, disk_write: str
) -> None:
    process = server_process("--cpu", "64MiB", "--disk", "128MiB:disk", "--write", disk_write)
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


def test_a_log_that_nobody_reads_holds_up_no_call_and_its_next_line_counts_what_was_lost(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "log")
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_NONBLOCK)
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", "--log-level", "info")
    process.launcher = ["sh", "-c", f'exec "$0" "$@" 2>{tmp_path / "log"}']
    process.start()
    with closing(Connection(process.address, DEADLINE_MS)) as connection:

        def be_refused() -> None:
            with pytest.raises(LeaseExpiredError):
                connection.call("Lookup", pb.LookupRequest(), DEADLINE_MS, pb.LookupResponse)

        with suppress(BlockingIOError):
            while os.write(log, b"\n" * select.PIPE_BUF):
                pass
        for _ in range(3):
            be_refused()
        os.read(log, 1 << 20)
        be_refused()
    assert process.terminate() == 0
    assert b"lost=3" in os.read(log, 1 << 20)
    os.close(log)


def test_a_terminal_that_nobody_reads_holds_up_no_call(server_process: ProcessMaker) -> None:
    screen, terminal = os.openpty()
    os.set_blocking(terminal, False)
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", "--log-level", "info")
    process.launcher = ["sh", "-c", f'exec "$0" "$@" 2>{os.ttyname(terminal)}']
    process.start()
    with suppress(BlockingIOError):
        while os.write(terminal, b"."):
            pass
    os.read(screen, 64)  # some room, not that of a line
    with closing(Connection(process.address, DEADLINE_MS)) as connection:
        for _ in range(3):
            with pytest.raises(LeaseExpiredError):
                connection.call("Lookup", pb.LookupRequest(), DEADLINE_MS, pb.LookupResponse)
    assert process.terminate() == 0
    os.close(terminal)
    os.close(screen)


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_server_runs_without_its_standard_streams(
    server_process: ProcessMaker, closed: str
) -> None:
    process = server_process("--tiers", "cpu", "--cpu", "16MiB")
    process.port = free_port()
    process.launcher = ["sh", "-c", f'exec "$0" "$@" {closed}']
    process.spawn()
    assert eventually(partial(is_served, process.address))
    assert process.terminate() == 0


def test_a_setting_of_a_tier_that_is_not_used_is_in_the_log(server_process: ProcessMaker) -> None:
    process = server_process("--tiers", "cpu", "--disk", "1GiB", "--log-level", "warning")
    process.start()
    assert "add disk to --tiers, or leave --disk out" in process.errors


def is_served(address: str) -> bool:
    with suppress(KVStoreError):
        return fetch_status(address).state == "serving"
    return False


# --- traces


CHUNK_BYTES = 60 << 10
REQUESTS = 260


def make_trace(path: Path, seed: int) -> Path:
    """Conversations that grow by a block or three a turn, from one shared root; some come back."""
    rng = random.Random(seed)
    chats: list[list[int]] = [[0] for _ in range(24)]
    new = 1
    lines = []
    for turn in range(REQUESTS):
        at = min(int(rng.expovariate(0.15)), len(chats) - 1)
        if len(chats[at]) > 24:
            chats[at] = [0]
        for _ in range(rng.randrange(1, 4)):
            chats[at].append(new)
            new += 1
        lines.append(line_of(1000 * turn, chats[at]))
    path.write_text("".join(lines))
    return path


def line_of(at: int, blocks: list[int]) -> str:
    size = 512 * len(blocks)
    row = {"timestamp": at, "input_length": size, "output_length": 8, "hash_ids": blocks}
    return json.dumps(row) + "\n"


def fill(process: ServerProcess, folder: Path) -> int:
    """Put more chunks than fit; return how many did."""
    path = folder / "fill.jsonl"
    path.write_text("".join(line_of(at, [at]) for at in range(200)))
    done = replay_trace(process.address, path, CHUNK_BYTES)
    assert (done.stored, done.hit_blocks) == (200, 0)
    (tier,) = fetch_status(process.address).tiers
    return tier.chunks


def simulated(path: Path, policy: str, blocks: int) -> tuple[int, int]:
    """Return the blocks hit and asked for, on a tier of so many."""
    trace = make_blocks(read_trace(path))
    outcome = replay_blocks(trace, policy, str(512 * blocks), kv_bytes_per_token=1)
    asked = sum(one.known for one in trace.requests)
    return round(outcome.block_hit_rate * asked), asked


def test_a_real_server_hits_what_the_simulator_says(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    sizes = ("--tiers", "cpu", "--cpu", "8MiB", "--policy", "lru")
    process = server_process(*sizes, "--limits", "load_headroom_percent=0")
    process.start()
    capacity = fill(process, tmp_path)
    assert 60 < capacity < 200
    path = make_trace(tmp_path / "trace.jsonl", 1)
    done = replay_trace(process.address, path, CHUNK_BYTES)
    hits, asked = simulated(path, "lru", capacity)
    more, _ = simulated(path, "lru", capacity + 8)
    assert 0.2 < hits / asked < 0.8
    assert more > hits, "a trace on which the size does not matter shows nothing"
    assert (done.hit_blocks, done.blocks, done.refused) == (hits, asked, 0)
    assert process.terminate() == 0


def test_what_is_recorded_from_a_server_is_the_trace_that_was_played(
    server_process: ProcessMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = server_process("--tiers", "cpu", "--cpu", "8MiB")
    process.start()
    path, copy = make_trace(tmp_path / "trace.jsonl", 3), tmp_path / "copy.jsonl"
    now_s = [0.0]

    def play(_: float) -> None:
        """What happens while the recorder sleeps."""
        flags = ("--address", process.address, "--chunk-bytes", str(CHUNK_BYTES), "--json")
        with pytest.raises(SystemExit) as ended:
            main(["trace", "replay", str(path), *flags])
        assert not ended.value.code
        now_s[0] = 2.0

    made = record(process.address, copy, 1.0, 512, lambda: now_s[0], play)
    played = json.loads(capsys.readouterr().out)
    assert (made.lookups, made.lost) == (played["requests"], 0) == (REQUESTS, 0)
    mine, theirs = make_blocks(read_trace(path)), make_blocks(read_trace(copy))
    assert [one.chain for one in theirs.requests] == [one.chain for one in mine.requests]
    times_s = [one.time_s for one in theirs.requests]
    assert times_s == sorted(times_s)
    assert simulated(copy, "lru", 90) == simulated(path, "lru", 90)
