"""Our codecs beside others on the same KV tensors: bytes at equal quality, and speed on a core.

Quality is measured on two trained models, data/tinylm and the one of ``make real-model``: the KV
of a prefix is replaced by what a codec makes of it, the text behind it is scored, and facts that
the prefix tells are asked for. Bytes are those of whole frames, headers
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

from bench.charts import line_chart
from bench.codecs_kv import ROPE_THETA, Extent, Synthetic, make_synthetic
from bench.codecs_ours import Chunks, calibrated
from bench.codecs_rates import (
    BARS,
    IMPORTANCE_KEYS,
    REAL_KEYS,
    Rates,
    all_codes,
    family,
    measure_rates,
    report_bars,
    report_importance,
    report_rates,
    report_real,
    report_synthetic,
    synthetic_score,
    with_facts,
)
from bench.codecs_speeds import (
    ROUNDS,
    Measured,
    SpeedBench,
    break_even_gbps,
    gains,
    measure_speeds,
)
from bench.codecs_texts import TINYLM, Lengths
from bench.opponents import LMCacheCodecs, lmcache_codecs, lossless_coder
from bench.peer_process import PeerSkippedError
from bench.real_model import FOLDER, why_missing
from bench.report import Report
from kvstore.proto.types import RopeParameters

ROOT = Path(__file__).resolve().parents[1]
TINY, REAL, SYNTHETIC = "tinylm", "real model", "synthetic"
LOSSLESS_PEERS = ("zipnn", "blosc2")
LOSSLESS_CODEC = "zplane"
LOSSLESS_KEY = "lossless_ratio"
MODEL_KEYS = (*BARS, *REAL_KEYS, *IMPORTANCE_KEYS.values())
SEED = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the tests measure less."""

    tiny: Lengths = field(default_factory=Lengths)
    real: Lengths = field(
        default_factory=lambda: Lengths(
            windows=3, calibrate=3, prefix=512, rest=96, greedy=24, contexts=5
        )
    )
    synthetic: Extent = field(default_factory=Extent)
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class Run:
    """One run: where files go, where the second model and opponents are, what is reported."""

    folder: Path
    model: Path
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
        lmcache = open_or_reason(stack, lmcache_codecs(run.venvs, run.folder, TINYLM))
        coders = {
            name: open_or_reason(stack, lossless_coder(run.venvs, run.folder, name))
            for name in LOSSLESS_PEERS
        }
        synthetic, chunks = _synthetic(run.sizes.synthetic)
        curves: dict[str, Rates] = {}
        if run.speeds_only:
            run.report.skip([*MODEL_KEYS, LOSSLESS_KEY], "--speeds: no quality")
        else:
            curves.update(_rates_of_models(run, lmcache))
            curves[SYNTHETIC] = _rates_of_synthetic(run, synthetic, chunks, lmcache)
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


def _rates_of_models(run: Run, lmcache: LMCacheCodecs | str) -> dict[str, Rates]:
    """Measure both models; return the curves of those that are there, by name."""
    try:
        import bench.codecs_model  # noqa: F401 - looked for: the models need it
    except ImportError as error:
        run.report.skip(MODEL_KEYS, f"install the extra transformers: {error}")
        return {}
    found = {TINY: _rates_of_model(run, TINY, TINYLM, run.sizes.tiny, lmcache)}
    report_bars(run.report, found[TINY])
    report_importance(run.report, TINY, found[TINY])
    reason = why_missing(run.model)
    if reason is None:
        found[REAL] = _rates_of_model(run, REAL, run.model, run.sizes.real, lmcache)
        report_real(run.report, found[REAL])
        report_importance(run.report, REAL, found[REAL])
    else:
        run.report.skip([*REAL_KEYS, IMPORTANCE_KEYS[REAL]], reason)
    return found


def _rates_of_model(
    run: Run, name: str, folder: Path, lengths: Lengths, lmcache: LMCacheCodecs | str
) -> Rates:
    from bench.codecs_model import PrefixModel

    model = PrefixModel(lengths, folder)
    chunks = Chunks.of(f"bench/{name}", model.bits, model.rope)
    chunks = replace(chunks, importance=model.importance)
    calibrated(chunks, model.calibration())
    rates = measure_rates(chunks, lambda coded: model.score(coded.decoded), lmcache, run.folder)
    facts = Chunks(model.told_bits, chunks.model, model.told_importance)
    told = all_codes(facts, lmcache, run.folder, {})
    rates = with_facts(rates, told, model.answered)
    report_rates(run.report, name, rates)
    return rates


def _rates_of_synthetic(
    run: Run, synthetic: Synthetic, chunks: Chunks, lmcache: LMCacheCodecs | str
) -> Rates:
    rates = measure_rates(chunks, synthetic_score(synthetic), lmcache, run.folder)
    report_synthetic(run.report, rates)
    return rates


def _report_lossless(report: Report, curves: Mapping[str, Rates]) -> None:
    """Add the ratio of the lossless codec: the worst of the models' KV and synthetic."""
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
    for model, file in ((TINY, "codecs_rates.svg"), (REAL, "codecs_rates_real.svg")):
        if model in curves:
            _draw_rates(folder / file, f"bits a value against divergence, {model}", curves[model])
    title = "decoded bytes over a link against raw bytes, one core decoding"
    axes = ("GB/s of the link", "times raw")
    line_chart(folder / "codecs_links.svg", title, axes, gains(speeds))


def _draw_rates(file: Path, title: str, rates: Rates) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for point in rates.points:
        if point.quality.kl > 0:
            place = (point.quality.kl, point.bits_per_value)
            series.setdefault(family(point), []).append(place)
    if series:
        found = [kl for line in series.values() for kl, _ in line]
        decades = [10.0**power for power in range(-9, 2) if min(found) < 10.0**power < max(found)]
        line_chart(file, title, ("KL, nats a token", "bits"), series, decades)


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Run every part and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="where the opponents are installed; default build/peers")  # fmt: skip
    parser.add_argument("--model", type=Path, default=FOLDER, metavar="DIR",
                        help="the second model; default that of make real-model")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the curves as SVG files")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="write every point as JSON")
    parser.add_argument("--speeds", action="store_true", help="measure speeds alone, no quality")
    flags = parser.parse_args(argv)
    if flags.speeds and (flags.plot or flags.curves):
        parser.error("--speeds: quality is not measured; leave --plot and --curves out")
    for folder in filter(None, (flags.plot, flags.curves and flags.curves.parent)):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after ten minutes
    report = Report("codecs")
    with tempfile.TemporaryDirectory() as name:
        venvs = flags.venvs.absolute()
        run = Run(Path(name), flags.model, venvs, report, sizes or Sizes(), flags.speeds)
        curves, speeds = measure(run)
    report.print(only_json=flags.json)
    if flags.plot is not None:
        draw(flags.plot, curves, speeds)
    if flags.curves is not None:
        points = {name: [asdict(p) for p in rates.points] for name, rates in curves.items()}
        flags.curves.write_text(json.dumps(points, indent=1) + "\n")


if __name__ == "__main__":
    main()
