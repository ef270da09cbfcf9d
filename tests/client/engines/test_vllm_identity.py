"""What makes a vLLM engine's KV interchangeable, what is refused, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_pages import HYBRID, SHAPE, SLIDING
from helpers.vllm_stand_ins import (
    FakeLora,
    FakeRequest,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cache_config,
    engine_config,
    feature,
)

from kvstore.client.engines.vllm.identity import hashes_inputs, model_of, shape_of
from kvstore.client.engines.vllm.lookup import CacheIdentity, ChunkChain, RequestHasher
from kvstore.client.engines.vllm.messages import (
    FlopsModel,
    FollowedTables,
    VllmSettings,
    WorkerReport,
    stated_of,
)
from kvstore.client.planning import PrefillModel
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.keys import chain_digests
from kvstore.proto.plans import NO_HINTS, Hints, Reuse
from kvstore.proto.types import DType, LayerKind, Model

SIZE = 64
TOKENS = list(range(300))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def identity(config: Any, revision: str = "") -> Model:
    shape = shape_of(config, cache_config(FullAttentionSpec()))
    return model_of(config, shape, revision)


def digests(identity: CacheIdentity) -> list[bytes]:
    chain = ChunkChain(identity, SIZE)
    chain.extend(TOKENS, len(TOKENS) // SIZE)
    return list(chain.digests)


# --- the engine


def test_settings_that_change_the_kv_change_the_identity(model: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"quantization": "fp8"},
        {"dtype": "bfloat16"},
        {"hf_sliding_window": 64},
        {"rope": {"rope_theta": 20000.0}},
        {"rope": {"rope_type": "linear", "factor": 2.0}},
        {"hf_architectures": ["AnotherForCausalLM"]},
        {"quantization_config": {"linear": "int8"}},
        {"lora_config": SimpleNamespace(lora_dtype="float16")},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_rescale": False})},
    ]
    found = {identity(engine_config(model, **changed)) for changed in changes}
    assert len(found) == len(changes)
    assert found == {identity(engine_config(model, **changed)) for changed in changes}


def test_a_file_of_scales_is_what_it_holds(model: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    images = SimpleNamespace(mm_encoder_fp8_scale_path=str(scales))
    scales.write_text("1.0")
    before = identity(engine_config(model, multimodal_config=images))
    scales.write_text("2.0")
    assert identity(engine_config(model, multimodal_config=images)) != before


def test_the_ranks_and_stages_of_any_engine_share_the_identity_of_the_model(model: Path) -> None:
    alone = identity(engine_config(model))
    assert alone.layer_groups[0].kv_heads == 2
    for ranks in (2, 4):
        config = engine_config(model, tensor_parallel_size=ranks)
        shape = shape_of(config, cache_config(FullAttentionSpec(num_kv_heads=1)))
        assert model_of(config, shape) == alone
        assert (shape.groups[0].kv_heads, shape.ranks) == (1, ranks)
    config = engine_config(model, pipeline_parallel_size=2)
    for layers in ((0, 1), (1, 3)):
        cache = cache_config(FullAttentionSpec())
        (group,) = cache.kv_cache_groups
        group.layer_names = group.layer_names[slice(*layers)]
        shape = shape_of(config, cache)
        assert model_of(config, shape) == alone
        assert shape.own_layers == layers


def test_heads_that_are_no_share_and_stages_of_unlike_layers_are_refused(model: Path) -> None:
    for ranks, heads in ((2, 2), (3, 1), (4, 2)):
        config = engine_config(model, tensor_parallel_size=ranks)
        with pytest.raises(ModelError, match="num_kv_heads"):
            shape_of(config, cache_config(FullAttentionSpec(num_kv_heads=heads)))
    config = engine_config(model, pipeline_parallel_size=2)
    for specs in ((FullAttentionSpec(), FullAttentionSpec(head_size=16)), (SlidingWindowSpec(),)):
        with pytest.raises(ModelError, match="pipeline_parallel_size"):
            shape_of(config, cache_config(*specs))


def test_random_weights_and_folders_without_weights_are_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="dummy"):
        identity(engine_config(model, load_format="dummy"))
    with pytest.raises(ModelError, match="dummy"):
        identity(engine_config(model, load_format="dummy"), revision="main")
    brought = identity(engine_config(model, load_format="dummy"), revision="8f2c1d4")
    assert brought.model_revision.startswith("8f2c1d4+settings="), "not what the folder holds"
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="model_revision"):
        identity(engine_config(model))


def refused_field(work: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        work()
    return caught.value.field


def test_engines_whose_kv_cannot_be_stored_are_refused_by_name(model: Path) -> None:
    types = {"full_attention": {}, "sliding": {"rope_type": "longrope"}}
    mean = SimpleNamespace(seq_pooling_type="MEAN")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"pooler_config": mean, "is_prefix_caching_supported": False}, "pooler_config"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"rope": {"rope_type": "longrope"}}, "rope_type"),
        ({"hf_rope_parameters": types}, "rope_type"),
    ]
    for changes, field in refused:
        config = engine_config(model, **changes)
        assert refused_field(partial(identity, config)) == field


def test_caches_of_another_kind_are_refused_by_name(model: Path) -> None:
    unnumbered = []
    for wrong in ("layers", "layers.0.1", "draft.layers.1.attn", "layers.7.attn"):
        unnumbered.append(cache_config(FullAttentionSpec()))
        unnumbered[-1].kv_cache_groups[0].layer_names[0] = wrong
    refused: list[tuple[Any, str]] = [
        (cache_config(FullAttentionSpec(), SlidingWindowSpec(block_size=64)), "block_size"),
        (cache_config(MambaSpec()), "kv_cache_spec"),
        (cache_config(MLAAttentionSpec(cache_dtype_str="fp8_ds_mla")), "kv_cache_spec"),
        (cache_config(MLAAttentionSpec(tokens_per_state=4)), "kv_cache_spec"),
        (cache_config(FullAttentionSpec(non_causal=True)), "non_causal"),
        (cache_config(FullAttentionSpec(head_size_v=4)), "kv_cache_spec"),
        (cache_config(FullAttentionSpec(num_head_slots=7)), "kv_cache_spec"),
        (cache_config(FullAttentionSpec(), layers=4), "layers"),
        *((cache, "layers") for cache in unnumbered),
    ]
    for cache, field in refused:
        assert refused_field(partial(shape_of, engine_config(model), cache)) == field


def test_layers_of_a_kind_are_one_group_whatever_tables_their_blocks_are_in(model: Path) -> None:
    sliding = SlidingWindowSpec(sliding_window=40)
    cache = cache_config(sliding, sliding, FullAttentionSpec(), layers=6)
    config = engine_config(model, get_total_num_hidden_layers=lambda: 6)
    shape = shape_of(config, cache)
    windows, full = shape.groups
    assert [(layer.number, layer.table) for layer in windows.layers] == [
        (0, 0), (1, 1), (3, 0), (4, 1),
    ]  # fmt: skip
    assert [(layer.number, layer.table) for layer in full.layers] == [(2, 2), (5, 2)]
    assert (windows.kind, full.kind) == (LayerKind.window, LayerKind.attention)
    assert windows.window_tokens == 65, "40 tokens, in whole blocks of 32"
    assert (shape.tables, shape.has_ends) == (3, True)
    assert (shape.kept_blocks(windows, 8), shape.kept_blocks(windows, 1)) == (2, 1)
    assert shape.kept_blocks(full, 8) == 8
    representation = model_of(config, shape)
    assert [group.layer_ids for group in representation.layer_groups] == [(0, 1, 3, 4), (2, 5)]


def test_windows_are_of_whole_blocks(model: Path) -> None:
    for window, tokens in ((1, 33), (32, 33), (33, 65), (64, 65), (1024, 1025)):
        cache = cache_config(SlidingWindowSpec(sliding_window=window))
        (group,) = shape_of(engine_config(model), cache).groups
        assert group.window_tokens == tokens


def test_latents_have_one_head_and_one_part(model: Path) -> None:
    spec = MLAAttentionSpec(num_kv_heads=1, head_size=576, head_size_v=0)
    shape = shape_of(engine_config(model), cache_config(spec))
    (group,) = model_of(engine_config(model), shape).layer_groups
    assert (group.kind, group.kv_heads, group.head_dim) == (LayerKind.mla, 1, 576)
    assert group.parts == 1
    assert not shape.has_ends
    assert shape.continues
    alone = engine_config(model, enable_chunked_prefill=False)
    assert not shape_of(alone, cache_config(spec)).continues
    assert shape_of(alone, cache_config(FullAttentionSpec())).continues


def test_fp8_kv_is_of_its_own_identity_and_type(model: Path) -> None:
    cache = cache_config(FullAttentionSpec(dtype=torch.uint8))
    made = {}
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        config = engine_config(model, cache_dtype=name)
        made[name] = model_of(config, shape_of(config, cache))
    assert made["fp8"] == made["fp8_e4m3"]
    assert made["fp8"].quantization == "float8_e4m3fn"
    assert made["fp8"].layer_groups[0].dtype is DType.float8_e4m3fn
    assert made["fp8_e5m2"].quantization == "float8_e5m2"
    assert made["fp8_e5m2"].layer_groups[0].dtype is DType.float8_e5m2


# --- a request


def test_plain_prompts_have_the_stores_own_names() -> None:
    plain = RequestHasher().identity(FakeRequest("a", TOKENS), b"")
    assert digests(plain) == chain_digests(TOKENS, SIZE)[:4]


def test_names_extend_as_tokens_come() -> None:
    chain = ChunkChain(CacheIdentity((b"salt:x",)), SIZE)
    chain.extend(TOKENS[:130], 2)
    chain.extend(TOKENS, 4)
    assert list(chain.digests) == digests(CacheIdentity((b"salt:x",)))
    assert [chunk.position for chunk in chain.chunks] == [0, 64, 128, 192]
    assert chain.chunks[2].parent == chain.chunks[1].digest


def test_salts_epochs_and_adapters_separate_whole_prompts(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    names = RequestHasher()
    asked = [
        (FakeRequest("a", TOKENS), b""),
        (FakeRequest("b", TOKENS), b"epoch"),
        (FakeRequest("c", TOKENS, cache_salt="alice"), b""),
        (FakeRequest("d", TOKENS, cache_salt="bob"), b""),
        (FakeRequest("e", TOKENS, lora_request=FakeLora(str(tmp_path / "one"))), b""),
        (FakeRequest("f", TOKENS, lora_request=FakeLora(str(tmp_path / "two"), 2)), b""),
    ]
    found = [digests(names.identity(request, epoch)) for request, epoch in asked]
    assert all(len({chain[place] for chain in found}) == len(asked) for place in range(4))


def test_an_image_separates_from_the_chunk_on_that_it_begins_in() -> None:
    names = RequestHasher()
    plain = digests(names.identity(FakeRequest("a", TOKENS), b""))
    cat, dog = (
        digests(names.identity(FakeRequest(name, TOKENS, mm_features=[feature(name, 70, 80)]), b""))
        for name in ("cat", "dog")
    )
    assert plain[0] == cat[0] == dog[0]
    assert all(len({plain[place], cat[place], dog[place]}) == 3 for place in (1, 2, 3))
    moved = names.identity(FakeRequest("c", TOKENS, mm_features=[feature("cat", 71, 80)]), b"")
    assert digests(moved)[1] != cat[1]


def test_what_has_no_name_is_refused(tmp_path: Path) -> None:
    names = RequestHasher()
    refused = {
        "prompt_embeds": FakeRequest("a", TOKENS, prompt_embeds=SimpleNamespace()),
        "mm_features": FakeRequest("b", TOKENS, mm_features=[feature("", 0, 4)]),
        "resumable": FakeRequest("e", TOKENS, resumable=True),
        "lora_path": FakeRequest("c", TOKENS, lora_request=FakeLora(str(tmp_path))),
        "load_inplace": FakeRequest("d", TOKENS, lora_request=FakeLora("x", load_inplace=True)),
    }
    for field, request in refused.items():
        assert refused_field(partial(names.identity, request, b"")) == field
    image = FakeRequest("f", TOKENS, mm_features=[feature("renderer0-mm-0-image-0", 0, 4)])
    numbering = RequestHasher(has_hashes=False)
    assert refused_field(partial(numbering.identity, image, b"")) == "mm_features"
    assert numbering.identity(FakeRequest("g", TOKENS), b"") == CacheIdentity()


def test_an_adapter_whose_files_change_under_the_engine_is_refused_from_then_on(
    tmp_path: Path,
) -> None:
    names, file = RequestHasher(), tmp_path / "adapter_model.safetensors"
    file.write_text("old")
    request = FakeRequest("a", TOKENS, lora_request=FakeLora(str(tmp_path)))
    assert names.identity(request, b"") == names.identity(request, b"")
    file.write_text("newer")
    with pytest.raises(ModelError, match="changed"):
        names.identity(request, b"")


def test_images_have_no_names_where_vllm_numbers_them(model: Path) -> None:
    sizes = [SimpleNamespace(mm_processor_cache_gb=size) for size in (4, 0)]
    found = [
        hashes_inputs(engine_config(model, multimodal_config=size, enable_prefix_caching=caching))
        for size in (None, *sizes)
        for caching in (True, False)
    ]
    assert found == [True, True, True, True, True, False]


def test_an_id_that_was_another_adapters_is_refused_for_the_engine_keeps_that_one(
    tmp_path: Path,
) -> None:
    names = RequestHasher()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    one, two = (
        FakeRequest(name, TOKENS, lora_request=FakeLora(str(tmp_path / name)))
        for name in ("one", "two")
    )
    assert names.identity(one, b"").first
    assert refused_field(partial(names.identity, two, b"")) == "lora_int_id"


# --- block tables


def follow(
    tables: FollowedTables, new: dict[str, list[int]], more: dict[str, list[int] | None],
    resumed: Sequence[str] = (), over: Sequence[str] = (),
) -> None:  # fmt: skip
    """Take in a SchedulerOutput of vLLM 0.26, with one block table a request."""
    cached = SimpleNamespace(
        req_ids=list(more), resumed_req_ids=set(resumed),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in more.values()],
    )  # fmt: skip
    first = [SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in new.items()]
    tables.follow(SimpleNamespace(
        finished_req_ids=set(over), scheduled_new_reqs=first, scheduled_cached_reqs=cached
    ))  # fmt: skip


def test_a_request_has_the_blocks_it_was_given_until_it_is_over_or_given_others() -> None:
    given, tables = [1, 2], FollowedTables()
    follow(tables, {"a": given, "b": [7]}, {})
    follow(tables, {}, {"a": [3], "b": None, "unknown": [4]})
    assert (tables.of("a"), tables.of("b")) == ([[1, 2, 3]], [[7]])
    assert given == [1, 2], "vLLM's own list is left as it is"
    assert list(tables.of("unknown")) == []
    follow(tables, {}, {"b": [8, 9, 4]}, resumed=["b"], over=["a"])
    assert (list(tables.of("a")), tables.of("b")) == ([], [[8, 9, 4]])


def test_ranks_of_which_one_read_lossy_have_read_lossy() -> None:
    one, other = WorkerReport(lossy_loads={"a": 3}), WorkerReport(lossy_loads={"a": 1, "b": 2})
    assert one.joined(other).lossy_loads == other.joined(one).lossy_loads == {"a": 1, "b": 2}


# --- settings of an engine


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"adress": "x"}, "kv_connector_extra_config has address"),
        ({"deadline_ms": "50"}, "deadline_ms"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"durable": 1}, "durable"),
        ({"accuracy": "lossy"}, "accuracy"),
        ({"prefill_token_us": -1}, "prefill_token_us=-1: give 0 to"),
        ({"first_token_ms": -1}, "first_token_ms=-1: give 0 to"),
        ({"handover_ms": -1}, "handover_ms"),
        ({"handover_ms": 600_001}, "handover_ms"),
        ({"wait_ms": 600_001}, "wait_ms"),
    ],
)
def test_settings_that_nobody_knows_or_that_are_none_are_refused_by_name(
    extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        VllmSettings.of(extra)


def test_the_speed_of_an_engine_is_a_setting_and_chunks_are_whole_blocks() -> None:
    assert VllmSettings.of({}).prefill is None
    assert VllmSettings.of({"prefill_token_us": 50}).prefill == PrefillModel(0.0, 50e-6)
    for chosen, block, expected in ((0, 16, 256), (0, 96, 288), (64, 32, 64)):
        assert VllmSettings(chunk_tokens=chosen).chunk_tokens_for(block) == expected
    with pytest.raises(InvalidRequestError, match="multiple of the block size, 32"):
        VllmSettings(chunk_tokens=100).chunk_tokens_for(32)


def test_lossy_copies_are_loaded_into_plain_pages_in_cpu_memory_only() -> None:
    settings = VllmSettings.of({"accuracy": "bounded"})
    assert settings.accuracy_for(SHAPE, "cpu") == "bounded"
    for shape, device in ((SHAPE, "cuda"), (HYBRID, "cpu"), (SLIDING, "cpu")):
        assert settings.accuracy_for(shape, device) == "exact"


LLAMA = SimpleNamespace(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
    intermediate_size=16,
)  # fmt: skip


def test_a_token_costs_two_operations_a_weight_and_more_the_more_is_before_it() -> None:
    cost = FlopsModel.of(LLAMA)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert cost.token_flops == 2 * 2 * weights
    assert cost.context_flops == 4 * 2 * 4 * 2
    assert cost.of_chunk(0, 4) == 4 * (cost.token_flops + 2 * cost.context_flops)
    assert cost.of_chunk(1000, 4) - cost.of_chunk(0, 4) == 4000 * cost.context_flops
    many = SimpleNamespace(**vars(LLAMA), num_experts_per_tok=2, moe_intermediate_size=4)
    assert FlopsModel.of(many).token_flops < cost.token_flops, "of experts those a token meets"
    assert FlopsModel.of(SimpleNamespace(hidden_size=8)).of_chunk(10, 10) == 0.0


# --- of a request


def stating(stated: object) -> FakeRequest:
    request = FakeRequest("a", [1] * 30)
    request.kv_transfer_params = {"kvstore": stated}  # type: ignore[attr-defined]
    request.num_prompt_tokens = 20  # type: ignore[attr-defined]
    return request


def test_hints_are_what_the_user_states_and_how_long_the_prompt_is() -> None:
    assert stated_of(FakeRequest("a", [1]), 900) == (NO_HINTS, 900), "with the usual deadline"
    assert stated_of(stating(None), 0) == (Hints(prompt_tokens=20), 0)
    stated = {"reuse": 2, "category": "chat", "priority": 70, "first_token_ms": 300}
    assert stated_of(stating(stated), 900) == (Hints(Reuse.keep, 70, 0, 0, "chat", 20), 300)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"reuze": 1}, None), ({"priority": 500}, None), ("keep", None),
        ({"prompt_tokens": 3}, None), ({"category": []}, None),
        *(({"first_token_ms": wrong}, "first_token_ms") for wrong in (-1, 1.5, True, 1 << 40)),
    ],
)  # fmt: skip
def test_what_is_no_hint_and_no_deadline_is_refused(stated: object, words: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        stated_of(stating(stated), 0)
