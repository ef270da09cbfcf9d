"""Deadlines for the first token over links that change: our controller beside fixed choices.

A simulation: the clock, the link, the decoder and the engine (an 8B-class model) are numbers, so
that a run gives the same figures anywhere. Real are the controller, and the sizes and the quality
of the levels: those of kvq:layered on the KV of a trained model (data/tinylm).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from bench.report import Report
from bench.slo_replay import (
    Outcome,
    Replay,
    Request,
    Trace,
    controlled,
    knowing,
    load_all,
    recompute,
)
from kvstore.client.planning import LevelledChunk, LinkMeter, PlanTerms, PrefillModel
from kvstore.client.server_link import FIRST_GUESS_BYTES_PER_S

CHUNK_TOKENS = 256
VALUES_A_TOKEN = 32 * 2 * 8 * 128
"""Of an 8B-class model with grouped heads: 128 KiB in bfloat16."""
ENGINE = PrefillModel(0.005, 1e-4, 3e-9)
"""About what such a model takes on one H100."""
DECODE_BYTES_PER_S = 10e9
"""Decoded bytes, by all threads of a client: seven cores of kvq."""
PROMPT_TOKENS = (2048, 16384)
DEADLINES_S = (0.75, 1.0, 1.5)
GAP_S = 1.0
"""Between requests, in the mean."""
OURS = ("controller", "controller, loads first")
"""Beside an engine that computes from the first chunk on meanwhile, as transformers' connector has
it; and before one that computes when the loads are over, as vLLM has it."""
FLOORS = ("knows the trace", "knows the trace, loads first")
"""The soonest that is possible, before an engine of each kind: no choice that anybody has."""
COST_S = 0.06
"""Beside ``later_s``, what a decision may cost: the exchanges before bytes come, and how late a
read that is cut short may end."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Bits a value and KL, in nats a token, of each level; and of a lossless copy."""

    bits: tuple[float, ...]
    kl: tuple[float, ...]
    exact_bits: float

    def chunk(self, tokens: int) -> LevelledChunk:
        """Return a chunk of them, as client/deadline.py has it."""
        ends = tuple(int(tokens * VALUES_A_TOKEN * bits / 8) for bits in self.bits)
        return LevelledChunk(tokens, 2 * tokens * VALUES_A_TOKEN, ends)

    def exact_chunk(self, tokens: int) -> LevelledChunk:
        """Return a chunk that is stored without loss."""
        size_bytes = int(tokens * VALUES_A_TOKEN * self.exact_bits / 8)
        return LevelledChunk(tokens, 2 * tokens * VALUES_A_TOKEN, (size_bytes,))


def measured(windows: int = 4) -> Levels:
    """Return the levels of kvq:layered on the KV of a trained model."""
    from bench.codecs import LOSSLESS_CODEC
    from bench.codecs_model import PrefixModel
    from bench.codecs_ours import Chunks, Coder
    from bench.codecs_texts import Lengths

    model = PrefixModel(Lengths(windows, CHUNK_TOKENS, greedy=1))
    chunks = Chunks.of("bench/tinylm", model.bits, model.rope)
    coded = Coder.of("kvq:layered", chunks).code(chunks.bits)
    (exact,) = Coder.of(LOSSLESS_CODEC, chunks).code(chunks.bits)
    return Levels(
        tuple(one.bits_per_value for one in coded),
        tuple(model.score(one.decoded).kl for one in coded),
        exact.bits_per_value,
    )


def requests(levels: Levels, seed: int, count: int, *, exact: bool) -> list[Request]:
    """Return prompts of 2 to 16 thousand tokens, evenly by their logarithm."""
    draw = random.Random(seed)
    low, high = PROMPT_TOKENS
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(1 / GAP_S)
        tokens = int(low * (high / low) ** draw.random())
        deadline_s, tail = draw.choice(DEADLINES_S), 1 + tokens % CHUNK_TOKENS
        one = (levels.exact_chunk if exact else levels.chunk)(CHUNK_TOKENS)
        terms = PlanTerms(
            deadline_s, ENGINE, DECODE_BYTES_PER_S, tail_tokens=tail, loads_first=False
        )
        found.append(Request(at_s, (one,) * (tokens // CHUNK_TOKENS), terms))
    return found


def default_traces(seeds: int) -> tuple[list[Trace], list[list[Trace]]]:
    """Return the uniform traces, and *seeds* jumping ones of each kind."""
    uniform = [Trace.uniform(1), Trace.uniform(2), Trace.uniform(3, 0.1, 1.0)]
    jumping = [
        [Trace.jumping(seed, dwell_s) for seed in range(1, seeds + 1)] for dwell_s in (0.5, 2, 8)
    ]
    return uniform, jumping


@dataclass(frozen=True, slots=True)
class Score:
    """Of one way over one trace: share of late requests, seconds to the first token, KL."""

    late: float
    ttft_s: float
    kl: float
    worse: int
    """Requests later than computing everything, by more than a decision may cost."""


def score(replay: Replay, asked: Sequence[Request], trace: Trace, kl: Sequence[float]) -> Score:
    """Replay *asked*; ``kl[level]`` is the quality of a level."""
    outcomes = [replay(request, trace) for request in asked]
    pairs = list(zip(asked, outcomes, strict=True))
    return Score(
        mean(found.ttft_s > request.terms.deadline_s for request, found in pairs),
        mean(found.ttft_s for found in outcomes),
        mean(_kl(request, found, kl) for request, found in pairs),
        sum(_is_worse(request, found) for request, found in pairs),
    )


def _kl(request: Request, found: Outcome, kl: Sequence[float]) -> float:
    return sum(kl[level] for level in found.levels if level >= 0) / len(request.chunks)


def _is_worse(request: Request, found: Outcome) -> bool:
    chunks, terms = request.chunks, request.terms
    return found.ttft_s > terms.compute_s(chunks) + terms.later_s(chunks) + COST_S


def _loading_first(replay: Replay) -> Replay:
    def changed(request: Request, trace: Trace) -> Outcome:
        terms = replace(request.terms, loads_first=True)
        return replay(replace(request, terms=terms), trace)

    return changed


def compare(
    levels: Levels, trace: Trace, count: int, *, exact: bool, seed: int = 1
) -> dict[str, Score]:
    """Return the score of every way over *trace*, ours first; *seed* is that of the prompts."""
    asked = requests(levels, seed, count, exact=exact)

    def meter(clock: Callable[[], float]) -> LinkMeter:
        return LinkMeter(FIRST_GUESS_BYTES_PER_S, clock)

    kl = (0.0,) if exact else levels.kl
    ways: dict[str, Replay] = {
        OURS[0]: controlled(meter),
        OURS[1]: _loading_first(controlled(meter)),
        FLOORS[0]: knowing,
        FLOORS[1]: _loading_first(knowing),
        "recompute": recompute,
    }
    if exact:
        ways["load all, exact"] = load_all(0)
    else:
        ways |= {f"level {level}": load_all(level) for level in range(len(levels.bits))}
    return {name: score(way, asked, trace, kl) for name, way in ways.items()}


def together(scores: Sequence[dict[str, Score]]) -> dict[str, Score]:
    """Return the score of every way over all traces of a kind, each with as many requests."""
    return {
        name: Score(
            mean(one[name].late for one in scores),
            mean(one[name].ttft_s for one in scores),
            mean(one[name].kl for one in scores),
            sum(one[name].worse for one in scores),
        )
        for name in scores[0]
    }


def _fixed(scores: dict[str, Score]) -> list[Score]:
    return [one for name, one in scores.items() if name not in OURS + FLOORS]


def _ratios(scores: dict[str, Score]) -> tuple[float, float]:
    """Return our late requests, and time to first token, over those of the best fixed choice."""
    ours, fixed = scores[OURS[0]], _fixed(scores)
    late, ttft_s = min(one.late for one in fixed), min(one.ttft_s for one in fixed)
    return ours.late / late if late else float(ours.late > 0), ours.ttft_s / ttft_s


def _note(report: Report, name: str, scores: dict[str, Score]) -> None:
    for way, one in scores.items():
        figures = f"late, {one.ttft_s:.3f} s to the first token, KL {one.kl:.2g}"
        report.note(f"  {name}: {way}", f"{one.late:.3f}", figures)


def run(report: Report, levels: Levels, traces: Sequence[Trace],
        jumping: Sequence[Sequence[Trace]], count: int) -> None:  # fmt: skip
    """Replay *count* requests over every trace and add the keys."""
    words = ", ".join(
        f"{b:.2f} bits KL {k:.2g}" for b, k in zip(levels.bits, levels.kl, strict=True)
    )
    report.note("levels", f"{len(levels.bits)}", f"{words}; lossless {levels.exact_bits:.2f} bits")
    worse, most_late = 0, 0.0
    for trace in (*traces, *(kind[0] for kind in jumping)):
        for what, exact in (("levels", False), ("exact", True)):
            scores = compare(levels, trace, count, exact=exact)
            best_late = min(one.late for one in _fixed(scores))
            worse += sum(scores[name].worse for name in OURS)
            most_late = max(most_late, scores[OURS[0]].late - best_late)
            _note(report, f"{trace.name}, {what}", scores)
    alone, ratios = [], []
    for kind in jumping:
        each = [
            compare(levels, trace, count, exact=False, seed=seed)
            for seed, trace in enumerate(kind, start=1)
        ]
        found = together(each)
        worse += sum(found[name].worse for name in OURS)
        alone.append(_ratios(each[0])[0])
        ratios.append(_ratios(found))
        _note(report, f"{kind[0].name} and {len(kind) - 1} more, levels", found)
        report.note("  of the best fixed choice", f"{ratios[-1][0]:.3f}", "late requests")
    bars = "the best of recompute and each level, on the worst kind of jumping traces"
    late, ttft = (max(found) for found in zip(*ratios, strict=True))
    report.add("violations_vs_best_fixed", late, "late requests, over those of", bars)
    report.add("mean_ttft_vs_best_fixed", ttft, "mean time to first token, over that of", bars)
    said = (
        f"requests later than without a store by more than {COST_S} s and a chunk's or batch's time"
    )
    report.add("worse_than_recompute", worse, said, "all traces, bar 0")
    report.note("on one trace", f"{max(alone):.3f}", "the first key, by the first trace of a kind")
    report.note("most_above_best", f"{most_late:.3f}", "late requests above the best, any trace")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the levels, replay, print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE",
                        help="a recorded trace too: lines of seconds and Mbit/s")  # fmt: skip
    parser.add_argument("--requests", type=int, default=60, help="over each trace; default 60")
    parser.add_argument("--seeds", type=int, default=20, help="of each jumping trace; default 20")
    flags = parser.parse_args(argv)
    uniform, jumping = default_traces(flags.seeds)
    report = Report("slo")
    recorded = [Trace.recorded(path) for path in flags.trace]
    run(report, measured(), [*uniform, *recorded], jumping, flags.requests)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
