"""The demo: refused in words, judged without mercy, and run to its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.kvstore_command import Kvstore
from test_conventions import wheel_files

from kvstore.cli.demo.demo import MODEL, ServerChild, check_model, judge
from kvstore.proto.errors import InvalidRequestError, KVStoreError

SRC = Path(__file__).resolve().parents[2] / "src"


def report(tiers: Mapping[str, int]) -> dict[str, Any]:
    """What an engine process prints when all is well."""
    return {
        "prompt_tokens": 100, "tokens": [5, 6, 7], "plain_tokens": [5, 6, 7],
        "hit_tokens": sum(tiers.values()), "hit_tokens_by_tier": tiers,
        "errors": {}, "ttft_without_ms": 40.0, "ttft_with_ms": 10.0, "load_ms": 1.0,
        "samples_without_ms": [40.0], "samples_with_ms": [10.0],
    }  # fmt: skip


def judged(**changes: dict[str, Any]) -> dict[str, Any]:
    """The demo's figures when the processes named in *changes* saw something else."""
    names = ("first", "second", "restarted")
    reports = dict(zip(names, map(report, ({}, {"cpu": 99}, {"disk": 99})), strict=True))
    for name, change in changes.items():
        reports[name] |= change
    return judge(reports, duration_s=1.0)


def test_whatever_did_not_hold_is_a_problem() -> None:
    good = judged()
    assert good["problems"] == []
    assert good["tokens_identical"]
    assert (good["hit_tokens"], good["disk_hit_tokens_after_kill"]) == (99, 99)
    assert good["ttft_ratio"] == 0.25
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("second", {"tokens": [5, 6, 8]}, "differ"),
        ("restarted", {"tokens": [5, 6]}, "differ"),
        ("first", {"plain_tokens": [1, 6, 7]}, "differ"),
        ("first", {"hit_tokens": 64}, "empty store"),
        ("second", {"hit_tokens": 0}, "loaded nothing"),
        ("restarted", {"hit_tokens_by_tier": {"cpu": 99}}, "from disk"),
        ("second", {"ttft_with_ms": 40.0}, "not faster"),
        ("second", {"errors": {"DeadlineError": 1}}, "DeadlineError"),
    ]
    for process, change, word in changes:
        (problem,) = judged(**{process: change})["problems"]
        assert word in problem


def test_a_folder_without_a_model_is_refused_with_what_it_lacks_and_what_to_give(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    rest = ["no weights (*.safetensors or *.bin)", "no tokenizer (tokenizer*)"]
    for name, content, absent in (
        ("other.json", "{}", ", ".join(["no config.json", *rest])),
        ("config.json", "[]", ", ".join(["no config.json", *rest])),
        ("config.json", "{}", ", ".join(rest)), ("model.safetensors", "", rest[1]),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        status, _, err = kvstore("demo", "--model", tmp_path)
        words = " ".join(err.split())
        assert (status, "make real-model" in words) == (2, True)
        assert f"model='{tmp_path}': {absent} there: give a transformers model" in words


def test_a_prompt_longer_than_the_model_takes_is_refused() -> None:
    check_model(MODEL, 900)
    with pytest.raises(InvalidRequestError, match="at most 960"):
        check_model(MODEL, 1000)


def test_an_engine_process_that_fails_is_reported_with_its_last_words(
    tmp_path: Path, kvstore: Kvstore
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("no such thing")
    run = kvstore("demo", "--model", tmp_path, "--tokens", "64")
    assert run.status == 1
    assert re.search(r"the first engine process failed: \w+", run.err)


def test_a_server_that_does_not_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match="cpu_size='none'"):
        ServerChild(tmp_path, ["--cpu", "none"]).start()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A TMPDIR whose name is short: there are sockets in it."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def start(folder: Path, scratch: Path, packages: Path, *argv: str) -> subprocess.Popen[str]:
    """Start the demo of *packages* in a session and a folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.cli", "demo", *argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(packages), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def check_nothing_is_left(demo: subprocess.Popen[str], scratch: Path) -> None:
    """All processes of the demo's session are gone, and its files."""
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGINT, "2. "), (signal.SIGTERM, "model: "), (signal.SIGHUP, "2. ")],
)
def test_a_demo_that_is_ended_leaves_nothing_behind(
    tmp_path: Path, scratch: Path, number: signal.Signals, step: str
) -> None:
    demo = start(tmp_path, scratch, SRC)
    assert demo.stdout is not None
    try:
        assert any(line.startswith(step) for line in demo.stdout)
        time.sleep(1)
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does
        else:
            demo.send_signal(number)
            demo.send_signal(number)
        printed, _ = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 128 + number
    assert "Traceback" not in printed
    check_nothing_is_left(demo, scratch)


@pytest.mark.slow
def test_the_demo_of_an_installed_package_holds_in_any_folder(
    tmp_path: Path, scratch: Path
) -> None:
    packages = tmp_path / "packages"
    for name in (*wheel_files(), "kvstore/proto/native/_loops.so"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SRC / name, packages / name)
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('of the folder, not the library')")

    demo = start(folder, scratch, packages, "--json", "deep/demo.json", "--tokens", "850")
    printed, _ = demo.communicate(timeout=200)

    figures = json.loads((folder / "deep" / "demo.json").read_text())
    # Which is faster is not judged here: the machine may be busy.
    problems = [problem for problem in figures["problems"] if "faster" not in problem]
    assert problems == []
    assert demo.returncode == (1 if figures["problems"] else 0)
    assert figures["tokens_identical"] is True
    assert (figures["prompt_tokens"], figures["new_tokens"]) == (850, 32)
    assert figures["hit_tokens"] == 849
    assert figures["hit_tokens_by_tier"] == {"cpu": 849}
    assert figures["disk_hit_tokens_after_kill"] == 849
    assert figures["ttft_ratio"] == figures["ttft_with_ms"] / figures["ttft_without_ms"]
    assert "849 from disk" in printed
    assert f"model: {packages / 'kvstore/cli/demo/tinylm'}" in printed
    check_nothing_is_left(demo, scratch)
