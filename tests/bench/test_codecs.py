"""bench.codecs without its baselines: arithmetic on known cases, and a tiny run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from bench.codecs import __main__ as codecs
from bench.codecs.__main__ import (
    AGAINST,
    Rates,
    in_rounds,
    report_bars,
    report_importance,
    report_real,
)
from bench.codecs.baselines import Baselines, LMCacheCodecs, Speed, TensorFile, kivi
from bench.codecs.kv import (
    ROPE,
    Lengths,
    Point,
    bits_at,
    error_at,
    frontier,
    synthetic,
    to_bits,
    to_floats,
)
from bench.codecs.model import PrefixModel
from bench.codecs.ours import Chunks, Coder
from bench.lib.processes import line_process
from bench.lib.report import Report
from bench.lib.traces import held_out

TINY = synthetic()[:, :2, :, :64, :2]
LINE = [(2.0, 1e-2), (4.0, 1e-4)]
"""A curve of one bit for each decade of error."""


def test_between_points_bits_follow_the_logarithm_of_the_error() -> None:
    assert frontier([(4.0, 1e-4), (3.0, 2e-2), (2.0, 1e-2), (16.0, 0.0)]) == LINE
    assert bits_at(LINE, 10**-3.5) == pytest.approx(3.5)
    for bits in (2.1, 2.3, 3.9):
        error = error_at(LINE, bits)
        assert error is not None
        assert error == pytest.approx(10**-bits)
        assert bits_at(LINE, error) == pytest.approx(bits)
    assert error_at(LINE, 1.9) is error_at(LINE, 4.1) is error_at([], 3.0) is None


def test_numbers_round_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    one, step = 0x3F80, 2.0**-7
    numbers = np.array([1 + 0.4 * step, 1 + 0.5 * step, 1 + 1.5 * step, -1.0], np.float32)
    assert to_bits(numbers).tolist() == [one, one, one + 2, one | 0x8000]
    assert np.array_equal(to_bits(to_floats(to_bits(numbers))), to_bits(numbers))


def test_kivi_codes_keys_along_tokens_and_values_along_channels() -> None:
    bits = to_bits(np.zeros((1, 1, 2, 64, 1, 64), np.float32))
    bits[0, 0, 0] = to_bits(np.arange(64, dtype=np.float32))  # one number a channel of keys
    bits[0, 0, 1] = to_bits(np.arange(64, dtype=np.float32))[:, None, None]  # one a value token
    coded = kivi(bits, 2, 64)
    assert np.array_equal(coded.decoded, bits)
    assert coded.bits_per_value == 2.5


CLIENT = """
import json, sys
import numpy as np
print('{"ready": 1}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    bits = np.load(request["tensors"])
    np.save(request["decoded"], bits)
    print(json.dumps({"digest": DIGEST, "stored_bytes": bits.size}), flush=True)
"""


@pytest.mark.parametrize("is_right", [True, False])
def test_a_baseline_that_read_other_tensors_ends_the_run(is_right: bool, tmp_path: Path) -> None:
    tensors = TensorFile.write(tmp_path, TINY)
    code = CLIENT.replace("DIGEST", str(tensors.digest if is_right else tensors.digest + 1))
    with line_process([sys.executable, "-c", code], tmp_path / "log") as program:
        baseline = LMCacheCodecs(program, tmp_path)
        if not is_right:
            with pytest.raises(ValueError, match="the baseline read other tensors"):
                baseline.coded("fp8", "bare cast", tensors)
            return
        coded = baseline.coded("fp8", "bare cast", tensors)
    assert coded.bits_per_value == 8
    assert np.array_equal(coded.decoded, tensors.bits)


def test_a_codec_that_calls_wrong_bytes_exact_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks.of("bench/test", TINY, ROPE)
    coder = Coder("raw", chunks)
    monkeypatch.setattr(type(coder.codec), "decode_into", lambda *_: None)
    with pytest.raises(ValueError, match="raw: wrong bytes"):
        coder.code(chunks.bits)


def test_each_key_is_our_bytes_over_theirs_at_their_divergence() -> None:
    points = [Point("kvq:1", "", 2.0, 1e-2), Point("kvq:3", "", 4.0, 1e-4)]
    points += [Point(codec, setting, 6.0, 1e-3) for codec, setting, _ in AGAINST.values()]
    report = Report("codecs")
    report_bars(report, Rates(points))
    assert report.values == dict.fromkeys(AGAINST, 0.5)


def test_keys_of_models_are_the_worst_of_their_ratios() -> None:
    points = [Point(f"kvq:{quality}", "", 2.0 + quality, 10.0**-quality) for quality in range(4)]
    report = Report("codecs")
    report_importance(report, "real model", Rates(points))
    points += [Point("kvq:0,sinks=0", "", 2.0, 5.0), Point("kvq:1,sinks=0", "", 3.0, 0.4)]
    points += [Point("kvq:0,importance", "", 3.0, 0.05), Point("kvq:1,importance", "", 4.0, 2e-3)]
    report_real(report, Rates(points))
    report_importance(report, "tinylm", Rates(points))
    assert report.values == {
        "real_model_kl@4bits": 0.01, "real_model_kl@3bits": 0.1, "sink_kl_ratio": 0.25,
        "importance_kl_ratio_tinylm": pytest.approx(0.5),
    }  # fmt: skip
    assert set(report.skipped) == {"importance_kl_ratio_real_model"}


def test_a_skipped_key_has_a_reason() -> None:
    for points, without, reason in [
        ([Point("kvq:1", "", 2.0, 1e-2)], "pip: no route", "pip: no route"),
        (
            [Point("kvq:1", "", 2.0, 1e-2), Point("lmcache fp8", "bare cast", 8.0, 1e-9)],
            "",
            "no quality of kvq has a KL as high as 1.00e-09",
        ),
    ]:
        report = Report("codecs")
        report_bars(report, Rates(points, without))
        assert report.values == {}
        assert report.skipped["kvq_bytes_vs_fp8_at_kl"] == reason


def test_the_best_encode_and_the_best_decode_count() -> None:
    runs = iter([Speed(9.0, 9.0), Speed(2.0, 1.0), Speed(1.0, 4.0)])
    assert in_rounds({"x": lambda: next(runs)}, 2) == {"x": Speed(1.0, 1.0)}


LENGTHS = Lengths(windows=2, calibrate=1, prefix=64, rest=24)


@pytest.fixture(scope="module")
def model() -> PrefixModel:
    return PrefixModel(LENGTHS)


def test_the_exact_prefix_changes_nothing_and_more_bits_lower_the_divergence(
    model: PrefixModel,
) -> None:
    assert model.score(model.bits) == 0.0
    fine, coarse = (model.score(kivi(model.bits, bits, 64).decoded) for bits in (8, 2))
    assert 0 < fine < coarse


def test_the_texts_that_fit_tables_are_not_those_that_are_scored(model: PrefixModel) -> None:
    lengths = codecs.Sizes().tiny
    assert len(held_out("score")) == lengths.windows
    assert len(held_out("calibrate")) == lengths.calibrate
    assert not set(held_out("score")) & set(held_out("calibrate"))
    assert model.calibration().shape == (1, *model.bits.shape[1:])


@pytest.mark.parametrize("speeds_only", [True, False])
def test_a_run_without_baselines_has_every_key_or_a_reason(
    speeds_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = {"raw": "exact", "lossless": "exact", "kvq:3": "kvq", "kvq:0": "kvq"}
    monkeypatch.setattr(codecs, "FAMILIES", families)
    absent = Baselines(tmp_path, "no lmcache", "no zipnn")
    sizes = codecs.Sizes(tiny=LENGTHS, synthetic=TINY, rounds=1)
    report = Report("codecs")
    codecs.measure(codecs.Run(absent, tmp_path, report, sizes, speeds_only))
    speeds = {"lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix"}
    skipped = {"lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn"}
    skipped |= {"kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen"}
    quality_keys = {*codecs.MODEL_KEYS, codecs.LOSSLESS_KEY}
    assert set(report.values) | set(report.skipped) == speeds | skipped | quality_keys
    if speeds_only:
        assert set(report.values) == speeds
        return
    assert set(report.values) == speeds | {"lossless_ratio", "kvq_bytes_vs_kivi4_at_kl"}
    assert report.skipped["kvq_bytes_vs_cachegen_at_kl"] == "no lmcache"
    assert report.skipped["sink_kl_ratio"] == f"no model in {tmp_path}: run make real-model"
