"""A server that hangs while a load waits for it is noticed long before the deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
from kvstore.client.engines.vllm import worker as vllm_watch
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS
from kvstore.client.engines.vllm.messages import LoadSpec, StepPlan
from kvstore.client.engines.vllm.worker import VllmWorker
from kvstore.client.options import ClientOptions
from kvstore.client.session import hangs, is_runnable, is_silent, peer_pid
from kvstore.proto.types import ChainDigest

PROMPT, OTHER, THIRD = (prompt_tokens(number, 200) for number in (1, 2, 3))

HANGS_S = 10.0
"""Half of the deadline of these engines; a hang costs some hundredths of a second."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    tmp_path.chmod(0o700)
    flags = ("--tiers", "cpu", "--cpu", "16MiB", "--bulk", "127.0.0.1:0", "--log-level", "error")
    server = ServerProcess(tmp_path, *flags)
    server.start()
    yield server
    server.kill()


def over(transport: Any) -> ClientOptions:
    return replace(options(retry_after_ms=300), transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_server_stopped_between_lookup_and_load_costs_no_deadline_and_is_asked_no_more(
    process: ServerProcess, transport: str
) -> None:
    engine = Engine(process.address, opts=over(transport))
    engine.run("a", PROMPT)
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
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
    again = FakeRequest("d", PROMPT)
    assert engine.matched(again) == 192
    assert engine.load(again, engine.blocks(200), 192) == set()
    engine.close()


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_the_first_load_of_an_engine_ends_soon_when_the_server_hangs(
    process: ServerProcess, transport: str
) -> None:
    first = Engine(process.address, opts=over(transport))
    first.run("a", PROMPT)
    engine = Engine(process.address, opts=over(transport))
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert engine.load(request, blocks, 192) == set(blocks[:6])
        assert time.monotonic() - began < HANGS_S
        assert engine.scheduler._desk.is_down
    finally:
        process.send_signal(signal.SIGCONT)
    first.close()
    engine.close()


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


def test_a_server_that_comes_after_the_engine_is_loaded_from(process: ServerProcess) -> None:
    process.kill()
    engine = Engine(process.address, opts=over("auto"))
    assert eventually(lambda: engine.scheduler._desk.is_down)
    process.start()
    other = Engine(process.address, opts=over("auto"))

    def matched(asked: Engine) -> int:
        asked.scheduler.finished(FakeRequest("b", PROMPT))
        return asked.matched(FakeRequest("b", PROMPT))

    assert eventually(lambda: matched(other) == 0 and not other.scheduler._desk.is_down)
    other.run("a", PROMPT)
    assert eventually(lambda: matched(engine) == 192)
    assert engine.load(FakeRequest("b", PROMPT), engine.blocks(200), 192) == set()
    other.close()
    engine.close()


def test_a_server_that_nothing_comes_from_any_more_costs_no_deadline(server: LocalServer) -> None:
    link = SlowLink(int(server.address.rpartition(":")[2]))
    engine = Engine(link.address, opts=over("grpc"))
    engine.run("a", PROMPT)
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    link.bytes_per_s = 1.0
    began = time.monotonic()
    assert engine.load(request, blocks, 192) == set(blocks[:6])
    assert time.monotonic() - began < HANGS_S
    link.close()
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_load_that_takes_its_time_is_not_ended(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    engine = Engine(server.address, opts=over(transport))
    engine.run("a", PROMPT)
    asked: list[bool] = []
    ask = Client.end_if_hung

    def noted(client: Client) -> bool:
        asked.append(ask(client))
        return asked[-1]

    monkeypatch.setattr(Client, "end_if_hung", noted)
    monkeypatch.setattr(
        "kvstore.client.session.PROBE_S", 10.0
    )  # a busy machine answers late, and does
    monkeypatch.setattr("kvstore.client.session.PULSE_S", 10.0)
    read_into = engine.workers[0]._connector.read_into

    def slow(*given: Any) -> int:
        assert eventually(lambda: len(asked) >= 2)
        return int(read_into(*given))

    engine.workers[0]._connector.read_into = slow
    request = FakeRequest("b", PROMPT)
    assert engine.matched(request) == 192
    assert engine.load(request, engine.blocks(200), 192) == set()
    assert not any(asked)
    engine.close()


# --- who hangs, and who does not

_LISTENS = """
import os, socket, sys, time
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.bind(sys.argv[1])
link.listen()
print("up", flush=True)
while sys.argv[2] == "runs":
    pass
sys.stdin.read()
"""


class Listener:
    """A process with a socket at which nobody answers; it *does* ``runs`` or ``sleeps``."""

    def __init__(self, folder: Path, does: str) -> None:
        self.path = str(folder / "l.sock")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LISTENS, self.path, does],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect(self.path)
            self.pid = peer_pid(link)

    @property
    def hangs(self) -> bool:
        terms: Any = SimpleNamespace(socket_path=self.path, session_id=1)
        return hangs(terms, self.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Callable[[str], Listener]]:
    made: list[Listener] = []

    def make(does: str) -> Listener:
        made.append(Listener(tmp_path, does))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_process_that_runs_and_does_not_answer_is_only_busy(
    listener: Callable[[str], Listener],
) -> None:
    one = listener("runs")
    assert one.pid == one.process.pid
    assert is_runnable(one.pid)
    assert not one.hangs


def test_a_process_that_neither_answers_nor_runs_hangs(
    listener: Callable[[str], Listener],
) -> None:
    one = listener("sleeps")
    assert eventually(lambda: not is_runnable(one.pid))
    assert one.hangs


def test_a_process_that_is_stopped_hangs_whatever_it_did(
    listener: Callable[[str], Listener],
) -> None:
    one = listener("runs")
    one.process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: not is_runnable(one.pid))
    assert one.hangs


def test_a_process_that_is_gone_does_not_hang(listener: Callable[[str], Listener]) -> None:
    one = listener("sleeps")
    one.close()
    os.unlink(one.path)
    assert not one.hangs
    assert not is_runnable(one.pid)


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


def test_a_server_whose_second_answer_comes_is_not_silent() -> None:
    answers = iter([False, True])
    link = SimpleNamespace(answers=lambda _: next(answers))
    session: Any = SimpleNamespace(pace_s=0.0, connection=link)
    assert not is_silent(session.connection, session.pace_s)


# --- the watch itself


class Asked:
    """What stands in for ``Client.end_if_hung``; answers are given beforehand."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.count = 0
        self.ended = threading.Event()

    def __call__(self) -> bool:
        self.count += 1
        answer = self.answers.pop(0) if self.answers else False
        if answer:
            self.ended.set()
        return answer


def reading(engine: Engine, monkeypatch: pytest.MonkeyPatch, read: Callable[..., int]) -> None:
    """Have a load of 192 tokens read by *read*, and wait until it is over."""
    engine.run("stored", PROMPT)
    monkeypatch.setattr(engine.workers[0]._connector, "read_into", read)
    request = FakeRequest("read", PROMPT)
    assert engine.matched(request) == 192
    engine.load(request, engine.blocks(200), 192)


def test_it_asks_again_until_the_load_is_over(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_watch, "AGAIN_S", 0.01)
    asked, engine = Asked(False, False, True), Engine(server.address)
    monkeypatch.setattr(Client, "end_if_hung", asked.__call__)

    def silent(*_: object) -> int:
        assert asked.ended.wait(20.0)
        return 3

    reading(engine, monkeypatch, silent)
    assert asked.count == 3
    engine.close()


def test_what_brings_something_all_the_time_is_not_asked_about(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, engine, looks = Asked(), Engine(server.address), 0
    monkeypatch.setattr(Client, "end_if_hung", asked.__call__)

    def arriving(loads: Sequence[Any], within_s: float) -> Any:
        """Something comes whenever it is waited for."""
        nonlocal looks
        looks += 1
        engine.workers[0]._note_arrival()
        return wait(loads, within_s)

    def read(*_: object) -> int:
        assert eventually(lambda: looks >= 20)
        return 3

    monkeypatch.setattr(vllm_watch, "wait", arriving)
    reading(engine, monkeypatch, read)
    assert asked.count == 0
    engine.close()


def test_loads_behind_one_that_came_short_wait_no_deadline_more(server: LocalServer) -> None:
    """One thread loads: were each tried, the last of many would wait for the deadlines of all."""
    one, engine = Engine(server.address), Engine(server.address)
    worker, client = engine.workers[0], engine.workers[0]._connector.client
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
    one.close()
    engine.close()
