"""A real vLLM with the store generates what it generates without it, and computes less."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.lib.vllm import VERSION, EngineProcess
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm.prompts import EngineMaker, assert_same, prompt


@pytest.fixture
def same(engine: EngineProcess, oracle: EngineProcess) -> Callable[..., list[int]]:
    """Generate with the store and without it; return how many tokens were cached."""

    def generate(*prompts: list[int], **arguments: Any) -> list[int]:
        found = engine.generate(*prompts, **arguments)
        expected = oracle.generate(*prompts, **arguments)
        oracle.forget()
        assert_same(found, expected)
        return [one["cached"] for one in found]

    engine.fresh()
    return generate


Same = Callable[..., list[int]]


# --- hits


def test_what_was_computed_once_is_loaded(engine: EngineProcess, same: Same) -> None:
    before = engine.ask("counts")
    assert same(prompt(1, 300)) == [0]
    engine.fresh()
    assert same(prompt(1, 300)) == [256]
    after = engine.ask("counts")
    if VERSION != "0.26":  # it loses the counts of steps that compute nothing
        assert after["hits"] - before["hits"] == 256
        assert after["event_hit_tokens"] - before.get("event_hit_tokens", 0) == 256
    assert after["worker_loaded_chunks"] - before.get("worker_loaded_chunks", 0) == 4


def test_a_prompt_hits_the_chunks_it_shares_with_another(engine: EngineProcess, same: Same) -> None:
    same(prompt(3, 300))
    engine.fresh()
    assert same([*prompt(3, 300)[:160], *prompt(4, 140)]) == [128]


def test_what_was_generated_is_stored_too(engine: EngineProcess, same: Same) -> None:
    first = prompt(7, 100)
    (answer,) = engine.generate(first, max_tokens=40)
    engine.fresh()
    assert same([*first, *answer["tokens"], *prompt(8, 20)]) == [128]


def test_a_cache_salt_separates(engine: EngineProcess, same: Same) -> None:
    one = prompt(9, 200)
    same(one, salts=["alice"])
    engine.fresh()
    assert same(one, salts=["bob"]) == [0]
    engine.fresh()
    assert same(one) == [0]
    engine.fresh()
    assert same(one, salts=["alice"]) == [192]


def test_preempted_requests_go_on_where_they_were(engine: EngineProcess, same: Same) -> None:
    before = engine.ask("counts")["preemptions"]
    prompts = [prompt(40 + number, 450) for number in range(8)]
    same(*prompts, max_tokens=150)
    assert engine.ask("counts")["preemptions"] > before
    engine.fresh()
    same(*prompts, max_tokens=150)


def test_requests_given_up_while_they_load_harm_nothing(engine: EngineProcess, same: Same) -> None:
    prompts = [prompt(60 + number, 400) for number in range(4)]
    same(*prompts)
    for steps in range(6):
        engine.fresh()
        assert engine.ask("abort", prompts=prompts, steps=steps) == 0
    engine.fresh()
    assert same(*prompts) == [384] * 4


def test_another_engine_with_other_blocks_finds_what_this_one_stored(
    engine: EngineProcess, same: Same, make_engine: EngineMaker
) -> None:
    same(prompt(70, 500))
    engine.fresh()
    other = make_engine({}, block_size=64)
    found = other.generate(prompt(70, 500))
    assert found[0]["cached"] == 448
    assert_same(found, engine.generate(prompt(70, 500)))
    other.close()


OTHERS: dict[str, dict[str, Any]] = {
    "rotation": {"hf_overrides": {"rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0,
    }}},
    "element type": {"dtype": "float16"},  # bfloat16 is refused on CPUs with AMX
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_an_engine_that_computes_other_kv_of_the_same_weights_loads_none_of_ours(
    engine: EngineProcess, same: Same, make_engine: EngineMaker, kind: str
) -> None:
    one = prompt(72, 300)
    same(one)
    engine.fresh()
    assert same(one) == [256]
    other = make_engine({}, **OTHERS[kind])
    first = other.generate(one)
    assert first[0]["cached"] == 0
    assert first[0]["logprobs"] != engine.generate(one)[0]["logprobs"], "it is another KV"
    other.fresh()
    found = other.generate(one)
    assert found[0]["cached"] == 256, "it loads its own"
    assert found[0]["tokens"] == first[0]["tokens"]
    other.close()


# --- the store fails, the engine does not


def test_a_server_killed_and_gone_is_a_miss_until_it_is_back(
    engine: EngineProcess, same: Same, store: ServerProcess
) -> None:
    prompts = [prompt(80 + number, 300) for number in range(8)]
    same(*prompts)
    engine.fresh()
    killer = threading.Timer(0.03, store.kill)
    killer.start()
    same(*prompts)
    killer.join()
    engine.fresh()
    assert same(*prompts) == [0] * 8
    assert same(prompt(90, 300)) == [0]
    store.start()

    def hits() -> bool:
        engine.fresh()
        return same(*prompts) == [256] * 8

    assert eventually(hits), engine.ask("counts")


def test_a_server_that_hangs_costs_one_deadline_and_then_nothing(
    make_engine: EngineMaker, oracle: EngineProcess, store: ServerProcess
) -> None:
    engine = make_engine({"lookup_deadline_ms": 300, "deadline_ms": 300, "retry_after_ms": 60_000})
    usual_s = engine.generate(prompt(100, 300))[0]["took_s"]
    engine.fresh()
    store.send_signal(signal.SIGSTOP)
    try:
        took = [engine.generate(prompt(101 + number, 300))[0]["took_s"] for number in range(4)]
    finally:
        store.send_signal(signal.SIGCONT)
    print(f"usual {usual_s:.3f} s, hung {[round(one, 3) for one in took]}")
    assert_same(engine.generate(prompt(100, 300)), oracle.generate(prompt(100, 300)))
    counts = engine.ask("counts")
    assert counts["scheduler_miss_down"] >= 3, counts
    engine.close()


def test_a_server_that_hangs_between_lookup_and_load_costs_no_deadline(
    engine: EngineProcess, same: Same, store: ServerProcess
) -> None:
    one = prompt(105, 300)
    engine.generate(one)
    engine.fresh()
    lost = engine.ask("counts").get("worker_lost_chunks", 0)
    assert engine.ask("stop_before_load", pid=store.pid)
    try:
        (found,) = engine.generate(one)
    finally:
        store.send_signal(signal.SIGCONT)
    assert found["cached"] == 0
    counts = engine.ask("counts")
    assert counts["worker_hung_loads"] == 1, "it was ended, and did not wait for its deadline"
    assert counts["worker_lost_chunks"] == lost + 4
    engine.fresh()
    same(one)


def test_a_damaged_chunk_is_computed_again_and_stored_again(
    engine: EngineProcess, same: Same, store: ServerProcess
) -> None:
    one = prompt(110, 300)
    before = engine.ask("counts").get("worker_lost_chunks", 0)

    def was_lost() -> bool:
        same(one)
        engine.fresh()
        assert store.terminate() == 0  # it copies to its disk first what it has in memory only
        damage(store.socket_path.parent / "disk")
        store.start()
        same(one)
        engine.fresh()
        return bool(engine.ask("counts").get("worker_lost_chunks", 0) > before)

    assert eventually(was_lost), engine.ask("counts")

    def hits() -> bool:
        engine.fresh()
        return same(one) == [256]

    assert eventually(hits), engine.ask("counts")


def damage(folder: Path) -> None:
    """Put the same byte into each half kilobyte of the frames on disk."""
    extents = [
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 22
    ]
    assert extents
    for path in extents:
        if "mdb" in path.name:
            continue
        data = np.memmap(path, np.uint8, "r+")
        data[4096 + 300 :: 512] = 0x5A  # a second time changes nothing back
        data.flush()


# --- resets


def test_after_its_caches_are_reset_an_engine_loads_nothing_older(
    engine: EngineProcess, same: Same
) -> None:
    one = prompt(120, 300)
    same(one)
    assert engine.ask("settle")
    assert engine.ask("reset", reset_connector=True)
    assert same(one) == [0]
    engine.fresh()
    assert same(one) == [256], "what is computed after it is loaded again"
