"""Rows 9 and 10: clients that are killed, hostile, or many at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import ProcessMaker, ServerMaker
from faults.oracle import verified
from faults.tools import resident_bytes
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, frame_of, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey

ROOT = Path(__file__).resolve().parents[2]
CHUNKS = 4
RECLAIM_S = 2.0
TRIES = 4

HOLD = """
import sys, time
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, chunks_of, keys_of
from kvstore.client import Client, ClientOptions, PlannedChunk

address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
clients = []
for seed in range(first, first + count):
    client = Client(address, SMALL, ClientOptions("shm", 16, DEADLINE_MS))
    keys = keys_of(client, 1, 4)
    lease = client.lease(keys=keys)
    assert len(lease.get()) == 4
    chunks = chunks_of(client, keys_of(client, seed, 4))
    put = client.put_chunk_layers([PlannedChunk(one.key, 16, parent=one.parent) for one in chunks])
    put.layer(0, [chunk.tensors[0][0] for chunk in chunks])
    clients.append((client, lease, put))
print("holding", flush=True)
time.sleep(600)
"""


SILENT = """
import sys, time
from helpers.bare_wire import Wire
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, frame_of, keys_of
from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

client = Client(sys.argv[1], SMALL, ClientOptions("grpc", 16, DEADLINE_MS))
lease = client.lease(keys=keys_of(client, 1, 4))
terms = client._link.connected().session.terms
own = pb.OpenSessionResponse(session_id=terms.session_id, key_namespace=terms.key_namespace)
wire = Wire(Connection(sys.argv[1], 1), own)
wire.call("Reserve", wire.reserve(2304, 2304, 2304))

def half_a_frame():
    frame = frame_of(wire.key(9), SMALL).tobytes()
    yield pb.PutRequest(session_id=terms.session_id, frame_bytes=len(frame), data=frame[:1000])
    print("holding", flush=True)
    time.sleep(600)

wire.connection.upload("Put", half_a_frame(), 600_000, pb.PutResponse)
"""


@contextmanager
def holding(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run *program* until it holds all that it will."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def kill_one(server: LocalServer) -> Callable[[int, int], float]:
    """Start a process that holds leases and puts, kill it; return how long they outlived it."""

    def kill(first_seed: int, count: int) -> float:
        with holding(HOLD, server.address, str(first_seed), str(count)) as process:
            assert server.usage().leases == count
            process.kill()
            started = time.monotonic()
            assert eventually(lambda: server.usage().leases == 0)
            return time.monotonic() - started

    return kill


def test_what_killed_clients_held_is_free_within_two_seconds_to_the_last_byte(
    server: LocalServer, kill_one: Callable[[int, int], float], amount: Callable[[int, int], int]
) -> None:
    client = server.connect("shm")
    keys = store(client, 1, CHUNKS)
    before = server.settled()
    seeds = count(100, 10)

    def is_in_time() -> bool:
        took_s = kill_one(next(seeds), 10)
        assert eventually(lambda: len(server.node.sessions) == 1)
        after = server.settled()
        assert after.tiers[0] == before.tiers[0]
        return took_s < RECLAIM_S

    for _ in range(amount(1, 50)):
        assert any(is_in_time() for _ in range(TRIES)), "a busy machine is late, but not always"
    assert verified(client, keys) == CHUNKS


def test_what_a_killed_client_without_a_socket_held_is_free_when_its_session_is_over(
    make_server: ServerMaker,
) -> None:
    # Leases that end with their session, which a busy machine keeps alive.
    server = make_server("--limits", "session_ttl_ms=60000", "--lease-ttl-ms", "86400000")
    client = server.connect("shm")
    keys = store(client, 1, CHUNKS)
    before = server.settled()
    with holding(SILENT, server.address) as process:
        assert eventually(lambda: server.usage().pending_puts == 4)
        held = server.usage()
        assert (held.leases, held.tiers[0][1].reservations) == (1, 4)
        process.kill()

    def is_over() -> bool:
        server.skip(61)  # again: a heartbeat may still have been on its way
        return len(server.node.sessions) == 1

    assert eventually(is_over)
    assert server.settled().tiers[0] == before.tiers[0]
    assert verified(client, keys) == CHUNKS


def test_connections_that_send_a_byte_now_and_then_hold_nobody_up(
    server: LocalServer, amount: Callable[[int, int], int]
) -> None:
    client = server.connect("grpc")
    slow = [socket.create_connection(("127.0.0.1", server.node.port)) for _ in range(200)]
    try:
        for turn in range(amount(5, 100)):
            for link in slow:
                with suppress(OSError):
                    link.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[turn : turn + 1] or b"x")
            assert verified(client, store(client, turn, CHUNKS)) == CHUNKS
    finally:
        for link in slow:
            link.close()


def test_a_flood_of_streams_is_refused_by_name_and_the_server_keeps_its_size(
    server_process: ProcessMaker, amount: Callable[[int, int], int]
) -> None:
    process = server_process("--cpu", "16MiB", "--disk", "32MiB:disk", "--workers", "4")
    process.start()
    with Client(process.address, SMALL, ClientOptions("grpc", 16, DEADLINE_MS)) as client:
        keys = store(client, 1, CHUNKS)
        terms = client._link.connected().session.terms
        before = resident_bytes(process.pid)
        with grpc.insecure_channel(process.address) as channel:
            put: Any = channel.stream_unary("/kvstore.v1.KVStore/Put", None, None)
            over = threading.Event()
            frame = frame_of(keys_of(client, 2, 1)[0], SMALL).tobytes()

            def endless() -> Iterator[bytes]:
                first = pb.PutRequest(
                    session_id=terms.session_id, frame_bytes=len(frame), data=frame[:1000]
                )
                yield first.SerializeToString()
                over.wait(DEADLINE_MS / 1000)

            calls = [put.future(endless(), timeout=20) for _ in range(amount(200, 10_000))]
            assert eventually(lambda: sum(call.done() for call in calls) > len(calls) // 2)
            codes = {call.code() for call in calls if call.done()}
            refused = grpc.StatusCode.RESOURCE_EXHAUSTED
            # Those that are begun wait for what does not come, and are ended to make room.
            assert codes - {grpc.StatusCode.CANCELLED} == {refused}
            over.set()
            for call in calls:
                call.cancel()
        assert eventually(lambda: answers(client, keys) == CHUNKS)
        assert resident_bytes(process.pid) - before < 100 << 20


def answers(client: Client, keys: list[ChunkKey]) -> int:
    try:
        return verified(client, keys)
    except KVStoreError:
        return -1
