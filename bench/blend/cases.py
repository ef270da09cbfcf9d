"""Prompts to blend, and how close a blend is to a full prefill, by selector and ratio.

A prompt is stored parts (a prefix, chunks from other contexts), a question, and scored tokens after
it. Scores of chunks are learned from full prefills of the same chunks in other orders, as a store
learns them from shadow prefills. Selectors see the question; no plan has the scored tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bench.blend.riddles import BEGIN, Riddle, answered, make_designed
from bench.lib import ROOT
from bench.lib.report import Estimate, resampled
from bench.lib.traces import TINYLM as FOLDER
from bench.lib.traces import Ids as Tokens
from bench.lib.traces import ids_of, rows_of
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import compare, deviations
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, Kind, Segment
from kvstore.client.blend.selectors import SELECTORS
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter

RIDDLE_FOLDER = ROOT / "data" / "riddlelm"
OTHER_ORDERS = 2
RATIOS = (0.15, 0.30)
_PREFIX, _CHUNK, _CHUNKS, _QUESTION, _SCORED = 128, 160, 3, 32, 64
"""Tokens of running text in each part, and the number of chunks."""

Scores = tuple[float, ...]
Placed = tuple[list[LayerKV], int]
"""KV of tokens, and their first position."""
Key = tuple[str, float]
NAIVE: Key = ("naive", 0.0)
WHOLE: Key = ("all", 1.0)


@dataclass(frozen=True, slots=True)
class Engine:
    """A Blender, and the token before a chunk that is prefilled alone."""

    blender: Blender
    sink: int = BEGIN
    model: Any = None

    @classmethod
    def of(cls, model: Any, sink: int = BEGIN) -> Engine:
        return cls(Blender(TransformersAdapter(model)), sink, model)

    def cut(self, prefix: Tokens, chunks: Sequence[Tokens], order: Sequence[int]) -> list[Placed]:
        joined = [*prefix, *(token for place in order for token in chunks[place])]
        kv = self.blender.prefill(joined, logits_from=len(joined) - 1).kv
        found, start = dict[int, Placed](), len(prefix)
        for place in order:
            stop = start + len(chunks[place])
            rows = [(k[:, start:stop].clone(), v[:, start:stop].clone()) for k, v in kv]
            found[place], start = (rows, start), stop
        return [found[place] for place in range(len(chunks))]

    def learned(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        stored: Sequence[list[LayerKV]],
        orders: Sequence[Sequence[int]],
    ) -> list[Scores]:
        """Return the mean rank of each token's deviation from *stored* in prefills of *orders*."""
        sums = [torch.zeros(len(chunk)) for chunk in chunks]
        for order in orders:
            cuts = self.cut(prefix, chunks, order)
            for total, (kv, _), before in zip(sums, cuts, stored, strict=True):
                ranks = torch.argsort(deviations(kv, before), stable=True)
                total += torch.argsort(ranks, stable=True).float() / len(ranks)
        return [tuple((total / len(orders)).tolist()) for total in sums]


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tokens: their KV, first position, and the gain of recomputing each (``scores``)."""

    tokens: Tokens
    kv: list[LayerKV]
    src_pos: int
    kind: Kind = "approx"
    scores: Scores | None = None


@dataclass(frozen=True)
class Case:
    """One prompt. ``scored``: tokens after the question, teacher-forced."""

    engine: Engine
    parts: tuple[Part, ...]
    question: Tokens
    scored: Tokens = ()
    secret: Riddle | None = None

    @property
    def riddle(self) -> Riddle:
        if self.secret is None:
            raise ValueError("riddle: this case was not made from one")
        return self.secret

    @cached_property
    def tokens(self) -> Tokens:
        return (*(token for part in self.parts for token in part.tokens), *self.question)

    @cached_property
    def source(self) -> MemorySource:
        return MemorySource({at: part.kv for at, part in enumerate(self.parts)})

    @cached_property
    def full(self) -> BlendResult:
        return self.engine.blender.prefill(self.tokens)

    def plan(self, ratio: float, selector: str) -> BlendPlan:
        segments, end = list[Segment](), 0
        for part in self.parts:
            start, end = end, end + len(part.tokens)
            src, scores = part.src_pos, part.scores
            segments.append(Segment(start, end, part.kind, src_pos=src, scores=scores))
        segments.append(Segment(end, len(self.tokens), "miss"))
        return BlendPlan(self.tokens, tuple(segments), ratio, selector)

    def blend(self, key: Key) -> BlendResult:
        """Blend the prompt. Raises RuntimeError if it was computed in full instead."""
        name, ratio = key
        plan = self.plan(ratio, name if name in SELECTORS else "hybrid")
        result = self.engine.blender.blend(plan, self.source)
        if result.report.failure:
            raise RuntimeError(result.report.failure)
        return result

    @cached_property
    def full_after(self) -> Tensor:
        """``after`` of the full prefill."""
        return self.after(self.full)

    def after(self, result: BlendResult) -> Tensor:
        """Return the logits that predict the scored tokens: (scored, vocabulary)."""
        return self.engine.blender.score(self.tokens, result, self.scored)


def _case(
    engine: Engine, prefix: Tokens, chunks: Sequence[Tokens], rng: random.Random | None, **rest: Any
) -> Case:
    """Return a prompt whose chunks are stored after the sink alone; without *rng* scores are 0."""
    stored = [engine.blender.compile(chunk, sink=[engine.sink]) for chunk in chunks]
    scores = [(0.0,) * len(chunk) for chunk in chunks]
    if rng is not None:
        orders = [rng.sample(range(len(chunks)), len(chunks)) for _ in range(OTHER_ORDERS)]
        orders = [order[::-1] if order == sorted(order) else order for order in orders]
        scores = engine.learned(prefix, chunks, stored, orders)
    parts = [Part(prefix, engine.blender.compile(prefix, sink=()), 0, "exact")]
    for tokens, kv, score in zip(chunks, stored, scores, strict=True):
        parts.append(Part(tokens, kv, 1, scores=score))
    return Case(engine, tuple(parts), **rest)


def riddle_case(engine: Engine, riddle: Riddle, rng: random.Random | None = None) -> Case:
    """Return the prompt of *riddle*: its first chunk is the stored prefix."""
    prefix, chunks = (BEGIN, *riddle.chunks[0]), riddle.chunks[1:]
    return _case(engine, prefix, chunks, rng, question=riddle.question, secret=riddle)


def trained_engine(folder: Path = FOLDER) -> tuple[Engine, Any]:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return riddle_engine(folder, tokenizer.bos_token_id), tokenizer


def riddle_engine(folder: Path = RIDDLE_FOLDER, sink: int = BEGIN) -> Engine:
    """Return a model in float32; the default one was trained on stories."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return Engine.of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sink)


def designed_engine() -> Engine:
    return Engine.of(make_designed())


def question_cases(engine: Engine, tokenizer: Any, rng: random.Random) -> Iterator[Case]:
    """Yield prompts of paragraphs and a question; the answer is scored."""
    for row in rows_of(FOLDER / "questions.jsonl"):
        chunks = [ids_of(tokenizer, text + "\n\n") for text in row["paragraphs"]]
        answer = ids_of(tokenizer, row["answer"]) + ids_of(tokenizer, "\n\n")
        question = ids_of(tokenizer, row["question"])
        yield _case(engine, (engine.sink,), chunks, rng, question=question, scored=answer)


def text_cases(engine: Engine, tokenizer: Any, rng: random.Random) -> Iterator[Case]:
    """Yield running text: a prefix, three chunks, 32 tokens as a question, 64 scored."""
    for row in rows_of(FOLDER / "heldout.jsonl"):
        ids = ids_of(tokenizer, row["text"][:4096])
        prefix, rest = (engine.sink, *ids[:_PREFIX]), ids[_PREFIX:]
        cuts = [_CHUNK * place for place in range(_CHUNKS + 1)]
        question = rest[cuts[-1] : cuts[-1] + _QUESTION]
        scored = rest[cuts[-1] + _QUESTION :][:_SCORED]
        if len(scored) == _SCORED:
            chunks = [rest[a:b] for a, b in pairwise(cuts)]
            yield _case(engine, prefix, chunks, rng, question=question, scored=scored)


@dataclass(frozen=True, slots=True)
class Mark:
    """Quality of one blend: KL a scored token, and the share of correct answers."""

    divergence: float
    exact_match: float


Marks = dict[Key, list[Mark]]
"""Marks of all cases, in order, by selector and ratio."""


def figures(marks: Marks, key: Key, name: str) -> NDArray[np.float64]:
    return np.array([getattr(mark, name) for mark in marks[key]])


def keys() -> list[Key]:
    """Return what is measured: naive reuse, and each selector at each ratio."""
    return [NAIVE, *((name, ratio) for name in SELECTORS for ratio in RATIOS)]


def measure(cases: Iterable[Case]) -> Marks:
    marks: Marks = {key: [] for key in keys()}
    for case in cases:
        for key, found in marks.items():
            found.append(judge(case, case.blend(key)))
    return marks


def judge(case: Case, result: BlendResult) -> Mark:
    """Score the rows that answer a riddle, or the scored tokens, which no selector saw."""
    if case.secret:
        full, found = case.full.logits[-len(case.question) :][1::2], result.logits[1::2]
        correct = answered(result.logits, case.secret)
    else:
        full, found = case.full_after, case.after(result)
        correct = [found.argmax(-1).tolist() == list(case.scored)]
    return Mark(compare(full, found).divergence, sum(correct) / len(correct))


def difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Estimate:
    """Return the mean of ours - theirs over the cases, and its paired 95 % interval."""
    return resampled(lambda pick: float((ours[pick] - theirs[pick]).mean()), len(ours))


def quotient(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Estimate:
    """Return the mean of ours over the mean of theirs, and its paired 95 % interval."""
    least = np.finfo(np.float64).tiny
    return resampled(
        lambda pick: float(ours[pick].mean() / max(theirs[pick].mean(), least)), len(ours)
    )


def paired(found: Estimate) -> str:
    return f"paired 95 %: [{found[1]:.3f}, {found[2]:.3f}]"


def table(title: str, marks: Marks) -> list[str]:
    """Return a table with a line for each selector and ratio."""
    lines = [title, f"  {'selector':18s}ratio         EM    KL x1e3"]
    for name, ratio in marks:
        em, kl = (
            figures(marks, (name, ratio), one).mean() for one in ("exact_match", "divergence")
        )
        lines.append(f"  {name:18s}{ratio:4.0%}   {em:10.3f} {1e3 * kl:10.3f}")
    return lines
