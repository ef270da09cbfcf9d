"""Ranks of a parallel vLLM engine keep one copy of each chunk, whoever stored it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.local_server import LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import SHAPE, representation
from helpers.vllm_stand_ins import FakeRequest, step
from helpers.vllm_steps import Engine

from kvstore.client.chunk import Shard
from kvstore.client.engines.vllm.messages import WorkerReport

Start = Callable[[str], Engine]

PROMPT = prompt_tokens(1, 200)


def ranks(tensor: int, *stages: tuple[int, int]) -> list[Shard | None]:
    return [
        Shard.of_rank(representation(), rank, tensor, layers)
        for layers in stages or (None,)
        for rank in range(tensor)
    ]


ENGINES: dict[str, list[Shard | None]] = {
    "one": [None],
    "tp2": ranks(2),
    "tp4": ranks(4),
    "pp2": ranks(1, (0, 1), (1, 3)),
    "tp2pp2": ranks(2, (0, 2), (2, 3)),
}
"""Of a model of three layers and two heads."""


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start one of the engines on the server, closed in the end."""

    def make(name: str) -> Engine:
        engine = Engine(server.address, shape=SHAPE, ranks=ENGINES[name])
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.mark.parametrize("writer", ENGINES)
def test_what_any_ranks_stored_any_others_load(start: Start, writer: str) -> None:
    assert start(writer).run("a", PROMPT) == 0
    for reader in ENGINES:
        assert start(reader).run("b", PROMPT) == 192


def test_a_chunk_that_a_rank_did_not_store_is_no_hit(start: Start) -> None:
    engine = start("tp2")
    lazy = engine.workers[1]
    lazy.refuse("it has its reasons")
    engine.run("a", PROMPT)
    assert start("one").matched(FakeRequest("b", PROMPT)) == 0


def test_a_rank_that_could_not_read_a_chunk_fails_its_blocks_for_all(start: Start) -> None:
    start("one").run("a", PROMPT)
    engine = start("tp2")
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    client = engine.workers[1]._connector.client
    client.delete(keys=client.keys(PROMPT)[2:])
    assert engine.load(request, blocks, 192) == set(blocks[4:6])


def test_what_the_slowest_rank_did_not_read_is_stored_again_whoever_says_so_last(
    start: Start,
) -> None:
    start("one").run("a", PROMPT)
    engine = start("tp2")
    request, blocks = FakeRequest("b", PROMPT), engine.blocks(200)
    assert engine.matched(request) == 192
    engine.scheduler.on_alloc(request, 192, [blocks])
    for chunks in (1, 2):  # of three; the second rank says so a step later
        engine.scheduler.on_report(WorkerReport({"b": chunks}))
    request.num_computed_tokens = 64
    plan = engine.scheduler.build_plan(step(b=136), lambda _: [blocks])
    assert [chunk.position for one in plan.stores for chunk in one.chunks] == [64, 128]
