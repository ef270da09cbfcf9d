"""`kvstore blend calibrate` with models at a real server, and gates as status shows them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.blending import gates
from kvstore.server.blending.gates import TRIALS

TINYLM = Path(__file__).parents[2] / "data" / "tinylm"
Calibrate = Callable[..., tuple[int, str]]
SMALL_PROMPTS = ("--documents", "2", "--document-tokens", "16", "--question-tokens", "8")
WORDS = ["the", "house", "of", "Morven", "was", "built", "by", "Selma", "in", "May", "and", "sold"]


def make_model(folder: Path, *, looks_around: bool) -> Path:
    """Save a Llama whose logits come from each token alone, or from all before it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3 if looks_around else 0.02,
        tie_word_embeddings=not looks_around,
    )
    model: Any = LlamaForCausalLM(config)
    if looks_around:
        model.lm_head.weight.data.mul_(4)  # sure of what it says
    else:
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINYLM / name, folder)
    return folder


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars of transformers leave a thread behind."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    places = torch.randint(0, len(WORDS), (900,), generator=draw).tolist()
    path = tmp_path / "text"
    path.write_text(" ".join(WORDS[place] for place in places))
    return path


@pytest.fixture
def calibrate(kvstore: Kvstore) -> Calibrate:
    """Run the command at a server on a model; return its status and what it printed."""

    def run(server: LocalServer, model: Path, *more: object) -> tuple[int, str]:
        at = ("--tag", "rag", "--address", server.address)
        told = kvstore("blend", "calibrate", model, *at, *more)
        return told.status, told.out + told.err

    return run


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many open a gate."""
    monkeypatch.setattr(gates, "TRIALS", 4)
    return 4


def gate_of(server: LocalServer) -> pb.Gate:
    status = server.dial().call("Status", pb.StatusRequest(), 5000, pb.StatusResponse)
    (gate,) = status.gates
    assert gate.tag == "rag"
    return gate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", looks_around=False)


def test_a_model_that_blends_well_has_its_gate_opened(
    server: LocalServer, calibrate: Calibrate, model: Path, text: Path, kvstore: Kvstore
) -> None:
    shown = kvstore("status", server.address, "--all").out
    assert ("rag" in shown, "blend_resolves" in shown) == (False, True)
    status, shown = calibrate(server, model, "--text", text, *SMALL_PROMPTS)
    assert (status, "open at ratio 0.300" in shown) == (0, True)
    gate = gate_of(server)
    assert (gate.open, gate.calibrated, gate.shadows) == (True, True, 0)
    assert gate.ratio == pytest.approx(0.3)
    assert gate.agreement > 0.95
    assert server.counter("blend_shadows") == TRIALS
    assert server.usage().tiers[0][1].chunks == 0, "what was stored for trials is deleted"
    assert "tag rag: open at ratio 0.3" in kvstore("status", server.address, "--all").out
    [told] = json.loads(kvstore("status", server.address, "--json").out)["gates"]
    assert (told["tag"], told["open"], told["agreement"]) == ("rag", True, gate.agreement)


def test_a_model_that_blends_badly_stays_closed(
    make_server: Callable[..., LocalServer], calibrate: Calibrate, tmp_path: Path, text: Path
) -> None:
    server = make_server("--limits", "blend_ratio=0.6")
    model = make_model(tmp_path / "model", looks_around=True)
    assert calibrate(server, model, "--text", text, *SMALL_PROMPTS)[0] == 1
    gate = gate_of(server)
    assert not gate.open
    assert gate.why.startswith("closed at 0.6")
    assert gate.agreement < 0.95
    assert server.counter("blend_shadows") == TRIALS <= 200


def exact_chunks_of_trials(server: LocalServer) -> float:
    """How many chunks of a trial's prompt were there as it has them."""
    return server.counter("blend_exact_chunks") / server.counter("blend_shadows")


@pytest.mark.usefixtures("few_trials")
def test_prompts_begin_with_the_prefix_that_is_given(
    server: LocalServer, calibrate: Calibrate, model: Path, text: Path, tmp_path: Path
) -> None:
    """It is all that is exact."""
    prefix = tmp_path / "system"
    prefix.write_text(" ".join(WORDS * 3))
    chunks = len(AutoTokenizer.from_pretrained(model)(prefix.read_text())["input_ids"]) // 16
    assert chunks > 1
    assert calibrate(server, model, "--text", text, *SMALL_PROMPTS, "--prefix", prefix)[0] == 0
    assert exact_chunks_of_trials(server) == chunks


@pytest.mark.usefixtures("few_trials")
def test_prompts_of_a_model_without_bos_begin_with_the_texts_first_tokens(
    server: LocalServer, calibrate: Calibrate, model: Path, text: Path
) -> None:
    settings = model / "tokenizer_config.json"
    named = json.loads(settings.read_text())
    settings.write_text(json.dumps({**named, "bos_token": None}))
    assert calibrate(server, model, "--text", text, *SMALL_PROMPTS)[0] == 0
    assert exact_chunks_of_trials(server) == 1


def test_prompts_are_those_of_the_questions_that_are_given(
    server: LocalServer, calibrate: Calibrate, model: Path, tmp_path: Path, few_trials: int
) -> None:
    documents = [" ".join(WORDS * times) for times in (2, 3, 4)]
    row = json.dumps({"documents": documents, "question": "Who built the house?"})
    questions = tmp_path / "questions"
    questions.write_text(f"{row}\n\n{row}\n")
    status, shown = calibrate(server, model, "--questions", questions)
    assert (status, gate_of(server).open, "open at ratio 0.300" in shown) == (0, True, True)
    assert server.counter("blend_variant_chunks") >= 2 * few_trials


def test_what_cannot_be_tried_is_refused_by_name(
    server: LocalServer, calibrate: Calibrate, model: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions"
    good = '{"documents": ["one", "two"], "question": "which?"}'
    for line in (
        "{",
        "[]",
        '{"documents": ["one", "two"]}',
        '{"documents": ["one"], "question": "which?"}',
        '{"documents": ["one", ""], "question": "which?"}',
        '{"documents": [1, 2], "question": "which?"}',
        '{"documents": ["one", "two"], "question": null}',
    ):
        questions.write_text(f"{good}\n{line}\n")
        status, shown = calibrate(server, model, "--questions", questions)
        assert (status, "questions='line 2'" in shown) == (2, True), shown
    questions.write_text("\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for argv, said in (
        ((model, "--questions", questions), "give a line or more"),
        ((model,), "give --text FILE or --questions FILE"),
        ((model, "--text", questions), "give at least"),
        ((empty, "--text", questions), "model="),
    ):
        status, shown = calibrate(server, *argv)
        assert (status, said in shown) == (2, True), shown
