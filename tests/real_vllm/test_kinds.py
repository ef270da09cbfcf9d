"""A real vLLM over models whose layers keep other kinds of KV: the same tokens, and less work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.server_process import ServerProcess
from real_vllm import models
from real_vllm.prompts import (
    EngineMaker,
    Pair,
    assert_same,
    prompt,
    skip_where_windows_are_refused,
)

from kvstore.client.engines.vllm.connector import TransferResults

TIGHT = {"num_gpu_blocks_override": 150}
"""Three block tables take more blocks of one pool; eight long requests still preempt each other."""


def pair(make_engine: EngineMaker, home: Path, kind: str, **settings: Any) -> Iterator[Pair]:
    settings["model"] = models.save(getattr(models, kind)(), home / kind)
    made = Pair(make_engine({}, **settings), make_engine(None, **settings))
    yield made
    made.close()


# --- sliding windows beside full attention, in three block tables


@pytest.fixture(scope="module")
def hybrid(make_engine: EngineMaker, home: Path) -> Iterator[Pair]:
    skip_where_windows_are_refused()
    yield from pair(make_engine, home, "hybrid", **TIGHT)


@pytest.mark.skipif(TransferResults is not None, reason="vLLM can be told of a load that failed")
def test_a_hybrid_model_whose_loads_may_fail_unheard_runs_as_if_there_were_no_store(
    make_engine: EngineMaker, home: Path
) -> None:
    for made in pair(make_engine, home, "hybrid", **TIGHT):
        assert made.same(prompt(1, 300)) == [0]
        assert made.again(prompt(1, 300)) == [0]
        assert made.count("scheduler_miss_kv_cache_groups") == 2


def test_hybrid_layers_are_loaded_with_their_windows(hybrid: Pair) -> None:
    assert hybrid.same(prompt(1, 300)) == [0]
    assert hybrid.again(prompt(1, 300)) == [256]
    assert hybrid.again(prompt(1, 300)[:150]) == [128], "every chunk has its window"
    assert hybrid.again([*prompt(1, 300)[:160], *prompt(2, 140)]) == [128]
    assert hybrid.again(prompt(1, 300)[:256]) == [255], "the last token is computed again"


def test_hybrid_requests_at_once_and_preempted_get_their_own(hybrid: Pair) -> None:
    before = hybrid.count("preemptions")
    prompts = [prompt(10 + number, 450) for number in range(8)]
    hybrid.same(*prompts, max_tokens=100)
    assert hybrid.count("preemptions") > before
    assert hybrid.again(*prompts[:4]) == [448] * 4
    assert hybrid.again(*prompts, max_tokens=100)[0] > 0


def test_a_hybrid_load_that_lost_a_chunk_is_computed_as_a_whole(
    hybrid: Pair, store: ServerProcess
) -> None:
    prompts = [prompt(30 + number, 300) for number in range(4)]
    hybrid.same(*prompts)
    hybrid.engine.fresh()
    before = hybrid.count("worker_lost_chunks")
    assert hybrid.engine.request("limit_loads", chunks=3) is True
    found = hybrid.same(*prompts)
    assert hybrid.engine.request("limit_loads", chunks=0) is True
    assert hybrid.count("worker_lost_chunks") > before
    assert found == [0] * 4
    assert hybrid.again(*prompts) == [256] * 4


# --- sliding windows only, longer than a chunk


@pytest.fixture(scope="module")
def sliding(make_engine: EngineMaker, home: Path) -> Iterator[Pair]:
    skip_where_windows_are_refused()
    yield from pair(make_engine, home, "sliding")


def test_layers_with_windows_only_load_what_the_next_token_sees(sliding: Pair) -> None:
    assert sliding.same(prompt(50, 300)) == [0]
    assert sliding.again(prompt(50, 300)) == [256]
    assert sliding.again(prompt(50, 300)[:150]) == [128]
    prompts = [prompt(60 + number, 450) for number in range(8)]
    sliding.same(*prompts, max_tokens=100)
    assert sliding.again(*prompts) == [448] * 8


# --- latents


@pytest.fixture(scope="module")
def latent(make_engine: EngineMaker, home: Path) -> Iterator[Pair]:
    pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")
    settings = {
        "num_gpu_blocks_override": 300, "max_num_batched_tokens": 3072,
        "attention_backend": "CPU_MLA",  # where a CPU has AMX vLLM takes one without float32
    }  # fmt: skip
    yield from pair(make_engine, home, "latent", **settings)


def test_latents_go_on_as_they_would_have_without_the_store(latent: Pair) -> None:
    # vLLM's CPU kernels compute a token otherwise behind a prefix than in a prefill, so a prompt
    # that ends in what was generated is compared with what was generated next.
    first = prompt(70, 250)
    (expected,) = latent.oracle.generate(first, max_tokens=30)
    latent.engine.generate(first, max_tokens=30)
    for known in (6, 7):
        latent.engine.fresh()
        (found,) = latent.engine.generate([*first, *expected["tokens"][:known]])
        assert found["cached"] >= 255
        assert found["tokens"] == expected["tokens"][known : known + 8]
        assert found["logprobs"] == expected["logprobs"][known : known + 8]


def test_latents_that_the_engine_cannot_go_on_from_are_a_miss_that_says_so(latent: Pair) -> None:
    assert latent.same(prompt(71, 300)) == [0]
    assert latent.again(prompt(71, 300)) == [0]
    assert latent.count("scheduler_miss_prefill") == 1


@pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="needs a CPU with AMX"
)
def test_latents_in_bfloat16_are_those_of_the_engines_own_cache(
    make_engine: EngineMaker, home: Path
) -> None:
    pytest.importorskip("vllm.v1.attention.backends.mla.amx_mla")
    # Behind a prefix tokens are computed otherwise than in a prefill: both have one here.
    settings = {"num_gpu_blocks_override": 300, "dtype": "bfloat16"}
    for made in pair(make_engine, home, "latent", **settings):
        for seed in (72, 73):
            one = prompt(seed, 287)
            assert_same(made.engine.generate(one), made.oracle.generate(one))
            made.engine.fresh()
            loaded, own = made.engine.generate(one), made.oracle.generate(one)
            assert loaded[0]["cached"] == own[0]["cached"] == 256
            assert_same(loaded, own)
            assert loaded[0]["logprobs"] == own[0]["logprobs"]


# --- fp8


def test_fp8_pools_are_stored_bit_for_bit(make_engine: EngineMaker, model: Path) -> None:
    fp8 = {"model": model, "kv_cache_dtype": "fp8"}
    pair = Pair(make_engine({}, **fp8), make_engine(None, **fp8))
    assert pair.same(prompt(280, 300)) == [0]
    assert pair.again(prompt(280, 300)) == [256]
    plain = make_engine({})
    assert plain.generate(prompt(280, 300))[0]["cached"] == 0, "other KV under the same tokens"
    plain.close()
    pair.close()
