"""Rate and distortion of every codec on the same KV: a trained model's, and synthetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.codecs_curve import Point, Quality, Rate, error_at, mean_ratio, ratio_at
from bench.codecs_kv import Bits, Synthetic
from bench.codecs_ours import Chunks, Coder
from bench.opponents import Coded, LMCacheCodecs, TensorFile, cachegen_levels
from bench.opponents_layouts import kivi
from bench.report import Report
from kvstore.proto.errors import UnknownCodecError

Score = Callable[[Coded], Quality]

OURS = {
    "exact": ("raw", "zplane"),
    "gq": ("gq8", "gq4", "gq2"),
    "kvq": ("kvq:3", "kvq:2", "kvq:1", "kvq:0"),
    "kvq layered": ("kvq:layered",),
    "kvq without sinks": ("kvq:1,sinks=0", "kvq:0,sinks=0"),
    "kvq importance": ("kvq:2,importance", "kvq:1,importance", "kvq:0,importance"),
    "cachegen": ("cachegen:3", "cachegen:2", "cachegen:1", "cachegen:0"),
    "kvqs": ("kvqs:3", "kvqs:2", "kvqs:1", "kvqs:0"),
    "kvt": ("kvt:3", "kvt:2", "kvt:1", "kvt:0"),
}
"""Settings of each family; those of one family are points of one curve.

The levels of a layered frame cost a little more than frames made for one quality.
"""
FAMILIES = {setting: name for name, settings in OURS.items() for setting in settings}
TURBOQUANT = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
KIVI = ((8, 64), (4, 32), (4, 64), (2, 32), (2, 64))
"""Bits and group."""
BARS = {
    "kvq_bytes_vs_cachegen_at_kl": 0.60,
    "kvq_bytes_vs_turboquant4_at_kl": 0.75,
    "kvq_bytes_vs_kivi4_at_kl": 0.82,
    "kvq_bytes_vs_fp8_at_kl": 0.62,
}
"""At most."""
AGAINST = {
    "kvq_bytes_vs_cachegen_at_kl": ("lmcache cachegen", "own bins"),
    "kvq_bytes_vs_turboquant4_at_kl": ("lmcache turboquant", "4bit_nc"),
    "kvq_bytes_vs_kivi4_at_kl": ("kivi", "4 bit g64"),
    "kvq_bytes_vs_fp8_at_kl": ("lmcache fp8", "bare cast"),
}
"""Whom each key compares with, and the beginning of the settings that count."""
REAL_KL = {"real_model_kl@4bits": 4.0, "real_model_kl@3bits": 3.0}
"""Bits a value at which kvq's divergence on the real model is reported."""
SINKS = (("kvq:0", "kvq:0,sinks=0"), ("kvq:1", "kvq:1,sinks=0"))
"""The same quality with the attention sink exact, and with it quantised as the rest."""
SINK_KEY = "sink_kl_ratio"
SINK_BAR = 0.4
"""At most."""
REAL_KEYS = (*REAL_KL, SINK_KEY)
IMPORTANCE = "kvq importance"
IMPORTANCE_KEYS = {
    "tinylm": "importance_kl_ratio_tinylm",
    "real model": "importance_kl_ratio_real_model",
}
"""By model: kvq's divergence with the importance that the connector sends, over that without."""


@dataclass(slots=True)
class Rates:
    """The points measured on one set of KV, and why others are not there."""

    points: list[Point]
    skipped: dict[str, str]

    def curve(self, codec: str) -> list[Rate]:
        """Return the points of *codec*: those of one curve."""
        return [p.rate for p in self.points if family(p) == codec]


def our_codes(chunks: Chunks, skipped: dict[str, str]) -> Iterator[Coded]:
    """Yield what each of our codecs makes of *chunks*; note in *skipped* what is not there."""
    left_out = IMPORTANCE if chunks.importance is None else ""
    for setting in (name for kin, names in OURS.items() if kin != left_out for name in names):
        try:
            yield from Coder.of(setting, chunks).code(chunks.bits, chunks.importance)
        except UnknownCodecError as error:
            skipped[setting] = f"not built: {error}"


def their_codes(tensors: TensorFile, lmcache: LMCacheCodecs | str) -> Iterator[Coded]:
    """Yield what the opponents make of the same; LMCache's only when it could be had."""
    for bits, group in KIVI:
        if tensors.bits.shape[3] % group == 0:
            yield kivi(tensors.bits, bits, group)
    if isinstance(lmcache, str):
        return
    layers, kv_heads, head_dim = (tensors.bits.shape[axis] for axis in (1, 4, 5))
    yield lmcache.fp8(tensors)
    if lmcache.knows(layers):
        yield lmcache.cachegen(tensors)
    for bins in cachegen_levels(layers):
        yield lmcache.cachegen(tensors, bins)
    # Narrow heads have more norms to store: it is measured on wider ones too, for its better.
    for width in sorted(w for w in {head_dim, 128} if kv_heads * head_dim % w == 0):
        for preset in TURBOQUANT:
            yield lmcache.turboquant(tensors, preset, width)


def measure_rates(
    chunks: Chunks, score: Score, lmcache: LMCacheCodecs | str, folder: Path
) -> Rates:
    """Return the point of every codec on *chunks*."""
    rates = Rates([], {})
    for coded in all_codes(chunks, lmcache, folder, rates.skipped):
        quality = score(coded)
        rates.points.append(Point(coded.codec, coded.setting, coded.bits_per_value, quality))
    return rates


def all_codes(
    chunks: Chunks, lmcache: LMCacheCodecs | str, folder: Path, skipped: dict[str, str]
) -> Iterator[Coded]:
    """Yield what every codec makes of *chunks*; note in *skipped* what is not there."""
    tensors = TensorFile.write(folder / "rates.npy", chunks.bits)
    if isinstance(lmcache, str):
        skipped["lmcache"] = lmcache
    yield from our_codes(chunks, skipped)
    yield from their_codes(tensors, lmcache)


def with_facts(rates: Rates, codes: Iterable[Coded], answered: Callable[[Bits], float]) -> Rates:
    """Return *rates* with the share of facts that each of *codes* leaves: those of its points."""
    facts = {(coded.codec, coded.setting): answered(coded.decoded) for coded in codes}
    points = [replace(p, facts=facts[p.codec, p.setting]) for p in rates.points]
    return Rates(points, rates.skipped)


def synthetic_score(synthetic: Synthetic) -> Score:
    """Return a score that knows the attention error alone, and takes it for the divergence."""

    def score(coded: Coded) -> Quality:
        error = synthetic.attention_error(coded.decoded)
        return Quality(error, 0.0, 0.0, error, 0.0, 0.0)

    return score


def report_rates(report: Report, model: str, rates: Rates) -> None:
    """Add a row for each point of *model*, and for each codec that is not there."""
    for point in rates.points:
        q = point.quality
        facts = "" if point.facts is None else f"facts {point.facts:.2f}, "
        report.note(
            f"  {model}: {point.codec} {point.setting}".rstrip(), f"{point.bits_per_value:.3f}",
            f"bits a value, KL {q.kl:.2e}, loss {q.loss_delta:+.1e}, greedy {q.greedy_match:.2f}, "
            f"{facts}attention {q.attention_error:.1e}, K {q.key_error:.1e}, V {q.value_error:.1e}",
        )  # fmt: skip
    for name, reason in rates.skipped.items():
        report.note(f"  {model}: {name}", "skipped", reason)


def report_bars(report: Report, rates: Rates) -> None:
    """Add the keys that compare with others at equal divergence."""
    for key in AGAINST:
        _report_key(report, key, rates)


def report_real(report: Report, rates: Rates) -> None:
    """Add the keys of the real model: kvq's divergence, and what an exact sink takes off it."""
    for key, bits in REAL_KL.items():
        kl = error_at(rates.curve("kvq"), bits)
        if kl is None:
            report.skip([key], f"no kvq quality on either side of {bits:g} bits a value")
        else:
            report.add(key, kl, f"nats a token at {bits:g} bits a value, between qualities of kvq")
    found = {point.codec: point.quality.kl for point in rates.points}
    missing = [name for pair in SINKS for name in pair if not found.get(name)]
    if missing:
        report.skip([SINK_KEY], rates.skipped.get(missing[0], f"{missing[0]}: no divergence"))
        return
    ratios = {exact: found[exact] / found[without] for exact, without in SINKS}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    report.add(SINK_KEY, max(ratios.values()), f"{words} of the KL without", f"bar {SINK_BAR:g}")


def report_importance(report: Report, model: str, rates: Rates) -> None:
    """Add the key of *model* that says what importance takes off kvq's divergence."""
    key, plain = IMPORTANCE_KEYS[model], rates.curve("kvq")
    pairs = [(kl, error_at(plain, bits)) for bits, kl in rates.curve(IMPORTANCE)]
    ratios = [kl / wanted for kl, wanted in pairs if wanted]
    if not ratios:
        report.skip([key], "no kvq quality on either side of one with importance")
        return
    words = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    report.add(
        key, max(ratios), f"{words} of the KL without, at equal bytes", "reported: the worst"
    )


def _report_key(report: Report, key: str, rates: Rates) -> None:
    codec, setting = AGAINST[key]
    theirs = [p for p in rates.points if p.codec == codec and p.setting.startswith(setting)]
    ours = rates.curve("kvq")
    if not ours:
        report.skip([key], rates.skipped.get(OURS["kvq"][0], "kvq: not built"))
        return
    if not theirs:
        report.skip([key], rates.skipped.get("lmcache", f"{codec}: not measured"))
        return
    ratios = [(ratio_at(ours, point.rate), point) for point in theirs]
    reached = [(ratio, point) for ratio, point in ratios if ratio is not None]
    if not reached:
        found = theirs[0].quality.kl
        report.skip([key], f"no kvq quality is as far from the original as KL {found:.2e}")
        return
    ratio, worst = max(reached, key=lambda pair: pair[0])
    overall = mean_ratio(ours, rates.curve(codec))
    more = "" if overall is None else f"; {overall:.2f} over both curves"
    report.add(
        key, ratio, f"{ratio * worst.bits_per_value:.2f} bits a value at the same KL{more}",
        f"{worst.bits_per_value:.2f} of {codec} {worst.setting}, KL {worst.quality.kl:.1e}, "
        f"bar {BARS[key]:g}",
    )  # fmt: skip


def report_synthetic(report: Report, rates: Rates) -> None:
    """Add rows of bits and attention error on synthetic KV, and the ratios at equal error."""
    ours = rates.curve("kvq")
    for point in rates.points:
        ratio = ratio_at(ours, point.rate) if not point.codec.startswith("kvq") else None
        more = "" if ratio is None else f", kvq needs {ratio:.2f} of it"
        report.note(
            f"  synthetic: {point.codec} {point.setting}".rstrip(), f"{point.bits_per_value:.3f}",
            f"bits a value, attention {point.quality.attention_error:.1e}{more}",
        )  # fmt: skip


def family(point: Point) -> str:
    """Return what *point* is on the curve of: its family, for others their codec."""
    return FAMILIES.get(point.codec, point.codec)
