"""A vLLM engine that says how fast it computes loads nothing that it has sooner by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.local_server import LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.vllm_pages import HYBRID, SHAPE
from helpers.vllm_stand_ins import FakeRequest
from helpers.vllm_steps import Engine

from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import VllmSettings
from kvstore.client.planning import PrefillModel
from kvstore.proto.errors import InvalidRequestError

Start = Callable[..., Engine]
PROMPT = prompt_tokens(1, 200)


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    """Start engines that state their speed, closed in the end."""

    def make(prefill: PrefillModel | None = None, shape: KVCacheShape = SHAPE) -> Engine:
        engine = Engine(server.address, shape=shape)
        engine.scheduler._lookups._prefill = prefill
        request.addfinalizer(engine.close)
        return engine

    return make


def test_what_is_sooner_computed_is_a_counted_miss_and_not_stored_again(
    start: Start, server: LocalServer
) -> None:
    start().run("a", PROMPT)
    for slot in server.node.store.tiers.slots.values():
        slot.round_trip_s = 1e-3
    fast, slow = start(PrefillModel(0.0, 1e-9)), start(PrefillModel(0.0, 1.0))
    request, blocks = FakeRequest("b", PROMPT), fast.blocks(200)
    assert fast.matched(request) == 0
    assert fast.scheduler.counted["miss_slow"] == 1
    assert fast.step(request, blocks, 200).stores == ()
    assert slow.run("c", PROMPT) == 192


@pytest.mark.parametrize(("shape", "hit"), [(SHAPE, 64), (HYBRID, 0)], ids=["full", "windows"])
def test_a_part_of_a_prefix_is_loaded_where_it_can_be_gone_on_from(
    start: Start, shape: KVCacheShape, hit: int
) -> None:
    start(shape=shape).run("a", PROMPT)
    engine = start(shape=shape)
    engine.scheduler._lookups.worth_loading = lambda match, token_count: 1  # type: ignore[method-assign]
    assert engine.matched(FakeRequest("b", PROMPT)) == hit


def test_the_speed_is_a_setting() -> None:
    assert VllmSettings.of({}).prefill is None
    assert VllmSettings.of({"prefill_token_us": 50}).prefill == PrefillModel(0.0, 50e-6)
    with pytest.raises(InvalidRequestError, match="prefill_token_us=-1: give 0 to"):
        VllmSettings.of({"prefill_token_us": -1})
