"""A real vLLM with the store generates what it generates without it, and computes less.

What a store does that is slow, hung or damaged is tested on stand-ins of vLLM
(``tests/client/engines``); here are vLLM's own ways.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from bench.lib.vllm import VERSION, EngineProcess
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm.prompts import EngineMaker, Pair, assert_same, prompt


@pytest.fixture
def pair(engine: EngineProcess, oracle: EngineProcess) -> Pair:
    engine.fresh()
    return Pair(engine, oracle)


# --- hits


def test_what_was_computed_once_is_loaded_as_far_as_prompts_agree(pair: Pair) -> None:
    counts = {"worker_loaded_chunks": 4}
    if VERSION != "0.26":  # it loses the counts of steps that compute nothing
        counts |= {"hits": 256, "event_hit_tokens": 256}
    before = {name: pair.count(name) for name in counts}
    assert pair.same(prompt(1, 300)) == [0]
    assert pair.again(prompt(1, 300)) == [256]
    assert {name: pair.count(name) - before[name] for name in counts} == counts
    assert pair.again([*prompt(1, 300)[:160], *prompt(4, 140)]) == [128]


def test_what_was_generated_is_stored_too(pair: Pair) -> None:
    first = prompt(7, 100)
    (answer,) = pair.engine.generate(first, max_tokens=40)
    assert pair.again([*first, *answer["tokens"], *prompt(8, 20)]) == [128]


def test_a_cache_salt_separates(pair: Pair) -> None:
    one = prompt(9, 200)
    pair.same(one, salts=["alice"])
    assert pair.again(one, salts=["bob"]) == [0]
    assert pair.again(one) == [0]
    assert pair.again(one, salts=["alice"]) == [192]


def test_preempted_requests_go_on_where_they_were(pair: Pair) -> None:
    before = pair.count("preemptions")
    prompts = [prompt(40 + number, 450) for number in range(8)]
    pair.same(*prompts, max_tokens=150)
    assert pair.count("preemptions") > before
    pair.again(*prompts, max_tokens=150)


def test_requests_given_up_while_they_load_harm_nothing(pair: Pair) -> None:
    prompts = [prompt(60 + number, 400) for number in range(4)]
    pair.same(*prompts)
    for steps in range(6):
        pair.engine.fresh()
        assert pair.engine.request("abort", prompts=prompts, steps=steps) == 0
    assert pair.again(*prompts) == [384] * 4


def test_another_engine_with_other_blocks_finds_what_this_one_stored(
    pair: Pair, make_engine: EngineMaker
) -> None:
    pair.same(prompt(70, 500))
    pair.engine.fresh()
    other = make_engine({}, block_size=64)
    found = other.generate(prompt(70, 500))
    assert found[0]["cached"] == 448
    assert_same(found, pair.engine.generate(prompt(70, 500)))
    other.close()


OTHERS: dict[str, dict[str, Any]] = {
    "rotation": {"hf_overrides": {"rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0,
    }}},
    "element type": {"dtype": "float16"},  # bfloat16 is refused on CPUs with AMX
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_an_engine_that_computes_other_kv_of_the_same_weights_loads_none_of_ours(
    pair: Pair, make_engine: EngineMaker, kind: str
) -> None:
    one = prompt(72, 300)
    pair.same(one)
    assert pair.again(one) == [256]
    other = make_engine({}, **OTHERS[kind])
    first = other.generate(one)
    assert first[0]["cached"] == 0
    assert first[0]["logprobs"] != pair.engine.generate(one)[0]["logprobs"], "it is another KV"
    other.fresh()
    found = other.generate(one)
    assert found[0]["cached"] == 256, "it loads its own"
    assert found[0]["tokens"] == first[0]["tokens"]
    other.close()


# --- the store fails, the engine does not; resets


def test_a_server_killed_and_gone_is_a_miss_until_it_is_back(
    pair: Pair, store: ServerProcess
) -> None:
    prompts = [prompt(80 + number, 300) for number in range(8)]
    pair.same(*prompts)
    pair.engine.fresh()
    killer = threading.Timer(0.03, store.kill)
    killer.start()
    pair.same(*prompts)
    killer.join()
    assert pair.again(*prompts) == [0] * 8
    assert pair.same(prompt(90, 300)) == [0]
    store.start()
    assert eventually(lambda: pair.again(*prompts) == [256] * 8), pair.engine.request("counts")


def test_after_its_caches_are_reset_an_engine_loads_nothing_older(pair: Pair) -> None:
    one = prompt(120, 300)
    pair.same(one)
    assert pair.engine.request("settle")
    assert pair.engine.request("reset", reset_connector=True)
    assert pair.same(one) == [0]
    assert pair.again(one) == [256], "what is computed after it is loaded again"
