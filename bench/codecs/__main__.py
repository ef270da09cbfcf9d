"""Our codecs beside others on the same KV tensors: bytes at equal quality, and speed on a core.

Quality is measured on two trained models, data/tinylm and the one of ``make real-model``: the KV
of a prefix is replaced by what a codec makes of it, the text behind it is scored, and facts that
the prefix tells are asked for. Bytes are those of whole frames, headers
included. Speeds are processor time on one core, the sides of a ratio in turns. The first run
makes a virtual environment for each opponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from bench.codecs.baselines import (
    CACHEGEN_LEVELS,
    Coded,
    LMCacheCodecs,
    TensorFile,
    bins_of,
    kivi,
    lmcache_codecs,
    zipnn_coder,
)
from bench.codecs.kv import ROPE_THETA, Extent, Point, Rate, error_at, make_synthetic, ratio_at
from bench.codecs.ours import Chunks, Coder, calibrated
from bench.codecs.speeds import ROUNDS, SpeedBench, measure_speeds
from bench.codecs.texts import Lengths
from bench.lib.processes import PeerSkippedError
from bench.lib.report import Report, parser_of
from bench.lib.traces import TINYLM
from bench.real_model import FOLDER, why_missing
from kvstore.proto.types import RopeParameters

OURS = {
    "exact": ("raw", "lossless"),
    "gq": ("kivi:8", "kivi:4", "kivi:2"),
    "kvq": ("kvq:3", "kvq:2", "kvq:1", "kvq:0"),
    "kvq layered": ("kvq:layered",),
    "kvq without sinks": ("kvq:1,sinks=0", "kvq:0,sinks=0"),
    "kvq importance": ("kvq:2,importance", "kvq:1,importance", "kvq:0,importance"),
    "cachegen": ("cachegen:3", "cachegen:2", "cachegen:1", "cachegen:0"),
    "kvq:static": ("kvq:3,static", "kvq:2,static", "kvq:1,static", "kvq:0,static"),
    "kvtc": ("kvtc:3", "kvtc:2", "kvtc:1", "kvtc:0"),
}
"""Settings of each family; those of one family are points of one curve.

The levels of a layered frame cost a little more than frames made for one quality.
"""
FAMILIES = {setting: name for name, settings in OURS.items() for setting in settings}
TURBOQUANT = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
KIVI = ((8, 64), (4, 32), (4, 64), (2, 32), (2, 64))
"""Bits and group."""
AGAINST = {
    "kvq_bytes_vs_cachegen_at_kl": ("lmcache cachegen", "own bins", 0.60),
    "kvq_bytes_vs_turboquant4_at_kl": ("lmcache turboquant", "4bit_nc", 0.75),
    "kvq_bytes_vs_kivi4_at_kl": ("kivi", "4 bit g64", 0.82),
    "kvq_bytes_vs_fp8_at_kl": ("lmcache fp8", "bare cast", 0.62),
}
"""Whom each key compares with, the beginning of the settings that count, and the bar: at most."""
REAL_KL = {"real_model_kl@4bits": 4.0, "real_model_kl@3bits": 3.0}
"""Bits a value at which kvq's divergence on the real model is reported."""
SINKS = (("kvq:0", "kvq:0,sinks=0"), ("kvq:1", "kvq:1,sinks=0"))
"""The same quality with the attention sink exact, and with it quantised as the rest."""
SINK_KEY, LOSSLESS, LOSSLESS_KEY = "sink_kl_ratio", "lossless", "lossless_ratio"
REAL_KEYS = (*REAL_KL, SINK_KEY)
IMPORTANCE = "kvq importance"
TINY, REAL = "tinylm", "real model"
IMPORTANCE_KEYS = {TINY: "importance_kl_ratio_tinylm", REAL: "importance_kl_ratio_real_model"}
"""By model: kvq's divergence with the importance that the connector sends, over that without."""
MODEL_KEYS = (*AGAINST, *REAL_KEYS, *IMPORTANCE_KEYS.values())
SEED = 1

T = TypeVar("T")


@dataclass(slots=True)
class Rates:
    """The points measured on one set of KV, and why LMCache's are not there."""

    points: list[Point]
    without: str = ""

    def curve(self, codec: str) -> list[Rate]:
        """Return the points of *codec*, or of a family of ours: those of one curve."""
        return [p.rate for p in self.points if FAMILIES.get(p.codec, p.codec) == codec]


def all_codes(chunks: Chunks, lmcache: LMCacheCodecs | str, folder: Path) -> Iterator[Coded]:
    """Yield what every codec makes of *chunks*; LMCache's only when it could be had."""
    for family, settings in OURS.items():
        for setting in settings if family != IMPORTANCE or chunks.importance is not None else ():
            yield from Coder.of(setting, chunks).code(chunks.bits, chunks.importance)
    tensors = TensorFile.write(folder / "rates.npy", chunks.bits)
    for bits, group in KIVI:
        if tensors.bits.shape[3] % group == 0:
            yield kivi(tensors.bits, bits, group)
    if isinstance(lmcache, str):
        return
    layers, kv_heads, head_dim = (tensors.bits.shape[axis] for axis in (1, 4, 5))
    yield lmcache.coded("fp8", "bare cast", tensors)
    if lmcache.knows(layers):
        yield lmcache.coded("cachegen", "own bins", tensors)
    for name, tables in CACHEGEN_LEVELS.items():
        yield lmcache.coded("cachegen", name, tensors, **bins_of(layers, *tables))
    # Narrow heads have more norms to store: it is measured on wider ones too, for its better.
    for width in sorted(w for w in {head_dim, 128} if kv_heads * head_dim % w == 0):
        for preset in TURBOQUANT:
            more = {"preset": f"turboquant_{preset}", "head_dim": width}
            yield lmcache.coded("turboquant", f"{preset} d{width}", tensors, **more)


def report_rates(report: Report, model: str, rates: Rates) -> None:
    for point in rates.points:
        q = point.quality
        facts = "" if point.facts is None else f", facts {point.facts:.2f}"
        name = f"  {model}: {point.codec} {point.setting}".rstrip()
        words = f"bits a value, KL {q.kl:.2e}, greedy {q.greedy_match:.2f}{facts}"
        report.note(name, f"{point.bits_per_value:.3f}", words)


def report_bars(report: Report, rates: Rates) -> None:
    ours = rates.curve("kvq")
    for key, (codec, setting, bar) in AGAINST.items():
        theirs = [p for p in rates.points if p.codec == codec and p.setting.startswith(setting)]
        reached = [(ratio_at(ours, p.rate) or 0.0, p) for p in theirs]
        ratio, worst = max(reached, key=lambda pair: pair[0], default=(0.0, None))
        if worst is None:
            report.skip([key], rates.without or f"{codec}: not measured")
        elif not ratio:
            kl = theirs[0].quality.kl
            report.skip([key], f"no kvq quality is as far from the original as KL {kl:.2e}")
        else:
            bits, kl = worst.rate
            words = f"{ratio * bits:.2f} bits a value at the same KL"
            other = f"{bits:.2f} of {codec} {worst.setting}, KL {kl:.1e}, bar {bar:g}"
            report.add(key, ratio, words, other)


def report_real(report: Report, rates: Rates) -> None:
    """Add the keys of the real model: kvq's divergence, and what an exact sink takes off it."""
    for key, bits in REAL_KL.items():
        kl = error_at(rates.curve("kvq"), bits)
        if kl is None:
            report.skip([key], f"no kvq quality on either side of {bits:g} bits a value")
        else:
            report.add(key, kl, f"nats a token at {bits:g} bits a value, between qualities of kvq")
    found = {point.codec: point.quality.kl for point in rates.points}
    ratios = {exact: found[exact] / found[without] for exact, without in SINKS}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    report.add(SINK_KEY, max(ratios.values()), f"{words} of the KL without", "bar 0.4")


def report_importance(report: Report, model: str, rates: Rates) -> None:
    """Add the key of *model* that says what importance takes off kvq's divergence."""
    key, plain = IMPORTANCE_KEYS[model], rates.curve("kvq")
    pairs = [(kl, error_at(plain, bits)) for bits, kl in rates.curve(IMPORTANCE)]
    ratios = [kl / wanted for kl, wanted in pairs if wanted]
    if not ratios:
        report.skip([key], "no kvq quality on either side of one with importance")
        return
    words = f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} of the KL without, at equal bytes"
    report.add(key, max(ratios), words, "reported: the worst")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the tests measure less."""

    tiny: Lengths = field(default_factory=Lengths)
    real: Lengths = field(default_factory=lambda: Lengths(3, 3, 512, 96, 24, 5))
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


def measure(run: Run) -> None:
    extent = run.sizes.synthetic
    made = make_synthetic(replace(extent, windows=extent.windows + 1), SEED)
    chunks = Chunks.of("bench/synthetic", made[:-1], RopeParameters(ROPE_THETA, extent.head_dim))
    calibrated(chunks, made[-1:])
    with ExitStack() as stack:
        lmcache = open_or_reason(stack, lmcache_codecs(run.venvs, run.folder, TINYLM))
        zipnn = open_or_reason(stack, zipnn_coder(run.venvs, run.folder))
        if run.speeds_only:
            run.report.skip([*MODEL_KEYS, LOSSLESS_KEY], "--speeds: no quality")
        else:
            points = _points_of_models(run, lmcache)
            bits = [p.bits_per_value for p in points if p.codec == LOSSLESS]
            bits += [one.bits_per_value for one in Coder.of(LOSSLESS, chunks).code(chunks.bits)]
            words = f"the worst of {len(bits)} KVs, synthetic the last of them"
            run.report.add(LOSSLESS_KEY, 16 / max(bits), words, "bf16, bar 1.45")
        measure_speeds(run.report, SpeedBench(chunks, run.folder, lmcache, zipnn, run.sizes.rounds))


def _points_of_models(run: Run, lmcache: LMCacheCodecs | str) -> list[Point]:
    """Measure both models; return the points of those that are there."""
    tiny = _rates_of_model(run, TINY, TINYLM, run.sizes.tiny, lmcache)
    report_bars(run.report, tiny)
    report_importance(run.report, TINY, tiny)
    if (reason := why_missing(run.model)) is not None:
        run.report.skip([*REAL_KEYS, IMPORTANCE_KEYS[REAL]], reason)
        return tiny.points
    real = _rates_of_model(run, REAL, run.model, run.sizes.real, lmcache)
    report_real(run.report, real)
    report_importance(run.report, REAL, real)
    return tiny.points + real.points


def _rates_of_model(
    run: Run, name: str, folder: Path, lengths: Lengths, lmcache: LMCacheCodecs | str
) -> Rates:
    from bench.codecs.model import PrefixModel  # loads torch and transformers

    model = PrefixModel(lengths, folder)
    chunks = Chunks.of(f"bench/{name}", model.bits, model.rope)
    chunks = replace(chunks, importance=model.importance)
    calibrated(chunks, model.calibration())
    points = [
        Point(one.codec, one.setting, one.bits_per_value, model.score(one.decoded))
        for one in all_codes(chunks, lmcache, run.folder)
    ]
    given = Chunks(model.told_bits, chunks.model, model.told_importance)
    facts = {
        (one.codec, one.setting): model.answered(one.decoded)
        for one in all_codes(given, lmcache, run.folder)
    }
    points = [replace(p, facts=facts[p.codec, p.setting]) for p in points]
    rates = Rates(points, lmcache if isinstance(lmcache, str) else "")
    report_rates(run.report, name, rates)
    return rates


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="where the opponents are installed; default build/peers")  # fmt: skip
    parser.add_argument("--model", type=Path, default=FOLDER, metavar="DIR",
                        help="the second model; default that of make real-model")  # fmt: skip
    parser.add_argument("--speeds", action="store_true", help="measure speeds alone, no quality")
    flags = parser.parse_args(argv)
    report = Report("codecs")
    with TemporaryDirectory() as name:
        venvs = flags.venvs.absolute()
        measure(Run(Path(name), flags.model, venvs, report, sizes or Sizes(), flags.speeds))
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
