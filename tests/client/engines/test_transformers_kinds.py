"""Models of each kind, of full attention, windows, states and latents, on any device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import transformers
from contracts.layers import damage
from helpers.local_server import LocalServer
from helpers.slow_device import SlowDevice
from helpers.torch_engine import (
    OPTIONS,
    greedy,
    ids_of,
    left_padded,
    plain_tokens,
    prefill,
    random_ids,
    stored_tokens,
)
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from typing_extensions import override

from kvstore.client import ClientOptions
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers import loads as transformers_loads
from kvstore.client.engines.transformers.cache import (
    CacheShape,
    StatePiece,
    StateShape,
    TokenShape,
    as_argument,
)
from kvstore.client.engines.transformers.loads import Staging, chunk_bytes
from kvstore.proto.device import HostDevice, HostStream, Stream
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import LayerGroup, LayerKind

VOCABULARY = 256
SHORT = replace(OPTIONS, chunk_tokens=16)

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
    "qwen2, biases": ("Qwen2Config", {}),
    "qwen3, normed keys": ("Qwen3Config", {"head_dim": 32}),
    "mistral, windows alone": ("MistralConfig", {"sliding_window": 40}),
    "mistral, a window within a chunk": ("MistralConfig", {"sliding_window": 12}),
    "gemma2, every other layer": ("Gemma2Config", {"head_dim": 16, "sliding_window": 40}),
    "gemma4, heads of two sizes": (
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 32, "sliding_window": 40, "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        },
    ),
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

FALCON = transformers.FalconConfig(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=True
)


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind, settings = MODELS[name]
    return random_model(getattr(transformers, kind)(**(BASE | settings)), dtype)


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(5)
    makers: Any = AutoModelForCausalLM
    model: PreTrainedModel = makers.from_config(config, dtype=dtype).eval()
    return model


Connect = Callable[..., TransformersConnector]


@pytest.fixture
def connect(server: LocalServer, tokenizer: Any) -> Connect:
    """Make connectors with a client each."""

    def make(model: PreTrainedModel, options: ClientOptions = SHORT) -> TransformersConnector:
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
    with patch.object(model, "generate", wraps=engine.generate) as calls:
        for hits in ((48, 0, 0), (64, 32, 80)):
            found = connector.generate(batch, greedy(), attention_mask=mask)
            assert torch.equal(found.output.sequences, own)
            assert found.row_hits == hits
    assert calls.call_count == 2 + 2, "padding is tried once"
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
    "states alone": ("MambaConfig", {"state_size": 8}, "states only|keeps its state elsewhere"),
    "a rotation by length": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "length of the whole prompt",
    ),
    "attention to later tokens": ("LlamaConfig", {"is_causal": False}, "depends on later tokens"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_whose_prefixes_cannot_be_continued_are_refused_by_name(
    tokenizer: Any, reason: str
) -> None:
    kind, settings, words = REFUSED[reason]
    model = random_model(getattr(transformers, kind)(**(BASE | settings)))
    with pytest.raises(ModelError, match=words):
        representation_of(model, tokenizer)


def test_a_model_with_cross_attention_is_refused_by_name(tokenizer: Any) -> None:
    model = make_model("gemma2, every other layer")
    model.config.add_cross_attention = True
    with pytest.raises(ModelError, match=r"add_cross_attention.*cross-attention"):
        representation_of(model, tokenizer)


def test_positions_that_do_not_count_tokens_equal_to_the_padding_are_refused(
    connect: Connect,
) -> None:
    with pytest.raises(ModelError, match="after a stored prefix"):
        connect(random_model(transformers.RobertaConfig(**BASE, is_decoder=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_that_counts_as_positions_is_refused_by_name(
    connect: Connect, dtype: torch.dtype
) -> None:
    """What such a batch generates is at other positions than in a prompt alone."""
    sizes: Any = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCABULARY}
    model = random_model(transformers.BartConfig(**sizes, decoder_ffn_dim=96), dtype)
    connector = connect(model)
    prompts = [random_ids(count, VOCABULARY, count)[0] for count in (80, 33)]
    batch, mask = left_padded(prompts)
    with pytest.raises(InvalidRequestError, match="positions count padding"):
        connector.generate(batch, greedy(), attention_mask=mask)
    assert connector.generate(batch[:, 47:], greedy()).row_hits == (0, 0)
    others = connect(random_model(transformers.GlmConfig(**BASE, head_dim=16), dtype))
    assert others.generate(batch, greedy(), attention_mask=mask).row_hits == (0, 0)


def _attend_to_half(model: Any) -> None:
    own = sdpa_attention_forward

    def half(*given: Any, **named: Any) -> Any:
        found, weights = own(*given, **named)
        return found / 2, weights

    transformers.AttentionInterface.register("half", half)
    transformers.AttentionMaskInterface.register("half", sdpa_mask)
    model.set_attn_implementation("half")


def _double(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: 2 * own(hidden)


CHANGES: dict[str, Callable[[Any], object]] = {
    "its rotation": lambda model: model.model.rotary_emb.inv_freq.mul_(0.25),
    "a hook": lambda model: model.model.layers[1].register_forward_hook(lambda *a: a[2] + 0.5),
    "its attention": _attend_to_half,
    "a number": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.7),
    "a module": lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
    "a method": _double,
    "its dropout": lambda model: model.model.layers[1].train(),
    "its active adapter": lambda model: setattr(model.model.layers[1], "active", ["second"]),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_what_a_model_computes_with_beside_its_weights_may_change(
    connect: Connect, changed: str
) -> None:
    model = make_model("qwen2, biases")
    vars(model.model.layers[1])["active"] = ["first"]
    model.model.layers[1].mlp.act_fn = torch.nn.SiLU()
    connector, ids = connect(model), random_ids(100, VOCABULARY)
    assert stored_tokens(connector, ids) == plain_tokens(model, ids)
    assert connector.load(ids)[1] == 96
    CHANGES[changed](model)
    assert connector.load(ids)[1] == 0
    assert stored_tokens(connector, ids) == plain_tokens(model, ids)
    assert connector.load(ids)[1] == 96


@pytest.mark.parametrize("changed", [name for name in CHANGES if name != "its active adapter"])
def test_a_model_with_other_code_or_numbers_than_its_settings_say_has_a_name_of_its_own(
    connect: Connect, changed: str
) -> None:
    model = make_model("qwen2, biases")
    ids = random_ids(100, VOCABULARY)
    stored_tokens(connect(model), ids)
    assert connect(model).load(ids)[1] == 96
    CHANGES[changed](model)
    assert connect(model).load(ids)[1] == 0


def test_tables_of_each_kind_of_layer_are_in_the_name(tokenizer: Any) -> None:
    """As in a model that was cast, whose tables are rounded."""
    model = random_model(
        transformers.Gemma3TextConfig(**BASE, head_dim=16, sliding_window=40), torch.bfloat16
    )
    before, cast = representation_of(model, tokenizer), copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[arg-type]
    assert representation_of(cast, tokenizer) != before


def test_tables_of_a_module_without_a_config_are_in_the_name(tokenizer: Any) -> None:
    """As in custom models, whose rotary modules are made from numbers."""

    class Rotary(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("inv_freq", scale / torch.arange(1.0, 9.0), persistent=False)

    found = []
    for scale in (1.0, 1.0, 2.0):
        model = make_model("qwen2, biases")
        model.model.layers[0].rotary = Rotary(scale)
        found.append(representation_of(model, tokenizer))
        model.model.layers[0].rotary.config = model.config
        assert representation_of(model, tokenizer) == found[-1], "it is not made from it"
    assert found[0] == found[1] != found[2]


def test_buffers_that_are_not_among_the_weights_are_in_the_name(tokenizer: Any) -> None:
    found = []
    for scale in (1.0, 1.0, 0.5):
        model = make_model("gemma2, every other layer")
        model.model.embed_tokens.embed_scale *= scale
        found.append(representation_of(model, tokenizer))
    assert found[0] == found[1] != found[2]


def test_a_model_with_fewer_layers_than_its_settings_say_is_refused_by_name(tokenizer: Any) -> None:
    model = make_model("qwen2, biases")
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ModelError, match=r"layers\[3\].*needs keys and values"):
        representation_of(model, tokenizer)


def test_attention_that_computes_otherwise_in_some_models_is_in_their_name(
    tokenizer: Any, connect: Connect
) -> None:
    """Falcon scales the biases of its heads in one of them only."""
    model = random_model(FALCON)
    connector, ids = connect(model), random_ids(100, VOCABULARY)
    connector.generate(ids, greedy(), output_attentions=True)  # takes the other one
    assert connector.load(ids)[1] == 0
    stored_tokens(connector, ids)
    assert connector.load(ids)[1] == 96
    name = representation_of(model, tokenizer)
    model.config._attn_implementation = "eager"
    assert (representation_of(model, tokenizer) == name, connector.load(ids)[1]) == (False, 0)


def test_kv_computed_in_another_dtype_by_autocast_is_not_that_of_the_model(
    connect: Connect,
) -> None:
    connector, ids = connect(make_model("qwen2, biases")), random_ids(100, VOCABULARY)
    with torch.autocast("cpu", torch.bfloat16):
        stored_tokens(connector, ids)
    assert connector.load(ids)[1] == 0
    stored_tokens(connector, ids)
    assert connector.load(ids)[1] == 96
    with torch.autocast("cpu", torch.bfloat16):
        assert connector.load(ids)[1] == 0


def test_what_changes_while_autocast_is_on_does_not_end_the_use_of_the_store(
    connect: Connect,
) -> None:
    """The cache has another dtype then."""
    model, ids = random_model(FALCON), random_ids(100, VOCABULARY)
    connector, engine = connect(model), cast(Any, model)
    engine.transformer.h[1].mlp.act = torch.nn.ReLU()
    with torch.autocast("cpu", torch.bfloat16):
        assert stored_tokens(connector, ids) == plain_tokens(model, ids)
    assert stored_tokens(connector, ids) == plain_tokens(model, ids)
    assert connector.load(ids)[1] == 96


def test_a_model_whose_cache_has_other_layers_now_runs_without_the_store(
    connect: Connect,
) -> None:
    model, ids = make_model("mistral, windows alone"), random_ids(100, VOCABULARY)
    connector = connect(model)
    batch, mask = left_padded([ids[0], ids[0, :40]])
    for window in (60, None):
        model.config.sliding_window = window
        for _ in range(2):
            assert stored_tokens(connector, ids) == plain_tokens(model, ids)
        engine: Any = model
        own = engine.generate(batch, generation_config=greedy(), attention_mask=mask)
        found = connector.generate(batch, greedy(), attention_mask=mask)
        assert (found.row_hits, connector.load(ids)[1]) == ((0, 0), 0)
        assert torch.equal(found.output.sequences, own)
    assert connector.stats().load_errors == {"ModelError": 2}
    model.config.sliding_window = 40
    for _ in range(2):
        assert stored_tokens(connector, ids) == plain_tokens(model, ids)
    assert connector.load(ids)[1] == 96


def test_a_model_in_training_is_refused_by_name(connect: Connect) -> None:
    model = make_model("qwen2, biases")
    connector, ids = connect(model), random_ids(100, VOCABULARY)
    cache = prefill(model, ids)
    model.train()
    for work in (connector.generate, connector.load, lambda ids: connector.save(ids, cache)):
        with pytest.raises(InvalidRequestError, match="in training mode"):
            work(ids)
    model.train(mode=False)
    assert connector.generate(ids, greedy()).hit_tokens == 0


def test_a_model_that_looks_at_its_state_for_one_token_only_is_refused(connect: Connect) -> None:
    jamba = {
        "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    }  # fmt: skip
    model = random_model(transformers.JambaConfig(**(BASE | jamba)))
    with pytest.raises(ModelError, match="after a stored prefix"):
        connect(model)


def test_static_caches_of_windows_are_refused_by_name(connect: Connect) -> None:
    model = make_model("gemma2, every other layer")
    settings = greedy()
    settings.cache_implementation = "static"
    with pytest.raises(InvalidRequestError, match=r"static.*is a ring"):
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


KINDS = ("gemma2, every other layer", "lfm2, convolutions")


class CountingDevice(HostDevice):
    """Counts the copies of its streams, and what host memory was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        self.staged: list[int] = []

    @override
    def staging(self, size_bytes: int) -> torch.Tensor:
        self.staged.append(size_bytes)
        return super().staging(size_bytes)

    @override
    def current_stream(self) -> Stream:
        return CountingStream(self)


class CountingStream(HostStream):
    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    @override
    def copy(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._device.copies += 1
        super().copy(out, data)


@pytest.fixture(scope="module")
def trained(load_tinylm: Any) -> Any:
    """The trained model in bfloat16."""
    return load_tinylm(torch.bfloat16)


def device_model(kind: str, trained: Any) -> Any:
    """The trained model, or a small random one of KINDS, in bfloat16."""
    return copy.deepcopy(trained) if kind == "full attention" else make_model(kind, torch.bfloat16)


def on_device(
    server: LocalServer, model: PreTrainedModel, tokenizer: Any, device: HostDevice | None = None
) -> TransformersConnector:
    client = server.connect("auto", representation_of(model, tokenizer), OPTIONS)
    return TransformersConnector(client, model, device=device)


def assert_same_tokens(model: Any, found: torch.Tensor, own: torch.Tensor, mask: Any) -> None:
    """*found* and *own*, (prompts, tokens), are alike up to where two tokens were as likely.

    A prompt that is computed in other pieces is rounded otherwise.
    """
    for row, (mine, theirs) in enumerate(zip(found, own, strict=True)):
        differ = (mine != theirs).nonzero()
        if not len(differ):
            continue
        at = int(differ[0])
        ids = theirs[int((mask[row] == 0).sum()) : at]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -1].float()
        gap = float(logits[theirs[at]] - logits[mine[at]])
        assert gap <= 4 * torch.finfo(model.dtype).eps * float(logits.abs().max())


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *(("cpu", kind) for kind in ("full attention", *KINDS)),
        *(pytest.param("cuda", k, marks=pytest.mark.gpu) for k in ("full attention", *KINDS)),
    ],
)
def test_on_each_device_tokens_are_the_same_without_with_and_from_the_store(
    server: LocalServer, trained: Any, tokenizer: Any, device: str, kind: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    model = device_model(kind, trained).to(device)
    twin = CountingDevice() if device == "cpu" else None
    prompts = [random_ids(count, 256, count)[0] for count in (150, 1, 97)]
    for some in (prompts[:1], prompts):
        batch, mask = (part.to(device) for part in left_padded(some))
        own = model.generate(batch, generation_config=greedy(), attention_mask=mask)
        for _ in range(2):
            connector = on_device(server, model, tokenizer, twin)
            found = connector.generate(batch, greedy(), attention_mask=mask)
            assert_same_tokens(model, found.output.sequences, own, mask)
            stats = connector.stats()
            assert (stats.load_errors, stats.store_errors) == ({}, {})
        assert found.row_hits[0] in (149, 128), "whole chunks where windows and states are kept"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_device_loads_is_what_it_stored_bit_for_bit(
    server: LocalServer, trained: Any, tokenizer: Any, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    model = device_model("full attention", trained).to(device)
    input_ids = random_ids(230).to(device)
    twin = CountingDevice() if device == "cpu" else None
    with torch.inference_mode():
        own = model(input_ids).past_key_values
        assert on_device(server, model, tokenizer, twin).save(input_ids, own) == 4
    cache, hit = on_device(server, model, tokenizer, twin).load(input_ids)
    assert hit == 229
    layers: Any = cache.layers
    for mine, theirs in zip(layers, own.layers, strict=True):
        assert mine.keys.device.type == device
        assert torch.equal(mine.keys, theirs.keys[:, :, :229])
        assert torch.equal(mine.values, theirs.values[:, :, :229])


# --- what is copied, and when


def test_a_chunk_of_all_layers_is_one_copy_each_way_through_memory_made_once(
    server: LocalServer, tinylm: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = chunk_bytes(CacheShape.of(tinylm), OPTIONS.chunk_tokens)
    monkeypatch.setattr(transformers_loads, "RING_BYTES", 2 * size + 1)
    device = CountingDevice()
    connector = on_device(server, tinylm, tokenizer, device)
    input_ids = random_ids(5 * 64 + 20)  # more chunks than the ring has places for
    own: Any = prefill(tinylm, input_ids)
    assert connector.save(input_ids, own) == 6
    assert device.copies == 6
    cache, hit = connector.load(input_ids)
    assert (hit, device.copies) == (5 * 64 + 19, 12)
    assert device.staged == [2 * size]
    layers: Any = cache.layers
    for mine, theirs in zip(layers, own.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys[:, :, :hit])


def test_host_memory_is_read_only_after_the_work_before_a_store_and_its_copy() -> None:
    device = SlowDevice()
    keys = torch.zeros(2, 4, 8)
    device.compute.launch(lambda: keys.fill_(7))  # the forward that the store comes behind
    shape = CacheShape(1, (TokenShape(0, 2, (8, 8), torch.float32),), ())
    staging = Staging(device, torch.device("cpu"), shape, 4)
    assert (staging.to_host([[[keys]]])[0][0][0] == 7).all()


def test_what_is_computed_behind_a_load_waits_for_its_copies(
    server: LocalServer, tinylm: Any, tokenizer: Any
) -> None:
    input_ids = random_ids(128)
    own: Any = prefill(tinylm, input_ids)
    on_device(server, tinylm, tokenizer).save(input_ids, own)
    device = SlowDevice()
    cache, hit = on_device(server, tinylm, tokenizer, device).load(input_ids)
    assert (hit, device.streams) == (127, []), "only the engine's own stream is used"
    layers: Any = cache.layers
    assert torch.equal(layers[0].keys, own.layers[0].keys[:, :, :hit])


def test_a_device_that_fails_is_a_counted_miss(
    server: LocalServer, tinylm: Any, tokenizer: Any
) -> None:
    device = SlowDevice()
    device.fails = True
    connector = on_device(server, tinylm, tokenizer, device)
    input_ids = random_ids(70)
    own: Any = prefill(tinylm, input_ids)
    assert connector.save(input_ids, own) == 0
    assert on_device(server, tinylm, tokenizer).save(input_ids, own) == 1
    cache, hit = connector.load(input_ids)
    assert (hit, cache.get_seq_length()) == (0, 0)
    stats = connector.stats()
    assert stats.load_errors == stats.store_errors == {"TierUnavailableError": 1}
