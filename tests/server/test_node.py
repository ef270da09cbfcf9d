"""A whole node and its process: what stops its start, what it shows, that it cleans up."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
import torch
from conftest import ProcessMaker, ServerMaker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import LARGE, SMALL, chunks_of, keys_of, outcomes
from helpers.redis_process import free_port
from helpers.server_process import ServerProcess
from structlog.testing import capture_logs

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError, UnauthenticatedError
from kvstore.proto.types import PutOutcome
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.marconi import MarconiEviction
from kvstore.server.eviction.quotas import PartitionedEviction
from kvstore.server.node import SERVICE_NAME, run_jobs
from kvstore.server.security.rate_limits import LINES_PER_S
from kvstore.server.settings import settings as config_module
from kvstore.server.settings.settings import load_config
from kvstore.server.settings.values import GIB, MIB
from kvstore.server.wiring import make_policies

States = health_pb2.HealthCheckResponse


@pytest.fixture
def channel(server: LocalServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_gpu_tier_without_what_it_needs_is_refused_with_the_fix(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match=r"host has none; start with --tiers cpu"):
        make_server("--tiers", "gpu,cpu")
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TierUnavailableError, match=r"has 0 CUDA devices.*install a CUDA build"):
        make_server("--tiers", "gpu,cpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TierUnavailableError, match=r"install kvstore-server\[gpu\]"):
        make_server("--tiers", "gpu,cpu")


def test_metrics_page_on_a_taken_port_is_refused(make_server: ServerMaker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(InvalidRequestError, match=f"http='{where}': Address already in"):
            make_server("--http", where)


def test_second_server_on_one_port_is_refused(make_server: ServerMaker, tmp_path: Path) -> None:
    server, socket_path = make_server(), tmp_path / "second.sock"
    with pytest.raises(TierUnavailableError, match=f"cannot listen on {server.address}; is it"):
        make_server("--listen", server.address, "--tiers", "cpu", "--socket", str(socket_path))
    assert not socket_path.exists()


def test_namespaces_follow_from_the_secret_alone(make_server: ServerMaker, tmp_path: Path) -> None:
    spaces = []
    for number, secret in enumerate((b"a" * 16, b"a" * 16, b"b" * 16)):
        file = tmp_path / f"secret{number}"
        file.write_bytes(secret)
        flags = ("--tiers", "cpu", "--secret-file", str(file))
        server = make_server(*flags, "--socket", str(tmp_path / f"{number}.sock"))
        spaces.append(server.connect().namespace)
    assert spaces[0] == spaces[1] != spaces[2]


def test_health_is_serving_by_every_name_that_probes_use_until_the_server_stops(
    server: LocalServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, store = health_pb2_grpc.HealthStub(channel), server.node.store
    drain, seen = store.drain, list[int]()

    def status(name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(stub.Check(request, timeout=20).status)

    def ask_and_drain(deadline: float) -> bool:
        if not seen:  # the second time nobody answers any more
            seen.append(status("readiness"))
        return drain(deadline)

    monkeypatch.setattr(store, "drain", ask_and_drain)
    assert {status(one) for one in ("", SERVICE_NAME, "readiness", "liveness")} == {States.SERVING}
    server.stop()
    assert seen[0] == States.NOT_SERVING
    with pytest.raises(grpc.RpcError):
        status("readiness")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("worker", ["maintenance", "learner", "socket", "streams"])
def test_health_fails_once_a_worker_died(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    server = make_server("--tiers", "cpu", "--bulk", "127.0.0.1:0")
    node = server.node
    assert node.is_alive()
    assert node.unix_server is not None

    def end(*_: object) -> None:
        raise SystemExit

    if worker == "maintenance":
        node._jobs.append(end)
    elif worker == "learner":
        monkeypatch.setattr(node._content_reader, "step", end)
    elif worker == "streams":
        monkeypatch.setattr(node.bulk, "_sweep", end)
    else:
        node.unix_server.close()
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_serving(name: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=name)
            return bool(stub.Check(request, timeout=20).status == States.SERVING)

        for name in ("liveness", "readiness"):
            assert eventually(lambda name=name: not is_serving(name))  # type: ignore[misc]


def test_stopping_under_open_calls_ends_them_and_leaves_nothing_running(
    server: LocalServer,
) -> None:
    client = server.connect("grpc")
    keys = keys_of(client, 1, 20)
    client.put_chunks(chunks_of(client, keys))
    replies = server.dial().stream(
        "List", pb.ListRequest(session_id=next(iter(server.node.sessions.by_id))), 20_000
    )
    next(replies)
    assert server.stop()
    replies.close()


def test_a_job_that_fails_stops_neither_itself_nor_others() -> None:
    runs = Counter[str]()

    def fail() -> None:
        runs["failing"] += 1
        raise OSError("no disk")

    for _ in range(2):
        run_jobs([fail, lambda: runs.update(["other"])])
    assert runs == {"failing": 2, "other": 2}


TESTS = Path(__file__).resolve().parents[1]


def test_no_thread_of_a_server_under_load_takes_a_lock_while_it_has_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "lock_watch.py"), str(tmp_path)],
        env={"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


CANNOT_START = 2


def fail_to_start(process: ServerProcess) -> str:
    """Spawn the process, which must end with status 2; return the one line it wrote."""
    process.spawn()
    assert process.wait() == CANNOT_START
    assert process.output == ""
    assert "Traceback" not in process.errors
    words_of_grpc = ("WARNING: All log messages before absl", "E0000 ")  # of a port not bound
    ours = [line for line in process.errors.splitlines() if not line.startswith(words_of_grpc)]
    assert len(ours) == 1
    assert ours[0].startswith("kvstore-server: ")
    return ours[0]


def test_what_stops_a_start_is_told_in_one_sentence_and_a_running_server_serves_on(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    disk, cpu = f"32MiB:{tmp_path / 'server0' / 'disk'}", ("--tiers", "cpu")
    first = server_process("--cpu", "16MiB", "--disk", disk)
    first.start()
    socket_taken = "another server listens there; stop it or choose --socket"
    for flags, sentence in [
        (
            ("--disk", f"900TiB:{tmp_path / 'disk'}"),
            "give the tier less capacity, or a larger disk",
        ),
        ((*cpu, "--listen", "192.0.2.1:7420", "--insecure"), "cannot listen on 192.0.2.1:7420"),
        ((*cpu, "--cpus", "4"), "see kvstore-server --help"),
        (("--cpu", "16MiB", "--disk", disk), "tier 'disk'"),
        ((*cpu, "--socket", str(first.socket_path)), socket_taken),
    ]:
        assert sentence in fail_to_start(server_process(*flags))
    with Client(first.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        assert client.transport_name == "shm"
    assert first.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_server_with_status_0(
    server_process: ProcessMaker, tmp_path: Path, number: signal.Signals
) -> None:
    disk = f"32MiB:{tmp_path / 'server0' / 'disk'}"
    process = server_process("--cpu", "16MiB", "--disk", disk, "--insecure")
    process.start()
    assert "tiers=cpu,disk recovered_chunks=0" in process.output
    assert process.socket_path.exists()
    process.send_signal(number)
    assert process.wait() == 0
    assert process.output.endswith("kvstore-server stopped clean=true\n")
    assert not process.socket_path.exists()
    assert process.errors == ""


def test_strangers_do_not_fill_the_log(server_process: ProcessMaker, tmp_path: Path) -> None:
    keys = KeyRing(tmp_path / "keys")
    keys.make("acme")
    pages = ("127.0.0.1", free_port())
    flags = ("--log-format", "json", "--log-level", "info", "--auth-keys", str(keys.path))
    process = server_process("--tiers", "cpu", *flags, "--http", f"{pages[0]}:{pages[1]}")
    process.start()
    for _ in range(50):
        with socket.create_connection(pages) as link:
            link.sendall(b"\x16\x03 no request\r\n\r\n")
            assert link.recv(1000).startswith(b"HTTP/1.1 400")
    started = time.monotonic()
    with closing(Connection(process.address, retry_after_ms=1)) as connection:
        for _ in range(500):
            with pytest.raises(UnauthenticatedError):
                connection.call("Status", pb.StatusRequest(), 20_000, pb.StatusResponse)
    seconds = time.monotonic() - started
    time.sleep(0.1)  # one more may be written
    with (
        closing(Connection(process.address, retry_after_ms=1)) as connection,
        pytest.raises(UnauthenticatedError),
    ):
        connection.call("Status", pb.StatusRequest(), 20_000, pb.StatusResponse)
    assert process.terminate() == 0
    records = [json.loads(line) for line in process.errors.splitlines()]
    assert {record["error"] for record in records} == {"UnauthenticatedError"}
    assert len(records) <= LINES_PER_S * (2 + seconds)
    assert len(records) + sum(record.get("left_out", 0) for record in records) == 501


def test_no_file_of_the_server_is_another_user_s_to_read_whatever_the_umask(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    folder, audit = tmp_path / "disk", str(tmp_path / "audit")
    folder.mkdir()
    folder.chmod(0o755)
    flags = ("--disk", f"32MiB:{folder}", "--audit-log", audit, "--log-level", "warning")
    process = server_process("--cpu", "16MiB", *flags)
    process.launcher = ["sh", "-c", 'umask 000; exec "$@"', "sh"]
    process.start()
    with Client(process.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        keys = keys_of(client, 1, 2)
        client.put_chunks(chunks_of(client, keys))
        client.get_chunks(keys)
    assert f"chmod 700 {folder}" in process.errors
    assert process.terminate() == 0
    files = [*folder.rglob("*"), Path(audit)]
    assert {"FORMAT", "history.kvh", "audit", "data.mdb"} <= {path.name for path in files}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_a_folder_of_the_user_s_that_others_can_write_to_costs_the_socket_and_not_the_start(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", "--log-level", "warning")
    process.has_socket = False
    process.environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    process.start()
    assert "no Unix socket: clients of this host use the network" in process.errors
    assert "others could replace the socket in" in process.errors
    with Client(process.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        (put,) = client.put_chunks(chunks_of(client, keys_of(client, 1, 1)))
        assert put.outcome is PutOutcome.stored


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one_and_too_low_a_one_is_told(
    server_process: ProcessMaker, kind: str
) -> None:
    few = "--max-sessions", "32", "--log-level", "warning"
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", *few)
    limit = "ulimit -Sn 256" if kind == "soft" else "ulimit -n 256"
    process.launcher = ["sh", "-c", f'{limit}; exec "$@"', "sh"]
    process.start()
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
    assert soft == hard
    assert (hard == "256") is (kind == "hard")
    assert process.errors.count("too few file descriptors for --max-sessions") == (kind == "hard")


CAPACITIES = {"cpu": 64 * MIB, "disk": GIB}


def test_each_tier_has_the_policy_that_was_named_for_it() -> None:
    config = load_config(["--policy", "marconi,disk=lru"])
    metadata, policies = make_policies(config, CAPACITIES)
    assert isinstance(policies["cpu"], MarconiEviction)
    assert isinstance(policies["disk"], LruEviction)
    assert metadata.policy_names == {"cpu": "marconi", "disk": "lru"}


def test_quotas_put_partitions_over_the_policy_of_each_tier() -> None:
    flags = ["--tenant-quotas", "acme/disk=1MiB", "--category-terms", "batch=10s:2MiB,chat=5s"]
    flags += ["--tenant-limits", "acme=7:0:0"]
    metadata, policies = make_policies(load_config(flags), CAPACITIES)
    cpu, disk = policies["cpu"], policies["disk"]
    assert isinstance(cpu, PartitionedEviction)
    assert isinstance(disk, PartitionedEviction)
    assert [quota.limit_bytes for quota in cpu.quotas] == [0, 0, 2 * MIB]
    assert [quota.limit_bytes for quota in disk.quotas] == [0, MIB, 2 * MIB]
    assert [quota.limit_chunks for quota in cpu.quotas] == [0, 7, 0]
    assert metadata.category_ttls_s == {"batch": 10.0, "chat": 5.0}


def test_more_than_a_tier_has_cannot_be_guaranteed() -> None:
    flags = ["--tenant-quotas", "a=60MiB:40MiB,b=60MiB:40MiB"]
    with pytest.raises(InvalidRequestError, match=r"tenant_quotas=.*64MiB of tier 'cpu'"):
        make_policies(load_config(flags), CAPACITIES)


STORED, REFUSED = PutOutcome.stored, PutOutcome.refused
LARGE_CHUNKS = ClientOptions("auto", chunk_tokens=1024, deadline_ms=DEADLINE_MS)
"""Of 8 MiB."""


def test_a_chunk_larger_than_the_disk_stays_in_memory(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    server = make_server(
        "--cpu", "64MiB", "--limits", "cpu_slab_bytes=16MiB", "--disk", f"4MiB:{tmp_path / 'disk'}"
    )
    client = server.connect("auto", LARGE, LARGE_CHUNKS)
    keys = keys_of(client, 1, 2)
    assert outcomes(client, chunks_of(client, keys)) == [STORED] * 2
    server.settled()
    assert client.lookup(keys=keys).tiers == ("cpu", "cpu")
    assert dict(server.usage().tiers)["disk"].chunks == 0
    durable = client.put_chunks(chunks_of(client, keys_of(client, 2, 1)), durable=True)
    assert [one.outcome for one in durable] == [REFUSED]


def test_a_server_that_stops_does_not_say_that_a_worker_died(make_server: ServerMaker) -> None:
    server = make_server("--tiers", "cpu")
    node = server.node
    waits = threading.Event()

    def end_behind_the_learner() -> None:
        waits.set()
        node._stopping.wait()
        node._learner.join()

    node._jobs.insert(0, end_behind_the_learner)
    with capture_logs() as lines:
        assert waits.wait(20)
        server.stop()
    assert [line for line in lines if line["log_level"] == "error"] == []
