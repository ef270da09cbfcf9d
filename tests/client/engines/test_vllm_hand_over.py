"""Prefill in one engine, decode in another: what is announced is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import Engine

from kvstore.client.engines.vllm.messages import Role, VllmSettings
from kvstore.proto.errors import InvalidRequestError

PREFILL = Role(loads=False, handover_ms=60_000)
DECODE = Role(stores=False, wait_ms=60_000)
PROMPT, OTHER = prompt_tokens(1, 200), prompt_tokens(2, 200)

Start = Callable[..., Engine]


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start engines on the server, closed in the end."""

    def make(role: Role) -> Engine:
        engine = Engine(server.address, role=role)
        request.addfinalizer(engine.close)
        return engine

    return make


def announced(start: Start, server: LocalServer) -> Engine:
    """Return a prefill engine at which PROMPT has arrived, and nothing been computed of it."""
    engine = start(PREFILL)
    engine.scheduler.on_new_request(FakeRequest("first", list(PROMPT)))
    assert eventually(lambda: server.counter("announced_puts") == 3)
    return engine


def waiting(start: Start, server: LocalServer) -> tuple[Engine, FakeRequest]:
    """Return a decode engine that waits for PROMPT."""
    engine = start(DECODE)
    request = FakeRequest("second", list(PROMPT))
    engine.scheduler.on_new_request(request)
    assert eventually(lambda: server.counter("waited_lookups") == 1)
    assert engine.scheduler.matched_tokens(request, 0) is None
    return engine, request


def test_a_decode_engine_waits_for_what_a_prefill_engine_promised(
    start: Start, server: LocalServer
) -> None:
    prefill = announced(start, server)
    decode, request = waiting(start, server)
    prefill.run("first", PROMPT)
    assert decode.matched(request) == 192
    assert decode.load(request, decode.room_for(200, 192), 192) == set()


def test_who_waits_holds_up_nobody_else(start: Start, server: LocalServer) -> None:
    start(Role()).run("other", OTHER)
    announced(start, server)
    decode, request = waiting(start, server)
    assert decode.matched(FakeRequest("third", list(OTHER))) == 192
    assert decode.scheduler.matched_tokens(request, 0) is None


def test_a_prefill_engine_that_goes_is_not_waited_for(start: Start, server: LocalServer) -> None:
    prefill = announced(start, server)
    decode, request = waiting(start, server)
    prefill.close()
    assert decode.matched(request) == 0
    assert decode.scheduler.counted["miss_absent"] == 1


def test_what_nobody_promised_is_not_waited_for(start: Start, server: LocalServer) -> None:
    assert start(DECODE).matched(FakeRequest("first", list(PROMPT))) == 0
    assert server.counter("waited_lookups") == 0


def test_a_prompt_that_is_given_up_is_not_waited_for(start: Start, server: LocalServer) -> None:
    prefill = announced(start, server)
    decode, request = waiting(start, server)
    prefill.scheduler.finished(FakeRequest("first", list(PROMPT)))
    assert decode.matched(request) == 0
    assert decode.scheduler.counted["miss_absent"] == 1


def test_a_prompt_that_is_preempted_is_waited_for_again_once_it_goes_on(
    start: Start, server: LocalServer
) -> None:
    prefill = announced(start, server)
    decode, request = waiting(start, server)
    output = step()
    output.preempted_req_ids = {"first"}
    prefill.scheduler.build_plan(output, lambda _: [])
    assert decode.matched(request) == 0
    first = FakeRequest("first", list(PROMPT), num_preemptions=1)
    prefill.scheduler.matched_tokens(first, 0)
    assert eventually(lambda: server.counter("announced_puts") == 6)


def test_a_prompt_given_up_before_it_was_looked_up_is_not_waited_for(
    start: Start, server: LocalServer
) -> None:
    prefill = start(PREFILL)
    desk, hold = prefill.scheduler._desk, threading.Event()
    find, desk._find = desk._find, lambda digests: find(digests) if hold.wait(20.0) else None
    prefill.scheduler.on_new_request(FakeRequest("first", list(PROMPT)))
    assert eventually(lambda: desk._threads._queue.empty())
    prefill.scheduler.finished(FakeRequest("first", list(PROMPT)))
    hold.set()
    assert eventually(lambda: not desk._waiting)
    assert start(DECODE).matched(FakeRequest("second", list(PROMPT))) == 0
    assert server.counter("waited_lookups") == 0


def test_what_another_request_promised_too_is_waited_for_all_the_same(
    start: Start, server: LocalServer
) -> None:
    prefill = announced(start, server)
    longer = [*PROMPT[:192], *OTHER[:70]]
    prefill.scheduler.on_new_request(FakeRequest("longer", longer))
    assert eventually(lambda: server.counter("announced_puts") == 4)
    prefill.scheduler.finished(FakeRequest("first", list(PROMPT)))
    assert eventually(lambda: not prefill.scheduler._desk._waiting)
    decode, request = waiting(start, server)
    prefill.run("longer", longer)
    assert decode.matched(request) == 192


def test_chunks_there_is_no_room_for_are_not_waited_for(start: Start, server: LocalServer) -> None:
    prefill = announced(start, server)
    worker = prefill.workers[0]
    worker._queue_bytes = 1
    decode, request = waiting(start, server)
    prefill.run("first", PROMPT)
    report = worker.report()
    assert report is not None
    assert len(report.unstored) == 2
    prefill.scheduler.on_report(report)
    assert decode.matched(request) == 64


def test_stores_of_a_prefill_engine_ask_to_be_kept_until_they_were_read(start: Start) -> None:
    engine = start(PREFILL)
    request = FakeRequest("first", list(PROMPT))
    engine.scheduler.on_new_request(request)
    tracked = engine.scheduler._tracked["first"]
    assert eventually(lambda: tracked.lookup.result is not None)
    plan = engine.step(request, engine.blocks(200), 200)
    assert [spec.hints.handover_ms for spec in plan.stores] == [60_000]


@pytest.mark.parametrize("name", ["handover_ms", "wait_ms"])
def test_times_that_no_server_allows_stop_the_start(name: str) -> None:
    for value in (-1, 600_001):
        with pytest.raises(InvalidRequestError, match=name):
            VllmSettings.of({name: value})
