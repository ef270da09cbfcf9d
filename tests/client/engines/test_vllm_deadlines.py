"""vLLM's requests with a deadline: what loads too slowly is computed, and nothing waits for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.slow_link import SlowLink
from helpers.vllm_pages import HYBRID, SHAPE
from helpers.vllm_stand_ins import FakeRequest
from helpers.vllm_steps import Engine, options

from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import Role, VllmSettings, deadline_ms_of, hints_of
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import Hints

PROMPT = prompt_tokens(1, 400)
TOKEN_S = 1e-3
GRPC = replace(options(), transport="grpc")


@pytest.fixture
def link(server: LocalServer) -> Iterator[SlowLink]:
    link = SlowLink(server.node.port)
    yield link
    link.close()


@pytest.fixture
def start(link: SlowLink, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Start engines behind the link, closed in the end."""

    def make(shape: KVCacheShape = SHAPE, **role: Any) -> Engine:
        engine = Engine(link.address, shape=shape, role=Role(**role), opts=GRPC)
        request.addfinalizer(engine.close)
        return engine

    return make


def with_deadline(name: str, stated: object) -> FakeRequest:
    request = FakeRequest(name, PROMPT)
    request.kv_transfer_params = {"kvstore": {"first_token_ms": stated}}  # type: ignore[attr-defined]
    return request


def loaded(engine: Engine, request: FakeRequest) -> tuple[int, float]:
    """Have a request loaded; return how many chunks came and how long that took."""
    tokens = engine.matched(request)
    assert tokens > 0
    engine.scheduler.on_alloc(request, tokens, [engine.blocks(len(PROMPT))])
    spec = engine.scheduler._tracked[request.request_id].load
    assert spec is not None
    before, started_s = engine.workers[0].counted["loaded_chunks"], time.monotonic()
    engine.workers[0].load(type("Orders", (), {"loads": (spec,)})())
    assert eventually(lambda: request.request_id in engine.workers[0].finished_loads(is_idle=False))
    return engine.workers[0].counted["loaded_chunks"] - before, time.monotonic() - started_s


def test_over_a_slow_link_a_load_with_a_deadline_ends_while_computing_is_still_in_time(
    start: Callable[..., Engine], link: SlowLink
) -> None:
    start().run("a", PROMPT)
    engine = start()
    engine.scheduler._lookups.learned.observe(100, 100 * TOKEN_S)
    engine.matched(FakeRequest("warm", PROMPT))
    # A session that is still being opened over so slow a link is given up as a hang.
    client = engine.workers[0]._connector.client
    assert eventually(lambda: client.is_connected)
    link.bytes_per_s = 2000.0
    # So is one that turns this slow all at once. This one answered slowly all the time.
    client._link.connected().session.pace_s = 1.0
    request = with_deadline("b", 300)
    chunks, took_s = loaded(engine, request)
    assert chunks < len(PROMPT) // 64
    assert took_s < 1.0
    assert engine.workers[0].counted["slow_chunks"] > 0
    report = engine.workers[0].report()
    assert report is not None
    assert not report.is_down
    engine.scheduler.on_report(report)
    assert engine.scheduler._tracked["b"].stored is None, "it is there: nothing to store again"


def test_over_a_fast_link_a_load_with_a_deadline_brings_everything(
    start: Callable[..., Engine],
) -> None:
    start().run("a", PROMPT)
    engine = start(first_token_ms=5000)
    engine.scheduler._lookups.learned.observe(100, 1.0)
    assert loaded(engine, FakeRequest("b", PROMPT))[0] == len(PROMPT) // 64
    assert engine.workers[0].failed_blocks() == set()


def test_models_with_windows_are_loaded_whole_whatever_the_deadline(
    start: Callable[..., Engine],
) -> None:
    start(shape=HYBRID).run("a", PROMPT)
    assert start(shape=HYBRID, first_token_ms=50).run("b", PROMPT) > 0


def test_what_a_token_takes_is_learned_from_steps_that_compute_prompts(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start().scheduler
    now_s = 100.0
    monkeypatch.setattr(scheduler, "_clock", lambda: now_s)
    for number in range(20):
        scheduler._learn_speed({"a": 500, "b": 1})
        now_s += 500 * TOKEN_S
        scheduler._learn_speed({f"d{one}": 1 for one in range(64)})  # a step of answers
        now_s += 60.0 if number == 7 else 0.01  # and once a pause
    learned = scheduler._lookups.learned.model()
    assert learned is not None
    assert learned.token_s == pytest.approx(TOKEN_S)


def test_steps_that_are_scheduled_ahead_are_told_apart(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM schedules the next step when the one before it has ended and another is running."""
    scheduler = start(steps_ahead=1).scheduler
    now_s = 100.0
    monkeypatch.setattr(scheduler, "_clock", lambda: now_s)
    running: deque[int] = deque()
    for number in range(40):
        scheduler._learn_speed({"a": 500 if number % 2 else 4000})
        running.append(500 if number % 2 else 4000)
        if len(running) == 2:
            now_s += running.popleft() * TOKEN_S
    learned = scheduler._lookups.learned.model()
    assert learned is not None
    assert learned.token_s == pytest.approx(TOKEN_S)


@pytest.mark.parametrize("stated", [-1, "soon", 1.5, True, 1 << 40])
def test_what_is_no_deadline_is_refused_by_name_and_the_usual_one_holds(
    start: Callable[..., Engine], stated: object
) -> None:
    with pytest.raises(InvalidRequestError, match="first_token_ms"):
        deadline_ms_of(with_deadline("a", stated), 0)
    engine = start(first_token_ms=700)
    engine.scheduler.on_new_request(with_deadline("a", stated))
    within = engine.scheduler._tracked["a"].deadline
    assert within is not None
    assert within.deadline_s == 0.7
    assert engine.scheduler.counted["bad_hints"] == 1


def test_a_deadline_is_no_hint_and_may_be_a_setting() -> None:
    assert hints_of(with_deadline("a", 300)) == Hints()
    assert deadline_ms_of(with_deadline("a", 300), 900) == 300
    assert deadline_ms_of(FakeRequest("a", PROMPT), 900) == 900
    assert VllmSettings.of({"first_token_ms": 900}).first_token_ms == 900
    with pytest.raises(InvalidRequestError, match="first_token_ms=-1: give 0 to"):
        VllmSettings.of({"first_token_ms": -1})
