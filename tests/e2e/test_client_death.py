"""Clients killed with SIGKILL: whatever they held is free again, to the last byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import chunks_of, is_right, keys_of

from kvstore.client.options import TransportName

ROOT = Path(__file__).resolve().parents[2]
SILENT_S = 61
SILENT = ("--limits", "session_ttl_ms=60000", "--lease-ttl-ms", "86400000")
"""Leases that end with their session, which a busy machine keeps alive."""

HOLD = """
import sys, time
from helpers.bare_wire import Wire
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, chunks_of, frame_of, keys_of
from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

address, transport = sys.argv[1:]
client = Client(address, SMALL, ClientOptions(transport, 16, DEADLINE_MS))
keys = keys_of(client, 1, 4)
client.put_chunks(chunks_of(client, keys))
leases = [client.lease(keys=keys) for _ in range(3)]
assert len(leases[0].get()) == 4
terms = client._link.connected().session.terms
wire = Wire(
    Connection(address, 1),
    pb.OpenSessionResponse(session_id=terms.session_id, key_namespace=terms.namespace),
)
wire.call("Reserve", wire.reserve(2304, 2304, 2304))

def half_a_frame():
    frame = frame_of(wire.key(9), SMALL).tobytes()
    yield pb.PutRequest(session_id=terms.session_id, frame_bytes=len(frame), data=frame[:1000])
    print("holding", flush=True)
    time.sleep(600)

wire.connection.upload("Put", half_a_frame(), 600_000, pb.PutResponse)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that lease four chunks three times and have four puts open."""
    started: list[subprocess.Popen[str]] = []

    def start(server: LocalServer, transport: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, server.address, transport],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def kill(process: subprocess.Popen[str], server: LocalServer, silent_s: int) -> None:
    """Kill the only client of *server*; return when its session is over."""
    process.kill()
    process.wait()

    def is_over() -> bool:
        server.skip(silent_s)  # again: a heartbeat may still have been on its way
        return len(server.node.sessions) == 0

    assert eventually(is_over)


@pytest.mark.parametrize(
    ("transport", "silent_s"),
    [("shm", 0), ("grpc", SILENT_S)],
    ids=["shm by its socket", "grpc by its silence"],
)
def test_client_killed_while_it_holds_leases_and_open_puts_leaves_nothing(
    make_server: Callable[..., LocalServer],
    holder: Callable[[LocalServer, str], subprocess.Popen[str]],
    transport: TransportName,
    silent_s: int,
) -> None:
    server = make_server(*SILENT)
    process = holder(server, transport)
    assert eventually(lambda: server.usage().pending_puts == 4)
    held = server.usage()
    assert held.leases == 3
    assert held.tiers[0][1].reservations == 4
    kill(process, server, silent_s)
    after = server.settled()
    cpu = after.tiers[0][1]
    assert (cpu.chunks, cpu.reservations) == (4, 0)
    assert cpu.used_bytes < held.tiers[0][1].used_bytes
    client = server.connect(transport)
    keys = keys_of(client, 1, 4)
    found = client.get_chunks(keys)
    assert [is_right(client, *pair) for pair in zip(keys, found, strict=True)] == [True] * 4
    assert client.delete(keys=keys) == 4
    assert server.settled().tiers[0][1].used_bytes == 0
    assert [put.reason for put in client.put_chunks(chunks_of(client, keys))] == [""] * 4
