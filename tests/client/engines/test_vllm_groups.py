"""vLLM's connector where layers keep different kinds of KV, in several block tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import CHUNK_TOKENS, HYBRID, LATENT, SLIDING, Tables, holds
from helpers.vllm_stand_ins import FakeRequest
from helpers.vllm_steps import Engine

from kvstore.client.chunk import Chunk
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import FlopsModel
from kvstore.proto.plans import Hints
from kvstore.proto.types import KVLayout

PROMPT = prompt_tokens(1, 200)
SHAPES = pytest.mark.parametrize(
    "shape", [HYBRID, SLIDING, LATENT], ids=["hybrid", "window", "mla"]
)

Start = Callable[..., Engine]


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start engines of a shape on the server, closed in the end."""

    def make(shape: KVCacheShape) -> Engine:
        engine = Engine(server.address, shape=shape)
        request.addfinalizer(engine.close)
        return engine

    return make


def tables(engine: Engine, tokens: int, computed: int = 0) -> Tables:
    return engine.room_for(tokens, computed)  # type: ignore[return-value]


@SHAPES
def test_what_one_engine_computed_another_loads(start: Start, shape: KVCacheShape) -> None:
    assert start(shape).run("a", PROMPT) == 0
    assert start(shape).run("b", PROMPT) == 192
    assert start(shape).run("c", PROMPT[:150]) == 128


def test_null_blocks_are_never_written_to(start: Start) -> None:
    start(HYBRID).run("a", PROMPT)
    engine = start(HYBRID)
    engine.run("b", PROMPT)
    assert not any(bool(pages[0].any()) for pages in engine.pages[0].values())


@pytest.mark.parametrize("shape", [HYBRID, SLIDING], ids=["hybrid", "window"])
def test_a_load_that_lost_a_chunk_is_computed_as_a_whole_and_stored_again(
    start: Start, shape: KVCacheShape
) -> None:
    start(shape).run("a", PROMPT)
    engine = start(shape)
    request = FakeRequest("b", PROMPT)
    assert engine.matched(request) == 192
    client = engine.workers[0]._connector.client
    client.delete(keys=client.keys(PROMPT)[2:3])
    assert engine.load(request, tables(engine, 200, 192), 192) == set(), "blocks are not reported"
    assert engine.workers[0].failed_loads() == {"b"}
    assert engine.matched(request) == 0
    plan = engine.step(request, tables(engine, 200), 200)
    assert [chunk.position for spec in plan.stores for chunk in spec.chunks] == [128]
    assert engine.workers[0].settled(20.0)
    assert start(shape).run("c", PROMPT) == 192


def test_blocks_that_the_engine_had_are_not_written_to_in_any_table(start: Start) -> None:
    start(HYBRID).run("a", PROMPT)
    engine = start(HYBRID)
    request, room = FakeRequest("b", PROMPT), tables(engine, 200, 192)
    for whole in engine.pages[0].values():
        whole.fill_(7.0)
    assert engine.matched(request, computed=160) == 32
    assert engine.load(request, room, 32) == set()
    for group in HYBRID.groups:
        for layer in group.layers:
            kept = [block for block in room[layer.table][:5] if block]
            assert bool(
                (engine.pages[0][layer.name][torch.tensor(kept, dtype=torch.long)] == 7.0).all()
            )
    last = [[0, 0, 0, 0, 0, table[5]] for table in room]
    assert holds(engine.pages[0], engine.packing, PROMPT[:192], last, HYBRID)


def test_a_prompt_that_is_stored_to_its_end_is_loaded_with_the_window_of_its_last_token(
    start: Start,
) -> None:
    start(HYBRID).run("a", PROMPT)
    engine = start(HYBRID)
    request = FakeRequest("b", PROMPT[:128])
    assert engine.matched(request) == 127
    room = tables(engine, 128, 127)
    assert engine.load(request, room, 127) == set()
    assert engine.workers[0].failed_loads() == set()
    assert holds(engine.pages[0], engine.packing, PROMPT[:128], room, HYBRID)


def test_a_window_that_is_wanted_longer_than_chunks_have_it_fails_the_load(start: Start) -> None:
    start(HYBRID).run("a", PROMPT)
    engine = start(HYBRID)
    request = FakeRequest("b", PROMPT)
    assert engine.matched(request) == 192
    assert engine.load(request, tables(engine, 200), 192) == set()
    assert engine.workers[0].failed_loads() == {"b"}


def test_chunks_whose_windows_the_engine_gave_up_end_no_prefix(start: Start) -> None:
    engine = start(HYBRID)
    request, room = FakeRequest("a", PROMPT), tables(engine, 200, 192)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, room, 200)
    assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["stored_chunks"] == 3
    other = start(HYBRID)
    assert other.matched(FakeRequest("b", PROMPT)) == 192, "the last has its window"
    assert other.matched(FakeRequest("c", PROMPT[:150])) == 0, "the second has not"
    client = other.workers[0]._connector.client
    bare = KVLayout.of(client.model, CHUNK_TOKENS, window=False)
    found = client.get_chunks(client.keys(PROMPT), lambda _, layout: _empty(layout))
    assert [len(one) for one in found] == [len(bare.components), len(bare.components), 2]


def _empty(layout: KVLayout) -> list[list[list[object]]]:
    from kvstore.codecs.base import empty_tensors

    return empty_tensors(layout)  # type: ignore[return-value]


def test_windows_that_chunks_lack_are_stored_when_they_are_computed_again(start: Start) -> None:
    engine = start(HYBRID)
    request = FakeRequest("a", PROMPT)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, tables(engine, 200, 192), 200)
    assert engine.workers[0].settled(20.0)
    assert start(HYBRID).run("b", PROMPT[:150]) == 0
    assert start(HYBRID).run("c", PROMPT[:150]) == 128


def test_of_layers_with_windows_only_chunks_that_are_gone_are_not_stored(start: Start) -> None:
    engine = start(SLIDING)
    request, (room,) = FakeRequest("a", PROMPT), tables(engine, 200)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, [[0, 0, *room[2:]]], 200)
    assert engine.workers[0].settled(20.0)
    assert engine.workers[0].counted["gone_chunks"] == 1
    assert engine.workers[0].counted["stored_chunks"] == 2
    assert start(SLIDING).matched(FakeRequest("b", PROMPT)) == 0


def test_a_preempted_request_loads_the_windows_of_where_it_goes_on(start: Start) -> None:
    engine = start(HYBRID)
    request = FakeRequest("a", PROMPT)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 0
    engine.step(request, tables(engine, 200), 150)
    assert engine.workers[0].settled(20.0)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.matched(request) == 128
    again = start(HYBRID)
    assert again.run("b", PROMPT) == 128


def test_an_engine_that_prefills_from_nothing_only_loads_all_but_a_token(start: Start) -> None:
    shape = replace(LATENT, continues=False)
    start(shape).run("a", PROMPT)
    engine = start(shape)
    assert engine.matched(FakeRequest("b", PROMPT)) == 0
    assert engine.scheduler.counted["miss_prefill"] == 1
    assert engine.matched(FakeRequest("c", PROMPT[:193])) == 192
    assert engine.matched(FakeRequest("d", PROMPT[:192])) == 192


def test_hints_and_costs_go_with_what_is_stored(start: Start) -> None:
    engine = start(HYBRID)
    engine.workers[0].cost = FlopsModel(1e6, 1e3)
    puts: list[tuple[list[float], Hints]] = []
    client = engine.workers[0]._connector.client
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
    wrong = FakeRequest("b", PROMPT)
    wrong.kv_transfer_params = {"kvstore": {"reuse": 9}}  # type: ignore[attr-defined]
    assert engine.matched(wrong) == 192, "a hint that is none costs no request anything"
    assert engine.scheduler.counted["bad_hints"] == 1


def test_a_rank_without_a_name_fails_loads_as_a_whole(start: Start) -> None:
    start(HYBRID).run("a", PROMPT)
    engine = start(HYBRID)
    (refused,) = engine.workers
    refused.refuse("the weights are not here")
    request = FakeRequest("b", PROMPT)
    assert engine.matched(request) == 192
    assert engine.load(request, tables(engine, 200, 192), 192) == set()
    assert refused.failed_loads() == {"b"}
    assert refused.failed_loads() == set()
