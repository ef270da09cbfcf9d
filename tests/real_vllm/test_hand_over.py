"""Prefill in one vLLM, decode in another, one server between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from bench.lib.vllm import EngineProcess
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm.prompts import CHUNK_TOKENS, EngineMaker, assert_same, prompt

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

WAIT_MS = 60_000
TOKENS, STORED = 2500, 2496
"""Of a prompt, and of its whole chunks."""

Counter = Callable[[str], int]


@pytest.fixture
def counter(store: ServerProcess) -> Iterator[Counter]:
    """Ask the server for one of its counters."""
    connection = Connection(store.address, retry_after_ms=1)

    def ask(name: str) -> int:
        status = connection.call("Status", pb.StatusRequest(), 5000, pb.StatusResponse)
        return int(status.counters[name])

    yield ask
    connection.close()


@pytest.fixture(scope="module")
def prefill(make_engine: EngineMaker) -> Iterator[EngineProcess]:
    """An engine that computes prompts and stores them. Prefills of 512 tokens a step."""
    engine = make_engine({"kv_role": "kv_producer", "handover_ms": WAIT_MS})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def decode(make_engine: EngineMaker) -> Iterator[EngineProcess]:
    """An engine that waits for what the other announced."""
    engine = make_engine({"kv_role": "kv_consumer", "wait_ms": WAIT_MS})
    yield engine
    engine.close()


def test_a_decode_engine_loads_what_a_prefill_engine_promised_and_had_not_computed(
    prefill: EngineProcess, decode: EngineProcess, oracle: EngineProcess, counter: Counter
) -> None:
    prompts = [prompt(30 + number, TOKENS) for number in range(4)]
    expected = oracle.generate(*prompts, max_tokens=24)
    announced, stored = (counter(name) for name in ("announced_puts", "put_stored_chunks"))
    chunks = len(prompts) * STORED // CHUNK_TOKENS
    computing = threading.Thread(target=lambda: prefill.generate(*prompts, max_tokens=1))
    computing.start()
    assert eventually(lambda: counter("announced_puts") == announced + chunks)
    assert counter("put_stored_chunks") < stored + chunks, "it came too late to be waited for"
    found = decode.generate(*prompts, max_tokens=24)
    computing.join()
    assert_same(found, expected)
    assert [one["cached"] for one in found] == [STORED] * len(prompts)
    assert decode.ask("counts")["worker_loaded_chunks"] == chunks
    assert counter("waited_lookups") >= 1


def test_what_is_asked_of_the_decode_engine_first_is_computed_there(
    decode: EngineProcess, oracle: EngineProcess
) -> None:
    found = decode.generate(prompt(40, 300))
    assert [one["cached"] for one in found] == [0]
    assert_same(found, oracle.generate(prompt(40, 300)))


def test_prompts_given_up_by_the_prefill_engine_are_not_waited_for(
    prefill: EngineProcess, decode: EngineProcess, oracle: EngineProcess, counter: Counter
) -> None:
    announced = counter("announced_puts")
    one = prompt(50, TOKENS)
    assert prefill.ask("abort", prompts=[one], steps=2) == 0
    assert counter("announced_puts") > announced
    found = decode.generate(one, max_tokens=8)
    assert_same(found, oracle.generate(one, max_tokens=8))
    assert found[0]["cached"] < STORED
    assert found[0]["took_s"] < WAIT_MS / 1000 / 2
