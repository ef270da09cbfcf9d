"""Clients used on both sides of a fork, or dropped: see ``tests/helpers/forking_client.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.server_process import ServerProcess

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "helpers" / "forking_client.py"
PATHS = (TESTS.parent / "src", TESTS)
TRANSPORTS = ("shm", "grpc", "tcp")
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("forks")
    sizes = ("--cpu", "64MiB", "--disk", f"64MiB:{folder / 'disk'}", "--max-sessions", "256")
    server = ServerProcess(folder, *sizes, "--bulk", "127.0.0.1:0")
    server.start()
    yield server
    server.kill()


def faults_of(server: ServerProcess, scenario: str, transport: str) -> list[str]:
    """Return what the program found wrong; that it crashed or hung, too."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), scenario, server.address, transport],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


SCENARIOS = {
    "grpc_13873_a_client_is_used_on_both_sides_of_a_fork": ("twice", TRANSPORTS),
    "grpc_13873_a_client_is_given_to_any_process_of_multiprocessing": ("methods", TRANSPORTS),
    "grpc_13873_a_connector_for_transformers_is_used_on_both_sides": ("connector", ["shm"]),
    "grpc_12455_a_child_that_closes_its_client_ends_nothing_of_the_parents": (
        "generations", TRANSPORTS,
    ),
    "grpc_13464_the_parents_calls_go_on_through_a_fork": ("busy", TRANSPORTS),
    "grpc_13464_a_call_that_a_fork_holds_up_ends_by_its_deadline": ("late", ["grpc"]),
    "grpc_13464_a_fork_does_not_wait_for_a_stream_of_events": ("followed", ["grpc"]),
    "py_lmdb_346_what_the_parent_holds_is_an_error_in_a_child": ("held", TRANSPORTS),
    "pytorch_39570_the_workers_of_a_data_loader_read_from_the_store": ("loader", ["shm", "grpc"]),
    "pytorch_39570_threads_inside_a_connector_leave_no_lock_held_in_the_child": ("inside", ["shm"]),
    "skein_179_clients_that_are_dropped_leave_nothing_open": ("dropped", TRANSPORTS),
    "grpc_6619_a_process_that_keeps_its_clients_leaves_sessions_for_others": ("kept", ["grpc"]),
}  # fmt: skip
"""What is tried by ``forking_client.py``, over which transports.

grpc#13873, #12455, #13464, pytorch#39570, py-lmdb#346: what was opened before a fork was used by
parent and child, which took each other's answers, hung or crashed. skein#179, grpc#6619, #21995:
clients that nobody closed kept threads and connections; here 300, on a server of 256 sessions.
"""


@pytest.mark.parametrize(
    ("scenario", "transport"),
    [
        pytest.param(scenario, transport, id=f"{name}-{transport}")
        for name, (scenario, transports) in SCENARIOS.items()
        for transport in transports
    ],
)
def test_nothing_goes_wrong_where(server: ServerProcess, scenario: str, transport: str) -> None:
    assert faults_of(server, scenario, transport) == []


def test_grpc_13464_a_hung_server_is_asked_for_no_longer_than_a_fork_waits(
    server: ServerProcess,
) -> None:
    """The thread that beats asked for longer than a fork waits: gRPC was lost to the child."""
    connection = Connection(server.address, retry_after_ms=1)
    connection.call("Status", pb.StatusRequest(), 2000, object)
    server.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert not connection.answers(4.0)
        assert time.monotonic() - began < 3.0
    finally:
        server.send_signal(signal.SIGCONT)
        connection.close()
