"""The demo: refused in words, judged without mercy, and run to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.demo import DemoError, Outcome, check_model, run_demo
from kvstore.cli.demo_engine import EngineReport
from kvstore.cli.main import main
from kvstore.cli.server_child import ServerChild
from kvstore.proto.errors import KVStoreError

TINYLM = Path(__file__).resolve().parents[2] / "data" / "tinylm"


def report(role: str, tiers: Mapping[str, int], **changes: Any) -> dict[str, Any]:
    """What an engine process prints when all is well."""
    values: dict[str, Any] = {
        "role": role, "prompt_tokens": 100, "tokens": [5, 6, 7], "plain_tokens": [5, 6, 7],
        "hit_tokens": sum(tiers.values()), "hit_tokens_by_tier": tiers, "stored_chunks": 1,
        "errors": {}, "ttft_without_ms": 40.0, "ttft_with_ms": 10.0,
    }  # fmt: skip
    return asdict(EngineReport(**(values | changes)))


def outcome(**changes: dict[str, Any]) -> Outcome:
    """The demo's outcome when the processes named in *changes* saw something else."""
    reports = {
        "first": report("first", {}),
        "second": report("second", {"cpu": 99}),
        "restarted": report("restarted", {"disk": 99}),
    }
    for name, change in changes.items():
        reports[name] |= change
    return Outcome.of(reports, duration_s=1.0)


def test_an_outcome_in_which_all_held_has_no_problems() -> None:
    good = outcome()
    assert list(good.problems) == []
    assert good.tokens_identical
    assert (good.hit_tokens, good.disk_hit_tokens_after_kill, good.ttft_ratio) == (99, 99, 0.25)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"second": {"tokens": [5, 6, 8]}}, "differ"),
        ({"restarted": {"tokens": [5, 6]}}, "differ"),
        ({"first": {"plain_tokens": [1, 6, 7]}}, "differ"),
        ({"first": {"hit_tokens": 64}}, "empty store"),
        ({"second": {"hit_tokens": 0}}, "loaded nothing"),
        ({"restarted": {"hit_tokens_by_tier": {"cpu": 99}}}, "from disk"),
        ({"second": {"ttft_with_ms": 40.0}}, "not faster"),
        ({"second": {"errors": {"DeadlineError": 1}}}, "DeadlineError"),
    ],
)
def test_whatever_did_not_hold_is_a_problem(changes: dict[str, Any], word: str) -> None:
    problems = outcome(**changes).problems
    assert len(problems) == 1
    assert word in problems[0]


@pytest.mark.parametrize(
    ("files", "absent"),
    [
        ({}, "no config.json, no weights (*.safetensors or *.bin), no tokenizer (tokenizer*)"),
        ({"config.json": "[]", "model.safetensors": "", "tokenizer.json": ""}, "no config.json"),
        ({"config.json": "{}", "tokenizer.json": ""}, "no weights (*.safetensors or *.bin)"),
        ({"config.json": "{}", "model.safetensors": ""}, "no tokenizer (tokenizer*)"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_what_it_lacks_and_what_to_give(
    files: dict[str, str], absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--model", str(tmp_path)])
    assert ended.value.code == 2
    words = " ".join(capsys.readouterr().err.split())
    assert f"--model {tmp_path}: {absent} there: give a folder" in words
    assert "make real-model" in words


def test_a_prompt_longer_than_the_model_takes_is_refused() -> None:
    assert check_model(None, 900) == TINYLM
    with pytest.raises(DemoError, match="960 at most"):
        check_model(None, 1000)


def test_an_engine_process_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("no such thing")
    with pytest.raises(DemoError, match=r"the first engine process failed: \w+"):
        run_demo(tmp_path, 64, None)


def test_a_server_that_does_not_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match="cpu_size='none'"):
        ServerChild(tmp_path, ["--cpu", "none"]).start()


def test_a_server_child_keeps_its_disk_and_changes_its_port(tmp_path: Path) -> None:
    with ServerChild(tmp_path) as child:
        before = child.address
        child.kill()
        child.start()
        assert child.address != before
        assert "recovered_chunks=0" in child.greeting
    assert "Traceback" not in child.log_file.read_text()


@pytest.mark.slow
def test_the_demo_holds_from_the_command_to_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_file = tmp_path / "deep" / "demo.json"
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--json", str(figures_file), "--tokens", "850"])
    printed = capsys.readouterr().out
    figures = json.loads(figures_file.read_text())
    # Which is faster is not judged here: the machine may be busy.
    problems = [problem for problem in figures["problems"] if "faster" not in problem]
    assert problems == []
    assert ended.value.code == (1 if figures["problems"] else 0)
    assert figures["tokens_identical"] is True
    assert (figures["prompt_tokens"], figures["new_tokens"]) == (850, 32)
    assert figures["hit_tokens"] == 849
    assert figures["hit_tokens_by_tier"] == {"cpu": 849}
    assert figures["disk_hit_tokens_after_kill"] == 849
    assert figures["ttft_ratio"] == figures["ttft_with_ms"] / figures["ttft_without_ms"]
    assert "849 from disk" in printed
    assert f"model: {TINYLM}" in printed.replace("\n", "")
