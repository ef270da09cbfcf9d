"""Both halves of the vLLM connector on a real server, stepped as vLLM steps them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.redis_process import free_port
from helpers.vllm_pages import (
    CHUNK_TOKENS,
    HEAD_DIM,
    HEADS,
    SHAPE,
    compute,
    empty_pages,
    holds,
    representation,
    scrambled,
    writer,
)
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import QUEUE_BYTES, Engine, options

from kvstore.client import Client
from kvstore.client.chunk import Shard
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import blocks as vllm_copies
from kvstore.client.engines.vllm import scheduler as vllm_scheduler
from kvstore.client.engines.vllm import worker as vllm_worker
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS
from kvstore.client.engines.vllm.messages import LoadSpec, Role, StepPlan
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.proto.types import ChainDigest

Start = Callable[..., Engine]


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start engines on the server, closed in the end."""

    def make(*arguments: object, **settings: object) -> Engine:
        engine = Engine(server.address, *arguments, **settings)  # type: ignore[arg-type]
        request.addfinalizer(engine.close)
        return engine

    return make


PROMPT = prompt_tokens(1, 200)


def test_what_one_engine_computed_another_loads(start: Start) -> None:
    assert start().run("a", PROMPT) == 0
    assert start().run("b", PROMPT) == 192


def test_engines_that_pack_otherwise_share_too(start: Start) -> None:
    start().run("a", PROMPT)
    assert start(packing=BLOCK_LAYOUTS[1]).run("b", PROMPT) == 192


def test_a_load_is_asynchronous_only_when_there_is_something_to_load(start: Start) -> None:
    engine = start()
    assert engine.matched(FakeRequest("a", PROMPT)) == 0
    engine.run("b", PROMPT[:CHUNK_TOKENS])
    assert engine.matched(FakeRequest("c", PROMPT), computed=CHUNK_TOKENS) == 0


def test_blocks_that_the_engine_had_are_not_written_to(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    kept = blocks[:3]  # one chunk and a half
    for whole in engine.pages[0].values():
        whole[torch.tensor(kept)] = 7.0
    assert engine.matched(request, computed=96) == 96
    assert engine.load(request, blocks, 96) == set()
    loaded = {name: whole.clone() for name, whole in engine.pages[0].items()}
    for whole in loaded.values():
        assert bool((whole[torch.tensor(kept)] == 7.0).all())
    compute(loaded, engine.packing, PROMPT[:96], blocks)
    assert holds(loaded, engine.packing, PROMPT[:192], blocks)


def test_every_block_that_a_load_left_without_kv_is_reported_and_stored_again(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    engine = start()
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    client = engine.workers[0]._connector.client
    client.delete(keys=client.keys(PROMPT)[1:2])
    assert engine.load(request, blocks, 192) == set(blocks[2:6])
    request.num_computed_tokens = CHUNK_TOKENS
    assert engine.matched(request) == 0, "a load that failed is not tried again"
    plan = engine.step(request, blocks, 200 - CHUNK_TOKENS)
    assert [chunk.position for spec in plan.stores for chunk in spec.chunks] == [64, 128]
    assert engine.workers[0].settled(20.0)
    assert start().run("c", PROMPT) == 192


def test_a_load_beside_kept_blocks_that_fails_reports_none_of_them(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request, computed=32) == 160
    client = engine.workers[0]._connector.client
    client.delete(keys=client.keys(PROMPT))
    assert engine.load(request, blocks, 160) == set(blocks[1:6])


def test_chunks_are_stored_in_the_step_that_fills_them(start: Start) -> None:
    engine = start()
    request, blocks = FakeRequest("a", list(PROMPT[:130])), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0

    def positions(tokens: int) -> list[int]:
        plan = engine.step(request, blocks, tokens)
        return [chunk.position for spec in plan.stores for chunk in spec.chunks]

    assert positions(40) == []
    assert positions(60) == [0]
    assert positions(30) == [64]
    for token in PROMPT[130:191]:
        request.all_token_ids.append(token)
        assert positions(1) == []
    request.all_token_ids.append(PROMPT[191])
    assert positions(1) == [128]
    assert engine.workers[0].settled(20.0)
    assert start().run("b", PROMPT) == 192


def test_tokens_that_are_only_guessed_are_not_stored(start: Start) -> None:
    engine = start()
    request, blocks = FakeRequest("a", PROMPT[:126]), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    engine.matched(request)
    compute(engine.pages[0], engine.packing, PROMPT[:126], blocks)
    plan = engine.scheduler.build_plan(step(a=130), lambda _: [blocks])
    assert [chunk.position for spec in plan.stores for chunk in spec.chunks] == [0]


def test_a_preempted_request_loads_what_was_stored_of_it(start: Start) -> None:
    engine = start()
    request, blocks = FakeRequest("a", PROMPT), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, blocks, 150)
    assert engine.workers[0].settled(20.0)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.matched(request) == 128
    again = engine.blocks(200)
    assert engine.load(request, again, 128) == set()
    assert holds(engine.pages[0], engine.packing, PROMPT[:128], again)
    request.num_computed_tokens = 128
    plan = engine.step(request, again, 72)
    assert [chunk.position for spec in plan.stores for chunk in spec.chunks] == [128]


def test_a_request_preempted_while_it_is_stored_leaves_what_it_had_computed(start: Start) -> None:
    engine = start()
    request, blocks = FakeRequest("a", PROMPT), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    worker, hold = engine.workers[0], threading.Event()
    worker._storer.submit(hold.wait)
    engine.step(request, blocks, 150)
    other = FakeRequest("b", prompt_tokens(5, 200))
    engine.scheduler.on_new_request(other)
    assert engine.matched(other) == 0
    engine.step(other, blocks, 200)  # the blocks of the preempted one
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.matched(request) == 0, "nothing is there yet"
    hold.set()
    assert worker.settled(20.0)
    assert start().run("c", PROMPT) == 128
    assert start().run("d", other.all_token_ids) == 192


def test_a_request_given_up_while_it_loads_is_reported_all_the_same(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    engine.scheduler.on_alloc(request, 192, [blocks])
    plan = engine.scheduler.build_plan(step(), lambda _: [])
    engine.scheduler.finished(request)
    worker = engine.workers[0]
    worker.load(plan)
    assert worker.settled(20.0)
    assert worker.finished_loads(is_idle=True) == {"b"}


def test_stores_beyond_the_queue_are_dropped_from_the_end_and_counted(start: Start) -> None:
    chunk_bytes = 3 * 2 * CHUNK_TOKENS * HEADS * HEAD_DIM * 4
    engine = start(queue_bytes=2 * chunk_bytes)
    engine.run("a", PROMPT)
    assert engine.workers[0].counted["dropped_chunks"] == 1
    assert engine.workers[0].counted["stored_chunks"] == 2
    assert start().run("b", PROMPT) == 128


@pytest.mark.parametrize("ranks", [(None,), (Shard(kv_heads=((0, 1),)), Shard(kv_heads=((1, 2),)))])
def test_what_any_rank_did_not_store_is_stored_when_it_is_computed_again(
    start: Start, ranks: tuple[Shard | None, ...]
) -> None:
    engine = start(ranks=ranks)
    engine.workers[-1]._queue_bytes = 1  # one chunk, the least
    engine.run("a", PROMPT)
    engine.tell()
    engine.workers[-1]._queue_bytes = QUEUE_BYTES
    assert engine.run("b", PROMPT) == CHUNK_TOKENS
    assert start().run("c", PROMPT) == 192


def test_an_engine_without_its_pages_stores_what_it_computes_once_it_has_them(
    start: Start,
) -> None:
    engine = start()
    (worker,) = engine.workers
    worker.drop_pages()
    engine.run("a", PROMPT)
    engine.tell()
    worker.register(engine.pages[0], writer(engine.packing))
    engine.run("b", PROMPT)
    assert start().run("c", PROMPT) == 192


def test_what_is_said_of_chunks_that_are_not_stored_is_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "MOST_UNSTORED", 2)
    engine = start(queue_bytes=1)
    request = FakeRequest("a", prompt_tokens(3, 6 * CHUNK_TOKENS))
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    plan = engine.step(request, engine.blocks(request.num_tokens), request.num_tokens)
    report = engine.workers[0].report()
    assert [*report.unstored] == [chunk.digest for chunk in plan.stores[0].chunks[-2:]]
    assert report.joined(report).unstored == report.unstored


def test_what_is_said_of_chunks_that_are_stored_keeps_their_order(start: Start) -> None:
    """A router takes a chunk for the continuation of those before it."""
    engine, request = start(), FakeRequest("a", prompt_tokens(4, 12 * CHUNK_TOKENS))
    engine.workers[0].reports_stores = True
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    plan = engine.step(request, engine.blocks(request.num_tokens), request.num_tokens)
    assert engine.workers[0].settled(20.0)
    assert [*engine.workers[0].report().stored.items()] == [
        (chunk.digest, 1) for chunk in plan.stores[0].chunks
    ]


def test_the_batches_of_a_backlog_follow_each_other_without_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_copies, "BATCH_BYTES", 1)  # a chunk at a time
    pauses: list[float] = []
    monkeypatch.setattr(vllm_worker, "time", SimpleNamespace(sleep=pauses.append))
    engine, hold = start(), threading.Event()
    (worker,) = engine.workers
    worker._storer.submit(hold.wait)
    for name in "ab":
        request = FakeRequest(name, prompt_tokens(ord(name), 200))
        engine.scheduler.on_new_request(request)
        assert engine.matched(request) == 0
        engine.step(request, engine.blocks(200), 200)
    hold.set()
    assert worker.settled(20.0)
    assert worker.counted["stored_chunks"] == 6
    assert len(pauses) == 1
    assert eventually(lambda: worker._storer._queue.empty())
    engine.run("c", PROMPT[:CHUNK_TOKENS])
    assert len(pauses) == 2, "a pause before what nothing was sent before"


def test_roles_load_only_or_store_only(start: Start) -> None:
    start(role=Role(stores=False)).run("a", PROMPT)
    assert start(role=Role(loads=False)).run("b", PROMPT) == 0
    assert start(role=Role(loads=False)).run("c", PROMPT) == 0
    assert start(role=Role(stores=False)).run("d", PROMPT) == 192


def test_who_wants_no_cached_prefix_gets_none(start: Start) -> None:
    engine = start()
    engine.run("a", PROMPT)
    unwilling = replace(FakeRequest("b", PROMPT), skip_reading_prefix_cache=True)
    assert engine.matched(unwilling) == 0


def test_after_a_reset_nothing_older_is_loaded_nor_what_was_under_way_stored(start: Start) -> None:
    engine = start()
    engine.run("a", PROMPT)
    request, blocks = FakeRequest("b", prompt_tokens(2, 200)), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.scheduler.reset()
    assert engine.step(request, blocks, 200).stores == ()
    assert engine.run("c", PROMPT) == 0
    assert engine.matched(FakeRequest("d", PROMPT)) == 192, "what came after it is loaded"
    assert start().matched(FakeRequest("e", prompt_tokens(2, 200))) == 0


def test_a_request_preempted_by_a_reset_is_of_the_new_time(start: Start) -> None:
    engine = start()
    engine.run("a", PROMPT)
    request = FakeRequest("b", PROMPT)
    assert engine.matched(request) == 192
    engine.scheduler.reset()
    request.num_preemptions = 1
    assert engine.matched(request) == 0


def test_pages_that_are_not_understood_fail_loads_at_once_and_end_them(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    engine = start()
    reason = engine.workers[0].register(empty_pages(), scrambled)
    assert "packs otherwise" in reason
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    assert engine.load(request, blocks, 192) == set(blocks[:6])
    assert engine.matched(FakeRequest("c", PROMPT)) == 0
    engine.scheduler.on_new_request(FakeRequest("d", PROMPT))
    assert engine.scheduler.counted["miss_pages"] == 1


def test_an_engine_without_its_pages_loads_and_stores_nothing_until_it_has_them_again(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    engine = start()
    (worker,) = engine.workers
    assert worker.drop_pages()
    assert not worker.drop_pages(), "they are gone"
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    assert engine.load(request, blocks, 192) == set(blocks[:6])
    engine.step(request, blocks, 200)
    assert worker.counted["stored_chunks"] == 0
    assert worker.register(engine.pages[0], writer(engine.packing)) == ""
    assert engine.run("c", PROMPT) == 192
    assert engine.run("d", prompt_tokens(2, 200)) == 0
    assert worker.counted["stored_chunks"] == 3


def test_pages_are_let_go_of_once_what_is_stored_of_them_is_copied(start: Start) -> None:
    engine = start()
    request, blocks = FakeRequest("a", PROMPT), engine.blocks(200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, blocks, 200)
    assert engine.workers[0].drop_pages()
    assert engine.workers[0].counted["stored_chunks"] == 3


def test_after_close_a_load_is_failed_and_nothing_waits_for_it(start: Start) -> None:
    engine = start()
    engine.run("a", PROMPT)
    (worker,) = engine.workers
    worker.close()
    worker.load(StepPlan((LoadSpec("b", (ChainDigest(bytes(16)),), ((3, 4),)),)))
    assert worker.settled(0.0)
    assert worker.finished_loads(is_idle=False) == {"b"}
    assert worker.failed_blocks() == {3, 4}


def test_a_dead_server_is_a_counted_miss_and_costs_no_copies() -> None:
    engine = Engine(f"127.0.0.1:{free_port()}", opts=options(retry_after_ms=600_000))
    assert eventually(lambda: engine.scheduler._desk.is_down)
    for name in "abc":
        assert engine.run(name, PROMPT[:100]) == 0
    assert engine.scheduler.counted["miss_down"] == 3
    assert engine.workers[0].counted["dropped_chunks"] == 0
    assert engine.workers[0]._connector.stats().store_errors == {}
    engine.close()


def test_a_server_that_is_back_is_used_again(server: LocalServer) -> None:
    engine = Engine(server.address)
    assert engine.run("a", PROMPT[:70]) == 0
    find, engine.scheduler._desk._find = engine.scheduler._desk._find, lambda _: None
    assert engine.run("b", PROMPT[:70]) == 0
    engine.scheduler._desk._find = find
    assert eventually(lambda: engine.matched(FakeRequest("c", PROMPT)) == 64 or _forget(engine))
    engine.close()


def _forget(engine: Engine) -> bool:
    engine.scheduler.finished(FakeRequest("c", PROMPT))
    return False


def test_the_reasons_of_misses_are_counted_once_a_request(start: Start) -> None:
    engine = start()
    for _ in range(3):
        engine.matched(FakeRequest("a", PROMPT))
    engine.matched(FakeRequest("b", PROMPT, prompt_embeds=object()))
    assert engine.scheduler.counts() == {
        "lookups": 2, "prompt_tokens": 400, "miss_absent": 1, "miss_prompt_embeds": 1,
    }  # fmt: skip
    assert engine.scheduler.counts() == {}


def test_nothing_is_kept_of_requests_that_ended(start: Start) -> None:
    engine = start()
    for number in range(3):
        engine.run(f"r{number}", PROMPT[:100])
    assert engine.scheduler._tracked == {}


def test_of_requests_that_share_a_prefix_and_come_together_one_stores_it(start: Start) -> None:
    engine = start()
    stored = []
    for name in "ab":
        request, blocks = FakeRequest(name, PROMPT), engine.blocks(200)
        engine.scheduler.on_new_request(request)
        assert engine.matched(request) == 0
        plan = engine.scheduler.build_plan(step(**{name: 200}), {name: [blocks]}.__getitem__)
        stored += [chunk.position for spec in plan.stores for chunk in spec.chunks]
    assert stored == [0, 64, 128]


@pytest.mark.parametrize(
    "params", [{"kvstore": {"category": []}}, {"kvstore": {"priority": "high"}}, {"kvstore": 5}]
)
def test_what_a_user_states_wrongly_ends_no_engine(start: Start, params: object) -> None:
    """What comes with a request is taken in by the engine's own thread."""
    engine, request = start(), FakeRequest("a", PROMPT)
    request.kv_transfer_params = params  # type: ignore[attr-defined]
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    assert engine.scheduler.counted["bad_hints"] == 1


def test_parameters_that_are_none_of_ours_are_left_alone(start: Start) -> None:
    engine, request = start(), FakeRequest("a", PROMPT)
    request.kv_transfer_params = ["of", "others"]  # type: ignore[attr-defined]
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.counted["bad_hints"] == 0


def test_an_engine_that_is_refused_counts_each_request_as_a_miss_for_its_reason() -> None:
    client = Client(f"127.0.0.1:{free_port()}", representation(), options())
    refused = VllmScheduler(Connector(client), SHAPE, refusal="kv_cache_dtype")
    for name in "ab":
        request = FakeRequest(name, PROMPT)
        refused.on_new_request(request)
        assert [refused.matched_tokens(request, 0) for _ in range(2)] == [0, 0]
        refused.finished(request)
    # What it cannot read of a vLLM that it does not know is not read.
    assert refused.build_plan(object(), lambda _: [[1]]) == StepPlan()
    assert refused.counts() == {"lookups": 2, "miss_kv_cache_dtype": 2, "prompt_tokens": 400}
    assert refused.counts() == {}
    refused.close()


def test_a_rank_without_a_name_fails_loads_at_once_and_says_so(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    engine.workers[0].refuse("the weights are not here")
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request, computed=32) == 160
    assert engine.load(request, blocks, 160) == set(blocks[1:6])
    assert engine.matched(FakeRequest("c", PROMPT)) == 0
    assert engine.step(request, blocks, 200).stores == ()


def test_requests_that_come_together_to_an_engine_at_rest_are_computed_together(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks once and waits for the answers, which would be a step later for some."""
    monkeypatch.setattr(vllm_scheduler, "TOGETHER_S", 60.0)
    engine = start()
    requests = [FakeRequest(f"r{number}", prompt_tokens(number, 200)) for number in range(8)]
    for request in requests:
        engine.scheduler.on_new_request(request)
    assert [engine.scheduler.matched_tokens(request, 0) for request in requests] == [0] * 8


def test_an_engine_that_computes_something_waits_for_no_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_scheduler, "TOGETHER_S", 60.0)
    engine, let_go = start(), threading.Event()
    running, new = FakeRequest("a", PROMPT), FakeRequest("b", prompt_tokens(2, 200))
    engine.scheduler.on_new_request(running)
    assert engine.scheduler.matched_tokens(running, 0) == 0
    engine.step(running, engine.blocks(200), 200)
    find = engine.scheduler._look
    monkeypatch.setattr(engine.scheduler, "_look", lambda keys: let_go.wait(20.0) and find(keys))
    assert engine.scheduler.matched_tokens(new, 0) is None
    let_go.set()
    engine.scheduler.finished(running)
    assert engine.scheduler.matched_tokens(new, 0) == 0


def test_an_engine_at_rest_waits_but_once_a_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests of it have no answer: what it waits is one measure for all of them."""
    monkeypatch.setattr(vllm_scheduler, "TOGETHER_S", 0.002)
    engine, let_go, waits = start(), threading.Event(), list[float]()
    monkeypatch.setattr(engine.scheduler, "_look", lambda _: let_go.wait(20.0) and 0)
    wait = engine.scheduler._desk.wait

    def noted(within_s: float, lookup: object = None) -> None:
        waits.append(within_s)
        wait(within_s, lookup)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.scheduler._desk, "wait", noted)
    requests = [FakeRequest(f"r{number}", prompt_tokens(number, 200)) for number in range(4)]
    assert [engine.scheduler.matched_tokens(request, 0) for request in requests] == [None] * 4
    assert len(waits) == 1
    let_go.set()
