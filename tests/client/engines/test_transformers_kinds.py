"""Models that keep windows, states or latents: tokens are the same, and prefixes are hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from contracts.layers import damage
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.torch_engine import (
    greedy,
    ids_of,
    left_padded,
    plain_tokens,
    random_ids,
    stored_tokens,
)
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvstore.client import ClientOptions
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import StatePiece, StateShape, as_argument
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import LayerGroup, LayerKind

VOCABULARY = 256
OPTIONS = ClientOptions(chunk_tokens=16, deadline_ms=DEADLINE_MS, retry_after_ms=1)

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 4,
    "moe_intermediate_size": 32, "head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, windows alone": ("MistralConfig", {"sliding_window": 40}),
    "mistral, a window within a chunk": ("MistralConfig", {"sliding_window": 12}),
    "gemma2, every other layer": ("Gemma2Config", {"head_dim": 16, "sliding_window": 40}),
    "deepseek, latents": ("DeepseekV3Config", _MLA),
    "granite, mamba": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_chunk_size": 16,
            **_MAMBA2,
        },
    ),
    "qwen3-next, linear attention": (
        "Qwen3NextConfig",
        {
            "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 32, **_EXPERTS,
        },
    ),
    "lfm2, convolutions": ("Lfm2Config", {"full_attn_idxs": [1, 3], "block_ff_dim": 96}),
    "falcon-h1, both in each layer": (
        "FalconH1Config",
        {"head_dim": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16, **_MAMBA2},
    ),
}  # fmt: skip


def make_model(name: str) -> PreTrainedModel:
    kind, settings = MODELS[name]
    torch.manual_seed(5)
    return random_model(getattr(transformers, kind)(**(BASE | settings)))


def random_model(config: Any) -> PreTrainedModel:
    """Return a model of *config* with weights of the seed at hand."""
    makers: Any = AutoModelForCausalLM
    model: PreTrainedModel = makers.from_config(config).float().eval()
    return model


Connect = Callable[..., TransformersConnector]


@pytest.fixture
def connect(server: LocalServer, tokenizer: Any) -> Connect:
    """Make connectors with a client each."""

    def make(model: PreTrainedModel, options: ClientOptions = OPTIONS) -> TransformersConnector:
        identity = representation_of(model, tokenizer)
        return TransformersConnector(server.connect("auto", identity, options), model)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_same_without_with_and_from_the_store(connect: Connect, name: str) -> None:
    model = make_model(name)
    input_ids = random_ids(100, VOCABULARY)
    without = plain_tokens(model, input_ids)
    writer = connect(model)
    assert stored_tokens(writer, input_ids) == without
    assert (writer.stats().load_errors, writer.stats().store_errors) == ({}, {})
    reader = connect(model)
    assert stored_tokens(reader, input_ids) == without
    assert reader.stats().hit_tokens == 96
    # The conversation goes on: what was generated, and what is asked then.
    longer = ids_of([*without, *random_ids(30, VOCABULARY, 1)[0].tolist()])
    assert stored_tokens(reader, longer) == plain_tokens(model, longer)
    assert reader.stats().hit_tokens == 96 + (len(without) - 1) // 16 * 16
    # Another prompt leaves the first in its fourth chunk.
    other = torch.cat([input_ids[:, :60], random_ids(50, VOCABULARY, 2)], 1)
    assert stored_tokens(connect(model), other) == plain_tokens(model, other)
    again = connect(model)
    assert stored_tokens(again, other) == plain_tokens(model, other)
    assert (again.stats().hit_tokens, again.stats().load_errors) == (96, {})


@pytest.mark.parametrize("name", ["gemma2, every other layer", "granite, mamba"])
def test_without_one_of_its_chunks_nothing_of_a_prompt_is_a_hit(
    connect: Connect, server: LocalServer, name: str
) -> None:
    """What it has of its end, a window or a state, is that of all chunks."""
    model = make_model(name)
    input_ids = random_ids(100, VOCABULARY)
    without = plain_tokens(model, input_ids)
    writer = connect(model)
    assert stored_tokens(writer, input_ids) == without
    damage(server, writer.client.keys(input_ids[0].tolist())[3])
    reader = connect(model)
    assert stored_tokens(reader, input_ids) == without
    assert reader.stats().hit_tokens == 0
    assert connect(model).load(input_ids)[1] == 96, "it was stored again"


def test_where_a_prompt_leaves_another_a_state_is_kept_for_the_third(connect: Connect) -> None:
    model = make_model("granite, mamba")
    connector = connect(model)
    common = random_ids(64, VOCABULARY)
    hits = []
    for seed in range(3):
        prompt = torch.cat([common, random_ids(40, VOCABULARY, seed + 10)], 1)
        before = connector.stats().hit_tokens
        assert stored_tokens(connector, prompt) == plain_tokens(model, prompt)
        hits.append(connector.stats().hit_tokens - before)
    assert hits == [0, 0, 64], "the second finds what is shared, the third hits it"


@pytest.mark.parametrize(
    "name", ["gemma2, every other layer", "granite, mamba", "deepseek, latents"]
)
def test_a_batch_of_prompts_with_different_prefixes_gives_the_tokens_of_each(
    connect: Connect, name: str
) -> None:
    model = make_model(name)
    connector = connect(model)
    prompts = [random_ids(count, VOCABULARY, count)[0] for count in (70, 33, 90)]
    connector.generate(prompts[0][None, :50], greedy())
    batch, mask = left_padded(prompts)
    engine: Any = model
    own = engine.generate(batch, generation_config=greedy(), attention_mask=mask)
    for hits in ((48, 0, 0), (64, 32, 80)):
        found = connector.generate(batch, greedy(), attention_mask=mask)
        assert torch.equal(found.output.sequences, own)
        assert found.row_hits == hits
    assert connector.stats().store_errors == {}


def test_what_each_model_keeps_is_found_by_looking(tokenizer: Any) -> None:
    attention, state, window = LayerKind.attention, LayerKind.state, LayerKind.window
    found = {
        name: {(g.kind, g.layer_ids, g.window_tokens) for g in groups(name, tokenizer)}
        for name in MODELS
    }
    assert found["mistral, windows alone"] == {(window, (0, 1, 2, 3), 40)}
    assert found["gemma2, every other layer"] == {(window, (0, 2), 40), (attention, (1, 3), 0)}
    assert found["deepseek, latents"] == {(LayerKind.mla, (0, 1, 2, 3), 0)}
    assert found["granite, mamba"] == {(attention, (1, 3), 0), (state, (0, 2), 0)}
    assert found["falcon-h1, both in each layer"] == {
        (attention, (0, 1, 2, 3), 0),
        (state, (4, 5, 6, 7), 0),
    }


def groups(name: str, tokenizer: Any) -> tuple[LayerGroup, ...]:
    return representation_of(make_model(name), tokenizer).layer_groups


def test_a_cache_that_stands_at_the_end_of_a_short_chunk_is_stored_with_its_end(
    connect: Connect,
) -> None:
    model = make_model("qwen3-next, linear attention")
    connector = connect(model, replace(OPTIONS, chunk_tokens=32))
    input_ids = random_ids(60, VOCABULARY)
    cache, held = connector.load(input_ids)
    with torch.no_grad():
        model(input_ids[:, :56], **as_argument(cache))
    assert (held, connector.save(input_ids[:, :56], cache)) == (0, 2)
    loaded, held = connector.load(input_ids[:, :57])
    assert held == 56
    with torch.no_grad():
        own = model(input_ids[:, 56:], **as_argument(cache)).logits
        assert torch.equal(model(input_ids[:, 56:], **as_argument(loaded)).logits, own)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "its state is in its modules": (
        "RecurrentGemmaConfig",
        {"num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 20},
        "keeps its state elsewhere|needs keys and values",  # the latter before transformers 5.18
    ),
    "a cache of its own": (
        "MiniMaxConfig",
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        "does not run with a DynamicCache",
    ),
    "states alone": ("MambaConfig", {"state_size": 8}, "states alone|keeps its state elsewhere"),
    "a rotation by length": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "length of the whole prompt",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_whose_prefixes_cannot_be_continued_are_refused_by_name(
    tokenizer: Any, reason: str
) -> None:
    kind, settings, words = REFUSED[reason]
    torch.manual_seed(5)
    model = random_model(getattr(transformers, kind)(**(BASE | settings)))
    with pytest.raises(ModelError, match=words):
        representation_of(model, tokenizer)


def test_a_model_with_cross_attention_is_refused_by_name(tokenizer: Any) -> None:
    model = make_model("gemma2, every other layer")
    model.config.add_cross_attention = True
    with pytest.raises(ModelError, match=r"add_cross_attention.*cross-attention"):
        representation_of(model, tokenizer)


def test_a_model_that_looks_at_its_state_for_one_token_only_is_refused(connect: Connect) -> None:
    torch.manual_seed(5)
    jamba = {
        "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    }  # fmt: skip
    model = random_model(transformers.JambaConfig(**(BASE | jamba)))
    with pytest.raises(ModelError, match="behind a stored prefix"):
        connect(model)


def test_static_caches_of_windows_are_refused_by_name(connect: Connect) -> None:
    model = make_model("gemma2, every other layer")
    settings = greedy()
    settings.cache_implementation = "static"
    with pytest.raises(InvalidRequestError, match=r"static.*goes round"):
        connect(model).generate(random_ids(40, VOCABULARY), settings)


def test_states_of_an_odd_size_in_all_are_kept_from_their_bytes() -> None:
    pieces = (
        StatePiece("conv_states", 0, (3, 1), torch.bfloat16),
        StatePiece("recurrent_states", 0, (2, 2), torch.float32),
    )
    shape, cache = StateShape(0, pieces), DynamicCache()
    cache.layers = [LinearAttentionLayer()]
    data = torch.arange(2 * shape.size_bytes, dtype=torch.uint8).reshape(2, -1)
    shape.unpack(cache, data)
    kept: Any = cache.layers[0]
    assert torch.equal(kept.conv_states[0].view(torch.uint8).reshape(2, 6), data[:, :6])
    assert torch.equal(kept.recurrent_states[0].view(torch.uint8).reshape(2, 16), data[:, 6:])
