"""The benchmark of engines where there is no vLLM to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import engines


def test_without_its_environment_it_says_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "PYTHON", tmp_path / "python")
    assert engines.main(["--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["values"] == {}
    assert "make vllm-env" in line["skipped"]["miss_overhead"]


def test_a_ratio_is_that_of_rounds_and_not_of_times() -> None:
    times = {"ours": [9.0, 1.0, 20.0, 3.0], "theirs": [1.0, 2.0, 40.0, 3.0]}
    assert engines.ratio(times, "ours", "theirs", 1) == 0.5
