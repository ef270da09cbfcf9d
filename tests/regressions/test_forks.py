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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_grpc_13873_a_client_is_used_on_both_sides_of_a_fork(
    server: ServerProcess, transport: str
) -> None:
    """grpc#13873, #12455 and #13464, pytorch#39570, py-lmdb#346: what was opened before a fork was
    used by parent and child, which took each other's answers, hung or crashed."""
    assert faults_of(server, "twice", transport) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_grpc_12455_a_child_that_closes_its_client_ends_nothing_of_the_parents(
    server: ServerProcess, transport: str
) -> None:
    """Children of children too, those that never used theirs, and one that ends at sys.exit."""
    assert faults_of(server, "generations", transport) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_grpc_13464_the_parents_calls_go_on_through_a_fork(
    server: ServerProcess, transport: str
) -> None:
    """Of a fork while threads are inside gRPC: "Other threads are currently calling into gRPC"."""
    assert faults_of(server, "busy", transport) == []


def test_grpc_13464_a_call_that_a_fork_holds_up_ends_by_its_deadline(server: ServerProcess) -> None:
    """A fork waits for calls that run, and holds up the others meanwhile."""
    assert faults_of(server, "late", "grpc") == []


def test_grpc_13464_a_fork_does_not_wait_for_a_stream_of_events(server: ServerProcess) -> None:
    """It never ends by itself, and no call was made for as long as the fork waited."""
    assert faults_of(server, "followed", "grpc") == []


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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_py_lmdb_346_what_the_parent_holds_is_an_error_in_a_child(
    server: ServerProcess, transport: str
) -> None:
    """Leases and their views, layered puts and gets, and streams of events."""
    assert faults_of(server, "held", transport) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_grpc_13873_a_client_is_given_to_any_process_of_multiprocessing(
    server: ServerProcess, transport: str
) -> None:
    """By fork, forkserver and spawn, for which it is pickled."""
    assert faults_of(server, "methods", transport) == []


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_pytorch_39570_the_workers_of_a_data_loader_read_from_the_store(
    server: ServerProcess, transport: str
) -> None:
    """pytorch#39570: workers that inherit an open gRPC channel hang."""
    assert faults_of(server, "loader", transport) == []


def test_grpc_13873_a_connector_for_transformers_is_used_on_both_sides_of_a_fork(
    server: ServerProcess,
) -> None:
    assert faults_of(server, "connector", "shm") == []


def test_pytorch_39570_a_fork_while_threads_are_inside_a_connector_leaves_no_lock_held_in_the_child(
    server: ServerProcess,
) -> None:
    assert faults_of(server, "inside", "shm") == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_skein_179_clients_that_are_dropped_leave_nothing_open(
    server: ServerProcess, transport: str
) -> None:
    """skein#179, grpc#6619, #21995: clients that nobody closed kept threads and connections."""
    assert faults_of(server, "dropped", transport) == []


def test_grpc_6619_a_process_that_keeps_its_clients_leaves_sessions_for_others(
    server: ServerProcess,
) -> None:
    """300 clients that one process never closes, on a server of 256 sessions without keys."""
    assert faults_of(server, "kept", "grpc") == []
