"""Our codecs beside others on the same KV tensors: bytes at equal quality, and speed on a core.

Quality is measured on a trained model (data/tinylm): the KV of a prefix is replaced by what a
codec makes of it, and the text behind it is scored. Bytes are those of whole frames, headers
included. Speeds are processor time on one core, the sides of a ratio in turns. The first run
makes a virtual environment for each opponent.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from bench.codecs_kv import ROPE_THETA, Extent, Synthetic, make_synthetic
from bench.codecs_links import break_even_gbps, gains
from bench.codecs_ours import Chunks, calibrated
from bench.codecs_rates import (
    BARS,
    Rates,
    family,
    measure_rates,
    report_rates,
    report_synthetic,
    synthetic_score,
)
from bench.codecs_speeds import ROUNDS, Measured, SpeedBench, measure_speeds
from bench.opponents import LMCacheCodecs, lmcache_codecs, lossless_coder
from bench.peer_process import PeerSkippedError
from bench.report import Report
from kvstore.cli.plot import line_chart
from kvstore.proto.background import make_at_once
from kvstore.proto.types import RopeParameters

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "data" / "tinylm"
LOSSLESS_PEERS = ("zipnn", "blosc2")
LOSSLESS_CODEC = "zplane"
LOSSLESS_KEY = "lossless_ratio"
SEED = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the tests measure less."""

    windows: int = 16
    calibrate: int = 8
    prefix: int = 256
    rest: int = 256
    greedy: int = 64
    synthetic: Extent = field(default_factory=Extent)
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class Run:
    """One run: where files go, where opponents live, what is reported."""

    folder: Path
    venvs: Path
    report: Report
    sizes: Sizes
    speeds_only: bool = False


def open_or_reason(stack: ExitStack, side: AbstractContextManager[T]) -> T | str:
    """Open *side* until *stack* closes; return it, or why it cannot be had."""
    try:
        return stack.enter_context(side)
    except PeerSkippedError as error:
        return str(error)


def measure(run: Run) -> tuple[dict[str, Rates], dict[str, Measured]]:
    """Run every part; return the curves by the KV they are of, and the speeds of ours."""
    with ExitStack() as stack:
        lmcache = open_or_reason(stack, lmcache_codecs(run.venvs, run.folder, MODEL))
        coders = {
            name: open_or_reason(stack, lossless_coder(run.venvs, run.folder, name))
            for name in LOSSLESS_PEERS
        }
        synthetic, chunks = _synthetic(run.sizes.synthetic)
        curves: dict[str, Rates] = {}
        if run.speeds_only:
            run.report.skip([*BARS, LOSSLESS_KEY], "--speeds: no quality")
        else:
            curves["trained model"] = _rates_of_model(run, lmcache)
            curves["synthetic"] = _rates_of_synthetic(run, synthetic, chunks, lmcache)
            _report_lossless(run.report, curves)
        speeds = measure_speeds(
            run.report, SpeedBench(chunks, run.folder, lmcache, coders, run.sizes.rounds)
        )
        _report_links(run.report, speeds)
    return curves, speeds


def _synthetic(extent: Extent) -> tuple[Synthetic, Chunks]:
    """Return synthetic KV, and as chunks; one window more of it fits the tables."""
    made = make_synthetic(replace(extent, windows=extent.windows + 1), SEED)
    synthetic = Synthetic(made.bits[:-1], made.queries)
    chunks = Chunks.of(
        "bench/synthetic", synthetic.bits, RopeParameters(ROPE_THETA, extent.head_dim)
    )
    calibrated(chunks, made.bits[-1:])
    return synthetic, chunks


def _rates_of_model(run: Run, lmcache: LMCacheCodecs | str) -> Rates:
    try:
        from bench.codecs_model import Lengths, PrefixModel
    except ImportError as error:
        run.report.skip(list(BARS), f"install the extra transformers: {error}")
        return Rates([], {})
    sizes = run.sizes
    model = PrefixModel(Lengths(sizes.windows, sizes.prefix, sizes.rest, sizes.greedy))
    chunks = Chunks.of("bench/tinylm", model.bits, model.rope)
    calibrated(chunks, model.calibration(sizes.calibrate))
    rates = measure_rates(chunks, lambda coded: model.score(coded.decoded), lmcache, run.folder)
    report_rates(run.report, rates)
    return rates


def _rates_of_synthetic(
    run: Run, synthetic: Synthetic, chunks: Chunks, lmcache: LMCacheCodecs | str
) -> Rates:
    rates = measure_rates(chunks, synthetic_score(synthetic), lmcache, run.folder)
    report_synthetic(run.report, rates)
    return rates


def _report_lossless(report: Report, curves: Mapping[str, Rates]) -> None:
    """Add the ratio of the lossless codec: the worse of the trained model's KV and synthetic."""
    ratios = {
        name: 16 / point.bits_per_value
        for name, rates in curves.items()
        for point in rates.points
        if point.codec == LOSSLESS_CODEC
    }
    if not ratios:
        report.skip([LOSSLESS_KEY], f"{LOSSLESS_CODEC}: not built")
        return
    words = ", ".join(f"{ratio:.3f} {name}" for name, ratio in ratios.items())
    report.add(LOSSLESS_KEY, min(ratios.values()), words, "bf16, bar 1.45")


def _report_links(report: Report, speeds: Mapping[str, Measured]) -> None:
    """Add a row for the link up to which each codec pays, decoding on one core."""
    copy = speeds["memcpy"].decode_gbps
    for name, found in speeds.items():
        fastest = break_even_gbps(found.ratio, found.decode_gbps, copy)
        if fastest:
            full = found.decode_gbps / found.ratio
            report.note(
                f"  pays: {name}", f"{fastest:.2f}", f"GB/s of link, in full up to {full:.2f}"
            )


def draw(folder: Path, curves: Mapping[str, Rates], speeds: Mapping[str, Measured]) -> None:
    """Draw bits against divergence, and the gain over raw bytes against the link."""
    rates = curves["trained model"]
    series: dict[str, list[tuple[float, float]]] = {}
    for point in rates.points:
        if point.quality.kl > 0:
            place = (point.quality.kl, point.bits_per_value)
            series.setdefault(family(point), []).append(place)
    if series:
        title = "bits a value against divergence, KV of a trained model"
        found = [kl for line in series.values() for kl, _ in line]
        decades = [10.0**power for power in range(-9, 2) if min(found) < 10.0**power < max(found)]
        axes = ("KL, nats a token", "bits")
        line_chart(folder / "codecs_rates.svg", title, axes, series, decades)
    title = "decoded bytes over a link against raw bytes, one core decoding"
    axes = ("GB/s of the link", "times raw")
    line_chart(folder / "codecs_links.svg", title, axes, gains(speeds))


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Run every part and print the report."""
    make_at_once()  # what is measured is not what stands in for it
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="where the opponents are installed; default build/peers")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the curves as SVG files")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="write every point as JSON")
    parser.add_argument("--speeds", action="store_true", help="measure speeds alone, no quality")
    flags = parser.parse_args(argv)
    if flags.speeds and (flags.plot or flags.curves):
        parser.error("--speeds: quality is not measured; leave --plot and --curves out")
    report = Report("codecs")
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), flags.venvs.absolute(), report, sizes or Sizes(), flags.speeds)
        curves, speeds = measure(run)
    if flags.plot is not None:
        draw(flags.plot, curves, speeds)
    if flags.curves is not None:
        points = {name: [asdict(p) for p in rates.points] for name, rates in curves.items()}
        flags.curves.write_text(json.dumps(points, indent=1) + "\n")
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
