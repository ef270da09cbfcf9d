"""Prompts to blend: a stored prefix, chunks from other contexts, a question, what is scored.

The chunks' scores are learned from other orders of the same chunks, computed in full, as a
store learns them from shadow prefills. Selectors see the question; what is scored comes after
it and is in no plan.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bench.blend_designed import BEGIN, Riddle, make_designed
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import deviations
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.engines.transformers.blend_adapter import BlendedCache, TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument

DATA = Path(__file__).resolve().parents[1] / "data"
FOLDER = DATA / "tinylm"
RIDDLE_FOLDER = DATA / "riddlelm"
OTHER_ORDERS = 2
_TEXT_PREFIX, _TEXT_CHUNK, _TEXT_QUESTION, _TEXT_SCORED = 128, 160, 32, 64
_TEXT_CHUNKS = 3

Scores = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """A Blender and the token that stands before a chunk that is prefilled alone."""

    blender: Blender
    sink: int = BEGIN
    model: Any = None


@dataclass(frozen=True)
class Case:
    """One prompt. ``learned``: a score for each token of each chunk, from other orders."""

    engine: Engine
    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    learned: tuple[Scores, ...]
    scored: tuple[int, ...] = ()
    """What follows the question, teacher-forced."""
    secret: Riddle | None = None

    @property
    def riddle(self) -> Riddle:
        """The riddle that it was made of."""
        if self.secret is None:
            raise ValueError("riddle: this case was not made of one")
        return self.secret

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.prefix, *(t for chunk in self.chunks for t in chunk), *self.question)

    @cached_property
    def stored(self) -> dict[int, list[LayerKV]]:
        """KV by the segment's index: the prefix's own, the chunks' behind the sink alone."""
        blender, sink = self.engine.blender, self.engine.sink
        chunks = [blender.compile(chunk, sink=[sink]) for chunk in self.chunks]
        return {0: blender.compile(self.prefix, sink=()), **dict(enumerate(chunks, 1))}

    @cached_property
    def source(self) -> MemorySource:
        """All of it."""
        return MemorySource(self.stored)

    @cached_property
    def full(self) -> BlendResult:
        """All of the prompt, computed."""
        return self.engine.blender.prefill(self.tokens)

    @cached_property
    def true_scores(self) -> tuple[Scores, ...]:
        """Scores from this very prompt: what no selector can know."""
        found, start = [], len(self.prefix)
        for index, chunk in enumerate(self.chunks, 1):
            stop = start + len(chunk)
            full = [(k[:, start:stop], v[:, start:stop]) for k, v in self.full.kv]
            found.append(tuple(deviations(full, self.stored[index]).tolist()))
            start = stop
        return tuple(found)

    def plan(
        self, ratio: float, selector: str, scores: Sequence[Scores] | None = None, **settings: Any
    ) -> BlendPlan:
        """Return the plan that blends the chunks, with what was learned of them."""
        place = len(self.prefix)
        segments = [Segment(0, place, "exact", src_pos=0)]
        for chunk, score in zip(self.chunks, scores or self.learned, strict=True):
            stop = place + len(chunk)
            segments.append(Segment(place, stop, "approx", src_pos=1, scores=score))
            place = stop
        segments.append(Segment(place, len(self.tokens), "miss"))
        return BlendPlan(self.tokens, tuple(segments), ratio, selector, **settings)

    def after(self, result: BlendResult) -> Tensor:
        """Return the logits that predict the scored tokens: (scored, vocabulary).

        The first from the question's last token, the others computed behind the blended KV.
        """
        found = [result.logits[-1:]]
        if len(self.scored) > 1:
            cache = BlendedCache(config=self.engine.model.config)
            for layer, (keys, values) in enumerate(result.kv):
                cache.update(keys[None], values[None], layer)
            ids = torch.tensor([self.scored[:-1]])
            with torch.inference_mode():
                found.append(self.engine.model(ids, **as_argument(cache)).logits[0])
        return torch.cat(found)


def learn(
    engine: Engine,
    prefix: Sequence[int],
    chunks: Sequence[tuple[int, ...]],
    rng: random.Random,
) -> tuple[Scores, ...]:
    """Return what shadow prefills of other orders tell: the mean rank of each deviation."""
    alone = [engine.blender.compile(chunk, sink=[engine.sink]) for chunk in chunks]
    sums = [torch.zeros(len(chunk)) for chunk in chunks]
    for _ in range(OTHER_ORDERS):
        order = rng.sample(range(len(chunks)), len(chunks))
        if order == sorted(order):
            order.reverse()
        joined = [*prefix, *(token for index in order for token in chunks[index])]
        full, start = engine.blender.prefill(joined).kv, len(prefix)
        for index in order:
            stop = start + len(chunks[index])
            part = [(k[:, start:stop], v[:, start:stop]) for k, v in full]
            sums[index] += ranks(deviations(part, alone[index]))
            start = stop
    return tuple(tuple((total / OTHER_ORDERS).tolist()) for total in sums)


def riddle_case(engine: Engine, riddle: Riddle, rng: random.Random) -> Case:
    """Return the prompt of *riddle*: its first chunk is the stored prefix."""
    prefix, chunks = (BEGIN, *riddle.chunks[0]), riddle.chunks[1:]
    learned = learn(engine, prefix, chunks, rng)
    return Case(engine, prefix, chunks, riddle.question, learned, secret=riddle)


def bare_case(engine: Engine, riddle: Riddle) -> Case:
    """Return the prompt of *riddle* with nothing learned of its chunks."""
    prefix, chunks = (BEGIN, *riddle.chunks[0]), riddle.chunks[1:]
    nothing = tuple((0.0,) * len(chunk) for chunk in chunks)
    return Case(engine, prefix, chunks, riddle.question, nothing, secret=riddle)


def trained_engine(folder: Path = FOLDER) -> tuple[Engine, Any]:
    """Return the model of *folder*, float32, and its tokenizer."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return _engine(_loaded(folder), tokenizer.bos_token_id), tokenizer


def riddle_engine(folder: Path = RIDDLE_FOLDER) -> Engine:
    """Return the model that was trained on stories, float32: its tokens are those of riddles."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return _engine(_loaded(folder), BEGIN)


def designed_engine() -> Engine:
    """Return the model whose weights are set by hand."""
    return _engine(make_designed(), BEGIN)


def _engine(model: Any, sink: int) -> Engine:
    return Engine(Blender(TransformersAdapter(model)), sink, model)


def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def question_cases(engine: Engine, tokenizer: Any, use: str, rng: random.Random) -> Iterator[Case]:
    """Yield prompts of paragraphs and a question: the answer's tokens are scored."""
    for line in (FOLDER / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["use"] != use:
            continue
        chunks = tuple(_ids(tokenizer, text + "\n\n") for text in row["paragraphs"])
        answer = _ids(tokenizer, row["answer"]) + _ids(tokenizer, "\n\n")
        prefix = (engine.sink,)
        learned = learn(engine, prefix, chunks, rng)
        yield Case(engine, prefix, chunks, _ids(tokenizer, row["question"]), learned, answer)


def text_cases(engine: Engine, tokenizer: Any, use: str, rng: random.Random) -> Iterator[Case]:
    """Yield running text: a prefix, three chunks, 32 tokens as a question, 64 that are scored."""
    for line in (FOLDER / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["use"] != use:
            continue
        ids = _ids(tokenizer, row["text"][:4096])
        prefix, rest = (engine.sink, *ids[:_TEXT_PREFIX]), ids[_TEXT_PREFIX:]
        cuts = [_TEXT_CHUNK * i for i in range(_TEXT_CHUNKS + 1)]
        chunks = tuple(rest[a:b] for a, b in pairwise(cuts))
        question = rest[cuts[-1] : cuts[-1] + _TEXT_QUESTION]
        scored = rest[cuts[-1] + _TEXT_QUESTION :][:_TEXT_SCORED]
        if len(scored) == _TEXT_SCORED:
            learned = learn(engine, prefix, chunks, rng)
            yield Case(engine, prefix, chunks, question, learned, scored)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def ranks(values: Tensor) -> Tensor:
    """Return the place of each of *values*, (tokens,), from 0 for the least to under 1."""
    places = torch.argsort(torch.argsort(values, stable=True), stable=True)
    return places.float() / max(1, len(values))
