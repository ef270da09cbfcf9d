"""bench.codecs on the trained model with little of everything, and a tiny run without opponents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import codecs
from bench.codecs_curve import Quality
from bench.codecs_kv import Extent
from bench.codecs_model import Lengths, PrefixModel, held_out
from bench.codecs_rates import BARS
from bench.codecs_speeds import Measured
from bench.opponents import Speed
from bench.opponents_layouts import kivi
from bench.report import Report

KEYS = {
    *BARS,
    "lossless_ratio",
    "lossless_encode_vs_zipnn",
    "lossless_decode_vs_zipnn",
    "lossless_encode_vs_aibrix",
    "lossless_decode_vs_aibrix",
    "kvq_encode_vs_lmcache_cachegen",
    "kvq_decode_vs_lmcache_cachegen",
}
LENGTHS = Lengths(windows=2, prefix=64, rest=24, greedy=6)


# --- the model


@pytest.fixture(scope="module")
def model() -> PrefixModel:
    return PrefixModel(LENGTHS)


def test_the_prefix_as_it_was_changes_nothing(model: PrefixModel) -> None:
    assert model.score(model.bits) == Quality(0.0, 0.0, 1.0, 0.0, 0.0, 0.0)


def test_more_bits_bring_the_text_behind_a_prefix_nearer(model: PrefixModel) -> None:
    fine, coarse = (model.score(kivi(model.bits, bits, 64).decoded) for bits in (8, 2))
    assert 0 < fine.kl < coarse.kl
    assert fine.attention_error < coarse.attention_error
    assert fine.key_error < coarse.key_error
    assert fine.value_error < coarse.value_error
    assert fine.greedy_match >= coarse.greedy_match
    assert coarse.loss_delta != 0


def test_the_texts_that_fit_tables_are_not_those_that_are_scored(model: PrefixModel) -> None:
    folder = codecs.MODEL
    assert len(held_out(folder, "score")) == codecs.Sizes().windows
    assert len(held_out(folder, "calibrate")) == codecs.Sizes().calibrate
    assert not set(held_out(folder, "score")) & set(held_out(folder, "calibrate"))
    assert model.calibration(1).shape == (1, *model.bits.shape[1:])


# --- a run


ALONE = """
import sys
from contextlib import contextmanager
from bench import codecs
from bench.codecs_kv import Extent
from bench.peer_process import PeerSkippedError

@contextmanager
def absent(*_):
    raise PeerSkippedError("not on this machine")
    yield

codecs.lmcache_codecs = codecs.lossless_coder = absent
tiny = Extent(layers=2, tokens=64, kv_heads=2, head_dim=64)
sizes = codecs.Sizes(
    windows=2, calibrate=1, prefix=64, rest=16, greedy=4, synthetic=tiny, rounds=1
)
codecs.main(sys.argv[1:], sizes)
"""
"""A run without opponents, in a process of its own: it takes memory that others measure."""


@pytest.mark.slow
def test_a_tiny_run_has_every_key_or_says_why_not(tmp_path: Path) -> None:
    curves = tmp_path / "curves.json"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "--plot", tmp_path, "--curves", curves],
        cwd=codecs.ROOT,
        env={**os.environ, "PYTHONPATH": str(codecs.ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    result = json.loads(line)
    assert result["bench"] == "codecs"
    assert set(result["values"]) | set(result["skipped"]) == KEYS
    assert {"kvq_bytes_vs_kivi4_at_kl", "lossless_ratio"} <= set(result["values"])
    assert result["skipped"]["kvq_bytes_vs_cachegen_at_kl"] == "not on this machine"
    assert any("memcpy" in row for row in table)
    for name in ("codecs_rates.svg", "codecs_links.svg"):
        drawing = ElementTree.parse(tmp_path / name).getroot()
        assert list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))
    points = json.loads(curves.read_text())
    assert {p["codec"] for p in points["trained model"]} > {"raw", "kvq:2", "kivi"}


def test_the_flags_are_those_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codecs.main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--json", "--venvs", "--plot", "--curves", "--speeds"):
        assert flag in text
    for wrong in (["--jsn"], ["--speeds", "--plot", "docs"]):
        with pytest.raises(SystemExit):
            codecs.main(wrong)


def test_speeds_alone_leave_out_every_key_of_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "open_or_reason", lambda *_: "not asked for")
    copied = Measured("memcpy", 1, Speed(1.0, 1.0, 1))
    monkeypatch.setattr(codecs, "measure_speeds", lambda *_: {"memcpy": copied})
    report = Report("codecs")
    sizes = codecs.Sizes(synthetic=Extent(layers=1, tokens=64, kv_heads=2, head_dim=64))
    curves, speeds = codecs.measure(codecs.Run(tmp_path, tmp_path, report, sizes, True))
    assert (curves, speeds) == ({}, {"memcpy": copied})
    assert set(report.skipped) == {*BARS, "lossless_ratio"}


def test_every_key_stands_in_the_documentation() -> None:
    page = (codecs.ROOT / "docs" / "benchmarks.md").read_text()
    assert {key for key in KEYS if f"| `{key}` |" in page} == KEYS
