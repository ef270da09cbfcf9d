"""`kvstore blend calibrate` with models, against a real server: what opens, and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_server import LocalServer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstore.cli.__main__ import main
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.blending.gates import TRIALS

TINYLM = Path(__file__).parents[2] / "data" / "tinylm"
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


def calibrate(server: LocalServer, model: Path, text: Path | None, *more: str) -> int:
    """Run the command; return its status."""
    command = ["blend", "calibrate", str(model), "--tag", "rag"]
    command += [] if text is None else ["--text", str(text)]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--address", server.address, *more])
    return int(ended.value.code or 0)


def gate_of(server: LocalServer) -> pb.Gate:
    status = server.dial().call("Status", pb.StatusRequest(), 5000, pb.StatusResponse)
    (gate,) = status.gates
    assert gate.tag == "rag"
    return gate


def test_a_model_that_blends_well_has_its_gate_opened(
    server: LocalServer, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", looks_around=False)
    assert calibrate(server, model, text, *SMALL_PROMPTS) == 0
    gate = gate_of(server)
    assert (gate.open, gate.calibrated, gate.shadows) == (True, True, 0)
    assert gate.ratio == pytest.approx(0.3)
    assert gate.agreement > 0.95
    assert server.counter("blend_shadows") == TRIALS
    assert "open at ratio 0.300" in capsys.readouterr().out
    assert server.usage().tiers[0][1].chunks == 0, "what was stored for trials is deleted"


def test_a_model_that_blends_badly_stays_closed(
    make_server: Callable[..., LocalServer], tmp_path: Path, text: Path
) -> None:
    server = make_server("--limits", "blend_ratio=0.6")
    model = make_model(tmp_path / "model", looks_around=True)
    assert calibrate(server, model, text, *SMALL_PROMPTS) == 1
    gate = gate_of(server)
    assert not gate.open
    assert gate.why.startswith("closed at 0.6")
    assert gate.agreement < 0.95
    assert server.counter("blend_shadows") == TRIALS <= 200


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", looks_around=False)


def exact_chunks_of_trials(server: LocalServer) -> float:
    """How many chunks of a trial's prompt were there as it has them."""
    return server.counter("blend_exact_chunks") / server.counter("blend_shadows")


def test_prompts_begin_with_the_prefix_that_is_given(
    server: LocalServer, model: Path, text: Path, tmp_path: Path
) -> None:
    """It is all that is exact."""
    prefix = tmp_path / "system"
    prefix.write_text(" ".join(WORDS * 3))
    chunks = len(AutoTokenizer.from_pretrained(model)(prefix.read_text())["input_ids"]) // 16
    assert chunks > 1
    assert calibrate(server, model, text, *SMALL_PROMPTS, "--prefix", str(prefix)) == 0
    assert exact_chunks_of_trials(server) == chunks


def test_prompts_of_a_model_without_bos_begin_with_the_texts_first_tokens(
    server: LocalServer, model: Path, text: Path
) -> None:
    settings = model / "tokenizer_config.json"
    named = json.loads(settings.read_text())
    settings.write_text(json.dumps({**named, "bos_token": None}))
    assert calibrate(server, model, text, *SMALL_PROMPTS) == 0
    assert exact_chunks_of_trials(server) == 1


def test_prompts_are_those_of_the_questions_that_are_given(
    server: LocalServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [" ".join(WORDS * times) for times in (2, 3, 4)]
    row = json.dumps({"documents": documents, "question": "Who built the house?"})
    questions = tmp_path / "questions"
    questions.write_text(f"{row}\n\n{row}\n")
    assert calibrate(server, model, None, "--questions", str(questions)) == 0
    assert gate_of(server).open
    assert "open at ratio 0.300" in capsys.readouterr().out
    assert server.counter("blend_variant_chunks") >= 2 * TRIALS


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"documents": ["one", "two"]}',
        '{"documents": ["one"], "question": "which?"}',
        '{"documents": ["one", ""], "question": "which?"}',
        '{"documents": [1, 2], "question": "which?"}',
        '{"documents": ["one", "two"], "question": null}',
    ],
)
def test_a_line_that_is_no_question_is_refused_by_its_number(
    server: LocalServer, model: Path, tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions"
    questions.write_text(f'{{"documents": ["one", "two"], "question": "which?"}}\n{line}\n')
    assert calibrate(server, model, None, "--questions", str(questions)) == 2
    assert "questions=line 2" in capsys.readouterr().err.replace("'", "")


def test_a_file_without_questions_is_refused(
    server: LocalServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions"
    questions.write_text("\n")
    assert calibrate(server, model, None, "--questions", str(questions)) == 2
    assert "give a line or more" in capsys.readouterr().err


def test_neither_a_text_nor_questions_is_said_so(
    server: LocalServer, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, model, None) == 2
    assert "give --text FILE or --questions FILE" in capsys.readouterr().err
