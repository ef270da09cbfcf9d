"""What an SGLang engine was started with is in the names of its pages; SGLang is not needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.client.engines.sglang.pages import (
    UNKNOWN,
    PageSettings,
    RankInfo,
    ServerArgsDigest,
    kv_model,
)
from kvstore.proto.errors import ModelError


def terms(**stated: Any) -> ServerArgsDigest:
    common = {"load_format": "auto", "dtype": "auto", "kv_cache_dtype": "auto"}
    return ServerArgsDigest.of(
        SimpleNamespace(**{**common, "json_model_override_args": "{}", **stated})
    )


def named(**stated: Any) -> str:
    """Return what the revision of an engine's pages is called."""
    pool: Any = SimpleNamespace(
        layout="page_first", page_size=16, start_layer=0, layer_num=1,
        kv_buffer=torch.zeros(2, 16, 1, 2, 8),
        get_dummy_flat_data_page=lambda: torch.zeros(2, 16, 1, 2, 8),
    )  # fmt: skip
    settings = PageSettings.parse({"model_revision": "c" * 40}, "tiny", terms(**stated))
    return kv_model(pool, RankInfo(is_mla=False), settings).model_revision


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path / "lora"


def test_engines_that_were_started_alike_share() -> None:
    assert terms(port=1) == terms(port=2)
    assert named() == named()


@pytest.mark.parametrize(
    "stated",
    [
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'},
        {"quantization": "fp8"},
        {"dtype": "half"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"revision": "other"},
        {"model_impl": "transformers"},
        {"mm_process_config": {"image": {"max_pixels": 4}}},
    ],
    ids=str,
)
def test_what_changes_the_kv_is_another_revision(stated: dict[str, Any]) -> None:
    assert named(**stated) != named()


def test_the_weights_are_those_of_the_path_and_commit_that_the_engine_was_started_with() -> None:
    """The name that it serves them under may be any."""
    commit = "8f2c1d4e" * 5
    started = terms(model_path="org/model", revision=commit)
    assert PageSettings.parse({}, "served-name", started).weights.revision == commit
    branch = terms(model_path="org/model", revision="main")
    with pytest.raises(ModelError, match="'org/model' is no folder"):
        PageSettings.parse({}, "served-name", branch)


def test_amds_fp8_is_another() -> None:
    assert ServerArgsDigest.of(SimpleNamespace(), is_hip=True) != ServerArgsDigest.of(
        SimpleNamespace()
    )


def test_a_file_is_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text("1.0")
    before = terms(quantization_param_path=str(file))
    file.write_text("2.0")
    assert terms(quantization_param_path=str(file)) != before


def forms(path: Path) -> list[Any]:
    return [
        [str(path)],
        [f"name={path}"],
        {"name": str(path)},
        [{"lora_name": "name", "lora_path": str(path)}],
        [SimpleNamespace(lora_path=str(path))],
    ]


def test_an_adapter_whose_files_changed_under_its_path_is_another(adapter: Path) -> None:
    """SGLang's ids of adapters that are given at the start are made of names and paths alone."""
    before = {terms(lora_paths=stated).adapter_digest("none") for stated in forms(adapter)}
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    after = {terms(lora_paths=stated).adapter_digest("none") for stated in forms(adapter)}
    assert len(before) == len(after) == 1
    assert len(before | after | {terms().adapter_digest("none")}) == 3


def test_an_adapter_that_is_not_here_has_to_be_named() -> None:
    found = terms(lora_paths=["org/adapter"])
    with pytest.raises(ModelError, match=r"lora_paths='org/adapter'.*adapter_digest"):
        found.adapter_digest("none")
    assert found.adapter_digest("sha256:5f") == "sha256:5f"


def test_random_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="load_format"):
        terms(load_format="dummy")


def test_without_an_engine_the_users_words_stand_alone() -> None:
    assert UNKNOWN.adapter_digest("none") == "none"
