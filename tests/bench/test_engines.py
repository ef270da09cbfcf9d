"""The benchmarks of engines without a vLLM: prompts, ratios and summaries."""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench.engines import sides as engines_prompts
from bench.engines.__main__ import AGAIN, Samples
from bench.engines.sides import OURS, PLAIN, Result, Side
from bench.gpu import engines
from bench.gpu.child import write
from bench.gpu.engines import DECODE_CHUNKS, DECODE_REQUESTS, DECODE_ROUNDS, KEYS, summarize
from bench.lib.report import Report, median_of


def side(name: str, *, has_store: bool = True) -> Side:
    return Side(name, None, has_store)  # type: ignore[arg-type]


def samples(ours: list[float], theirs: list[float], cached: int = 128) -> Samples:
    made = Samples()
    plain = side(PLAIN, has_store=False)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        made.take(side(OURS), AGAIN, number, Result(one, cached, []), (128, 256))
        made.take(plain, AGAIN, number, Result(other, 0, []), (128, 256))
    return made


def test_a_ratio_is_that_of_rounds_and_not_of_times() -> None:
    made = samples([9.0, 9.0, 1.0, 20.0, 3.0, 5.0], [1.0, 1.0, 2.0, 40.0, 3.0, 10.0])
    assert median(made.ratios(AGAIN, PLAIN)) == 0.5


@pytest.mark.parametrize("cached", [127, 257])
def test_a_failed_hit_counts_nowhere(cached: int) -> None:
    made, report = samples([1.0] * 9, [2.0] * 9, cached), Report("engines")
    made.add(report, "miss_overhead", AGAIN, PLAIN)
    assert made.lost == {OURS: 9}
    assert "0 rounds" in report.skipped["miss_overhead"]


def test_an_overhead_is_what_is_above_one_and_so_is_its_interval() -> None:
    report = Report("engines")
    made = samples([1.1] * 9, [1.0] * 9)
    made.add(report, "miss_overhead", AGAIN, PLAIN)
    made.add(report, "ttft_hit_vs_recompute", AGAIN, PLAIN)
    assert report.values == {"miss_overhead": 0.1, "ttft_hit_vs_recompute": 1.1}
    assert [row[1] for row in report.rows[:2]] == ["0.100", "0.100 to 0.100"]


def test_the_interval_of_a_median_grows_with_the_spread_of_its_rounds() -> None:
    assert median_of([1.0] * 9) == (1.0, 1.0, 1.0)
    near, far = (
        median_of([1.0 + step * (number - 20) for number in range(41)]) for step in (0.001, 0.01)
    )
    assert near[1] < near[0] == 1.0 < near[2] < 1.01
    assert far[2] - far[1] > 5 * (near[2] - near[1])


def test_turns_share_a_long_prefix_with_the_prompt_before_and_nothing_with_other_rounds() -> None:
    found = engines_prompts.turns(12)
    assert [bool(turn.earlier) for turn in found] == [False, True] * 6, "of chats, of documents"
    for turn in found:
        earlier, prompt = turn.prompts(3)
        shared = turn.history_tokens
        assert shared >= engines_prompts.LEAST_TOKENS
        assert len(prompt) <= engines_prompts.MOST_TOKENS
        assert earlier[:shared] == prompt[:shared]
        assert len(prompt) > shared
        assert min(prompt) >= 3
        assert max(prompt) < 3 + engines_prompts.VOCABULARY
        assert turn.prompts(4)[1][:shared] != prompt[:shared]


DECODED = DECODE_REQUESTS * DECODE_ROUNDS * DECODE_CHUNKS
GPU_OURS = "kvstore cpu"


def a_result(times: dict[int, float], *, hits: bool, decode_ms: float = 0.0) -> dict[str, Any]:
    prompts = [
        {
            "tokens": tokens, "cold_ms": 100.0, "filled": [tokens // 2] if hits else [],
            "hit_ms": [3 * ms, ms, ms / 2], "load_ms": [ms / 3] * 3,
            "cached": [tokens if hits else 0] * 4,
            "own_tokens": [tokens, 7], "hit_tokens": [tokens, 7], "apart": 0.0,
            **({} if number else {"control_apart": -1.0}),
        }
        for number, (tokens, ms) in enumerate(times.items())
    ]  # fmt: skip
    return {
        "start_s": 30.0, "prompts": prompts, "decode_ms": [decode_ms] * 3 if decode_ms else [],
        "decode_stored": DECODED if hits and decode_ms else 0, "dropped": 0,
    }  # fmt: skip


RESULTS = {
    "none": a_result({8192: 100.0, 32768: 1000.0}, hits=False, decode_ms=5.0),
    GPU_OURS: a_result({8192: 12.0, 32768: 80.0}, hits=True, decode_ms=5.05),
    "offloading": a_result({8192: 15.0, 32768: 64.0}, hits=True),
    "kvstore gpu,cpu": a_result({8192: 6.0, 32768: 20.0}, hits=True),
}


def summed(results: dict[str, Any], failed: dict[str, str] | None = None) -> Report:
    report = Report("gpu")
    summarize(report, results, failed or {}, GPU_OURS)
    return report


@pytest.fixture
def results() -> dict[str, Any]:
    return deepcopy(RESULTS)


def planned(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engines.add_flags(parser)
    return parser.parse_args(words.split(), argparse.Namespace(json=True))


def test_flags_give_the_lengths_and_the_engines_in_order() -> None:
    plan = planned("--lengths 2048,1024 --tiers cpu,disk")
    assert plan.lengths == (1024, 2048)
    names = [name for name, _, _ in engines.engines_of(plan)]
    assert names == ["none", "kvstore cpu,disk", "offloading"]


def test_a_model_is_written_with_an_index_of_its_files(tmp_path: Path) -> None:
    total = write(tmp_path, "tiny")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert all((tmp_path / name).is_file() for name in index["weight_map"].values())
    assert index["metadata"]["total_size"] == total > 2 * 2 * engines.VOCABULARY * 512


def test_an_engine_beyond_the_budget_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, seconds = [], count(0, 200)

    def run_child(order: dict[str, Any], log: Path, within_s: float) -> tuple[str, str]:
        started.append((order["engine"], order["tiers"], order["decodes"], within_s))
        return ("", "exited with 1") if order["engine"] == "offloading" else ("{}", "")

    monkeypatch.setattr(engines, "run_child", run_child)
    monkeypatch.setattr("bench.gpu.engines.time.monotonic", lambda: float(next(seconds)))
    found, failed = engines.run_all(planned("--budget-s 650"), tmp_path, tmp_path / "model")
    assert started == [
        ("none", "", True, 450.0), ("kvstore", "cpu", True, 250.0),
    ]  # fmt: skip
    assert list(found) == ["none", GPU_OURS]
    assert failed["offloading"] == "not started: 50 s left"
    assert failed["kvstore cpu,disk"] == "not started: 0 s left"


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


def test_a_partial_hit_is_no_value(results: dict[str, Any]) -> None:
    results[GPU_OURS]["prompts"][1]["cached"][2] = 15360
    report = summed(results)
    assert report.skipped == dict.fromkeys(KEYS[1:3], "kvstore cpu: hit share 0.47 at 32768 tokens")
    assert report.values["tokens_identical"] == 1.0


def test_an_engine_that_did_not_run_is_named(results: dict[str, Any]) -> None:
    del results["offloading"]
    report = summed(results, {"offloading": "exited with 1"})
    assert report.skipped == {"ttft_hit_vs_offload": "offloading: exited with 1"}
    assert len(report.values) == 3
    nothing = summed({}, {"none": "exited with 1", GPU_OURS: "not started: 0 s left"})
    assert set(nothing.skipped) == set(KEYS)


@pytest.mark.parametrize("name", ["none", GPU_OURS, "kvstore gpu,cpu"])
def test_other_tokens_show(results: dict[str, Any], name: str) -> None:
    results[name]["prompts"][1]["hit_tokens"] = [1, 2]
    assert summed(results).values["tokens_identical"] == 0.0


def test_without_a_control_or_all_chunks_of_decoding_there_is_no_value(
    results: dict[str, Any],
) -> None:
    results[GPU_OURS]["prompts"][0]["control_apart"] = 0.0
    results[GPU_OURS]["decode_stored"] -= 1
    skipped = summed(results).skipped
    assert "control" in skipped["tokens_identical"]
    text = f"{DECODED - 1} of {DECODED} chunks were stored while decoding"
    assert skipped["decode_with_store"] == text
