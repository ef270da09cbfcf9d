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

import torch
from transformers import DynamicCache

from bench.blend_cases import (
    NAIVE,
    WHOLE,
    Case,
    Key,
    designed_engine,
    difference,
    figures,
    measure,
    paired,
    question_cases,
    quotient,
    riddle_case,
    riddle_engine,
    table,
    text_cases,
    trained_engine,
)
from bench.blend_model import MODEL_KEYS, ModelSizes, measure_model
from bench.blend_riddles import STORY, make_riddle
from bench.blend_speed import LINKS_MB_PER_S, StageShape, speed
from bench.report import Report
from kvstore.client.blend.layer_pass import rerotate
from kvstore.client.engines.transformers.cache import as_argument

SEED = 3
BEST: Key = ("hybrid", 0.15)
RIVAL: Key = ("hkvd", 0.15)
"""The selector that a plan has unless another is given, and CacheBlend's."""


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
    for name, (full, zero) in found.items():
        report.note(
            f"logits, {name}", f"{full:.1e} at 100 %, {zero:.1e} at 0", "largest difference"
        )
    keys = ("full_ratio_max_abs_logit", "zero_ratio_max_abs_logit")
    against = ("the models' full prefills", "the models over caches of moved chunks")
    for at, key in enumerate(keys):
        distance = max(ends[at] for ends in found.values())
        report.add(key, distance, f"largest difference of a logit: {distance:.1e}", against[at])
        report.values[key] = distance  # a report rounds to ten-thousandths


def _ends(case: Case) -> tuple[float, float]:
    """Return how far logits are at 100 % from the model's own, and at 0 from those it has over
    what is stored, moved by hand and joined.
    """
    model, adapter = case.engine.model, case.engine.blender.adapter
    cache = DynamicCache(config=model.config)
    for layer in range(adapter.n_layers):
        keys, values, rope = [], [], adapter.rope[layer]
        for segment, part in zip(case.plan(0.0, BEST[0]).segments, case.parts, strict=False):
            k, v = part.kv[layer]
            new = torch.arange(segment.start, segment.end)
            old = torch.arange(len(segment)) + segment.src_pos
            keys.append(k if rope is None else rerotate(k, old, new, rope))
            values.append(v)
        cache.update(torch.cat(keys, 1)[None], torch.cat(values, 1)[None], layer)
    ids, count = torch.tensor([case.tokens]), len(case.question)
    with torch.inference_mode():
        full = model(ids, logits_to_keep=count).logits[0]
        joined = model(ids[:, -count:], **as_argument(cache)).logits[0]
    ends = ((WHOLE, full), (NAIVE, joined))
    whole, zero = (float((case.blend(key).logits - own).abs().max()) for key, own in ends)
    return whole, zero


def quality(report: Report, sizes: Sizes) -> list[str]:
    """Measure every selector at every ratio; return the tables."""
    rng = random.Random(SEED)
    designed, learned, (trained, tokenizer) = designed_engine(), riddle_engine(), trained_engine()
    riddles = [riddle_case(designed, make_riddle(rng), rng) for _ in range(sizes.riddles)]
    stories = [riddle_case(learned, make_riddle(rng, STORY), rng) for _ in range(sizes.stories)]
    asked = list(islice(question_cases(trained, tokenizer, rng), sizes.questions))
    texts = islice(text_cases(trained, tokenizer, rng), sizes.texts)
    identity(report, {"set by hand": riddles[0], "riddlelm": stories[0], "tinylm": asked[0]})
    answers, story_scores, marks = measure(riddles), measure(stories), measure(asked)
    running = measure(texts)
    ours, theirs, naive = (figures(answers, key, "exact_match") for key in (BEST, RIVAL, NAIVE))
    gain = difference(ours, theirs)
    report.add(
        "best_em_minus_hkvd_em@15",
        gain[0],
        f"right answers of {BEST[0]} less those of {RIVAL[0]}, {paired(gain)}",
        f"{ours.mean():.3f}, {theirs.mean():.3f}; naive {naive.mean():.3f}",
    )
    for one, other in ((WHOLE, NAIVE), (BEST, RIVAL)):
        ours, theirs = (figures(story_scores, key, "exact_match") for key in (one, other))
        gain = difference(ours, theirs)
        found = f"{ours.mean():.3f}, {theirs.mean():.3f}"
        report.note(
            f"riddlelm, right: {one[0]}, {other[0]}", found, f"{gain[0]:+.3f}, {paired(gain)}"
        )
    parts = {}
    for name, part in (("riddlelm", story_scores), ("questions", marks), ("text", running)):
        kls = [figures(part, key, "divergence") for key in (BEST, RIVAL)]
        parts[name] = quotient(*kls), f"{kls[0].mean():.2e}, {kls[1].mean():.2e}"
        interval = parts[name][0]
        report.note(f"KL of {BEST[0]} / {RIVAL[0]}, {name}", f"{interval[0]:.3f}", paired(interval))
    worst = max(("questions", "text"), key=lambda name: parts[name][0][0])
    interval, found = parts[worst]
    report.add(
        "best_kl_vs_hkvd_kl@15",
        interval[0],
        f"KL of {BEST[0]} over that of {RIVAL[0]}, {worst} (the worse of two), {paired(interval)}",
        found,
    )
    columns = [("EM", "exact_match", 1.0), ("KL x1e3", "divergence", 1e3)]
    columns += [("top-1", "agreement", 1.0), ("rows", "rows", 1.0)]
    lines = table("model set by hand", answers, columns)
    lines += table("riddlelm, trained until naive reuse hurts", story_scores, columns)
    lines += table("tinylm, questions", marks, columns)
    return lines + table("tinylm, text", running, columns[1:])


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
        lines = quality(report, sizes)
        if asked.model is None:
            report.skip(MODEL_KEYS, "no --model FOLDER was given: make real-model makes one")
        else:
            lines += measure_model(report, asked.model, sizes.model)
        lines += speed(report, sizes.stage, sizes.links_mb_per_s)
    finally:
        torch.set_num_threads(threads)
    if not asked.json:
        print("\n".join(lines))
    report.print(only_json=asked.json)


if __name__ == "__main__":
    main()
