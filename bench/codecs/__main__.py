"""Our codecs against others on the same KV tensors: bytes at equal quality, speed on one core.

Quality is measured on two trained models, data/tinylm and the one of ``make real-model``: the KV
of a prefix is encoded and decoded, and the text behind it is scored. Bytes are those of whole
frames, headers included. Speeds are processor time on one core, the sides of a ratio in turns. The
first run makes a virtual environment for each compared system.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.codecs.baselines import (
    TINYLM_LAYERS,
    Baselines,
    Coded,
    Speed,
    TensorFile,
    aibrix_time,
    kivi,
)
from bench.codecs.kv import ROPE, Bits, Lengths, Point, Rate, bits_at, error_at, synthetic
from bench.codecs.ours import Chunks, Coder, calibrated
from bench.lib.report import Report, gbps, parser_of
from bench.lib.traces import TINYLM
from bench.real_model import FOLDER, why_missing

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
"""Settings of each family: the points of one curve.

The levels of a layered frame are a little larger than frames of one quality.
"""
FAMILIES = {setting: name for name, settings in OURS.items() for setting in settings}
AGAINST = {
    "kvq_bytes_vs_cachegen_at_kl": ("lmcache cachegen", "own bins", 0.60),
    "kvq_bytes_vs_turboquant4_at_kl": ("lmcache turboquant", "4bit_nc", 0.75),
    "kvq_bytes_vs_kivi4_at_kl": ("kivi", "4 bit g64", 0.82),
    "kvq_bytes_vs_fp8_at_kl": ("lmcache fp8", "bare cast", 0.62),
}
"""By key: the compared codec, the prefix of its settings, and the upper bar."""
REAL_KL = {"real_model_kl@4bits": 4.0, "real_model_kl@3bits": 3.0}
"""Bits a value at which kvq's KL on the real model is reported."""
SINKS = (("kvq:0", "kvq:0,sinks=0"), ("kvq:1", "kvq:1,sinks=0"))
"""The same quality with an exact attention sink, and with a quantised one."""
SINK_KEY, LOSSLESS, LOSSLESS_KEY = "sink_kl_ratio", "lossless", "lossless_ratio"
REAL_KEYS = (*REAL_KL, SINK_KEY)
IMPORTANCE = "kvq importance"
TINY, REAL = "tinylm", "real model"
IMPORTANCE_KEYS = {TINY: "importance_kl_ratio_tinylm", REAL: "importance_kl_ratio_real_model"}
"""By model: kvq's KL with the importance that the connector sends, over that without."""
MODEL_KEYS = (*AGAINST, *REAL_KEYS, *IMPORTANCE_KEYS.values())


ROUNDS = 5
AIBRIX_KEYS = ("lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix")
ZIPNN_KEYS = ("lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn")
CACHEGEN_KEYS = ("kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen")
BARS = {AIBRIX_KEYS: (2.0, 2.0), ZIPNN_KEYS: (1.0, 0.95), CACHEGEN_KEYS: (8.0, 15.0)}
Side = Callable[[], Speed]


@dataclass(slots=True)
class Rates:
    """The points measured on one set of KV, and why those of LMCache are missing."""

    points: list[Point]
    without: str = ""

    def curve(self, codec: str) -> list[Rate]:
        """Return the points of *codec*, or of one of our families."""
        found = (one for one in self.points if FAMILIES.get(one.codec, one.codec) == codec)
        return [(one.bits_per_value, one.kl) for one in found]


def all_codes(chunks: Chunks, baselines: Baselines) -> Iterator[Coded]:
    """Yield the result of every codec on *chunks*; LMCache's only if it runs."""
    for setting, family in FAMILIES.items():
        if family != IMPORTANCE or chunks.importance is not None:
            yield from Coder(setting, chunks).code(chunks.bits, chunks.importance)
    for bits in (4, 2):
        yield kivi(chunks.bits, bits, 64)
    lmcache, tensors = baselines.lmcache, TensorFile.write(baselines.folder, chunks.bits)
    if isinstance(lmcache, str):
        return
    yield lmcache.coded("fp8", "bare cast", tensors)
    layers, kv_heads, head_dim = (chunks.bits.shape[axis] for axis in (1, 4, 5))
    if layers == TINYLM_LAYERS:
        yield lmcache.coded("cachegen", "own bins", tensors)
    # Narrow heads store more norms; wider ones are measured too, in its favour.
    for width in sorted(w for w in {head_dim, 128} if kv_heads * head_dim % w == 0):
        preset = {"preset": "turboquant_4bit_nc", "head_dim": width}
        yield lmcache.coded("turboquant", f"4bit_nc d{width}", tensors, **preset)


def report_bars(report: Report, rates: Rates) -> None:
    ours = rates.curve("kvq")
    for key, (codec, setting, bar) in AGAINST.items():
        theirs = [p for p in rates.points if p.codec == codec and p.setting.startswith(setting)]
        ratios = [((bits_at(ours, p.kl) or 0.0) / p.bits_per_value, p) for p in theirs]
        ratio, worst = max(ratios, key=lambda pair: pair[0], default=(0.0, None))
        if worst is None:
            report.skip([key], rates.without or f"{codec}: not measured")
        elif not ratio:
            kl = theirs[0].kl
            report.skip([key], f"no quality of kvq has a KL as high as {kl:.2e}")
        else:
            bits, kl = worst.bits_per_value, worst.kl
            measured = f"{ratio * bits:.2f} bits a value at the same KL"
            against = f"{bits:.2f} of {codec} {worst.setting}, KL {kl:.1e}, bar {bar:g}"
            report.add(key, ratio, measured, against)


def report_real(report: Report, rates: Rates) -> None:
    """Add the keys of the real model: kvq's KL, and the ratio with an exact sink."""
    for key, bits in REAL_KL.items():
        kl = error_at(rates.curve("kvq"), bits)
        if kl is None:
            report.skip([key], f"no qualities of kvq around {bits:g} bits a value")
        else:
            report.add(
                key,
                kl,
                f"nats a token at {bits:g} bits a value, interpolated between qualities of kvq",
            )
    found = {point.codec: point.kl for point in rates.points}
    ratios = {exact: found[exact] / found[without] for exact, without in SINKS}
    measured = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    report.add(SINK_KEY, max(ratios.values()), f"{measured} of the KL without", "bar 0.4")


def report_importance(report: Report, model: str, rates: Rates) -> None:
    """Add the key of *model* for the effect of importance on kvq's KL."""
    key, plain = IMPORTANCE_KEYS[model], rates.curve("kvq")
    pairs = [(kl, error_at(plain, bits)) for bits, kl in rates.curve(IMPORTANCE)]
    ratios = [kl / wanted for kl, wanted in pairs if wanted]
    if not ratios:
        report.skip([key], "no qualities of kvq around one with importance")
        return
    measured = f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} of the KL without, at equal bytes"
    report.add(key, max(ratios), measured, "reported: the worst")


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread, and threads it starts, to one core until the block ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def in_rounds(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, Speed]:
    """Return the best of *rounds* of each side, in turns after one warm-up round."""
    runs = [[work() for work in sides.values()] for _ in range(rounds + 1)][1:]
    best = (Speed(*map(min, zip(*some, strict=True))) for some in zip(*runs, strict=True))
    return dict(zip(sides, best, strict=True))


def measure_speeds(report: Report, chunks: Chunks, baselines: Baselines, rounds: int) -> None:
    """Measure one chunk, in our frames' memory order (heads first), on one core."""
    heads_first = np.ascontiguousarray(chunks.bits[0].transpose(0, 1, 3, 2, 4))
    window = heads_first.transpose(0, 1, 3, 2, 4)
    tensors = TensorFile.write(baselines.folder, heads_first)

    def ours(setting: str) -> Side:
        return partial(Coder(setting, chunks).time, window)

    def compare(keys: tuple[str, str], mine: Speed, theirs: Speed) -> None:
        """Add the ratio of the encodes under the first key, of the decodes under the second."""
        for key, bar, our_s, their_s in zip(keys, BARS[keys], mine, theirs, strict=True):
            against = f"{gbps(window.nbytes, their_s)}, bar {bar:g}"
            report.add(key, their_s / our_s, gbps(window.nbytes, our_s), against)

    with one_core():
        zstd: Side = partial(aibrix_time, tensors.bits)
        sides = {"lossless": ours("lossless"), "zstd": zstd}
        if not isinstance(baselines.zipnn, str):
            sides["zipnn"] = partial(baselines.zipnn, tensors)
        found = in_rounds(sides, rounds)
        compare(AIBRIX_KEYS, found["lossless"], found["zstd"])
        if isinstance(baselines.zipnn, str):
            report.skip(ZIPNN_KEYS, baselines.zipnn)
        else:
            compare(ZIPNN_KEYS, found["lossless"], found["zipnn"])
        if isinstance(baselines.lmcache, str):
            report.skip(CACHEGEN_KEYS, baselines.lmcache)
        else:
            tensors = TensorFile.write(baselines.folder, chunks.bits[:1])
            theirs = partial(baselines.lmcache.time_cachegen, tensors)
            found = in_rounds({"kvq": ours("kvq"), "cachegen": theirs}, rounds)
            compare(CACHEGEN_KEYS, found["kvq"], found["cachegen"])


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; tests use less."""

    tiny: Lengths = field(default_factory=Lengths)
    real: Lengths = field(default_factory=lambda: Lengths(3, 3, 512, 96))
    synthetic: Bits = field(default_factory=synthetic)
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class Run:
    """One run: the compared systems, the folder of the second model, the report."""

    baselines: Baselines
    model: Path
    report: Report
    sizes: Sizes
    speeds_only: bool = False


def measure(run: Run) -> None:
    chunks = Chunks.of("bench/synthetic", run.sizes.synthetic, ROPE)
    if run.speeds_only:
        run.report.skip([*MODEL_KEYS, LOSSLESS_KEY], "--speeds: no quality")
    else:
        points = _points_of_models(run)
        bits = [p.bits_per_value for p in points if p.codec == LOSSLESS]
        bits += [one.bits_per_value for one in Coder(LOSSLESS, chunks).code(chunks.bits)]
        measured = f"the worst of {len(bits)} sets of KV, the last one synthetic"
        run.report.add(LOSSLESS_KEY, 16 / max(bits), measured, "bf16, bar 1.45")
    measure_speeds(run.report, chunks, run.baselines, run.sizes.rounds)


def _points_of_models(run: Run) -> list[Point]:
    """Measure both models; return the points of those that are installed."""
    tiny = _rates_of_model(run, TINY, TINYLM, run.sizes.tiny)
    report_bars(run.report, tiny)
    report_importance(run.report, TINY, tiny)
    if (reason := why_missing(run.model)) is not None:
        run.report.skip([*REAL_KEYS, IMPORTANCE_KEYS[REAL]], reason)
        return tiny.points
    real = _rates_of_model(run, REAL, run.model, run.sizes.real)
    report_real(run.report, real)
    report_importance(run.report, REAL, real)
    return tiny.points + real.points


def _rates_of_model(run: Run, name: str, folder: Path, lengths: Lengths) -> Rates:
    """Measure every codec on the model of *folder*, and report each point."""
    from bench.codecs.model import PrefixModel  # loads torch and transformers

    model, lmcache = PrefixModel(lengths, folder), run.baselines.lmcache
    chunks = Chunks.of(f"bench/{name}", model.bits, model.rope)
    calibrated(chunks, model.calibration())
    chunks = replace(chunks, importance=model.importance)
    rates = Rates([], lmcache if isinstance(lmcache, str) else "")
    for one in all_codes(chunks, run.baselines):
        kl = model.score(one.decoded)
        rates.points.append(Point(one.codec, one.setting, one.bits_per_value, kl))
        title = f"  {name}: {one.codec} {one.setting}".rstrip()
        run.report.note(title, f"{one.bits_per_value:.3f}", f"bits a value, KL {kl:.2e}")
    return rates


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="folder of the compared systems; default build/peers")  # fmt: skip
    parser.add_argument("--model", type=Path, default=FOLDER, metavar="DIR",
                        help="the second model; default: of make real-model")  # fmt: skip
    parser.add_argument("--speeds", action="store_true", help="measure speeds alone, no quality")
    flags = parser.parse_args(argv)
    report = Report("codecs")
    with (
        TemporaryDirectory() as folder,
        Baselines.running(flags.venvs.absolute(), Path(folder)) as baselines,
    ):
        measure(Run(baselines, flags.model, report, sizes or Sizes(), flags.speeds))
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
