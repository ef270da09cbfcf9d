"""Both halves of the vLLM connector on a real server, stepped as vLLM steps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.local_server import LocalServer, eventually
from helpers.prompts import tokens as prompt_tokens
from helpers.redis_process import free_port
from helpers.vllm_pages import (
    CHUNK_TOKENS,
    HEAD_DIM,
    HEADS,
    HYBRID,
    LATENT,
    SHAPE,
    SLIDING,
    Tables,
    compute,
    empty_pages,
    holds,
    ranks_of,
    representation,
    scrambled,
    writer,
)
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import QUEUE_BYTES, Engine, options, positions

from kvstore.client import Client
from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import worker as vllm_worker
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS, BlockTarget
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import FlopsModel, LoadSpec, Role, StepPlan, WorkerReport
from kvstore.client.engines.vllm.scheduler import VllmScheduler
from kvstore.client.planning import PrefillModel
from kvstore.codecs.base import empty_tensors
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChainDigest, KVLayout

Start = Callable[..., Engine]
PROMPT, OTHER = prompt_tokens(1, 200), prompt_tokens(2, 200)


# --- loads


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    "shape", [SHAPE, HYBRID, SLIDING, LATENT], ids=["full", "hybrid", "window", "mla"]
)
def test_what_one_engine_computed_another_loads(
    start: Start, shape: KVCacheShape, on_device: bool
) -> None:
    where = {"shape": shape, "on_device": on_device}
    assert start(**where).run("a", PROMPT) == 0
    reader = start(**where)
    assert reader.run("b", PROMPT) == 192
    assert shape is SHAPE or not any(bool(pages[0].any()) for pages in reader.pages[0].values()), (
        "null blocks"
    )
    assert start(**where).run("c", PROMPT[:150]) == 128
    assert reader.scheduler._tracked == {}, "nothing is kept of requests that ended"


def test_packings_and_places_of_pages_share_and_what_is_cached_or_not_wanted_is_not_loaded(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    assert start(packing=BLOCK_LAYOUTS[1]).run("b", PROMPT) == 192
    assert start(on_device=True).run("c", PROMPT) == 192
    start(on_device=True).run("d", OTHER)
    assert start().run("e", OTHER) == 192
    assert start().matched(FakeRequest("f", PROMPT), computed=192) == 0
    unwilling = FakeRequest("g", PROMPT, skip_reading_prefix_cache=True)
    assert start().matched(unwilling) == 0


def test_every_block_that_a_load_left_without_kv_is_reported_and_stored_again(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    engine.client.delete(keys=engine.client.keys(PROMPT)[1:2])
    assert engine.load(request, blocks, 192) == set(blocks[2:6])
    request.num_computed_tokens = CHUNK_TOKENS
    assert engine.matched(request) == 0, "a load that failed is not tried again"
    assert positions(engine.step(request, blocks, 200 - CHUNK_TOKENS)) == [64, 128]
    assert engine.workers[0].settled(20.0)
    assert start().run("c", PROMPT) == 192


def test_chunks_that_were_read_but_not_copied_into_their_blocks_are_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().run("a", PROMPT)
    engine = start()
    monkeypatch.setattr(BlockTarget, "finish", Mock(side_effect=MemoryError("of the host")))
    request, blocks = engine.arrived("b", PROMPT, hit=160, computed=32), engine.blocks(200)
    assert engine.load(request, blocks, 160) == set(blocks[1:6]), "but for kept ones"


def test_what_is_sooner_computed_is_a_counted_miss_and_not_stored_again(
    start: Start, server: LocalServer
) -> None:
    start().run("a", PROMPT)
    for slot in server.node.store.tiers.slots.values():
        slot.round_trip_s = 1e-3
    fast, slow = start(), start()
    fast.scheduler._lookups._prefill = PrefillModel(0.0, 1e-9)
    slow.scheduler._lookups._prefill = PrefillModel(0.0, 1.0)
    request = fast.arrived("b", PROMPT)
    assert fast.scheduler.counted["miss_slow"] == 1
    assert fast.step(request, fast.blocks(200), 200).stores == ()
    assert slow.run("c", PROMPT) == 192


@pytest.mark.parametrize(("shape", "hit"), [(SHAPE, 64), (HYBRID, 0)], ids=["full", "windows"])
def test_a_part_of_a_prefix_is_loaded_where_it_can_be_gone_on_from(
    start: Start, shape: KVCacheShape, hit: int
) -> None:
    start(shape=shape).run("a", PROMPT)
    engine = start(shape=shape)
    engine.scheduler._lookups.worth_loading = lambda match, token_count: 1  # type: ignore[method-assign]
    engine.arrived("b", PROMPT, hit=hit)


# --- stores


def test_chunks_are_stored_in_the_step_that_fills_them(start: Start) -> None:
    engine = start()
    request, blocks = engine.arrived("a", PROMPT[:130]), engine.blocks(200)

    def stored(tokens: int) -> list[int]:
        return positions(engine.step(request, blocks, tokens))

    assert [stored(tokens) for tokens in (40, 60, 30)] == [[], [0], [64]]
    for token in PROMPT[130:191]:
        request.all_token_ids.append(token)
        assert stored(1) == []
    request.all_token_ids.append(PROMPT[191])
    assert stored(1) == [128]
    assert engine.workers[0].settled(20.0)
    assert start().run("b", PROMPT) == 192


def test_tokens_that_are_only_guessed_are_not_stored(start: Start) -> None:
    engine = start()
    engine.arrived("a", PROMPT[:126])
    blocks = engine.blocks(200)
    compute(engine.pages[0], engine.packing, PROMPT[:126], blocks)
    assert positions(engine.scheduler.build_plan(step(a=130), lambda _: [blocks])) == [0]


def test_a_preempted_request_loads_what_was_stored_of_it(start: Start) -> None:
    engine = start()
    request, blocks = engine.arrived("a", PROMPT), engine.blocks(200)
    engine.step(request, blocks, 150)
    assert engine.workers[0].settled(20.0)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.matched(request) == 128
    again = engine.blocks(200)
    assert engine.load(request, again, 128) == set()
    assert holds(engine.pages[0], engine.packing, PROMPT[:128], again)
    request.num_computed_tokens = 128
    assert positions(engine.step(request, again, 72)) == [128]


@pytest.mark.parametrize(("ranks", "room"), [(1, 2), (1, 1), (2, 1)])
def test_stores_beyond_any_ranks_queue_are_dropped_from_the_end_and_stored_when_computed_again(
    start: Start, ranks: int, room: int
) -> None:
    engine = start(ranks=ranks_of(ranks))
    last = engine.workers[-1]
    last._queue_bytes = room * 3 * 2 * CHUNK_TOKENS * HEADS // ranks * HEAD_DIM * 4
    engine.run("a", PROMPT)
    assert (last.counted["stored_chunks"], last.counted["dropped_chunks"]) == (room, 3 - room)
    engine.collect_reports()
    last._queue_bytes = QUEUE_BYTES
    assert engine.run("b", PROMPT) == room * CHUNK_TOKENS
    assert start().run("c", PROMPT) == 192


def test_what_is_said_of_chunks_that_are_not_stored_is_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "MOST_UNSTORED", 2)
    engine = start(queue_bytes=1)
    request = engine.arrived("a", prompt_tokens(3, 6 * CHUNK_TOKENS))
    plan = engine.step(request, engine.blocks(request.num_tokens), request.num_tokens)
    report = engine.workers[0].report()
    assert [*report.unstored] == [chunk.digest for chunk in plan.stores[0].chunks[-2:]]
    assert report.joined(report).unstored == report.unstored


def test_what_is_said_of_chunks_that_are_stored_keeps_their_order(start: Start) -> None:
    """A router takes a chunk for the continuation of those before it."""
    engine = start()
    engine.workers[0].reports_stores = True
    request = engine.arrived("a", prompt_tokens(4, 12 * CHUNK_TOKENS))
    plan = engine.step(request, engine.blocks(request.num_tokens), request.num_tokens)
    assert engine.workers[0].settled(20.0)
    assert [*engine.workers[0].report().stored.items()] == [
        (chunk.digest, 1) for chunk in plan.stores[0].chunks
    ]


def test_of_requests_that_share_a_prefix_and_come_together_one_stores_it(start: Start) -> None:
    engine = start()
    stored = []
    for name in "ab":
        engine.arrived(name, PROMPT)
        tables = {name: [engine.blocks(200)]}
        stored += positions(engine.scheduler.build_plan(step(**{name: 200}), tables.__getitem__))
    assert stored == [0, 64, 128]


# --- roles, resets and refusals


def test_roles_load_only_or_store_only(start: Start) -> None:
    start(role=Role(stores=False)).run("a", PROMPT)
    assert start(role=Role(loads=False)).run("b", PROMPT) == 0
    assert start(role=Role(loads=False)).run("c", PROMPT) == 0
    assert start(role=Role(stores=False)).run("d", PROMPT) == 192


def test_after_a_reset_nothing_older_is_loaded_nor_what_was_under_way_stored(start: Start) -> None:
    engine = start()
    engine.run("a", PROMPT)
    preempted = engine.arrived("p", PROMPT, hit=192)
    request, blocks = engine.arrived("b", OTHER), engine.blocks(200)
    engine.scheduler.reset()
    assert engine.step(request, blocks, 200).stores == ()
    preempted.num_preemptions = 1
    assert engine.matched(preempted) == 0
    assert engine.run("c", PROMPT) == 0
    engine.arrived("d", PROMPT, hit=192)  # what came after it is loaded
    start().arrived("e", OTHER)


def test_pages_that_are_not_understood_fail_loads_at_once_and_end_them(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start()
    (worker,) = engine.workers
    assert "unknown layout" in worker.register(empty_pages(), scrambled)
    request, blocks = engine.arrived("b", PROMPT, hit=160, computed=32), engine.blocks(200)
    assert engine.load(request, blocks, 160) == set(blocks[1:6]), "but for kept ones"
    engine.arrived("c", PROMPT)
    assert engine.step(request, blocks, 200).stores == ()
    assert engine.scheduler.counted["miss_pages"] == 1


def test_an_engine_without_its_pages_loads_and_stores_nothing_until_it_has_them_again(
    start: Start,
) -> None:
    start().run("a", PROMPT)
    engine = start()
    (worker,) = engine.workers
    engine.computed("z", prompt_tokens(3, 200))
    assert worker.drop_pages()
    assert worker.counted["stored_chunks"] == 3, "what is copied of them is stored before"
    assert not worker.drop_pages(), "they are gone"
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    assert engine.load(request, blocks, 192) == set(blocks[:6])
    engine.step(request, blocks, 200)
    engine.run("e", OTHER)
    engine.collect_reports()
    assert worker.counted["stored_chunks"] == 3
    assert worker.register(engine.pages[0], writer(engine.packing)) == ""
    assert engine.run("c", PROMPT) == 192
    assert engine.run("d", OTHER) == 0
    assert worker.counted["stored_chunks"] == 6


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


def test_the_reasons_of_misses_are_counted_once_a_request(start: Start) -> None:
    engine = start()
    for _ in range(3):
        engine.matched(FakeRequest("a", PROMPT))
    engine.matched(FakeRequest("b", PROMPT, prompt_embeds=object()))
    assert {name: count for name, count in engine.scheduler.counted.items() if count} == {
        "lookups": 2, "prompt_tokens": 400, "miss_absent": 1, "miss_prompt_embeds": 1,
    }  # fmt: skip


def test_what_a_user_states_wrongly_ends_no_engine_and_what_is_none_of_ours_is_left_alone(
    start: Start,
) -> None:
    """What comes with a request is taken in by the engine's own thread."""
    engine = start()
    wrong: list[object] = [{"category": []}, {"priority": "high"}, 5]
    for number, params in enumerate([["of", "others"], *({"kvstore": one} for one in wrong)]):
        request = FakeRequest(f"r{number}", PROMPT)
        request.kv_transfer_params = params  # type: ignore[attr-defined]
        engine.scheduler.on_new_request(request)
        assert engine.matched(request) == 0
        assert engine.scheduler.counted["bad_hints"] == number


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
    assert refused.counted == {"lookups": 2, "miss_kv_cache_dtype": 2, "prompt_tokens": 400}
    refused.close()


# --- several block tables, windows and latents


def tables(engine: Engine, tokens: int, computed: int = 0) -> Tables:
    return engine.blocks_for(tokens, computed)  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [HYBRID, SLIDING], ids=["hybrid", "window"])
def test_a_load_that_lost_a_chunk_is_computed_as_a_whole_and_stored_again(
    start: Start, shape: KVCacheShape
) -> None:
    start(shape=shape).run("a", PROMPT)
    engine = start(shape=shape)
    request = engine.arrived("b", PROMPT, hit=192)
    engine.client.delete(keys=engine.client.keys(PROMPT)[2:3])
    assert engine.load(request, tables(engine, 200, 192), 192) == set(), "blocks are not reported"
    assert engine.workers[0].failed_loads() == {"b"}
    assert engine.workers[0].failed_loads() == set()
    assert engine.matched(request) == 0
    assert positions(engine.step(request, tables(engine, 200), 200)) == [128]
    assert engine.workers[0].settled(20.0)
    assert start(shape=shape).run("c", PROMPT) == 192


def test_blocks_that_the_engine_had_are_not_written_to_in_any_table(start: Start) -> None:
    start(shape=HYBRID).run("a", PROMPT)
    engine = start(shape=HYBRID)
    request, room = FakeRequest("b", PROMPT), tables(engine, 200, 192)
    for whole in engine.pages[0].values():
        whole.fill_(7.0)
    assert engine.matched(request, computed=160) == 32
    assert engine.load(request, room, 32) == set()
    for layer in (layer for group in HYBRID.groups for layer in group.layers):
        kept = torch.tensor([block for block in room[layer.table][:5] if block], dtype=torch.long)
        assert bool((engine.pages[0][layer.name][kept] == 7.0).all())
    last = [[0, 0, 0, 0, 0, table[5]] for table in room]
    assert holds(engine.pages[0], engine.packing, PROMPT[:192], last, HYBRID)


def test_a_prompt_that_is_stored_to_its_end_is_loaded_with_the_window_of_its_last_token(
    start: Start,
) -> None:
    start(shape=HYBRID).run("a", PROMPT)
    engine = start(shape=HYBRID)
    request = engine.arrived("b", PROMPT[:128], hit=127)
    room = tables(engine, 128, 127)
    assert engine.load(request, room, 127) == set()
    assert engine.workers[0].failed_loads() == set()
    assert holds(engine.pages[0], engine.packing, PROMPT[:128], room, HYBRID)


def test_a_window_that_is_wanted_longer_than_chunks_have_it_fails_the_load(start: Start) -> None:
    start(shape=HYBRID).run("a", PROMPT)
    engine = start(shape=HYBRID)
    request = engine.arrived("b", PROMPT, hit=192)
    assert engine.load(request, tables(engine, 200), 192) == set()
    assert engine.workers[0].failed_loads() == {"b"}


def test_chunks_whose_windows_the_engine_gave_up_end_no_prefix_until_they_are_computed_again(
    start: Start,
) -> None:
    engine = start(shape=HYBRID)
    engine.computed("a", PROMPT, tables(engine, 200, 192))
    assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["stored_chunks"] == 3
    other = start(shape=HYBRID)
    other.arrived("b", PROMPT, hit=192)  # the last has its window
    client = other.client
    bare = KVLayout.of(client.model, CHUNK_TOKENS, window=False)
    place: Any = lambda _, layout: empty_tensors(layout)  # noqa: E731
    found = client.get_chunks(client.keys(PROMPT), place)
    assert [len(one) for one in found] == [len(bare.components), len(bare.components), 2]
    assert start(shape=HYBRID).run("c", PROMPT[:150]) == 0, "the second has not"
    assert start(shape=HYBRID).run("d", PROMPT[:150]) == 128


def test_of_layers_with_windows_only_chunks_that_are_gone_are_not_stored(start: Start) -> None:
    engine = start(shape=SLIDING)
    (room,) = tables(engine, 200)
    engine.computed("a", PROMPT, [[0, 0, *room[2:]]])
    assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["gone_chunks"] == 1
    assert engine.workers[0].counted["stored_chunks"] == 2
    start(shape=SLIDING).arrived("b", PROMPT)


def test_an_engine_that_prefills_from_nothing_only_loads_all_but_a_token(start: Start) -> None:
    shape = replace(LATENT, continues=False)
    start(shape=shape).run("a", PROMPT)
    engine = start(shape=shape)
    engine.arrived("b", PROMPT)
    assert engine.scheduler.counted["miss_prefill"] == 1
    engine.arrived("c", PROMPT[:193], hit=192)
    engine.arrived("d", PROMPT[:192], hit=192)


def test_hints_and_costs_go_with_what_is_stored(start: Start) -> None:
    engine = start(shape=HYBRID)
    engine.workers[0].cost = FlopsModel(1e6, 1e3)
    puts: list[tuple[list[float], Hints]] = []
    client: Any = engine.client
    put = client.put_chunks

    def noted(chunks: list[Chunk], **how: Any) -> object:
        puts.append(([chunk.prefill_flops for chunk in chunks], how["hints"]))
        return put(chunks, **how)

    client.put_chunks = noted
    request, room = FakeRequest("a", PROMPT), tables(engine, 200)
    request.kv_transfer_params = {"kvstore": {"category": "chat"}}  # type: ignore[attr-defined]
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, room, 200)
    assert engine.workers[0].settled(20.0)
    flops = [64 * (1e6 + 1e3 * (position + 32)) for position in (0, 64, 128)]
    assert puts == [(flops, Hints(category="chat"))]


# --- ranks keep one copy of each chunk, whoever stored it


ENGINES = {
    "one": ranks_of(1),
    "tp4": ranks_of(4),
    "pp2": ranks_of(1, (0, 1), (1, 3)),
    "tp2pp2": ranks_of(2, (0, 2), (2, 3)),
}
"""Of a model of three layers and two heads."""


@pytest.mark.parametrize("writer", ["one", "tp4", "tp2pp2"])
def test_what_any_ranks_stored_any_others_load(start: Start, writer: str) -> None:
    assert start(ranks=ENGINES[writer]).run("a", PROMPT) == 0
    for reader in ENGINES.values():
        assert start(ranks=reader).run("b", PROMPT) == 192


def test_a_chunk_that_a_rank_did_not_store_is_no_hit(start: Start) -> None:
    engine = start(ranks=ranks_of(2))
    engine.workers[1].refuse("it has its reasons")
    engine.run("a", PROMPT)
    start().arrived("b", PROMPT)


def test_a_rank_that_could_not_read_a_chunk_fails_its_blocks_for_all(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start(ranks=ranks_of(2))
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    client = engine.workers[1]._connector.client
    client.delete(keys=client.keys(PROMPT)[2:])
    assert engine.load(request, blocks, 192) == set(blocks[4:6])


def test_what_the_slowest_rank_did_not_read_is_stored_again_whoever_says_so_last(
    start: Start,
) -> None:
    start(shape=SHAPE).run("a", PROMPT)
    engine = start(ranks=ranks_of(2))
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    engine.scheduler.on_alloc(request, 192, [blocks])
    for chunks in (1, 2):  # of three; the second rank says so a step later
        engine.scheduler.on_report(WorkerReport({"b": chunks}))
    request.num_computed_tokens = 64
    assert positions(engine.scheduler.build_plan(step(b=136), lambda _: [blocks])) == [64, 128]
