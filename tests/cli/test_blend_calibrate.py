"""`kvstore blend calibrate` with models, against a real server: what opens, and what does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_server import LocalServer
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.cli.main import main
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.policy.blend_gate import TRIALS

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


def calibrate(server: LocalServer, model: Path, text: Path, *more: str) -> int:
    """Run the command; return its status."""
    command = ["blend", "calibrate", str(model), "--text", str(text), "--tag", "rag"]
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
    server = make_server("--blend-ratio", "0.6")
    model = make_model(tmp_path / "model", looks_around=True)
    assert calibrate(server, model, text, *SMALL_PROMPTS) == 1
    gate = gate_of(server)
    assert not gate.open
    assert gate.why.startswith("closed at 0.6")
    assert gate.agreement < 0.95
    assert server.counter("blend_shadows") == TRIALS <= 200
