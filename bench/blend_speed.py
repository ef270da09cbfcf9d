"""Time to the first token: blended, prefix alone and full, by the speed of storage.

The storage is memory that sleeps as long as a link of its speed would take; the model is a
Llama with random weights, because time does not depend on what it says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.client.blend.cost import BlendPlanner, Decision, Speed
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.planning import LinkMeter

LINKS_MB_PER_S = (10_000.0, 200.0, 50.0, 20.0, 5.0)
_FAST_MB_PER_S = 1e6
NEAR_FULL = 0.9
NARROW = 0.01
"""Half of an interval's width."""
RESAMPLES = 1000
LEARNED_FROM = (0.15, 0.4, 0.15, 0.7, 0.15)
"""Ratios of the blends that a planner sees before it decides."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """How large the model and its prompt are, and how often each is timed."""

    layers: int = 8
    hidden: int = 512
    prefix: int = 128
    chunk: int = 256
    chunks: int = 5
    question: int = 64
    rounds: int = 7
    most_rounds: int = 31
    """Where the ratio to a full prefill is near 1 turns go on until its interval is narrow."""

    @property
    def token_bytes(self) -> int:
        """KV of a token, all layers, in float32: half as many heads as queries have."""
        return self.layers * self.hidden * 4


class SlowSource(MemorySource):
    """Stored KV behind a link of *bytes_per_s*; rows that need not come are not waited for."""

    def __init__(
        self, stored: Mapping[int, Sequence[LayerKV]], plan: BlendPlan, bytes_per_s: float
    ) -> None:
        super().__init__(stored)
        keys = stored[0][0][0]
        self._token_bytes = 2 * keys.shape[0] * keys.shape[2] * keys.element_size()
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._rows = [range(s.start, s.end) for s in plan.segments if s.kind != "miss"]
        self._tokens = sum(map(len, self._rows))
        self.loaded_bytes = 0

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* when the link has brought it: it works without a pause."""
        size = self._tokens * self._token_bytes
        self.loaded_bytes += size
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - now))
        return super().layer(i)

    def narrow(self, rows: Sequence[int]) -> None:
        """Leave *rows* out."""
        self._tokens = sum(len(set(span).difference(rows)) for span in self._rows)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A blend from memory and a full prefill, one after the other."""

    plan: BlendPlan
    result: BlendResult
    full_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision made and carried out: its seconds, and those of the model's own full prefill.

    *asked_s* of them went into asking the store, making the plan and deciding.
    """

    decision: Decision
    measured_s: float
    full_s: float
    asked_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Turns of one selector at one speed of storage."""

    selector: str
    link_mb_per_s: float
    turns: tuple[Turn, ...]

    @property
    def decision(self) -> Decision:
        """The last one."""
        return self.turns[-1].decision

    @property
    def ratio_to_full(self) -> float:
        """Time over that of a full prefill: the median of the turns."""
        return median(turn.measured_s / turn.full_s for turn in self.turns)

    @property
    def interval(self) -> tuple[float, float]:
        """Of that median, 95 %: turns drawn again and again (bootstrap), paired as they were."""
        ratios = np.array([turn.measured_s / turn.full_s for turn in self.turns])
        picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
        low, high = np.quantile(np.median(ratios[picks], 1), [0.025, 0.975])
        return float(low), float(high)

    @property
    def is_settled(self) -> bool:
        """Whether it is far from a full prefill's time, or known well."""
        low, high = self.interval
        return self.ratio_to_full < NEAR_FULL or high - low <= 2 * NARROW

    @property
    def asked_s(self) -> float:
        """Of asking, planning and deciding: the median."""
        return median(turn.asked_s for turn in self.turns)

    @property
    def measured_s(self) -> float:
        """The median."""
        return median(turn.measured_s for turn in self.turns)

    @property
    def full_s(self) -> float:
        """Of the full prefill: likewise."""
        return median(turn.full_s for turn in self.turns)

    @property
    def expected_to_measured(self) -> float:
        """Time that was expected over the one measured: the median of the turns."""
        return median(turn.decision.expected_s / turn.measured_s for turn in self.turns)

    @property
    def model_error(self) -> float:
        """How far the time that was expected is from the one measured: likewise."""
        return median(abs(turn.decision.expected_s / turn.measured_s - 1) for turn in self.turns)


class Stage:
    """A model, a prompt of a prefix, chunks and a question, and their stored KV."""

    def __init__(self, shape: StageShape) -> None:
        self._shape = shape
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=shape.hidden,
            intermediate_size=11 * shape.hidden // 4,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 64,
            num_key_value_heads=shape.hidden // 128,
            head_dim=64,
            max_position_embeddings=4096,
        )
        self.model: Any = LlamaForCausalLM(config)
        self.adapter = TransformersAdapter(self.model)
        self.blender = Blender(self.adapter)
        self.ask: Callable[[], None] = _nothing
        """What is asked of the store before anything is decided."""
        rng = random.Random(0)
        sizes = [shape.prefix] + [shape.chunk] * shape.chunks
        parts = [_some(rng, size) for size in sizes]
        self.stored = {0: self.blender.compile(parts[0], sink=())}
        segments = [Segment(0, shape.prefix, "exact", src_pos=0)]
        for index, part in enumerate(parts[1:], 1):
            self.stored[index] = self.blender.compile(part, sink=[0])
            start = segments[-1].end
            scores = tuple(rng.random() for _ in part)
            segments.append(Segment(start, start + len(part), "approx", src_pos=1, scores=scores))
        end = segments[-1].end
        segments.append(Segment(end, end + shape.question, "miss"))
        self.tokens = tuple(t for part in (*parts, _some(rng, shape.question)) for t in part)
        self.segments = tuple(segments)

    def plan(self, ratio: float, selector: str) -> BlendPlan:
        """Return the plan of the prompt."""
        return BlendPlan(self.tokens, self.segments, ratio, selector)

    def full_s(self) -> float:
        """Return the seconds of the model's own prefill, to the logits of the last token."""
        ids = torch.tensor([self.tokens])
        with torch.inference_mode():
            return _seconds(lambda: self.model(ids, logits_to_keep=1))

    def learned(self, selector: str) -> list[Lesson]:
        """Return what a planner sees of this engine before it decides."""
        plan, found = self.plan(0.15, selector), []
        for ratio in LEARNED_FROM:
            tried = plan.with_ratio(ratio)
            full_s = self.full_s()
            found.append(Lesson(tried, self._blend(tried, _FAST_MB_PER_S)[1], full_s))
        return found

    def time(self, selector: str, lessons: Sequence[Lesson], link_mb_per_s: float) -> Timing:
        """Let a planner decide that knows the engine and the link, and time what it says.

        Blend and full prefill take turns, each first every other time. The planner learns
        from every turn, as an engine's does, after it has decided it.
        """
        planner = BlendPlanner(
            self._shape.layers, Speed(0.0, 0.0, 1e-4, 1e-9), LinkMeter(link_mb_per_s * 1e6)
        )
        for lesson in lessons:
            planner.observe_full(len(self.tokens), lesson.full_s)
            planner.observe_blend(lesson.plan, lesson.result, 0)
        timing = Timing(selector, link_mb_per_s, ())
        while len(timing.turns) < self._shape.rounds or not (
            timing.is_settled or len(timing.turns) >= self._shape.most_rounds
        ):
            is_first = len(timing.turns) % 2 == 0
            turn = self._turn(planner, selector, link_mb_per_s, is_first)
            timing = replace(timing, turns=(*timing.turns, turn))
        return timing

    def _turn(
        self, planner: BlendPlanner, selector: str, link_mb_per_s: float, full_first: bool
    ) -> Turn:
        full_s = self.full_s() if full_first else 0.0
        started = time.perf_counter()
        self.ask()
        plan = self.plan(0.15, selector)
        decision = planner.choose(
            plan, self._shape.token_bytes, can_skip_rows=selector == "stored_priority"
        )
        chosen = decision.applied(plan)
        asked_s = time.perf_counter() - started
        source = SlowSource(self.stored, chosen, link_mb_per_s * 1e6)
        blended_s, result = self._timed(chosen, source)
        measured_s = asked_s + blended_s
        full_s = full_s or self.full_s()
        planner.observe_full(len(self.tokens), full_s)
        if decision.action != "full":
            planner.observe_blend(chosen, result, source.loaded_bytes)
        return Turn(decision, measured_s, full_s, asked_s)

    def blend_to_full(self, ratio: float, selector: str) -> float:
        """Return the time of a blend from memory over that of a full prefill."""
        return self._to_full(self.plan(ratio, selector))

    def prefix_to_full(self) -> float:
        """Return the time with the prefix alone, from memory, over that of a full prefill."""
        return self._to_full(self.plan(0.15, "first_k").without("approx"))

    def _to_full(self, plan: BlendPlan) -> float:
        pairs = [
            (self._blend(plan, _FAST_MB_PER_S)[0], self.full_s()) for _ in range(self._shape.rounds)
        ]
        return median(ours / theirs for ours, theirs in pairs)

    def _blend(self, plan: BlendPlan, link_mb_per_s: float) -> tuple[float, BlendResult]:
        return self._timed(plan, SlowSource(self.stored, plan, link_mb_per_s * 1e6))

    def _timed(self, plan: BlendPlan, source: SlowSource) -> tuple[float, BlendResult]:
        started = time.perf_counter()
        result = self.blender.blend(plan, source)
        taken_s = time.perf_counter() - started
        if result.report.failure:
            raise RuntimeError(result.report.failure)
        return taken_s, result


def _some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 1024) for _ in range(count)]


def _nothing() -> None:
    """There is no store: all is at hand."""


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
