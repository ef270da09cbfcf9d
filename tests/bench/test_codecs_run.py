"""bench.codecs on the trained model with little of everything, and a tiny run without opponents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from bench import codecs, codecs_rates
from bench.codecs_curve import Quality
from bench.codecs_kv import Extent
from bench.codecs_model import PrefixModel
from bench.codecs_rates import BARS, IMPORTANCE_KEYS, REAL_KEYS
from bench.codecs_speeds import Measured
from bench.codecs_texts import TINYLM, Lengths, contexts, held_out
from bench.opponents import Speed
from bench.opponents_layouts import kivi
from bench.real_model import FOLDER, why_missing
from bench.report import Report
from transformers import AutoTokenizer

KEYS = {
    *BARS,
    *REAL_KEYS,
    *IMPORTANCE_KEYS.values(),
    "lossless_ratio",
    "lossless_encode_vs_zipnn",
    "lossless_decode_vs_zipnn",
    "lossless_encode_vs_aibrix",
    "lossless_decode_vs_aibrix",
    "kvq_encode_vs_lmcache_cachegen",
    "kvq_decode_vs_lmcache_cachegen",
}
LENGTHS = Lengths(windows=2, calibrate=1, prefix=64, rest=24, greedy=6, contexts=3, told=320)
SMALL = Extent(layers=1, tokens=64, kv_heads=2, head_dim=64)
COPIED = Measured("memcpy", 1, Speed(1.0, 1.0, 1))


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
    lengths = codecs.Sizes().tiny
    assert len(held_out("score")) == lengths.windows
    assert len(held_out("calibrate")) == lengths.calibrate
    assert not set(held_out("score")) & set(held_out("calibrate"))
    assert model.calibration().shape == (1, *model.bits.shape[1:])


def test_a_prefix_that_is_gone_answers_fewer_facts_than_one_that_is_there(
    model: PrefixModel,
) -> None:
    assert model.told_bits.shape[0] == LENGTHS.contexts
    assert model.answered(model.told_bits) > model.answered(np.zeros_like(model.told_bits)) == 0


def test_every_answer_stands_in_its_prefix(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINYLM)
    for folder, questions in ((TINYLM, 1), (tmp_path, 6)):
        for context in contexts(folder, tokenizer, 4, 400):
            assert len(context.prefix) == 400
            assert len(context.asked) == questions
            told = tokenizer.decode(context.prefix)
            for question, answer in context.asked:
                assert tokenizer.decode(answer) in told
                assert tokenizer.decode(answer) not in tokenizer.decode(question)


def test_prefixes_too_short_for_their_facts_are_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINYLM)
    with pytest.raises(ValueError, match="fit in 40 tokens, not 4"):
        contexts(tmp_path, tokenizer, 4, 40)


@pytest.mark.slow
def test_the_real_model_answers_what_a_prompt_told_it() -> None:
    if reason := why_missing(FOLDER):
        pytest.skip(reason)
    lengths = Lengths(windows=1, prefix=32, rest=8, greedy=1, contexts=1, told=256)
    model = PrefixModel(lengths, FOLDER)
    assert model.bits.shape == (1, 30, 2, 32, 3, 64)
    assert model.answered(model.told_bits) >= 0.5


# --- a run


ALONE = """
import sys
from contextlib import contextmanager
from bench import codecs
from bench.codecs_kv import Extent
from bench.codecs_texts import Lengths
from bench.peer_process import PeerSkippedError

@contextmanager
def absent(*_):
    raise PeerSkippedError("not on this machine")
    yield

codecs.lmcache_codecs = codecs.lossless_coder = absent
tiny = Extent(layers=2, tokens=64, kv_heads=2, head_dim=64)
few = Lengths(windows=2, calibrate=1, prefix=64, rest=16, greedy=4, contexts=1, told=320)
one = Lengths(windows=1, calibrate=1, prefix=64, rest=16, greedy=1, contexts=1, told=320)
codecs.main(sys.argv[1:], codecs.Sizes(tiny=few, real=one, synthetic=tiny, rounds=1))
"""
"""A run without opponents, in a process of its own: it takes memory that others measure."""


@pytest.mark.slow
def test_a_tiny_run_has_every_key_or_says_why_not(tmp_path: Path) -> None:
    curves = tmp_path / "curves.json"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "--plot", tmp_path, "--curves", curves, "--model", TINYLM],
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
    there = {"kvq_bytes_vs_kivi4_at_kl", "lossless_ratio", "real_model_kl@4bits"}
    assert there <= set(result["values"])
    assert result["skipped"]["kvq_bytes_vs_cachegen_at_kl"] == "not on this machine"
    assert any("memcpy" in row for row in table)
    for name in ("codecs_rates.svg", "codecs_rates_real.svg", "codecs_links.svg"):
        drawing = ElementTree.parse(tmp_path / name).getroot()
        assert list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))
    points = json.loads(curves.read_text())
    for model in ("tinylm", "real model"):
        assert {p["codec"] for p in points[model]} > {"raw", "kvq:2", "kvq:1,importance", "kivi"}
        assert all(0 <= p["facts"] <= 1 for p in points[model])


def test_the_flags_are_those_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codecs.main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--json", "--venvs", "--model", "--plot", "--curves", "--speeds"):
        assert flag in text
    for wrong in (["--jsn"], ["--speeds", "--plot", "docs"]):
        with pytest.raises(SystemExit):
            codecs.main(wrong)


def test_speeds_alone_leave_out_every_key_of_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "open_or_reason", lambda *_: "not asked for")
    monkeypatch.setattr(codecs, "measure_speeds", lambda *_: {"memcpy": COPIED})
    report = Report("codecs")
    sizes = codecs.Sizes(synthetic=SMALL)
    curves, speeds = codecs.measure(codecs.Run(tmp_path, tmp_path, tmp_path, report, sizes, True))
    assert (curves, speeds) == ({}, {"memcpy": COPIED})
    assert set(report.skipped) == {
        *BARS, *REAL_KEYS, *IMPORTANCE_KEYS.values(), "lossless_ratio",
    }  # fmt: skip


def test_without_the_real_model_its_keys_say_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "open_or_reason", lambda *_: "not asked for")
    monkeypatch.setattr(codecs, "measure_speeds", lambda *_: {"memcpy": COPIED})
    monkeypatch.setattr(codecs_rates, "OURS", {"exact": ("raw",), "kvq": ("kvq:0",)})
    report = Report("codecs")
    sizes = codecs.Sizes(tiny=LENGTHS, synthetic=SMALL)
    curves, _ = codecs.measure(codecs.Run(tmp_path, tmp_path, tmp_path, report, sizes))
    assert set(curves) == {"tinylm", "synthetic"}
    assert {report.skipped[key] for key in (*REAL_KEYS, IMPORTANCE_KEYS["real model"])} == {
        f"no model in {tmp_path}: run make real-model"
    }


def test_every_key_stands_in_the_documentation() -> None:
    page = (codecs.ROOT / "docs" / "benchmarks.md").read_text()
    assert {key for key in KEYS if f"| `{key}` |" in page} == KEYS
