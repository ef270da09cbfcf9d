"""bench.blend: intervals of known cases, the slow link, and a tiny run."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from bench.blend import __main__ as blend
from bench.blend.__main__ import SlowSource, StageShape
from bench.blend.cases import difference, quotient
from bench.blend.model import MODEL_KEYS, ModelSizes, measure_model
from bench.lib.report import Report
from bench.lib.traces import TINYLM

from kvstore.client.blend.plan import BlendPlan, Segment

KEYS = [
    "full_ratio_max_abs_logit",
    "zero_ratio_max_abs_logit",
    "best_em_minus_hkvd_em@15",
    "best_kl_vs_hkvd_kl@15",
    "slowest_vs_full_prefill",
    "ttft_vs_full_prefill@15",
]
TINY = blend.Sizes(
    riddles=1,
    stories=1,
    questions=1,
    texts=1,
    links_mb_per_s=(1000.0,),
    stage=StageShape(
        layers=2, hidden=128, prefix=16, chunk=32, chunks=2, question=8, rounds=1, most_rounds=1
    ),
)


def test_an_interval_is_that_of_pairs() -> None:
    """A part common to all cases does not widen it."""
    base = np.arange(50.0)
    assert difference(base + 2, base) == pytest.approx((2.0, 2.0, 2.0))
    assert quotient(3 * base, base) == pytest.approx((3.0, 3.0, 3.0))
    noisy = base + np.where(np.arange(50) % 2, 1.0, -1.0)
    mean, low, high = difference(noisy, base)
    assert low < mean < high
    assert -0.5 < low < high < 0.5


def test_a_slow_link_takes_its_time_and_skips_unneeded_rows() -> None:
    tokens = 64
    plan = BlendPlan(
        tuple(range(tokens + 1)),
        (Segment(0, tokens, "approx", src_pos=0), Segment(tokens, tokens + 1, "miss")),
    )
    layer = (torch.zeros(1, tokens, 8), torch.zeros(1, tokens, 8))
    source = SlowSource({0: [layer, layer]}, plan, 1e5)
    started = time.perf_counter()
    source.layer(0)
    assert time.perf_counter() - started >= 0.04  # 4096 bytes
    source.narrow(range(48))
    source.layer(1)
    assert source.loaded_bytes == 4096 + 1024


def test_a_tiny_run_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    blend.main(["--json"], TINY)
    line = json.loads(capsys.readouterr().out)
    assert line["bench"] == "blend"
    assert sorted(line["values"]) == sorted(KEYS)
    assert line["values"]["full_ratio_max_abs_logit"] <= 1e-4
    assert line["values"]["zero_ratio_max_abs_logit"] <= 1e-4
    assert sorted(line["skipped"]) == sorted(MODEL_KEYS)
    assert "--model" in line["skipped"][MODEL_KEYS[0]]


def test_a_models_folder_adds_its_keys_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.blend.cases.RATIOS", (0.3,))  # the values are not tested
    report = Report("blend")
    lines = measure_model(report, TINYLM, ModelSizes(contexts=1, texts=1, bare=1))
    assert sorted(report.values) == sorted(MODEL_KEYS)
    assert all(np.isfinite(value) for value in report.values.values())
    assert sum("hybrid" in line for line in lines) == 3
