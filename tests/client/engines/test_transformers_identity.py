"""What a transformers model's identity is made of, and which models have none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvstore.client.engines.transformers import representation_of
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, rope_parameters
from kvstore.proto.types import DType, LayerGroup, LayerKind, RopeParameters

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 1,
}  # fmt: skip


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | settings)))


def test_the_trained_model_is_described_completely(tinylm: PreTrainedModel, tokenizer: Any) -> None:
    identity = representation_of(tinylm, tokenizer)
    assert re.fullmatch("llama-[0-9a-f]{8}", identity.model_id)
    assert identity.layer_groups == (
        LayerGroup(LayerKind.attention, DType.float32, (0, 1, 2, 3, 4, 5), 4, 32),
    )
    assert identity.rope == RopeParameters(500_000.0, 32)
    assert re.fullmatch("weights=[0-9a-f]{64}", identity.model_revision)
    assert identity.tokenizer_digest == OWN_TOKENIZER


@pytest.mark.parametrize(
    ("given", "weight", "where", "names"),
    [
        (None, "layers.1.self_attn.k_proj", (3, 4), ("weights=", "blake3:")),
        ("8f2c1d4", "layers.1.self_attn.k_proj", ..., ("8f2c1d4+sample=", "8f2c1d4+blake3:")),
        ("8f2c1d4", "embed_tokens", 7, ("8f2c1d4+sample=", "8f2c1d4+blake3:")),
    ],
    ids=["an element", "a layer beside a commit", "a row beside a commit"],
)
def test_weights_that_are_not_those_of_the_files_do_not_have_the_files_name(
    load_tinylm: Any, tokenizer: Any, given: str | None, weight: str, where: Any,
    names: tuple[str, str],
) -> None:  # fmt: skip
    model = load_tinylm()
    before = representation_of(model, tokenizer, given).model_revision
    with torch.no_grad():
        model.model.get_submodule(weight).weight[where] += 1e-3
    after = representation_of(model, tokenizer, given).model_revision
    assert before != after
    assert (before.startswith(names[0]), after.startswith(names[1])) == (True, True)


def test_a_model_cast_after_it_was_loaded_is_not_one_loaded_in_that_type(tokenizer: Any) -> None:
    """Its rotation was rounded, too: keys of late tokens are others."""
    model: Any = llama(max_position_embeddings=4096)
    loaded = representation_of(model, tokenizer)
    assert representation_of(model.to(torch.bfloat16).to(torch.float32), tokenizer) != loaded


def test_a_model_whose_state_is_not_of_tensors_is_refused_by_name(tokenizer: Any) -> None:
    """As torch's own quantisation packs its weights."""

    class Packed(torch.nn.Module):
        def get_extra_state(self) -> tuple[int, int]:
            return (1, 2)

    model = llama()
    model.lm_head.packed = Packed()
    with pytest.raises(ModelError, match="its weights are packed"):
        representation_of(model, tokenizer)


@pytest.mark.parametrize("own", ["class", "attention"])
def test_a_model_of_other_code_does_not_have_the_files_name(
    load_tinylm: Any, tokenizer: Any, own: str
) -> None:
    """What it computes otherwise nobody knows."""
    model = load_tinylm()
    before = representation_of(model, tokenizer)
    model.config._attn_implementation = "eager"
    assert representation_of(model, tokenizer) == before, "another kernel for the same"
    if own == "class":
        model.__class__ = type("OwnForCausalLM", (LlamaForCausalLM,), {})
    else:
        AttentionInterface.register("of_every_fourth_token", lambda *_: None)
        model.config._attn_implementation = "of_every_fourth_token"
    assert representation_of(model, tokenizer) != before


def test_a_model_in_a_cache_is_called_as_the_hub_calls_it_and_by_its_commit(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path and by its name."""
    commit = "8f2c1d4e" * 5
    folder = tmp_path / "models--org--tiny" / "snapshots" / commit
    llama().save_pretrained(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    by_path = AutoModelForCausalLM.from_pretrained(folder)
    by_name = AutoModelForCausalLM.from_pretrained(folder)
    by_name.config._name_or_path, by_name.config._commit_hash = "org/tiny", commit
    found = [representation_of(model, tokenizer) for model in (by_path, by_name)]
    assert found[0] == found[1]
    assert (found[0].model_id, found[0].model_revision) == ("org/tiny", commit)


def test_a_commit_is_the_revision_where_there_is_one(tokenizer: Any) -> None:
    model, again = llama(), llama()
    model.config._commit_hash = again.config._commit_hash = "c0ffee"
    revision = representation_of(model, tokenizer).model_revision
    assert revision.startswith("c0ffee+")
    assert representation_of(again, tokenizer).model_revision == revision
    given = representation_of(model, tokenizer, "8f2c1d4").model_revision
    assert given.startswith("8f2c1d4+blake3:")
    assert "c0ffee" not in given
    branch = representation_of(model, tokenizer, "main").model_revision
    assert branch == f"main+{revision}"


@pytest.mark.parametrize("given", [None, "given"])
def test_a_commit_with_other_weights_or_settings_is_another_revision(
    tokenizer: Any, given: str | None
) -> None:
    """As ``from_pretrained(name, rms_norm_eps=...)`` loads it, a merged adapter leaves weights, or
    a quantisation at load time."""
    models = [llama(), llama(), llama(rms_norm_eps=1e-3), llama(), llama(), llama()]
    merged, four, eight = models[3:]
    with torch.no_grad():
        merged.model.layers[1].self_attn.k_proj.weight += 1e-3
    four.config.quantization_config = {"load_in_4bit": True}
    eight.config.quantization_config = {"load_in_8bit": True}
    for model in models:
        model.config._commit_hash = "c0ffee"
    found = [representation_of(model, tokenizer, given).model_revision for model in models]
    assert found[0] == found[1]
    assert len(set(found)) == 5


def test_what_is_no_model_and_no_tokenizer_is_refused_by_name(tokenizer: Any) -> None:
    for wrong in ("model", "tokenizer"):
        given = {"model": llama(), "tokenizer": tokenizer, wrong: None}
        with pytest.raises(ModelError, match=f"{wrong}=None: give the {wrong} loaded"):
            representation_of(**given)


def test_a_token_that_means_something_else_is_another_tokenizer(tokenizer: Any) -> None:
    make: Any = PreTrainedTokenizerFast
    other, model = make(tokenizer_object=tokenizer.backend_tokenizer), llama()
    own = representation_of(model, tokenizer).tokenizer_digest
    assert representation_of(model, other).tokenizer_digest == own
    other.add_tokens(["<new>"])
    assert representation_of(model, other).tokenizer_digest != own


@pytest.mark.parametrize("mark", ["_hf_peft_config_loaded", "peft_config"])
def test_a_model_with_an_adapter_needs_the_adapters_digest(tokenizer: Any, mark: str) -> None:
    model = llama()
    setattr(model, mark, {"default": "lora"})
    with pytest.raises(ModelError, match="adapter"):
        representation_of(model, tokenizer)
    assert representation_of(model, tokenizer, adapter_digest="5ad1").adapter_digest == "5ad1"


def test_the_rotation_is_read_from_the_configuration(tokenizer: Any) -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    llama3 = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    factors = (
        ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 128.0),
    )  # fmt: skip
    for stated, expected in (
        ({"rope_type": "default", "rope_theta": 1e4}, RopeParameters(1e4, 16)),
        (linear, RopeParameters(1e4, 16, "linear", (("factor", 4.0),))),
        (llama3, RopeParameters(5e5, 16, "llama3", factors)),
    ):
        assert rope_parameters(LlamaConfig(**SMALL, rope_parameters=stated)) == expected
    of_length = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 256,
    }  # fmt: skip
    with pytest.raises(ModelError, match="longrope"):
        representation_of(llama(rope_parameters=of_length), tokenizer)


def test_a_model_without_weights_in_memory_is_refused(tokenizer: Any) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(ModelError, match="one device"):
        representation_of(model, tokenizer)
