"""Servers whose codec asks which tokens matter are told by the attention that these get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_server import LocalServer
from helpers.torch_engine import (
    OPTIONS,
    greedy,
    kept,
    left_padded,
    plain_tokens,
    prefill,
    random_ids,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from typing_extensions import override

from kvstore.client import Chunk
from kvstore.client.engines.transformers import TransformersConnector, generation
from kvstore.client.engines.transformers.generation import QUERIES, mean_attention
from kvstore.proto.types import Model

PROMPT = random_ids(150)
"""Two chunks of 64 tokens and some."""

Server = Callable[..., LocalServer]
Put = list[Chunk]


@pytest.fixture
def connect(
    make_server: Server, tinylm: PreTrainedModel, identity: Model
) -> Callable[..., TransformersConnector]:
    """Make a connector to a server whose disk has a codec."""

    def make(codec: str, model: PreTrainedModel = tinylm, **more: Any) -> TransformersConnector:
        client = make_server("--codec", f"disk={codec}").connect("auto", identity, OPTIONS)
        return TransformersConnector(client, model, **more)

    return make


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[TransformersConnector], Put]:
    """Return the chunks that a connector puts from now on."""

    def watched(connector: TransformersConnector) -> Put:
        chunks: Put = []
        own = connector.client.put_chunks

        def noting(some: Any, **more: Any) -> Any:
            chunks.extend(some)
            return own(some, **more)

        monkeypatch.setattr(connector.client, "put_chunks", noting)
        return chunks

    return watched


def attention_of(model: PreTrainedModel, prompt: torch.Tensor) -> np.ndarray:
    """What each token gets of the last ones that see it, by transformers' own account."""
    engine: Any = model
    engine.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            given = torch.stack(engine(prompt, output_attentions=True).attentions)
    finally:
        engine.set_attn_implementation("sdpa")
    last = given.mean((0, 1, 2))[-QUERIES:]
    found: np.ndarray = (last.sum(0) / (last > 0).sum(0)).numpy()
    return found


def test_a_prompts_chunks_say_what_attention_their_tokens_get(
    connect: Any, put: Any, tinylm: PreTrainedModel
) -> None:
    connector = connect("kvq:2,importance")
    chunks = put(connector)
    output = connector.generate(PROMPT, greedy(80)).output
    wanted, own = attention_of(tinylm, PROMPT), kept(prefill(tinylm, PROMPT))
    assert output.sequences[0].tolist()[:162] == plain_tokens(tinylm, PROMPT), "as without"
    pairs = zip(kept(output.past_key_values), own, strict=True)
    assert all(torch.equal(part[:, :, :150], wanted) for part, wanted in pairs)
    assert [chunk.position for chunk in chunks] == [0, 64, 128, 128, 192]
    for chunk, start in zip(chunks, (0, 64, 128), strict=False):
        assert chunk.importance is not None
        np.testing.assert_allclose(chunk.importance, wanted[start : start + 64], rtol=1e-3)
    assert [chunk.importance for chunk in chunks[3:]] == [None, None]  # with generated tokens


def test_the_tokens_behind_a_hit_are_weighed_as_those_of_a_whole_prompt(
    connect: Any, put: Any, tinylm: PreTrainedModel
) -> None:
    connector = connect("kvq:2,importance")
    connector.generate(PROMPT[:, :64], greedy(1))
    chunks = put(connector)
    assert connector.generate(PROMPT, greedy(1)).hit_tokens == 64
    assert [chunk.position for chunk in chunks] == [64, 128]
    wanted = attention_of(tinylm, PROMPT)
    np.testing.assert_allclose(chunks[0].importance, wanted[64:128], rtol=1e-3)


def test_static_caches_batches_and_other_attention_are_stored_without_a_word_of_it(
    connect: Any, put: Any, load_tinylm: Any
) -> None:
    connector = connect("kvq:2,importance")
    chunks = put(connector)
    connector.generate(PROMPT, greedy(2), cache_implementation="static")
    ids, mask = left_padded([PROMPT[0, 1:], PROMPT[0, 20:]])
    connector.generate(ids, greedy(2), attention_mask=mask)
    other = TransformersConnector(connector.client, load_tinylm(attn_implementation="eager"))
    other.generate(PROMPT[:, 2:], greedy(2))
    assert len(chunks) >= 8
    assert {chunk.importance for chunk in chunks} == {None}


def test_a_server_that_does_not_ask_is_told_nothing(connect: Any, put: Any) -> None:
    connector = connect("kvq:2")
    chunks = put(connector)
    connector.generate(PROMPT, greedy(2))
    assert {chunk.importance for chunk in chunks} == {None}
    assert not connector.client.weighs


def test_numbers_that_are_none_are_not_taken_for_importance(
    connect: Any, put: Any, load_tinylm: Any
) -> None:
    model = load_tinylm()
    connector = connect("kvq:2,importance", model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    chunks = put(connector)
    connector.generate(PROMPT, greedy(1))
    assert {chunk.importance for chunk in chunks} == {None}


def no_memory(_: int) -> torch.Tensor:
    raise torch.OutOfMemoryError("of the device")


@pytest.mark.parametrize(("fault", "looks"), [(no_memory, 1), (torch.zeros, 6)])
def test_attention_that_cannot_be_noted_fails_no_request(
    connect: Any, put: Any, tinylm: PreTrainedModel, monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[int], torch.Tensor], looks: int,
) -> None:  # fmt: skip
    connector = connect("kvq:2,importance")
    chunks, asked = put(connector), list[int]()

    def look(*_: Any) -> torch.Tensor:
        asked.append(0)
        return fault(len(asked))  # what differs in length cannot be stacked

    monkeypatch.setattr(generation, "mean_attention", look)
    found = connector.generate(PROMPT, greedy(2))
    assert found.output.sequences[0].tolist() == plain_tokens(tinylm, PROMPT)[:152]
    assert {chunk.importance for chunk in chunks} == {None}
    assert len(asked) == looks


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is made within."""

    elements = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_noting_attention_takes_the_memory_of_one_key_value_head() -> None:
    heads, kv_heads, tokens, dim = 8, 4, 500, 8
    with Largest() as seen:  # type: ignore[no-untyped-call]
        mean_attention(torch.ones(heads, QUERIES, dim), torch.ones(kv_heads, tokens, dim))
    assert seen.elements <= heads // kv_heads * QUERIES * tokens
