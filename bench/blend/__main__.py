"""Blending against full prefill: quality and time to first token, by selector.

Quality on a model with weights set by hand, whose answers need attention across chunks, on one
trained until naive reuse hurts (data/riddlelm), and on data/tinylm. Selectors see the question;
the scored tokens follow it. Time to the first token on a Llama with random weights, in turns with
its own full prefill.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.blend.cases import (
    NAIVE,
    WHOLE,
    Case,
    Engine,
    Key,
    Part,
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
from bench.blend.model import MODEL_KEYS, ModelSizes, measure_model
from bench.blend.riddles import STORY, make_riddle
from bench.lib.report import Report, median_of, parser_of, timed
from bench.lib.traces import Ids as Tokens
from bench.lib.workload import joined
from kvstore.client.blend.cost import BlendPlanner, Decision, Speed
from kvstore.client.blend.engine import BlendResult, MemorySource
from kvstore.client.blend.layer_pass import LayerKV, rerotate
from kvstore.client.blend.plan import BlendPlan, SegmentRange
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.client.planning import LinkMeter
from kvstore.client.segments import SegmentQuery
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model

LINKS_MB_PER_S = (10_000.0, 200.0, 50.0, 20.0, 5.0)
TIMED = ("hybrid", "stored_priority")
AT = 0.15
NEAR_FULL = 0.9
NARROW = 0.01
"""Half the width of an interval that is narrow enough."""
LEARNED_FROM = (0.15, 0.4, 0.15, 0.7, 0.15)
"""Ratios of the blends that a planner observes before it decides."""
_FAST_MB_PER_S = 1e6
Resolve: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class StageShape:
    """Sizes of the model and its prompt, and the number of rounds."""

    layers: int = 8
    hidden: int = 512
    prefix: int = 128
    chunk: int = 256
    chunks: int = 5
    question: int = 64
    rounds: int = 7
    most_rounds: int = 31
    """If the ratio to a full prefill is near 1, rounds go on until its interval is narrow."""


class SlowSource(MemorySource):
    """Stored KV behind a link of *bytes_per_s*; skipped rows take no time."""

    def __init__(
        self, stored: Mapping[int, Sequence[LayerKV]], plan: BlendPlan, bytes_per_s: float
    ) -> None:
        super().__init__(stored)
        keys = stored[0][0][0]
        self._token_bytes = 2 * keys.shape[0] * keys.shape[2] * keys.element_size()
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._rows = {at for s in plan.segments if s.kind != "miss" for at in range(s.start, s.end)}
        self.loaded_bytes = 0

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* when it has arrived; the link never idles."""
        size = len(self._rows) * self._token_bytes
        self.loaded_bytes += size
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - now))
        return super().layer(i)

    def narrow(self, rows: Sequence[int]) -> None:
        self._rows.difference_update(rows)


@dataclass(slots=True)
class Timing:
    """Rounds of one selector on one link: ratios to a full prefill, and the seconds of that."""

    selector: str
    link_mb_per_s: float
    decision: Decision | None = None
    ratios: list[float] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        ratio, low, high = median_of(self.ratios)
        return ratio < NEAR_FULL or high - low <= 2 * NARROW


class Stage:
    """A random model and a prompt of a prefix, chunks and a question, with its stored KV."""

    def __init__(self, shape: StageShape) -> None:
        self._shape = shape
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024, hidden_size=shape.hidden, intermediate_size=11 * shape.hidden // 4,
            num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 64,
            num_key_value_heads=shape.hidden // 128, head_dim=64, max_position_embeddings=4096,
        )  # fmt: skip
        engine, rng = Engine.of(LlamaForCausalLM(config), 0), random.Random(0)
        prefix, *chunks = (_some(rng, n) for n in [shape.prefix] + [shape.chunk] * shape.chunks)
        compiled = engine.blender.compile
        parts = [Part(prefix, compiled(prefix, sink=()), 0, "exact")]
        for one in chunks:
            scores = tuple(rng.random() for _ in one)
            parts.append(Part(one, compiled(one, sink=[0]), 1, scores=scores))
        self.case = Case(engine, tuple(parts), _some(rng, shape.question))
        self._stored = {at: part.kv for at, part in enumerate(parts)}

    def plan(self, selector: str) -> BlendPlan:
        return self.case.plan(AT, selector)

    def full_s(self) -> float:
        """Return the seconds of the model's own prefill, to the logits of the last token."""
        ids = torch.tensor([self.case.tokens])
        with torch.inference_mode():
            return timed(lambda: self.case.engine.model(ids, logits_to_keep=1))

    def blend(self, plan: BlendPlan, link_mb_per_s: float) -> tuple[float, BlendResult, int]:
        """Return the seconds of a blend, its result, and the bytes it loaded."""
        source, started = SlowSource(self._stored, plan, link_mb_per_s * 1e6), time.perf_counter()
        result = self.case.engine.blender.blend(plan, source)
        taken_s = time.perf_counter() - started
        if result.report.failure:
            raise RuntimeError(result.report.failure)
        return taken_s, result, source.loaded_bytes

    def to_full(self, plan: BlendPlan) -> float:
        rounds = range(self._shape.rounds)
        return median(self.blend(plan, _FAST_MB_PER_S)[0] / self.full_s() for _ in rounds)

    def times(self, selector: str, links: Sequence[float], resolve: Resolve) -> Iterator[Timing]:
        """Time the decisions of a planner that has observed the engine and the link.

        Blend and full prefill alternate, each first every other round. The planner observes
        every round after it has decided it, as an engine's planner does.
        """
        observed = []
        for ratio in LEARNED_FROM:
            plan, full_s = self.plan(selector).with_ratio(ratio), self.full_s()
            observed.append((full_s, plan, self.blend(plan, _FAST_MB_PER_S)[1]))
        for link in links:
            speeds, meter = Speed(0.0, 0.0, 1e-4, 1e-9), LinkMeter(link * 1e6)
            planner = BlendPlanner(self._shape.layers, speeds, meter)
            for full_s, plan, result in observed:
                planner.observe_full(len(self.case.tokens), full_s)
                planner.observe_blend(plan, result, 0)
            timing = Timing(selector, link)
            while len(timing.ratios) < self._shape.rounds or not (
                timing.is_settled or len(timing.ratios) >= self._shape.most_rounds
            ):
                self._turn(planner, timing, resolve)
            yield timing

    def _turn(self, planner: BlendPlanner, timing: Timing, resolve: Resolve) -> None:
        full_s = 0.0 if len(timing.ratios) % 2 else self.full_s()
        started = time.perf_counter()
        resolve()
        # KV of a token, all layers, in float32: half as many heads as the queries.
        token_bytes = self._shape.layers * self._shape.hidden * 4
        can_skip = timing.selector == "stored_priority"
        plan = self.plan(timing.selector)
        decision = planner.choose(plan, token_bytes, can_skip_rows=can_skip)
        chosen = decision.applied(plan)
        resolved_s = time.perf_counter() - started
        blended_s, result, loaded_bytes = self.blend(chosen, timing.link_mb_per_s)
        full_s = full_s or self.full_s()
        planner.observe_full(len(self.case.tokens), full_s)
        if decision.action != "full":
            planner.observe_blend(chosen, result, loaded_bytes)
        timing.decision = decision
        timing.ratios.append((resolved_s + blended_s) / full_s)
        timing.full_s.append(full_s)


def _some(rng: random.Random, count: int) -> Tokens:
    return tuple(rng.randrange(1, 1024) for _ in range(count))


@contextmanager
def resolving(stage: Stage) -> Iterator[Resolve]:
    """Store *stage*'s documents from a prompt in another order; yield a function that finds them.

    It resolves the prompt, makes its plan and releases the leases; it raises RuntimeError if no
    document is found.
    """
    tokens, blender = stage.case.tokens, stage.case.engine.blender
    ranges = [SegmentRange(s.start, s.end) for _, s in stage.plan(TIMED[0]).of_kind("approx")]
    documents, rng = [tokens[one.start : one.stop] for one in ranges], random.Random(1)
    rng.shuffle(documents)
    head = _some(rng, ranges[0].start)
    shuffled = [*head, *(token for one in documents for token in one), 1]
    ends = accumulate(map(len, documents), initial=len(head))
    adapter = blender.adapter
    layers = tuple(range(adapter.n_layers))
    group = LayerGroup(
        LayerKind.attention, DType.float32, layers, adapter.kv_heads, adapter.head_dim
    )
    model = Model("bench/blend", "r1", "none", "none", (group,), adapter.origin.rope, "none")
    with joined("--cpu", "256MiB", model=model) as client:
        stored = [SegmentRange(*span) for span in pairwise(ends)]
        store_prefill(client, blender.prefill(shuffled), shuffled, stored)

        def resolve() -> None:
            trial = SegmentQuery(is_trial=True)  # passes a closed gate
            with (
                client.find_segments(tokens, ranges, trial) as resolved,
                StoreSource(resolved, tokens, client.model) as source,
            ):
                if not source.plan.count("approx"):
                    raise RuntimeError("no stored document of the prompt was found")

        yield resolve


def speed(report: Report, shape: StageShape, links_mb_per_s: Sequence[float]) -> None:
    stage = Stage(shape)
    stage.full_s()
    with resolving(stage) as resolve:
        resolve()
        timings = [one for name in TIMED for one in stage.times(name, links_mb_per_s, resolve)]
    for one in timings:
        decision, (ratio, low, high) = one.decision, median_of(one.ratios)
        assert decision is not None
        text = f"of full [{low:.3f}, {high:.3f}]: {decision.action} at {decision.ratio:.0%}"
        report.note(f"  {one.selector} at {one.link_mb_per_s:g} MB/s", f"{ratio:.3f}", text)
    slowest = max(timings, key=lambda one: median(one.ratios))
    to_full = median_of(slowest.ratios)
    report.add(
        "slowest_vs_full_prefill", to_full[0],
        f"time as the planner decides, {slowest.selector} at {slowest.link_mb_per_s:g} MB/s, "
        f"{paired(to_full)}, {len(slowest.ratios)} rounds",
        f"the model's full prefill, {median(slowest.full_s) * 1e3:.0f} ms",
    )  # fmt: skip
    blended = stage.to_full(stage.plan(TIMED[0]))
    tokens = f"full prefill of {len(stage.case.tokens)} tokens"
    report.add("ttft_vs_full_prefill@15", blended, f"time of {TIMED[0]} from memory", tokens)


SEED = 3
BEST: Key = ("hybrid", 0.15)
RIVAL: Key = ("hkvd", 0.15)
"""The default selector of a plan, and CacheBlend's."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; tests use less."""

    riddles: int = 60
    stories: int = 40
    questions: int = 60
    texts: int = 16
    links_mb_per_s: tuple[float, ...] = LINKS_MB_PER_S
    stage: StageShape = field(default_factory=StageShape)
    model: ModelSizes = field(default_factory=ModelSizes)


def identity(report: Report, cases: Sequence[Case]) -> None:
    """Compare blends at ratios 1 and 0 with what each model computes itself, in float32."""
    found = list(map(_ends, cases))
    keys = ("full_ratio_max_abs_logit", "zero_ratio_max_abs_logit")
    against = ("the models' full prefills", "the models over caches of moved chunks")
    for at, key in enumerate(keys):
        distance = max(ends[at] for ends in found)
        report.add(key, distance, f"largest difference of a logit: {distance:.1e}", against[at])
        report.values[key] = distance  # unrounded


def _ends(case: Case) -> tuple[float, float]:
    """Return the largest difference of a logit: at ratio 1 from the full prefill, at ratio 0 from
    the model over stored KV that is re-rotated and joined here.
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
    questions = list(islice(question_cases(trained, tokenizer, rng), sizes.questions))
    texts = islice(text_cases(trained, tokenizer, rng), sizes.texts)
    identity(report, [riddles[0], stories[0], questions[0]])
    riddle_marks, story_marks, question_marks = (
        measure(riddles),
        measure(stories),
        measure(questions),
    )
    text_marks = measure(texts)
    ours, theirs, naive = (
        figures(riddle_marks, key, "exact_match") for key in (BEST, RIVAL, NAIVE)
    )
    gain = difference(ours, theirs)
    text = f"right answers of {BEST[0]} less those of {RIVAL[0]}, {paired(gain)}"
    means = f"{ours.mean():.3f}, {theirs.mean():.3f}; naive {naive.mean():.3f}"
    report.add("best_em_minus_hkvd_em@15", gain[0], text, means)
    parts = {}
    for name, part in (("questions", question_marks), ("text", text_marks)):
        kls = [figures(part, key, "divergence") for key in (BEST, RIVAL)]
        parts[name] = quotient(*kls), f"{kls[0].mean():.2e}, {kls[1].mean():.2e}"
    worst = max(parts, key=lambda name: parts[name][0][0])
    interval, found = parts[worst]
    text = f"KL of {BEST[0]} over that of {RIVAL[0]}, {worst} (the worse of two)"
    report.add("best_kl_vs_hkvd_kl@15", interval[0], f"{text}, {paired(interval)}", found)
    lines = table("model set by hand", riddle_marks)
    lines += table("riddlelm, trained until naive reuse hurts", story_marks)
    lines += table("tinylm, questions", question_marks)
    return lines + table("tinylm, text", text_marks)


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="also measure this model")
    flags = parser.parse_args(argv)
    threads = torch.get_num_threads()
    report, sizes = Report("blend"), sizes or Sizes()
    try:
        torch.set_num_threads(1)  # more are slower at these sizes
        lines = quality(report, sizes)
        if flags.model is None:
            report.skip(MODEL_KEYS, "no --model FOLDER was given: make real-model makes one")
        else:
            lines += measure_model(report, flags.model, sizes.model)
        speed(report, sizes.stage, sizes.links_mb_per_s)
    finally:
        torch.set_num_threads(threads)
    if not flags.json:
        print("\n".join(lines))
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
