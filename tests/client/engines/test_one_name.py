"""Engines of the same weights share chunks: transformers, vLLM's halves and SGLang's pages."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import tokens as prompt_tokens
from helpers.torch_engine import OPTIONS, ids_of, kept, prefill
from helpers.vllm_pages import BLOCK_TOKENS, CHUNK_TOKENS, HEAD_DIM, HEADS, kv_of
from helpers.vllm_stand_ins import (
    FakeRequest,
    FullAttentionSpec,
    cache_config,
    engine_config,
    feature,
)
from helpers.vllm_steps import Engine
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvstore.client.engines.identity import (
    SAMPLE_STRIDE,
    Departures,
    identity_of,
    is_exact,
    weights_name,
    weights_of,
)
from kvstore.client.engines.sglang import pages as sglang_pages
from kvstore.client.engines.sglang.pages import PageSettings, PageStore, RankInfo, ServerArgsDigest
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.vllm import identity as vllm_identity
from kvstore.client.engines.vllm.blocks import BLOCK_LAYOUTS
from kvstore.client.engines.vllm.identity import shape_of
from kvstore.client.engines.vllm.lookup import RequestHasher
from kvstore.proto.hf_config import rope_parameters
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": 512, "pad_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
TINYLM = Path(__file__).resolve().parents[3] / "data" / "tinylm"
PROMPT = [token % 512 for token in prompt_tokens(1, 200)]

Named = Callable[[Path], Model]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights and a tokenizer, as a hub has them."""
    torch.manual_seed(3)
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINYLM / name, folder)
    return folder


def loaded(folder: Path, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **settings
    )
    return model


def by_transformers(folder: Path, **settings: Any) -> Model:
    revision = settings.pop("model_revision", "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return representation_of(loaded(folder, **settings), tokenizer, revision)


def by_vllm(
    folder: Path, *, model_revision: str = "", own: dict[str, Any] | None = None, **settings: Any
) -> Model:
    """*own* are settings of the engine alone, others those of the model."""
    config = engine_config(folder, **(own or {}))
    model = config.model_config
    model.hf_config = model.hf_text_config = AutoConfig.from_pretrained(folder, **settings)
    model.model_impl, model.model_class_overrides = "auto", {}
    shape = shape_of(config, cache_config(FullAttentionSpec(), layers=LAYERS))
    return vllm_identity.model_of(config, shape, model_revision)


def host_pool() -> Any:
    """Return what SGLang keeps three pages in."""
    return SimpleNamespace(
        layout="page_first", page_size=CHUNK_TOKENS, start_layer=0, layer_num=LAYERS,
        kv_buffer=torch.zeros(2, 3 * CHUNK_TOKENS, LAYERS, HEADS, HEAD_DIM),
        get_dummy_flat_data_page=lambda: torch.zeros(2, CHUNK_TOKENS, LAYERS, HEADS, HEAD_DIM),
    )  # fmt: skip


def by_sglang(folder: Path, *, model_revision: str = "", **settings: Any) -> Model:
    rank, asked = started(folder, model_revision, **settings)
    return sglang_pages.kv_model(host_pool(), rank, asked)


def started(
    folder: Path, model_revision: str = "", address: str = "127.0.0.1:1", **settings: Any
) -> tuple[RankInfo, PageSettings]:
    """Return what an SGLang was started with that serves *folder* under another name."""
    stated = {"json_model_override_args": str(settings) if settings else "{}"}
    terms = ServerArgsDigest.of(SimpleNamespace(model_path=str(folder), dtype="auto", **stated))
    extra = {"model_revision": model_revision, "address": address, "deadline_ms": DEADLINE_MS}
    return RankInfo(False), PageSettings.parse(extra, "served-name", terms)


ENGINES = (by_transformers, by_vllm, by_sglang)


@pytest.mark.parametrize("revision", ["", "8f2c1d4"])
def test_the_same_weights_have_one_identity_in_every_engine_and_folder(
    folder: Path, tmp_path: Path, revision: str
) -> None:
    shutil.copytree(folder, tmp_path / "copied")
    found = {
        engine(place, model_revision=revision)
        for engine in ENGINES
        for place in (folder, tmp_path / "copied")
    }
    assert len(found) == 1


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("engine", "changed"),
    [(by_transformers, "weights"), (by_vllm, "settings"), (by_sglang, "tokenizer")],
)
def test_other_files_are_another_model_to_every_engine(
    folder: Path, engine: Named, changed: str
) -> None:
    before = engine(folder)
    if changed == "weights":
        torch.manual_seed(4)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    elif changed == "settings":
        replaced(folder / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    else:
        replaced(folder / "tokenizer.json", "{", " {")
    assert engine(folder) != before


def test_a_setting_that_an_engine_changes_is_its_own(folder: Path) -> None:
    plain = by_vllm(folder)
    found = [engine(folder, rms_norm_eps=1e-3) for engine in ENGINES]
    assert len({plain, *found}) == 4


def test_a_setting_of_the_engine_that_no_model_states_is_its_own(folder: Path) -> None:
    quantised = by_vllm(folder, own={"quantization_config": {"linear": "int8"}})
    adapted = by_vllm(folder, own={"lora_config": SimpleNamespace(lora_dtype="x")})
    assert not {quantised, adapted} & {engine(folder) for engine in ENGINES}


def test_an_architecture_that_may_be_kept_otherwise_is_each_engines_own(folder: Path) -> None:
    """As of Gemma, whose layers other engines may keep in another spec."""
    replaced(folder / "config.json", '"model_type": "llama"', '"model_type": "gemma"')
    assert by_vllm(folder) != by_sglang(folder)
    assert by_vllm(folder) == by_vllm(folder)


# --- SGLang's pages, where they are whole chunks


@pytest.fixture
def pages(folder: Path, server: LocalServer) -> Iterator[PageStore]:
    """The pages of an SGLang over them."""
    store = PageStore(host_pool(), *started(folder, address=server.address))
    yield store
    store.client.close()


@pytest.fixture
def as_sglang(folder: Path, server: LocalServer) -> Iterator[tuple[TransformersConnector, Engine]]:
    """A transformers connector and a vLLM engine that name prompts as SGLang does."""
    chosen = replace(OPTIONS, sglang_names=True)
    client = server.connect("auto", by_transformers(folder), chosen)
    engine = Engine(server.address, by_vllm(folder), opts=chosen)
    yield TransformersConnector(client, loaded(folder)), engine
    engine.close()


def hashes_of(tokens: Sequence[int]) -> list[str]:
    """Return SGLang's hashes of whole pages: SHA-256 of the hash before and of the tokens."""
    before, found = b"", []
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        page = np.array(tokens[start : start + CHUNK_TOKENS], "<u4").tobytes()
        before = hashlib.sha256(before + page).digest()
        found.append(before.hex())
    return found


def parts_of(engine: Engine, blocks: Sequence[int], tokens: int) -> list[torch.Tensor]:
    """Return K and V of each layer that lie in *blocks*, each (kv_heads, tokens, head_dim)."""
    pages = engine.pages[0]
    return [
        torch.cat([part[block] for block in blocks], 1)[:, :tokens]
        for name in sorted(pages)
        for part in BLOCK_LAYOUTS[0](pages[name])
    ]


def parts_on(pages: PageStore) -> list[torch.Tensor]:
    """Return K and V of each layer on the pool's pages, each (kv_heads, tokens, head_dim)."""
    places: list[Any] = [pages.page(number) for number in range(3)]
    return [
        torch.cat([place[0][layer][part] for place in places], 1)
        for layer in range(LAYERS)
        for part in range(2)
    ]


def test_what_transformers_and_vllm_stored_sglang_loads(
    as_sglang: tuple[TransformersConnector, Engine], pages: PageStore
) -> None:
    connector, engine = as_sglang
    cache = prefill(connector._model, ids_of(PROMPT))
    connector.save(ids_of(PROMPT), cache)
    places = [pages.page(number) for number in range(3)]
    assert pages.load(hashes_of(PROMPT), places) == 3
    for found, wanted in zip(parts_on(pages), kept(cache), strict=True):
        assert torch.equal(found, wanted[0, :, : 3 * CHUNK_TOKENS])
    other = [token + 1 for token in PROMPT]
    assert engine.run("a", other) == 0
    assert pages.load(hashes_of(other), places) == 3
    assert torch.equal(parts_on(pages)[-1][:, 69], kv_of(other[69], 69, LAYERS - 1)[1])


def test_what_sglang_stored_transformers_and_vllm_load(
    as_sglang: tuple[TransformersConnector, Engine], pages: PageStore
) -> None:
    connector, engine = as_sglang
    pages._pool.kv_buffer.copy_(torch.rand(pages._pool.kv_buffer.shape))
    places = [pages.page(number) for number in range(3)]
    assert pages.store(hashes_of(PROMPT), places, ()) == [True] * 3
    cache, hit = connector.load(ids_of(PROMPT))
    assert hit == 3 * CHUNK_TOKENS
    request, blocks = engine.arrived("a", PROMPT, hit=hit), engine.blocks(len(PROMPT))
    assert engine.load(request, blocks, hit) == set()
    wanted = parts_on(pages)
    ours = [part[0] for part in kept(cache)]
    for found in (ours, parts_of(engine, blocks[: hit // BLOCK_TOKENS], hit)):
        assert all(map(torch.equal, found, wanted))


def test_prompts_with_a_salt_keep_the_stores_own_names(folder: Path, server: LocalServer) -> None:
    """SGLang names those otherwise."""
    by_sglangs, by_own = (
        server.connect("auto", by_transformers(folder), replace(OPTIONS, sglang_names=chosen))
        for chosen in (True, False)
    )
    assert by_sglangs.keys(PROMPT, [b"salt"]) == by_own.keys(PROMPT, [b"salt"])
    assert not set(by_sglangs.keys(PROMPT)) & set(by_own.keys(PROMPT))
    names = RequestHasher(sglang_names=True)
    assert names.identity(FakeRequest("a", PROMPT), b"").is_sglangs
    for request, epoch in (
        (FakeRequest("a", PROMPT, cache_salt="x"), b""),
        (FakeRequest("a", PROMPT), b"epoch"),
        (FakeRequest("a", PROMPT, mm_features=[feature("cat", 70, 80)]), b""),
    ):
        assert not names.identity(request, epoch).is_sglangs


@pytest.mark.parametrize("names", [("step100", "step200"), ("q4.gguf", "q8.gguf")])
def test_two_models_of_one_commit_are_not_one(tmp_path: Path, names: tuple[str, str]) -> None:
    """A repository may have folders of checkpoints, and files of several quantisations."""
    commit = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    found = set()
    for name in names:
        if name.endswith(".gguf"):
            (commit / name).write_bytes(name.encode())
        else:
            (commit / name).mkdir()
            (commit / name / "model.safetensors").write_bytes(name.encode())
        found.add(weights_of(str(commit / name)).model_id)
    assert len(found) == 2
    assert weights_of(f"{commit}/").model_id == "org/name"


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0,
                          "original_max_position_embeddings": 128}},
        {"dual_chunk_attention_config": {"chunk_size": 64, "local_size": 8}},
    ],
)  # fmt: skip
def test_engines_share_nothing_where_they_may_compute_otherwise(
    folder: Path, settings: dict[str, Any]
) -> None:
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    stated.pop("rope_parameters", None)
    path.write_text(json.dumps(stated | settings))
    weights = weights_of(str(folder))
    groups = (LayerGroup(LayerKind.attention, DType.float32, (0, 1, 2), HEADS, HEAD_DIM),)
    rope = rope_parameters(weights.config)
    found = [
        identity_of(weights, groups, rope, weights.config, Departures(engine, {}))
        for engine in ("vllm", "sglang")
    ]
    assert found[0] != found[1]


# --- which revisions name weights, and what the files of a folder hold


COMMIT = "8f2c1d4e" * 5


def test_a_commit_or_a_digest_says_which_weights_they_are_and_nothing_else_does() -> None:
    exact = ("8f2c1d4", "8F2C1D4", "sha256:5f1e22ab", "run-7f3a9c21-step-1200", "0" * 40, "c" * 64)
    assert all(map(is_exact, (COMMIT, *exact)))
    others = (
        "", "main", "v1.0", "step-1000000", "20260101", "checkpoint-500", "8f2c1d",
        "decade-facade", "release2a3b4c5d6",
    )  # fmt: skip
    assert not any(map(is_exact, others))


@pytest.fixture
def files_of(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-1.safetensors").write_bytes(bytes(4 * SAMPLE_STRIDE))
    (tmp_path / "model" / "model-2.safetensors").write_bytes(b"small")
    return tmp_path / "model"


def written(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


@pytest.mark.parametrize("at", [0, SAMPLE_STRIDE - 1, 2 * SAMPLE_STRIDE + 5])
def test_a_stated_commit_is_beside_a_sample_of_the_files(files_of: Path, at: int) -> None:
    before = weights_name(str(files_of), COMMIT)
    assert before.startswith(f"{COMMIT}+sample=")
    written(files_of / "model-1.safetensors", at, b"x")
    assert weights_name(str(files_of), COMMIT) != before


@pytest.mark.parametrize("stated", ["", "main"])
def test_without_one_every_byte_of_the_files_counts(files_of: Path, stated: str) -> None:
    before = weights_name(str(files_of), stated)
    written(files_of / "model-1.safetensors", 3 * SAMPLE_STRIDE + 777_777, b"x")
    assert weights_name(str(files_of), stated) != before
    assert before.startswith(stated)
