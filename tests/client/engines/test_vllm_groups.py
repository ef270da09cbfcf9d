"""vLLM's connector where layers keep different kinds of KV in several block tables, and where
several ranks have parts of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import (
    CHUNK_TOKENS,
    HYBRID,
    LATENT,
    SHAPE,
    SLIDING,
    Tables,
    holds,
    representation,
)
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import Engine, positions

from kvstore.client.chunk import Chunk, Shard
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import FlopsModel, WorkerReport
from kvstore.codecs.base import empty_tensors
from kvstore.proto.plans import Hints
from kvstore.proto.types import KVLayout

PROMPT = prompt_tokens(1, 200)

Start = Callable[..., Engine]


def tables(engine: Engine, tokens: int, computed: int = 0) -> Tables:
    return engine.room_for(tokens, computed)  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [HYBRID, SLIDING, LATENT], ids=["hybrid", "window", "mla"])
def test_what_one_engine_computed_another_loads(start: Start, shape: KVCacheShape) -> None:
    assert start(shape=shape).run("a", PROMPT) == 0
    reader = start(shape=shape)
    assert reader.run("b", PROMPT) == 192
    assert not any(bool(pages[0].any()) for pages in reader.pages[0].values()), "null blocks"
    assert start(shape=shape).run("c", PROMPT[:150]) == 128


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


def test_a_preempted_request_loads_the_windows_of_where_it_goes_on(start: Start) -> None:
    engine = start(shape=HYBRID)
    request = engine.arrived("a", PROMPT)
    engine.step(request, tables(engine, 200), 150)
    assert engine.workers[0].settled(20.0)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.matched(request) == 128
    assert start(shape=HYBRID).run("b", PROMPT) == 128


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


def ranks(tensor: int, *stages: tuple[int, int]) -> list[Shard | None]:
    return [
        Shard.of_rank(representation(), rank, tensor, layers)
        for layers in stages or (None,)
        for rank in range(tensor)
    ]


ENGINES: dict[str, list[Shard | None]] = {
    "one": [None],
    "tp4": ranks(4),
    "pp2": ranks(1, (0, 1), (1, 3)),
    "tp2pp2": ranks(2, (0, 2), (2, 3)),
}
"""Of a model of three layers and two heads."""


@pytest.mark.parametrize("writer", ["one", "tp4", "tp2pp2"])
def test_what_any_ranks_stored_any_others_load(start: Start, writer: str) -> None:
    assert start(ranks=ENGINES[writer]).run("a", PROMPT) == 0
    for reader in ENGINES.values():
        assert start(ranks=reader).run("b", PROMPT) == 192


def test_a_chunk_that_a_rank_did_not_store_is_no_hit(start: Start) -> None:
    engine = start(ranks=ranks(2))
    engine.workers[1].refuse("it has its reasons")
    engine.run("a", PROMPT)
    start().arrived("b", PROMPT)


def test_a_rank_that_could_not_read_a_chunk_fails_its_blocks_for_all(start: Start) -> None:
    start().run("a", PROMPT)
    engine = start(ranks=ranks(2))
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    client = engine.workers[1]._connector.client
    client.delete(keys=client.keys(PROMPT)[2:])
    assert engine.load(request, blocks, 192) == set(blocks[4:6])


def test_what_the_slowest_rank_did_not_read_is_stored_again_whoever_says_so_last(
    start: Start,
) -> None:
    start(shape=SHAPE).run("a", PROMPT)
    engine = start(ranks=ranks(2))
    request, blocks = engine.arrived("b", PROMPT, hit=192), engine.blocks(200)
    engine.scheduler.on_alloc(request, 192, [blocks])
    for chunks in (1, 2):  # of three; the second rank says so a step later
        engine.scheduler.on_report(WorkerReport({"b": chunks}))
    request.num_computed_tokens = 64
    assert positions(engine.scheduler.build_plan(step(b=136), lambda _: [blocks])) == [64, 128]
