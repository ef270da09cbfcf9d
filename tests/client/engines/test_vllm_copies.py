"""What is stored is copied before its blocks are written to again, whoever gets them, and when."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import BLOCK_TOKENS, HEAD_DIM, HEADS
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import Engine

from kvstore.client.engines.vllm import blocks as vllm_copies
from kvstore.client.engines.vllm.blocks import BlockGather, Staged
from kvstore.client.engines.vllm.messages import LoadSpec, taken_blocks

Start = Callable[..., Engine]

CHUNK_BYTES = 3 * 64 * 2 * HEADS * HEAD_DIM * 4
"""Of three layers of float32."""

PROMPT, OTHER = prompt_tokens(1, 200), prompt_tokens(2, 200)


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start engines on the server, closed in the end."""

    def make() -> Engine:
        engine = Engine(server.address)
        request.addfinalizer(engine.close)
        return engine

    return make


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Nothing is copied or sent meanwhile, but what the engine's own thread copies."""
    let_go = threading.Event()
    engine.workers[0]._storer.submit(let_go.wait)
    try:
        yield
    finally:
        let_go.set()


def computed(engine: Engine, name: str, tokens: list[int], blocks: list[int]) -> FakeRequest:
    """Have a prompt that is not stored computed in one step."""
    request = FakeRequest(name, list(tokens))
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, blocks, len(tokens))
    return request


def test_blocks_that_another_request_gets_are_copied_before_it_is_computed(start: Start) -> None:
    engine = start()
    blocks = engine.blocks(200)
    with held(engine):
        computed(engine, "a", PROMPT, blocks)
        computed(engine, "b", OTHER, blocks[::-1])
    assert engine.workers[0].settled(20.0)
    assert start().run("c", PROMPT) == 192
    assert start().run("d", OTHER) == 192


def test_blocks_that_a_load_gets_are_copied_before_it_begins(start: Start) -> None:
    start().run("a", OTHER)
    engine = start()
    blocks = engine.blocks(200)
    with held(engine):
        computed(engine, "b", PROMPT, blocks)
        other = FakeRequest("c", list(OTHER))
        assert engine.matched(other) == 192
        engine.scheduler.on_alloc(other, 192, [blocks])
        plan = engine.scheduler.build_plan(step(), lambda _: [])
        engine.workers[0].save_before_overwrite(plan)
        for whole in engine.pages[0].values():
            whole[torch.tensor(blocks)] = 9.0  # as far as the load might have come
    assert engine.workers[0].settled(20.0)
    assert start().run("d", PROMPT) == 192


def test_blocks_that_nobody_else_gets_are_not_copied_by_the_engine(start: Start) -> None:
    engine = start()
    worker = engine.workers[0]
    with held(engine):
        computed(engine, "a", PROMPT, engine.blocks(200))
        computed(engine, "b", OTHER, engine.blocks(200))
        assert [one.copy.result for one in worker._storing] == [None] * 6
    assert worker.settled(20.0)
    assert worker.counted["stored_chunks"] == 6


@pytest.mark.parametrize(("batch_bytes", "puts"), [(1 << 20, [6]), (3 * CHUNK_BYTES, [3, 3])])
def test_what_requests_leave_together_is_put_together_up_to_a_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, puts: list[int]
) -> None:
    monkeypatch.setattr(vllm_copies, "BATCH_BYTES", batch_bytes)
    engine, seen = start(), list[int]()
    connector = engine.workers[0]._connector
    write_each = connector.write_each

    def noted(chunks: Callable[[], list[object]], hints: object) -> object:
        seen.append(len(chunks()))
        return write_each(chunks, hints)

    connector.write_each = noted
    with held(engine):
        computed(engine, "a", PROMPT, engine.blocks(200))
        computed(engine, "b", OTHER, engine.blocks(200))
    assert engine.workers[0].settled(20.0)
    assert seen == puts
    assert start().run("c", OTHER) == 192


def test_what_two_registrations_copied_is_put_apart_each_by_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sent = start(), list[tuple[object, int]]()
    worker = engine.workers[0]
    send, old = worker._send, worker._side

    def noted(batch: Sequence[Any]) -> None:
        sent.append((batch[0].side, len(batch)))
        send(batch)

    monkeypatch.setattr(worker, "_send", noted)
    with held(engine):
        computed(engine, "a", PROMPT, engine.blocks(200))
        new = worker._side = copy.copy(old)
        computed(engine, "b", OTHER, engine.blocks(200))
    assert worker.settled(20.0)
    assert sent == [(old, 3), (new, 3)]
    assert worker.counted["stored_chunks"] == 6


def test_an_engine_that_does_not_say_what_it_gives_out_has_everything_copied(start: Start) -> None:
    engine = start()
    worker = engine.workers[0]
    silent = step(b=1)
    del silent.scheduled_cached_reqs
    with held(engine):
        computed(engine, "a", PROMPT, engine.blocks(200))
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
    computed(engine, "a", PROMPT, blocks)
    assert began.wait(20.0)
    thread = threading.Thread(target=computed, args=(engine, "b", OTHER, blocks))
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
    def fails(copied: BlockGather, tables: list[list[int]]) -> Staged | None:
        raise MemoryError

    engine = start()
    blocks = engine.blocks(200)
    with monkeypatch.context() as patched:
        patched.setattr(BlockGather, "take", fails)
        with held(engine):
            computed(engine, "a", PROMPT, blocks)
            computed(engine, "b", OTHER, blocks)
        assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["gone_chunks"] == 6
    assert start().matched(FakeRequest("c", list(PROMPT))) == 0


@pytest.mark.parametrize("seed", range(2))
def test_however_blocks_go_round_what_is_stored_is_what_was_computed(
    start: Start, seed: int
) -> None:
    choose = random.Random(seed)
    engine, pool = start(), list(range(1, 15))
    prompts = [prompt_tokens(10 * seed + number, 200) for number in range(6)]
    for number, tokens in enumerate(prompts):
        with held(engine):
            for name in ("first", "second"):
                blocks = choose.sample(pool, 7)
                part = tokens if name == "first" else prompt_tokens(100 + number, 130)
                computed(engine, f"{name}{number}", part, blocks)
            if choose.random() < 0.5:  # a step of a request that goes on beside it
                engine.workers[0].save_before_overwrite(
                    engine.scheduler.build_plan(step(x=1), lambda _: [])
                )
    assert engine.workers[0].settled(20.0)
    reader = start()
    for number, tokens in enumerate(prompts):
        assert reader.run(f"again{number}", tokens) == 192


def test_blocks_given_out_are_those_of_new_and_old_requests_zeroed_copied_and_loaded() -> None:
    class Named:
        def __init__(self, **fields: object) -> None:
            vars(self).update(fields)

    output = step([[1, 2], [3]])
    output.scheduled_new_reqs = [
        Named(block_ids=([4], [0, 5]), num_computed_tokens=0),
        Named(block_ids=([11, 12, 1], [13, 14, 2]), num_computed_tokens=2 * BLOCK_TOKENS + 3),
    ]
    output.new_block_ids_to_zero = [6]
    output.kv_cache_block_copies = [Named(src_block_id=7, dst_block_id=8)]
    load = LoadSpec("a", (), ((9,), (10,)))
    found = taken_blocks(output, [load], BLOCK_TOKENS)
    assert found == frozenset([0, 1, 2, 3, 4, 5, 6, 8, 9, 10]), "without those found in its cache"
