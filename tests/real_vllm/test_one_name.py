"""A real vLLM and transformers over the same weights read what the other stored."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.lib.vllm import EngineProcess
from helpers.server_process import ServerProcess
from real_vllm.prompts import CHUNK_TOKENS, EngineMaker, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.client import Client, ClientOptions
from kvstore.client.engines.transformers import TransformersConnector, representation_of

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
    if "packs otherwise" in engine.log.read_text():
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
