"""A vLLM engine waits for no server: one that hangs is noticed, and a slow load ends in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.server_process import ServerProcess
from helpers.slow_link import SlowLink
from helpers.vllm_pages import SHAPE, empty_pages, representation, writer
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import QUEUE_BYTES, Engine, options

from kvstore.client.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import worker as vllm_worker
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS
from kvstore.client.engines.vllm.messages import LoadSpec, Role, StepPlan
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.client.options import ClientOptions
from kvstore.client.session import FIRST_PACE_S, hangs, is_runnable, is_silent, peer_pid
from kvstore.proto.types import ChainDigest

PROMPT, OTHER, THIRD = (prompt_tokens(number, 200) for number in (1, 2, 3))

HANGS_S = 10.0
"""Half of the deadline of these engines; a hang costs some hundredths of a second."""


@pytest.fixture
def process(server_process: Callable[..., ServerProcess]) -> ServerProcess:
    server = server_process("--tiers", "cpu", "--cpu", "16MiB", "--bulk", "127.0.0.1:0")
    server.start()
    return server


def over(transport: Any) -> ClientOptions:
    return replace(options(retry_after_ms=300), transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_server_stopped_between_lookup_and_load_costs_no_deadline_and_is_asked_no_more(
    process: ServerProcess, start_at: Callable[..., Engine], transport: str
) -> None:
    engine = start_at(process.address, opts=over(transport))
    engine.run("a", PROMPT)
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert engine.load(request, blocks, 192) == set(blocks[:6])
        assert time.monotonic() - began < HANGS_S
        assert engine.scheduler._desk.is_down
        assert engine.workers[0].counted["lost_chunks"] == 3
    finally:
        process.send_signal(signal.SIGCONT)

    def is_back() -> bool:
        engine.scheduler.finished(FakeRequest("c", PROMPT))
        return engine.matched(FakeRequest("c", PROMPT)) == 192

    assert eventually(is_back), "the server is used again"
    again = engine.arrived("d", PROMPT, hit=192)
    assert engine.load(again, engine.blocks(200), 192) == set()


def test_neither_a_start_nor_a_load_waits_for_a_server_that_hung_before(
    process: ServerProcess,
) -> None:
    client = Client(process.address, representation(), over("auto"))
    worker = VllmWorker(Connector(client), SHAPE, QUEUE_BYTES)
    process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert worker.register(empty_pages(), writer(BLOCK_LAYOUTS[0])) == ""
        worker.load(StepPlan((LoadSpec("a", (ChainDigest(bytes(16)),), ((3, 4),)),)))
        assert worker.settled(HANGS_S)
        assert time.monotonic() - began < HANGS_S
        assert worker.failed_blocks() == {3, 4}
        report = worker.report()
        assert report is not None
        assert report.is_down
    finally:
        process.send_signal(signal.SIGCONT)
    worker.close()


# --- who hangs, and who does not

_LISTENS = """
import socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.bind(sys.argv[1])
link.listen()
print("up", flush=True)
while True:
    pass
"""


def test_a_process_that_does_not_answer_hangs_only_if_it_does_not_run_either(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "l.sock")
    listens = [sys.executable, "-c", _LISTENS, path]
    with subprocess.Popen(listens, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(path)
            pid = peer_pid(link)
        terms: Any = SimpleNamespace(socket_path=path, session_id=1)
        assert pid == process.pid
        assert is_runnable(pid)
        assert not hangs(terms, pid), "it is only busy"
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: not is_runnable(pid))
        assert hangs(terms, pid)
        process.kill()
    os.unlink(path)
    assert not is_runnable(pid)
    assert not hangs(terms, pid), "it is gone"


@pytest.mark.parametrize(("pace_s", "patience_s"), [(0.001, 0.010), (0.1, 0.3)])
def test_a_server_elsewhere_is_silent_only_beyond_what_its_heartbeats_take(
    pace_s: float, patience_s: float
) -> None:
    waited: list[float] = []

    def silent(within_s: float) -> bool:
        waited.append(within_s)
        return False

    session: Any = SimpleNamespace(pace_s=pace_s, connection=SimpleNamespace(answers=silent))
    assert is_silent(session.connection, session.pace_s)
    assert waited == pytest.approx([patience_s, patience_s * 2 / 3])
    answers = iter([False, True])
    session.connection.answers = lambda _: next(answers)
    assert not is_silent(session.connection, session.pace_s), "its second answer came"


# --- the watch itself


@pytest.mark.parametrize("arrives", [False, True])
def test_it_asks_again_until_the_load_is_over_unless_something_comes_all_the_time(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    engine, asked, looks, ended = start(), list[bool](), list[float](), threading.Event()

    def ask(_: Client) -> bool:
        asked.append(len(asked) >= 2)
        if len(asked) == 4:  # the first hang-up may have met the session before the load's
            ended.set()
        return asked[-1]

    def waiting(loads: Sequence[Any], within_s: float) -> Any:
        looks.append(within_s)
        if arrives:
            engine.workers[0]._note_arrival()
        return wait(loads, within_s)

    def read(*_: object) -> int:
        assert eventually(lambda: len(looks) >= 20) if arrives else ended.wait(20.0)
        return 3

    engine.run("stored", PROMPT)
    engine.workers[0]._watcher.submit(int).result(20.0)  # a session that opens is watched, too
    monkeypatch.setattr(vllm_worker, "AGAIN_S", 0.01)
    monkeypatch.setattr(vllm_worker, "wait", waiting)
    monkeypatch.setattr(Client, "end_if_hung", ask)
    monkeypatch.setattr(engine.workers[0]._connector, "read_into", read)
    request = engine.arrived("read", PROMPT, hit=192)
    engine.load(request, engine.blocks(200), 192)
    assert asked == ([] if arrives else [False, False, True, True])


def test_loads_behind_one_that_came_short_wait_no_deadline_more(
    start: Callable[..., Engine],
) -> None:
    """One thread loads: were each tried, the last of many would wait for the deadlines of all."""
    one, engine = start(), start()
    worker, client = engine.workers[0], engine.client
    waited_s = [0.0]
    worker._clock = lambda: time.perf_counter() + waited_s[0]
    for name, prompt in (("a", PROMPT), ("b", OTHER), ("c", THIRD)):
        one.run(name, prompt)

    def load(name: str, prompt: list[int], late_s: float) -> tuple[int, int]:
        """Return how many of a load's chunks were lost, and how many loads were late so far."""
        request, let_go = FakeRequest(name, list(prompt)), threading.Event()
        assert engine.matched(request) == 192
        if name == "lost":
            client.delete(keys=client.keys(prompt)[1:3])
        before = worker.counted["lost_chunks"]
        engine.scheduler.on_alloc(request, 192, [engine.blocks(200)])
        worker._loader.submit(let_go.wait)
        worker.load(engine.scheduler.build_plan(step(), lambda _: []))
        waited_s[0] += late_s
        let_go.set()
        assert worker.settled(20.0)
        return worker.counted["lost_chunks"] - before, worker.counted["late_loads"]

    late_s = DEADLINE_MS / 1000 + 1
    assert load("slow", THIRD, late_s) == (0, 0), "a long queue alone gives nothing up"
    assert load("lost", PROMPT, 0.0) == (2, 0)
    assert load("behind", OTHER, late_s) == (3, 1)
    assert load("next", OTHER, 0.0) == (0, 1), "who has not waited is loaded"
    assert load("after", THIRD, late_s) == (0, 1)


# --- behind a slow link


LONG = prompt_tokens(1, 400)
TOKEN_S = 1e-3
GRPC = replace(options(), transport="grpc")


@pytest.fixture
def link(server: LocalServer) -> Iterator[SlowLink]:
    link = SlowLink(server.node.port)
    yield link
    link.close()


@pytest.fixture
def behind(link: SlowLink, start_at: Callable[..., Engine]) -> Callable[..., Engine]:
    """Start engines behind the link."""

    def make(**role: Any) -> Engine:
        return start_at(link.address, role=Role(**role), opts=GRPC)

    return make


def test_a_server_that_nothing_comes_from_any_more_costs_no_deadline(
    behind: Callable[..., Engine], link: SlowLink
) -> None:
    engine = behind()
    engine.run("a", PROMPT)
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    link.bytes_per_s = 1.0
    began = time.monotonic()
    assert engine.load(request, blocks, 192) == set(blocks[:6])
    assert time.monotonic() - began < HANGS_S


# --- requests with a deadline: what loads too slowly is computed


def with_deadline(name: str, stated: object) -> FakeRequest:
    request = FakeRequest(name, LONG)
    request.kv_transfer_params = {"kvstore": {"first_token_ms": stated}}  # type: ignore[attr-defined]
    return request


def loaded(engine: Engine, request: FakeRequest) -> tuple[int, float]:
    """Have a request loaded; return how many chunks came and how long that took."""
    tokens = engine.matched(request)
    assert tokens > 0
    engine.scheduler.on_alloc(request, tokens, [engine.blocks(len(LONG))])
    spec = engine.scheduler._tracked[request.request_id].load
    assert spec is not None
    before, started_s = engine.workers[0].counted["loaded_chunks"], time.monotonic()
    engine.workers[0].load(type("Orders", (), {"loads": (spec,)})())
    assert eventually(lambda: request.request_id in engine.workers[0].finished_loads(is_idle=False))
    return engine.workers[0].counted["loaded_chunks"] - before, time.monotonic() - started_s


def test_over_a_slow_link_a_load_with_a_deadline_ends_while_computing_is_still_in_time(
    behind: Callable[..., Engine], link: SlowLink
) -> None:
    behind().run("a", LONG)
    engine = behind()
    engine.scheduler._lookups.learned.observe(100, 100 * TOKEN_S)
    engine.matched(FakeRequest("warm", LONG))
    # A session that is still being opened over so slow a link is given up as a hang.
    client = engine.workers[0]._connector.client
    assert eventually(lambda: client.is_connected)
    session = client._link.connected().session
    # The first measurement replaces the pace, later ones only raise it.
    assert eventually(lambda: session.pace_s != FIRST_PACE_S)
    link.bytes_per_s = 2000.0
    # So is one that turns this slow all at once. This one answered slowly all the time.
    session.pace_s = 1.0
    request = with_deadline("b", 300)
    chunks, took_s = loaded(engine, request)
    assert chunks < len(LONG) // 64
    assert took_s < 1.0
    assert engine.workers[0].counted["slow_chunks"] > 0
    report = engine.workers[0].report()
    assert report is not None
    assert not report.is_down
    engine.scheduler.on_report(report)
    assert engine.scheduler._tracked["b"].stored is None, "it is there: nothing to store again"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_what_a_token_takes_is_learned_from_steps_that_compute_prompts(
    behind: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    """Also where vLLM schedules a step when another is running still."""
    scheduler = behind(steps_ahead=steps_ahead).scheduler
    now_s = 100.0
    monkeypatch.setattr(scheduler, "_clock", lambda: now_s)
    running: deque[float] = deque()
    for number in range(40):
        prompt = {"a": 500 if number % 2 else 4000, "b": 1}
        answers = {f"d{one}": 1 for one in range(64)}
        for tokens, took_s in ((prompt, prompt["a"] * TOKEN_S), (answers, 0.01)):
            scheduler._learn_speed(tokens)
            running.append(took_s)
            if len(running) > steps_ahead:
                now_s += running.popleft()
        now_s += 60.0 if number == 7 and not steps_ahead else 0.0  # once a pause
    learned = scheduler._lookups.learned.model()
    assert learned is not None
    assert learned.token_s == pytest.approx(TOKEN_S)


def test_of_what_is_no_deadline_the_usual_one_holds(behind: Callable[..., Engine]) -> None:
    engine = behind(first_token_ms=700)
    engine.scheduler.on_new_request(with_deadline("a", "soon"))
    within = engine.scheduler._tracked["a"].deadline
    assert within is not None
    assert within.deadline_s == 0.7
    assert engine.scheduler.counted["bad_hints"] == 1
