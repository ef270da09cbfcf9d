"""Stores of vLLM engines: copied before blocks are written to again, and announced to others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import BLOCK_TOKENS
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import Engine

from kvstore.client.engines.vllm.blocks import BlockGather, Staged
from kvstore.client.engines.vllm.messages import LoadSpec, Role, taken_blocks

Start = Callable[..., Engine]
PROMPT, OTHER = prompt_tokens(1, 200), prompt_tokens(2, 200)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Nothing is copied or sent meanwhile, but what the engine's own thread copies."""
    let_go = threading.Event()
    engine.workers[0]._storer.submit(let_go.wait)
    try:
        yield
    finally:
        let_go.set()


def test_blocks_that_another_request_gets_are_copied_before_it_is_computed(start: Start) -> None:
    engine = start()
    blocks = engine.blocks(200)
    with held(engine):
        engine.computed("a", PROMPT, blocks)
        engine.computed("b", OTHER, blocks[::-1])
    assert engine.workers[0].settled(20.0)
    assert start().run("c", PROMPT) == 192
    assert start().run("d", OTHER) == 192


def test_blocks_that_a_load_gets_are_copied_before_it_begins(start: Start) -> None:
    start().run("a", OTHER)
    engine = start()
    blocks = engine.blocks(200)
    with held(engine):
        engine.computed("b", PROMPT, blocks)
        other = FakeRequest("c", list(OTHER))
        assert engine.matched(other) == 192
        engine.scheduler.on_alloc(other, 192, [blocks])
        plan = engine.scheduler.build_plan(step(), lambda _: [])
        engine.workers[0].save_before_overwrite(plan)
        engine.wipe(blocks, value=9.0)  # as far as the load might have come
    assert engine.workers[0].settled(20.0)
    assert start().run("d", PROMPT) == 192


def test_an_engine_that_does_not_say_what_it_gives_out_has_everything_copied(start: Start) -> None:
    engine = start()
    worker = engine.workers[0]
    silent = step(b=1)
    del silent.scheduled_cached_reqs
    with held(engine):
        engine.computed("a", PROMPT)
        worker.save_before_overwrite(engine.scheduler.build_plan(silent, lambda _: []))
        assert None not in [one.copy.result for one in worker._storing]
    assert worker.settled(20.0)


def test_a_step_waits_for_a_copy_that_is_under_way(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, take = start(), BlockGather.take
    began, go_on = threading.Event(), threading.Event()

    def slow(copied: BlockGather, tables: list[list[int]]) -> Staged | None:
        began.set()
        go_on.wait(20.0)
        return take(copied, tables)

    monkeypatch.setattr(BlockGather, "take", slow)
    blocks = engine.blocks(200)
    engine.computed("a", PROMPT, blocks)
    assert began.wait(20.0)
    thread = threading.Thread(target=engine.computed, args=("b", OTHER, blocks))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    go_on.set()
    thread.join(20.0)
    assert engine.workers[0].settled(20.0)
    assert start().run("c", PROMPT) == 192
    assert start().run("d", OTHER) == 192


def test_a_copy_that_fails_is_not_stored_and_harms_no_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    blocks = engine.blocks(200)
    with monkeypatch.context() as patched:
        patched.setattr(BlockGather, "take", Mock(side_effect=MemoryError))
        with held(engine):
            engine.computed("a", PROMPT, blocks)
            engine.computed("b", OTHER, blocks)
        assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["gone_chunks"] == 6
    assert start().matched(FakeRequest("c", list(PROMPT))) == 0


def test_however_blocks_go_round_what_is_stored_is_what_was_computed(start: Start) -> None:
    choose = random.Random(1)
    engine, pool = start(), list(range(1, 15))
    prompts = [prompt_tokens(number, 200) for number in range(6)]
    for number, tokens in enumerate(prompts):
        with held(engine):
            for name, part in ("first", tokens), ("second", prompt_tokens(100 + number, 130)):
                engine.computed(f"{name}{number}", part, choose.sample(pool, 7))
            if choose.random() < 0.5:  # a step of a request that goes on beside it
                engine.workers[0].save_before_overwrite(
                    engine.scheduler.build_plan(step(x=1), lambda _: [])
                )
    assert engine.workers[0].settled(20.0)
    reader = start()
    for number, tokens in enumerate(prompts):
        assert reader.run(f"again{number}", tokens) == 192


def test_blocks_given_out_are_those_of_new_and_old_requests_zeroed_copied_and_loaded() -> None:
    output = step([[1, 2], [3]])
    output.scheduled_new_reqs = [
        SimpleNamespace(block_ids=([4], [0, 5]), num_computed_tokens=0),
        SimpleNamespace(
            block_ids=([11, 12, 1], [13, 14, 2]), num_computed_tokens=2 * BLOCK_TOKENS + 3
        ),
    ]
    output.new_block_ids_to_zero = [6]
    output.kv_cache_block_copies = [SimpleNamespace(src_block_id=7, dst_block_id=8)]
    load = LoadSpec("a", (), ((9,), (10,)))
    found = taken_blocks(output, [load], BLOCK_TOKENS)
    assert found == frozenset([0, 1, 2, 3, 4, 5, 6, 8, 9, 10]), "without those found in its cache"


# --- prefill in one engine, decode in another: what is announced is waited for


PREFILL = Role(loads=False, handover_ms=60_000)
DECODE = Role(stores=False, wait_ms=60_000)


def announced(start: Start, server: LocalServer) -> Engine:
    """Return a prefill engine at which PROMPT has arrived, and nothing been computed of it."""
    engine = start(role=PREFILL)
    engine.scheduler.on_new_request(FakeRequest("first", list(PROMPT)))
    assert eventually(lambda: server.counter("announced_puts") == 3)
    return engine


def waiting(start: Start, server: LocalServer) -> tuple[Engine, FakeRequest]:
    """Return a decode engine that waits for PROMPT."""
    engine = start(role=DECODE)
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
    assert decode.load(request, decode.blocks_for(200, 192), 192) == set()


@pytest.mark.parametrize("ends", ["engine", "prompt"])
def test_an_engine_that_goes_or_a_prompt_that_is_given_up_is_not_waited_for(
    start: Start, server: LocalServer, ends: str
) -> None:
    prefill = announced(start, server)
    decode, request = waiting(start, server)
    if ends == "engine":
        prefill.close()
    else:
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
    start: Start, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = start(role=PREFILL)
    desk, hold = prefill.scheduler._desk, threading.Event()
    find = desk._find
    monkeypatch.setattr(desk, "_find", lambda digests: hold.wait(20.0) and find(digests))
    prefill.scheduler.on_new_request(FakeRequest("first", list(PROMPT)))
    assert eventually(lambda: desk._threads._queue.empty())
    prefill.scheduler.finished(FakeRequest("first", list(PROMPT)))
    hold.set()
    assert eventually(lambda: not desk._waiting)
    start(role=DECODE).arrived("second", PROMPT)
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
    engine = start(role=PREFILL)
    request = FakeRequest("first", list(PROMPT))
    engine.scheduler.on_new_request(request)
    tracked = engine.scheduler._tracked["first"]
    assert eventually(lambda: tracked.lookup.result is not None)
    plan = engine.step(request, engine.blocks(200), 200)
    assert [spec.hints.handover_ms for spec in plan.stores] == [60_000]
