"""bench.codecs without its opponents: its arithmetic on cases done by hand, and a tiny run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from bench import codecs, codecs_rates
from bench.codecs_curve import (
    Point,
    Quality,
    bits_at,
    bits_per_value,
    error_at,
    frontier,
    mean_ratio,
    ratio_at,
)
from bench.codecs_kv import Extent, digest, make_synthetic, rotate, to_bits, to_floats
from bench.codecs_model import kl_per_token
from bench.codecs_ours import Chunks, Coder
from bench.codecs_rates import (
    AGAINST,
    BARS,
    REAL_KEYS,
    SINKS,
    Rates,
    report_bars,
    report_importance,
    report_rates,
    report_real,
)
from bench.codecs_speeds import (
    Measured,
    best_of,
    break_even_gbps,
    delivered_gbps,
    gains,
    in_rounds,
)
from bench.opponents import Bins, LMCacheCodecs, Speed, TensorFile, cachegen_levels
from bench.opponents_layouts import aibrix_time, kivi
from bench.peer_process import PeerSkippedError, asking
from bench.report import Report

from kvstore.proto.errors import UnknownCodecError
from kvstore.proto.types import RopeParameters

TINY = Extent(layers=2, tokens=64, kv_heads=2, head_dim=64)
LINE = [(2.0, 1e-2), (4.0, 1e-4)]
"""A curve that loses a bit a decade."""


def quality(kl: float) -> Quality:
    return Quality(kl, 0.0, 1.0, kl, kl, kl)


def point(codec: str, setting: str, bits: float, kl: float) -> Point:
    return Point(codec, setting, bits, quality(kl))


def tiny_chunks() -> Chunks:
    bits = make_synthetic(TINY, 3).bits
    return Chunks.of("bench/test", bits, RopeParameters(500000.0, TINY.head_dim))


# --- curves


def test_bits_per_value_are_those_of_all_bytes_stored() -> None:
    assert bits_per_value(64 + 256, 512) == 5.0
    with pytest.raises(ValueError, match="bits_per_value"):
        point("kvq", "", 0.0, 1e-3)


def test_between_two_points_bits_follow_the_logarithm_of_the_error() -> None:
    assert bits_at(LINE, 1e-3) == pytest.approx(3.0)
    assert bits_at(LINE, 10**-3.5) == pytest.approx(3.5)
    assert bits_at(LINE, 1e-2) == pytest.approx(2.0)


def test_the_error_at_some_bits_is_that_whose_bits_they_are() -> None:
    assert error_at(LINE, 3.0) == pytest.approx(1e-3)
    for bits in (2.1, 2.3, 3.9):
        error = error_at(LINE, bits)
        assert error is not None
        assert bits_at(LINE, error) == pytest.approx(bits)
    assert error_at(LINE, 1.9) is error_at(LINE, 4.1) is error_at([], 3.0) is None


@pytest.mark.parametrize("error", [2e-2, 9e-5])
def test_nothing_is_said_of_errors_a_curve_does_not_reach(error: float) -> None:
    assert bits_at(LINE, error) is None
    assert ratio_at(LINE, (6.0, error)) is None
    assert bits_at([], error) is None


def test_a_point_that_a_cheaper_one_undercuts_is_no_part_of_the_curve() -> None:
    assert frontier([(4.0, 1e-4), (3.0, 2e-2), (2.0, 1e-2), (16.0, 0.0)]) == LINE


def test_the_ratio_is_taken_at_the_error_of_the_other_side() -> None:
    assert ratio_at(LINE, (6.0, 1e-3)) == pytest.approx(0.5)


def test_the_ratio_of_whole_curves_is_their_geometric_mean_where_both_are() -> None:
    doubled = [(2 * bits, error) for bits, error in LINE]
    assert mean_ratio(LINE, doubled) == pytest.approx(0.5)
    assert mean_ratio(LINE, LINE) == pytest.approx(1.0)
    assert mean_ratio(LINE, [(1.0, 0.5), (1.5, 0.1)]) is None
    assert mean_ratio(LINE, []) is None


def test_divergence_is_that_of_kullback_and_leibler_in_nats() -> None:
    wanted = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    found = torch.tensor([[[0.25, 0.75], [0.9, 0.1]]]).log()
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_per_token(wanted, found) == pytest.approx(by_hand / 2, rel=1e-6)
    assert kl_per_token(found, found) == 0


# --- tensors


def test_numbers_round_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    one, step = 0x3F80, 2.0**-7
    numbers = np.array([1 + 0.4 * step, 1 + 0.5 * step, 1 + 1.5 * step, -1.0], np.float32)
    assert to_bits(numbers).tolist() == [one, one, one + 2, one | 0x8000]
    assert np.array_equal(to_bits(to_floats(to_bits(numbers))), to_bits(numbers))


def test_rotation_turns_each_pair_by_its_own_angle() -> None:
    keys = np.zeros((3, 1, 4), np.float32)
    keys[..., 0], keys[..., 3] = 1.0, 2.0
    turned = rotate(keys, theta=100.0)
    assert np.array_equal(turned[0], keys[0])
    for position in (1, 2):
        slow = position * 100.0**-0.5
        expected = [math.cos(position), -2 * math.sin(slow), math.sin(position), 2 * math.cos(slow)]
        assert turned[position, 0] == pytest.approx(expected, rel=1e-5)


def test_synthetic_keys_have_outlier_channels_and_values_have_none() -> None:
    made = make_synthetic(TINY, 5)
    assert made.bits.shape == (1, 2, 2, 64, 2, 64)
    assert np.array_equal(made.bits, make_synthetic(TINY, 5).bits)
    sizes = np.abs(to_floats(made.bits)).mean(3)[0].reshape(2, 2, -1)
    keys, values = (sizes[:, part].max(-1) / np.median(sizes[:, part], -1) for part in (0, 1))
    assert (keys > 4).all()
    assert (values < 4).all()


def test_attention_reads_no_error_from_what_came_back_as_it_was() -> None:
    made = make_synthetic(TINY, 5)
    assert made.attention_error(made.bits) == 0
    coarse, coarser = (kivi(made.bits, bits, 32).decoded for bits in (4, 2))
    assert 0 < made.attention_error(coarse) < made.attention_error(coarser)


# --- opponents


def test_kivi_codes_keys_along_tokens_and_values_along_channels() -> None:
    bits = to_bits(np.zeros((1, 1, 2, 64, 1, 64), np.float32))
    bits[0, 0, 0] = to_bits(np.arange(64, dtype=np.float32))  # one number a channel of keys
    bits[0, 0, 1] = to_bits(np.arange(64, dtype=np.float32))[:, None, None]  # one a value token
    coded = kivi(bits, 2, 64)
    assert np.array_equal(coded.decoded, bits)
    assert coded.bits_per_value == 2.5


def test_an_error_of_kivi_is_at_most_half_a_step() -> None:
    made = make_synthetic(TINY, 5)
    wanted, found = to_floats(made.bits), to_floats(kivi(made.bits, 4, 32).decoded)
    values, errors = (
        wanted[:, :, 1].reshape(-1, 32),
        np.abs(found - wanted)[:, :, 1].reshape(-1, 32),
    )
    steps = (values.max(1) - values.min(1)) / 15
    assert (errors.max(1) <= 0.51 * steps + 2**-8 * np.abs(values).max(1)).all()


def test_cachegens_bins_are_spread_over_the_layers_of_a_model() -> None:
    level = cachegen_levels(32)[1]
    assert level.key_bins == (32,) * 10 + (16,) * 22
    assert level.value_bins == (32,) * 2 + (16,) * 30
    assert Bins.spread("x", 4, [(0, 8), (16, 4)], [(0, 8)]).key_bins == (8, 8, 4, 4)


def test_zstd_as_it_comes_brings_the_bytes_back() -> None:
    speed = aibrix_time(np.zeros(1 << 16, np.uint16))
    assert 0 < speed.stored_bytes < 1 << 10


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
def test_an_opponent_that_read_other_tensors_ends_the_run(is_right: bool, tmp_path: Path) -> None:
    tensors = TensorFile.write(tmp_path / "kv.npy", make_synthetic(TINY, 5).bits)
    code = CLIENT.replace("DIGEST", str(tensors.digest if is_right else tensors.digest + 1))
    with asking([sys.executable, "-c", code], tmp_path / "log") as asked:
        opponent = LMCacheCodecs(asked, tmp_path, tmp_path)
        if not is_right:
            with pytest.raises(ValueError, match=r"kv\.npy: the opponent read other tensors"):
                opponent.fp8(tensors)
            return
        coded = opponent.fp8(tensors)
    assert coded.bits_per_value == 8
    assert np.array_equal(coded.decoded, tensors.bits)


def test_the_digest_is_of_the_numbers_whatever_their_order_in_memory() -> None:
    bits = make_synthetic(TINY, 5).bits
    turned = np.ascontiguousarray(bits.transpose(0, 1, 2, 4, 3, 5)).transpose(0, 1, 2, 4, 3, 5)
    assert digest(turned) == digest(bits)
    assert digest(bits + 1) != digest(bits)


def test_an_opponent_that_cannot_be_had_leaves_its_reason() -> None:
    @contextmanager
    def absent() -> Iterator[int]:
        raise PeerSkippedError("no wheel for this machine")
        yield 1

    with ExitStack() as stack:
        assert codecs.open_or_reason(stack, absent()) == "no wheel for this machine"


# --- our codecs


def test_a_lossless_codec_costs_its_frame_and_brings_everything_back() -> None:
    chunks = tiny_chunks()
    (coded,) = Coder.of("raw", chunks).code(chunks.bits)
    assert 16 < coded.bits_per_value < 17
    assert np.array_equal(coded.decoded, chunks.bits)


def test_a_lossy_codec_costs_less_and_comes_back_near() -> None:
    chunks = tiny_chunks()
    (coded,) = Coder.of("gq8", chunks).code(chunks.bits)
    assert 8 < coded.bits_per_value < 14
    wanted, found = to_floats(chunks.bits), to_floats(coded.decoded)
    assert 0 < np.square(found - wanted).sum() / np.square(wanted).sum() < 1e-3


def test_a_codec_that_calls_wrong_bytes_exact_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = tiny_chunks()
    coder = Coder.of("raw", chunks)
    monkeypatch.setattr(type(coder.codec), "decode_into", lambda *_: None)
    with pytest.raises(ValueError, match="raw: wrong bytes"):
        coder.code(chunks.bits)


def test_a_codec_that_is_not_there_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codecs_rates, "OURS", {"exact": ("raw", "nonesuch")})
    with pytest.raises(UnknownCodecError):
        Coder.of("nonesuch", tiny_chunks())
    skipped: dict[str, str] = {}
    names = [coded.codec for coded in codecs_rates.our_codes(tiny_chunks(), skipped)]
    assert names == ["raw"]
    assert list(skipped) == ["nonesuch"]
    assert "not built" in skipped["nonesuch"]


# --- keys


def test_each_key_is_our_bytes_over_theirs_at_their_divergence() -> None:
    points = [point("kvq:1", "", 2.0, 1e-2), point("kvq:3", "", 4.0, 1e-4)]
    points += [point(codec, setting, 6.0, 1e-3) for codec, setting in AGAINST.values()]
    report = Report("codecs")
    report_bars(report, Rates(points, {}))
    assert report.values == dict.fromkeys(BARS, 0.5)


def test_of_two_ways_to_run_an_opponent_the_better_counts() -> None:
    points = [point("kvq:1", "", 2.0, 1e-2), point("kvq:3", "", 4.0, 1e-4)]
    points += [
        point("lmcache turboquant", "4bit_nc d32", 6.0, 1e-3),
        point("lmcache turboquant", "4bit_nc d128", 5.0, 1e-3),
        point("lmcache turboquant", "3bit_nc d128", 1.0, 1e-3),
    ]
    report = Report("codecs")
    report_bars(report, Rates(points, {}))
    assert report.values == {"kvq_bytes_vs_turboquant4_at_kl": 0.6}


@pytest.mark.parametrize(
    ("points", "skipped", "reason"),
    [
        ([], {"kvq:3": "not built: kvq"}, "not built: kvq"),
        ([point("kvq:1", "", 2.0, 1e-2)], {"lmcache": "pip: no route"}, "pip: no route"),
        (
            [point("kvq:1", "", 2.0, 1e-2), point("lmcache fp8", "bare cast", 8.0, 1e-9)],
            {},
            "no kvq quality is as far from the original as KL 1.00e-09",
        ),
    ],
)
def test_a_key_that_cannot_be_had_says_why(
    points: list[Point], skipped: dict[str, str], reason: str
) -> None:
    report = Report("codecs")
    report_bars(report, Rates(points, skipped))
    assert report.values == {}
    assert report.skipped["kvq_bytes_vs_fp8_at_kl"] == reason


def test_the_real_model_gives_kvqs_divergence_and_the_worse_gain_of_an_exact_sink() -> None:
    points = [point(f"kvq:{quality}", "", 2.0 + quality, 10.0**-quality) for quality in range(4)]
    points += [point("kvq:0,sinks=0", "", 2.0, 5.0), point("kvq:1,sinks=0", "", 3.0, 0.4)]
    report = Report("codecs")
    report_real(report, Rates(points, {}))
    assert report.values == {
        "real_model_kl@4bits": 0.01, "real_model_kl@3bits": 0.1, "sink_kl_ratio": 0.25,
    }  # fmt: skip


def test_a_key_of_the_real_model_that_cannot_be_had_says_why() -> None:
    report = Report("codecs")
    report_real(report, Rates([point("kvq:1", "", 2.0, 1e-2)], {SINKS[0][0]: "not built: kvq"}))
    assert report.values == {}
    assert set(report.skipped) == set(REAL_KEYS)
    assert report.skipped["sink_kl_ratio"] == "not built: kvq"


def test_the_key_of_importance_is_the_worst_of_its_ratios_at_equal_bytes() -> None:
    points = [point(f"kvq:{quality}", "", 2.0 + quality, 10.0**-quality) for quality in range(4)]
    points += [point("kvq:0,importance", "", 3.0, 0.05), point("kvq:1,importance", "", 4.0, 2e-3)]
    report = Report("codecs")
    report_importance(report, "tinylm", Rates(points, {}))
    report_importance(report, "real model", Rates(points[:4], {}))
    assert report.values == {"importance_kl_ratio_tinylm": pytest.approx(0.5)}
    assert set(report.skipped) == {"importance_kl_ratio_real_model"}


def test_the_row_of_a_point_names_its_model_and_the_facts_that_were_answered() -> None:
    report = Report("codecs")
    told = Point("kvq:1", "", 2.0, quality(1e-2), facts=0.75)
    report_rates(report, "some model", Rates([told, point("raw", "", 16.0, 0.0)], {"x": "no"}))
    names, _, words, _ = zip(*report.rows, strict=True)
    assert names == ("  some model: kvq:1", "  some model: raw", "  some model: x")
    assert "facts 0.75" in words[0]
    assert "facts" not in words[1]


# --- speeds


def test_the_best_encode_and_the_best_decode_count() -> None:
    runs = iter([Speed(9.0, 9.0, 50), Speed(2.0, 1.0, 50), Speed(1.0, 4.0, 50)])
    found = in_rounds(10**9, {"x": lambda: next(runs)}, 2)["x"]
    assert (found.ratio, found.encode_gbps, found.decode_gbps) == (2e7, 1.0, 1.0)
    assert best_of("x", 8, [Speed(2.0, 3.0, 4)]).best == Speed(2.0, 3.0, 4)


def test_a_codec_pays_on_links_slower_than_it_decodes() -> None:
    assert delivered_gbps(0.1, 4.0, 2.0) == pytest.approx(0.4)
    assert delivered_gbps(1.0, 4.0, 2.0) == 2.0
    assert break_even_gbps(4.0, 2.0, 10.0) == 2.0
    assert break_even_gbps(4.0, 20.0, 10.0) == 10.0
    assert break_even_gbps(1.0, 20.0, 10.0) == 0.0


def test_gains_are_over_raw_bytes_on_the_same_link() -> None:
    second = Speed(1.0, 1.0, 1)
    measured = {
        "memcpy": Measured("memcpy", 10**10, second),
        "half": Measured("half", 10**9, Speed(1.0, 1.0, 5 * 10**8)),
    }
    assert gains(measured, [0.1, 1.0, 20.0]) == {
        "half": [(0.1, pytest.approx(2.0)), (1.0, 1.0), (20.0, pytest.approx(0.1))]
    }
