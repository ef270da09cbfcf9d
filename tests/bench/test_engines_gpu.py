"""The benchmark of vLLM on a GPU where there is none: what it is told, what it makes of runs."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from bench import engines_gpu
from bench.engines_gpu import (
    DECODE_CHUNKS,
    DECODE_REQUESTS,
    DECODE_ROUNDS,
    KEYS,
    Plan,
    Runs,
    model_bytes,
    summarize,
)
from bench.engines_gpu_child import write
from bench.lib.report import Report

ROOT = Path(__file__).resolve().parents[2]
DECODED = DECODE_REQUESTS * DECODE_ROUNDS * DECODE_CHUNKS
OURS = "kvstore cpu"


def a_prompt(tokens: int, ms: float, cached: int, control: float | None = None) -> dict[str, Any]:
    run = {
        "tokens": tokens, "cold_ms": 100.0, "filled": [cached // 2] if cached else [],
        "hit_ms": [3 * ms, ms, ms / 2],
        "load_ms": [ms / 3] * 3,
        "cached": [cached] * 4, "own_tokens": [tokens, 7], "hit_tokens": [tokens, 7], "apart": 0.0,
    }  # fmt: skip
    return run if control is None else {**run, "control_apart": control}


def a_result(times: dict[int, float], *, hits: bool, decode_ms: float = 0.0) -> dict[str, Any]:
    prompts = [
        a_prompt(tokens, ms, tokens if hits else 0, None if number else -1.0)
        for number, (tokens, ms) in enumerate(times.items())
    ]
    return {
        "start_s": 30.0, "prompts": prompts, "decode_ms": [decode_ms] * 3 if decode_ms else [],
        "decode_stored": DECODED if hits and decode_ms else 0, "dropped": 0,
    }  # fmt: skip


RESULTS = {
    "none": a_result({8192: 100.0, 32768: 1000.0}, hits=False, decode_ms=5.0),
    OURS: a_result({8192: 12.0, 32768: 80.0}, hits=True, decode_ms=5.05),
    "offloading": a_result({8192: 15.0, 32768: 64.0}, hits=True),
    "kvstore gpu,cpu": a_result({8192: 6.0, 32768: 20.0}, hits=True),
}


def summed(results: dict[str, Any], failed: dict[str, str] | None = None) -> Report:
    report = Report("engines_gpu")
    summarize(report, results, failed or {}, OURS)
    return report


@pytest.fixture
def results() -> dict[str, Any]:
    return deepcopy(RESULTS)


# --- what it is told


def test_flags() -> None:
    words = "--json --lengths 2048,1024 --tiers cpu,disk --model-size 8b --budget-s 100"
    plan = Plan.parse(words.split())
    assert plan == Plan((1024, 2048), "8b", ("cpu,disk",), "cuda", "", 100.0, True)
    assert [name for name, _, _ in plan.engines()] == ["none", "kvstore cpu,disk", "offloading"]


def test_a_model_is_as_large_as_it_says(tmp_path: Path) -> None:
    assert write(tmp_path, "tiny") == pytest.approx(model_bytes("tiny"), rel=1e-3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert all((tmp_path / name).is_file() for name in index["weight_map"].values())


# --- running engines


def test_what_there_is_no_time_for_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def ask(order: dict[str, Any], log: Path, within_s: float) -> tuple[str, str]:
        asked.append((order["engine"], order["tiers"], order["decodes"]))
        runs.began -= 200.0
        return ("", "ended with 1") if order["engine"] == "offloading" else ("{}", "")

    monkeypatch.setattr(engines_gpu, "ask_child", ask)
    runs = Runs(Plan(only_json=True, budget_s=650.0), tmp_path, tmp_path / "model")
    runs.run_all()
    assert asked == [("none", "", True), ("kvstore", "cpu", True), ("offloading", "", False)]
    assert list(runs.results) == ["none", OURS]
    assert runs.failed["offloading"] == "ended with 1"
    assert runs.failed["kvstore cpu,disk"].startswith("not started: ")


# --- values


def test_values_are_those_of_the_greatest_length(results: dict[str, Any]) -> None:
    report = summed(results)
    assert report.values == {
        "decode_with_store": 1.01,
        "ttft_hit_vs_recompute": 0.08,
        "ttft_hit_vs_offload": 1.25,
        "tokens_identical": 1.0,
    }
    assert tuple(report.values) == KEYS
    assert not report.skipped
    assert ("kvstore gpu,cpu 32768", "20.0") in [row[:2] for row in report.rows]
    assert any("hit share 1.00; 0.50 stored at once" in row[2] for row in report.rows)


def test_a_hit_that_is_not_whole_is_no_value(results: dict[str, Any]) -> None:
    results[OURS]["prompts"][1]["cached"][2] = 15360
    report = summed(results)
    assert report.skipped == dict.fromkeys(KEYS[1:3], "kvstore cpu: hit share 0.47 at 32768 tokens")
    assert report.values["tokens_identical"] == 1.0
    assert any("hit share 0.47" in row[2] for row in report.rows)


def test_an_engine_that_did_not_run_is_named(results: dict[str, Any]) -> None:
    del results["offloading"]
    report = summed(results, {"offloading": "ended with 1"})
    assert report.skipped == {"ttft_hit_vs_offload": "offloading: ended with 1"}
    assert len(report.values) == 3
    nothing = summed({}, {"none": "ended with 1", OURS: "not started: 0 s were left"})
    assert set(nothing.skipped) == set(KEYS)


@pytest.mark.parametrize("name", ["none", OURS, "kvstore gpu,cpu"])
def test_other_tokens_show(results: dict[str, Any], name: str) -> None:
    results[name]["prompts"][1]["hit_tokens"] = [1, 2]
    assert summed(results).values["tokens_identical"] == 0.0


def test_without_a_control_that_differs_tokens_prove_nothing(results: dict[str, Any]) -> None:
    results[OURS]["prompts"][0]["control_apart"] = 0.0
    assert "control" in summed(results).skipped["tokens_identical"]


def test_decoding_counts_if_all_its_chunks_were_stored(results: dict[str, Any]) -> None:
    results[OURS]["decode_stored"] -= 1
    text = summed(results).skipped["decode_with_store"]
    assert text == f"{DECODED - 1} of {DECODED} chunks were stored while decoding"
