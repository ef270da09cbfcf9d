"""A whole node: what stops its start, what it shows of itself, and that it cleans up."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.local_server import LocalServer, eventually
from helpers.prompts import chunks_of, keys_of

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.server.node import SERVICE_NAME, run_jobs
from kvstore.server.settings import settings as config_module

ServerMaker = Callable[..., LocalServer]
States = health_pb2.HealthCheckResponse


@pytest.fixture
def channel(server: LocalServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def taken_port() -> tuple[socket.socket, int]:
    """Return a listening socket and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_tier_on_a_torch_without_cuda_is_refused_with_the_fix(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", tmp_path)
    with pytest.raises(TierUnavailableError, match=r"sees 0 CUDA devices.*install a CUDA build"):
        make_server("--tiers", "gpu,cpu")


def test_gpu_tier_without_torch_is_refused_with_the_fix(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TierUnavailableError, match=r"install kvstore-server\[gpu\]"):
        make_server("--tiers", "gpu,cpu")


def test_metrics_page_on_a_taken_port_is_refused(make_server: ServerMaker) -> None:
    listener, port = taken_port()
    with (
        listener,
        pytest.raises(InvalidRequestError, match=f"http='127.0.0.1:{port}': Address already in"),
    ):
        make_server("--http", f"127.0.0.1:{port}")


def test_health_is_serving_by_every_name_that_probes_use(channel: grpc.Channel) -> None:
    for name in ["", SERVICE_NAME, "readiness", "liveness"]:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status == (
            States.SERVING
        )


def test_health_turns_not_serving_before_the_server_stops(
    server: LocalServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, store = health_pb2_grpc.HealthStub(channel), server.node.store
    request, drain = health_pb2.HealthCheckRequest(service="readiness"), store.drain
    seen: list[int] = []

    def ask_and_drain(deadline: float) -> bool:
        if not seen:  # the second time nobody answers any more
            seen.append(stub.Check(request, timeout=20).status)
        return drain(deadline)

    monkeypatch.setattr(store, "drain", ask_and_drain)
    assert stub.Check(request, timeout=20).status == States.SERVING
    server.stop()
    assert seen[0] == States.NOT_SERVING
    with pytest.raises(grpc.RpcError):
        stub.Check(request, timeout=20)


def test_health_fails_once_a_worker_died(server: LocalServer, channel: grpc.Channel) -> None:
    plane = server.node.unix_server
    assert plane is not None
    plane.close()
    stub = health_pb2_grpc.HealthStub(channel)

    def status(name: str) -> int:
        reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
        return int(reply.status)

    for name in ("liveness", "readiness"):
        assert eventually(lambda name=name: status(name) == States.NOT_SERVING)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("worker", ["maintenance", "learner"])
def test_health_fails_once_a_thread_of_the_node_died(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    server = make_server("--tiers", "cpu")
    node = server.node
    assert node.is_alive()

    def end(*_: object) -> None:
        raise SystemExit

    if worker == "maintenance":
        node._jobs.append(end)
    else:
        monkeypatch.setattr(node._content_reader, "step", end)
    assert eventually(lambda: not node.is_alive())
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("liveness", "readiness"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert eventually(
                lambda request=request: (  # type: ignore[misc]
                    stub.Check(request, timeout=20).status == States.NOT_SERVING
                )
            )


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
