"""Blending: how near to a full prefill each selector comes, and how much sooner.

Quality on a model set by hand, whose answers need attention across chunks, on one trained until
naive reuse hurts (data/riddlelm), and on the trained model of data/tinylm; selectors see the
question, and what is scored comes after it. Time to the
first token on a Llama with random weights, against its own full prefill in turns.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from bench.blend_asking import asking
from bench.blend_cases import (
    Case,
    designed_engine,
    question_cases,
    riddle_case,
    riddle_engine,
    text_cases,
    trained_engine,
)
from bench.blend_designed import make_riddle
from bench.blend_model import MODEL_KEYS, ModelSizes, measure_model
from bench.blend_quality import (
    NAIVE,
    WHOLE,
    Marks,
    difference,
    judge_riddle,
    judge_text,
    measure,
    quotient,
    table,
)
from bench.blend_speed import LINKS_MB_PER_S, Stage, StageShape, Timing
from bench.blend_stories import make_story
from bench.report import Report
from kvstore.client.blend.layer_pass import rerotate
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument

SEED = 3
BEST, RIVAL, AT = "hybrid", "hkvd", 0.15
"""The selector that a plan has unless told otherwise, and CacheBlend's."""
TIMED = ("hybrid", "stored_priority")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; the tests measure less."""

    riddles: int = 60
    stories: int = 40
    questions: int = 60
    texts: int = 16
    links_mb_per_s: tuple[float, ...] = LINKS_MB_PER_S
    stage: StageShape = field(default_factory=StageShape)
    model: ModelSizes = field(default_factory=ModelSizes)


def identity(report: Report, cases: Mapping[str, Case]) -> None:
    """Compare both ends of the ratio with what each model itself computes, in float32."""
    found = {name: _ends(case) for name, case in cases.items()}
    for name, (full, zero, own) in found.items():
        text = f"{full:.1e} at 100 %, {zero:.1e} at 0"
        report.note(f"logits, {name}", text, f"its own prefix cache: {own:.1e} from its prefill")
    full, zero = (max(ends[index] for ends in found.values()) for index in (0, 1))
    _add_distance(report, "full_ratio_max_abs_logit", full, "the models' full prefills")
    against = "the models over caches of moved chunks"
    _add_distance(report, "zero_ratio_max_abs_logit", zero, against)


def _ends(case: Case) -> tuple[float, float, float]:
    """Return how far logits are at 100 % and at 0, and with the model's own prefix cache."""
    model = case.engine.model
    ids = torch.tensor([case.tokens])
    first = len(case.tokens) - len(case.question)
    with torch.inference_mode():
        full = model(ids, logits_to_keep=len(case.question)).logits[0]
        joined = model(ids[:, first:], **as_argument(_joined(case, model, first))).logits[0]
        cached = model(ids[:, : len(case.prefix)]).past_key_values
        own = model(ids[:, len(case.prefix) :], **as_argument(cached)).logits[0]
    blender = case.engine.blender
    whole = blender.blend(case.plan(1.0, BEST), case.source).logits
    stored = blender.blend(case.plan(0.0, BEST), case.source).logits
    return (
        _distance(whole, full),
        _distance(stored, joined),
        _distance(own[-len(case.question) :], full),
    )


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


def _add_distance(report: Report, key: str, distance: float, against: str) -> None:
    report.add(key, distance, f"largest difference of a logit: {distance:.1e}", against)
    report.values[key] = distance  # a report rounds to ten-thousandths


def _joined(case: Case, model: Any, tokens: int) -> DynamicCache:
    """Return the stored KV of *case*, moved by hand and joined, as a cache."""
    adapter = TransformersAdapter(model)
    cache = DynamicCache(config=model.config)
    places = {i: s for i, s in enumerate(case.plan(0.0, BEST).segments) if s.end <= tokens}
    for layer in range(adapter.n_layers):
        keys, values = [], []
        for index, segment in places.items():
            k, v = case.stored[index][layer]
            new = torch.arange(segment.start, segment.end)
            old = torch.arange(len(segment)) + segment.src_pos
            rope = adapter.rope[layer]
            keys.append(k if rope is None else rerotate(k, old, new, rope))
            values.append(v)
        cache.update(torch.cat(keys, 1)[None], torch.cat(values, 1)[None], layer)
    return cache


def quality(report: Report, sizes: Sizes) -> list[str]:
    """Measure every selector at every ratio; return the tables."""
    rng = random.Random(SEED)
    designed, learned, (trained, tokenizer) = designed_engine(), riddle_engine(), trained_engine()
    riddles = [riddle_case(designed, make_riddle(rng), rng) for _ in range(sizes.riddles)]
    stories = [riddle_case(learned, make_story(rng).riddle, rng) for _ in range(sizes.stories)]
    asked = list(islice(question_cases(trained, tokenizer, "score", rng), sizes.questions))
    texts = islice(text_cases(trained, tokenizer, "score", rng), sizes.texts)
    firsts = {"set by hand": riddles[0], "riddlelm": stories[0], "tinylm": asked[0]}
    identity(report, firsts)
    answers, told = measure(riddles, judge_riddle), measure(stories, judge_riddle)
    _compare_answers(report, answers)
    _compare_stories(report, told)
    marks = {"questions": measure(asked, judge_text), "text": measure(texts, judge_text)}
    _compare_trained(report, marks)
    columns = [("EM", "exact_match", 1.0), ("KL x1e3", "divergence", 1e3)]
    columns += [("top-1", "agreement", 1.0), ("rows", "rows", 1.0)]
    lines = table("model set by hand", answers, columns)
    lines += table("riddlelm, trained until naive reuse hurts", told, columns)
    lines += table("tinylm, questions", marks["questions"], columns)
    return lines + table("tinylm, text", marks["text"], columns[1:])


def _compare_answers(report: Report, marks: Marks) -> None:
    gain = difference(marks.of((BEST, AT), "exact_match"), marks.of((RIVAL, AT), "exact_match"))
    report.add(
        "best_em_minus_hkvd_em@15",
        gain[0],
        f"right answers of {BEST} less those of {RIVAL}, {_interval(gain)}",
        f"{marks.mean((BEST, AT), 'exact_match'):.3f}, "
        f"{marks.mean((RIVAL, AT), 'exact_match'):.3f}; naive "
        f"{marks.mean(NAIVE, 'exact_match'):.3f}",
    )


def _compare_stories(report: Report, marks: Marks) -> None:
    """Say what naive reuse costs where it hurts, and what the selectors mend of it."""
    full, naive = (marks.of(key, "exact_match") for key in (WHOLE, NAIVE))
    lost = difference(full, naive)
    found = f"{full.mean():.3f}, {naive.mean():.3f}"
    report.note("riddlelm: full, naive", found, f"lost {lost[0]:.3f}, {_interval(lost)}")
    ours, theirs = (marks.of((name, AT), "exact_match") for name in (BEST, RIVAL))
    gain = difference(ours, theirs)
    found = f"{ours.mean():.3f}, {theirs.mean():.3f}"
    report.note(f"riddlelm: {BEST}, {RIVAL} @15", found, f"{gain[0]:+.3f}, {_interval(gain)}")
    part = quotient(*(marks.of((name, AT), "divergence") for name in (BEST, RIVAL)))
    report.note(f"KL of {BEST} / {RIVAL}, riddlelm", f"{part[0]:.3f}", _interval(part))


def _compare_trained(report: Report, marks: dict[str, Marks]) -> None:
    found = {
        name: quotient(part.of((BEST, AT), "divergence"), part.of((RIVAL, AT), "divergence"))
        for name, part in marks.items()
    }
    worst = max(found, key=lambda name: found[name][0])
    for name, interval in found.items():
        report.note(f"KL of {BEST} / {RIVAL}, {name}", f"{interval[0]:.3f}", _interval(interval))
    part = marks[worst]
    report.add(
        "best_kl_vs_hkvd_kl@15",
        found[worst][0],
        f"KL of {BEST} over that of {RIVAL}, {worst} (the worse of two), {_interval(found[worst])}",
        f"{part.mean((BEST, AT), 'divergence'):.2e}, {part.mean((RIVAL, AT), 'divergence'):.2e}",
    )


def _interval(found: Sequence[float]) -> str:
    return f"paired 95 %: [{found[1]:.3f}, {found[2]:.3f}]"


def speed(report: Report, sizes: Sizes) -> list[str]:
    """Measure times to the first token; return the table."""
    stage = Stage(sizes.stage)
    stage.full_s()
    timings = []
    with asking(stage) as store:
        store.ask()
        stage.ask = store.ask
        for name in TIMED:
            lessons = stage.learned(name)
            timings += [stage.time(name, lessons, link) for link in sizes.links_mb_per_s]
    slowest = max(timings, key=lambda one: one.ratio_to_full)
    report.add(
        "slowest_vs_full_prefill",
        slowest.ratio_to_full,
        f"time as the controller decides, {slowest.selector} at {slowest.link_mb_per_s:g} MB/s, "
        f"{_interval((slowest.ratio_to_full, *slowest.interval))}, {len(slowest.turns)} turns",
        f"the model's full prefill, {slowest.full_s * 1e3:.0f} ms",
    )
    asked = max(timings, key=lambda one: one.asked_s / one.full_s)
    report.note(
        "asking, planning, deciding",
        f"{asked.asked_s / asked.full_s:.4f}",
        f"of a full prefill, at worst: {asked.asked_s * 1e3:.1f} ms, in each of these times",
    )
    blended = stage.blend_to_full(AT, BEST)
    report.add(
        "ttft_vs_full_prefill@15",
        blended,
        f"time of {BEST} from memory",
        f"full prefill of {len(stage.tokens)} tokens; {1 / blended:.1f} times as fast",
    )
    report.note("prefix alone / full prefill", f"{stage.prefix_to_full():.3f}", "from memory")
    errors = [one.model_error for one in timings]
    report.note("time model's error", f"{median(errors):.3f}", f"median; worst {max(errors):.3f}")
    return ["time to the first token, by storage", *map(_line, timings)]


def _line(one: Timing) -> str:
    decision = one.decision
    return (
        f"  {one.selector:16s}{one.link_mb_per_s:8g} MB/s  {decision.action:6s}"
        f" at {decision.ratio:4.0%}  {one.ratio_to_full:6.3f} of full"
        f" [{one.interval[0]:.3f}, {one.interval[1]:.3f}] ({len(one.turns)} turns),"
        f" expected {decision.expected_s * 1e3:6.0f} ms, measured {one.measured_s * 1e3:6.0f};"
        f" expected / measured {one.expected_to_measured:.2f}"
    )


def real_model(report: Report, folder: Path | None, sizes: ModelSizes) -> list[str]:
    """Measure the model of *folder*, where one is given; return the tables."""
    if folder is None:
        report.skip(MODEL_KEYS, "no --model FOLDER was given: make real-model makes one")
        return []
    return measure_model(report, folder, sizes)


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    """Run every part and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="measure quality on this language model, too"
    )
    asked = parser.parse_args(argv)
    threads = torch.get_num_threads()
    report, sizes = Report("blend"), sizes or Sizes()
    try:
        torch.set_num_threads(1)  # more only wait for each other at these sizes
        lines = [*quality(report, sizes), *real_model(report, asked.model, sizes.model)]
        lines += speed(report, sizes)
    finally:
        torch.set_num_threads(threads)
    if not asked.json:
        print("\n".join(lines))
    report.print(only_json=asked.json)


if __name__ == "__main__":
    main()
