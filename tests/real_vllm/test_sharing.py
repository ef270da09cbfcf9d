"""Engines that share a store: ranks, prefill and decode, transformers, lossy copies, offloading."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.lib.vllm import EngineProcess
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm import models
from real_vllm.prompts import (
    CHUNK_TOKENS,
    EngineMaker,
    assert_same,
    prompt,
    skip_where_windows_are_refused,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.cli.server import fetch_status
from kvstore.client import Client, ClientOptions
from kvstore.client.engines.transformers import TransformersConnector, representation_of

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {
    "pipeline_parallel_size": 2, "distributed_executor_backend": "mp",
    "worker_extension_cls": "bench.lib.vllm_child.Stage",
}  # fmt: skip


@pytest.fixture(scope="module", params=["heads", "layers", "heads beside windows"])
def pair(
    request: pytest.FixtureRequest, make_engine: EngineMaker, engine: EngineProcess, home: Path
) -> Iterator[tuple[int, EngineProcess, EngineProcess]]:
    """A seed, an engine of one worker, and one of two that have halves of the model."""
    if request.param == "heads":
        seed, made = 200, [make_engine({}, **RANKS)]
    elif request.param == "layers":
        seed, made = 220, [make_engine({}, **STAGES)]
        assert made[0].request("make_buffers") == [True, True]
    else:
        skip_where_windows_are_refused()
        model = models.save(models.hybrid(), home / "hybrid-of-ranks")
        room = {"model": model, "num_gpu_blocks_override": 200}
        seed, made = 210, [make_engine({}, **room), make_engine({}, **room, **RANKS)]
    one, two = [engine, *made][-2:]
    yield seed, one, two
    for each in made:
        each.close()


@pytest.mark.parametrize("is_one_first", [False, True])
def test_what_any_number_of_workers_stored_any_other_number_loads_for_the_same_tokens(
    pair: tuple[int, EngineProcess, EngineProcess], is_one_first: bool
) -> None:
    seed, one, two = pair
    first, second = (one, two) if is_one_first else (two, one)
    asked = prompt(seed + is_one_first, 300)
    computed = first.generate(asked, max_tokens=40)
    assert computed[0]["cached"] == 0

    def is_loaded_by(reader: EngineProcess) -> bool:
        reader.forget()
        found = reader.generate(asked, max_tokens=40)
        assert_same(found, computed)
        return bool(found[0]["cached"] == 256)

    assert eventually(lambda: is_loaded_by(second))
    assert eventually(lambda: is_loaded_by(first))


WAIT_MS = 60_000
TOKENS, STORED = 2500, 2496
"""Of a prompt, and of its whole chunks."""


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
    prefill: EngineProcess, decode: EngineProcess, oracle: EngineProcess, store: ServerProcess
) -> None:
    def counter(name: str) -> int:
        return fetch_status(store.address).counters[name]

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
    assert decode.request("counts")["worker_loaded_chunks"] == chunks
    assert counter("waited_lookups") >= 1


TINYLM = Path(__file__).resolve().parents[2] / "data" / "tinylm"
LENGTHS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}
TIE = 0.125
"""Two steps of bfloat16 from 8 to 16, where the largest logits are."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """What both compute in; the weights in the files are bfloat16."""
    return str(request.param)


@pytest.fixture(scope="module")
def engines(make_engine: EngineMaker, dtype: str, home: Path) -> tuple[EngineProcess, ...]:
    """One with the store, over a copy of the folder by another name, and one without."""
    copied = home / f"copied-{dtype}"
    shutil.copytree(TINYLM, copied)
    engine = make_engine({}, model=copied, dtype=dtype, **LENGTHS)
    if "unknown layout" in engine.log.read_text():
        pytest.skip("vLLM's kernels for this CPU pack such pages in a way that is refused")
    return engine, make_engine(None, model=TINYLM, dtype=dtype, **LENGTHS)


@pytest.fixture(scope="module")
def connector(store: ServerProcess, dtype: str) -> Iterator[TransformersConnector]:
    model: Any = AutoModelForCausalLM.from_pretrained(TINYLM, dtype=getattr(torch, dtype))
    identity = representation_of(model, AutoTokenizer.from_pretrained(TINYLM))
    options = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=20_000)
    with Client(store.address, identity, options) as client:
        yield TransformersConnector(client, model, durable=True)


def agreed(one: list[int], other: list[int]) -> int:
    """Return how many tokens two answers begin with in common."""
    same = (a == b for a, b in zip(one, other, strict=True))
    return sum(itertools.takewhile(bool, same))


def test_vllm_goes_on_from_what_transformers_stored(
    engines: tuple[EngineProcess, ...], connector: TransformersConnector, dtype: str
) -> None:
    """With the tokens that it finds by itself, up to a choice that lies within rounding."""
    asked = prompt(70, 300)
    engine, oracle = engines
    with torch.inference_mode():
        cache = connector._model(torch.tensor([asked])).past_key_values
    assert connector.save(torch.tensor([asked]), cache) > 0
    (found,), (expected,) = engine.generate(asked), oracle.generate(asked)
    assert found["cached"] == 256
    at = agreed(found["tokens"], expected["tokens"])
    if at < len(expected["tokens"]):
        # The two engines' kernels round bfloat16 differently, and by CPU.
        assert dtype == "bfloat16"
        so_far = torch.tensor([asked + expected["tokens"][:at]])
        with torch.inference_mode():
            logits = connector._model(so_far).logits[0, -1]
        chosen = [found["tokens"][at], expected["tokens"][at]]
        assert set(chosen) == set(logits.topk(2).indices.tolist())
        assert abs(float(logits[chosen].diff())) <= TIE


def test_transformers_goes_on_from_what_vllm_stored(
    engines: tuple[EngineProcess, ...], connector: TransformersConnector
) -> None:
    asked = prompt(71, 300)
    engine, _ = engines
    engine.generate(asked)
    engine.fresh()
    cache, hit = connector.load(torch.tensor([asked]))
    assert hit == 256
    with torch.inference_mode():
        rest = connector._model(torch.tensor([asked[hit:]]), past_key_values=cache).logits[0, -1]
        alone = connector._model(torch.tensor([asked])).logits[0, -1]
    assert rest.argmax() == alone.argmax()
    assert torch.allclose(rest.float(), alone.float(), atol=0.5)


SHARED = prompt(71, 192)
"""Three chunks of which the store has lossy copies."""


@pytest.fixture(scope="module")
def lossy_store(home: Path) -> Iterator[ServerProcess]:
    """A server whose disk has a lossy codec: what memory lost by a restart is lossy."""
    folder = home / "lossy"
    folder.mkdir(mode=0o700)
    flags = ("--cpu", "64MiB", "--disk", f"256MiB:{folder / 'disk'}", "--codec", "disk=kvq:2")
    process = ServerProcess(folder, *flags, "--log-level", "error")
    process.start()
    yield process
    process.kill()


def counted(engine: EngineProcess, name: str) -> int:
    return int(engine.request("counts").get(name, 0))


def test_nothing_is_stored_behind_a_lossy_load_nor_behind_vllms_own_copy_of_it(
    make_engine: EngineMaker, lossy_store: ServerProcess
) -> None:
    extra = {"address": lossy_store.address, "durable": False, "accuracy": "bounded"}
    engine = make_engine(extra)
    engine.generate([*SHARED, *prompt(72, 20)])
    engine.fresh()
    assert eventually(lambda: fetch_status(lossy_store.address).tiers[1].chunks == 3)
    lossy_store.terminate()
    lossy_store.start()
    assert lossy_store.recovered_chunks == 3
    time.sleep(0.5)  # until the engine asks again
    engine.generate(prompt(70, 20))
    time.sleep(0.5)

    stored = counted(engine, "worker_stored_chunks")
    (loaded,) = engine.generate([*SHARED, *prompt(73, 140)])
    assert loaded["cached"] == 192
    assert engine.request("settle")
    (cached,) = engine.generate([*SHARED, *prompt(74, 140)])
    assert cached["cached"] == 192, "in vLLM's own cache"
    assert engine.request("settle")
    assert counted(engine, "worker_stored_chunks") == stored
    assert counted(engine, "event_lossy_hit_tokens") == 192
    assert counted(engine, "event_lossy_unstored_chunks") == 4

    engine.generate(prompt(75, 140))
    assert engine.request("settle")
    assert counted(engine, "worker_stored_chunks") == stored + 2


def offloading(address: str) -> dict[str, Any]:
    """Return the engine's arguments."""
    tier = {
        "type": "KVStoreTier", "module_path": "kvstore.client.engines.vllm_tier",
        "address": address, "model_revision": "tiny-1", "lookup_deadline_ms": 5000,
    }  # fmt: skip
    extra = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "bench.lib.vllm_offloading",
        "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier],
    }  # fmt: skip
    connector = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return {"kv_transfer_config": connector}


def test_what_one_engine_offloads_another_promotes(
    make_engine: EngineMaker, oracle: EngineProcess, store: ServerProcess
) -> None:
    one = prompt(220, 300)
    expected = oracle.generate(one)
    oracle.forget()
    first = make_engine(None, **offloading(store.address))
    assert_same(first.generate(one), expected)
    first.close()
    second = make_engine(None, **offloading(store.address))

    def is_promoted() -> bool:
        second.forget()
        found = second.generate(one)
        assert_same(found, expected)
        return bool(found[0]["cached"] >= 256)

    assert eventually(is_promoted)
    second.close()
