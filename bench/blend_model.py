"""Blending on a real language model: facts and text, by how the documents were stored.

Four documents of real text that tell four-digit codes, and questions about one document, about
two that are neighbours ("the item above"), and about one that names another; and running text.
KL of the question's rows and of what follows them are kept apart: selectors see the question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bench.blend_cases import (
    FOLDER,
    NAIVE,
    Case,
    Key,
    Part,
    Tokens,
    ids_of,
    keys,
    paired,
    quotient,
    trained_engine,
)
from bench.report import Report
from kvstore.client.blend.gate import SHADOW_TOKENS, ShadowEval, compare, worse
from kvstore.server.blending.gates import TRIALS, Gates
from kvstore.server.blending.gates import Shadow as GateResult
from kvstore.server.settings.values import GateTerms
from kvstore.server.telemetry.metrics import Counters

MODEL_KEYS = ("worst_selector_vs_naive_no_prefix", "hybrid30_answers_vs_naive")
WAYS = ("alone", "behind BOS", "behind the system prompt", "out of another prompt")
SERVED = WAYS[-1]
NO_PREFIX = "no prefix"
THINGS = (
    "lamp", "boat", "clock", "violin", "ladder", "kettle", "mirror", "barrel", "saddle", "anchor",
    "basket", "camera", "carpet", "drum", "engine", "flag", "guitar", "hammer", "kite", "lantern",
)  # fmt: skip
SYSTEM = "Answer from the documents. Every answer is a code of four digits."
DOCUMENTS = 4
QUESTIONS = 4
"""Of a context."""
RATIOS = (0.15, 0.3)
BEST: Key = ("hybrid", 0.3)
SEED = 3
_FEW, _MANY = 24, 60
"""Tokens of real text in a document."""
_CHUNK, _QUESTION, _SCORED = 72, 16, 48
"""Tokens of running text: of each of four chunks, of the question, and behind it."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """How much is measured: contexts of four questions, passages, and prompts without prefix, so
    many of either kind.
    """

    contexts: int = 14
    texts: int = 8
    bare: int = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of documents, and what follows it. ``stood``: another order of the documents."""

    prefix: Tokens
    documents: tuple[Tokens, ...]
    question: Tokens
    follows: Tokens
    stood: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """One blend against a full prefill: the question's rows, what follows, and both as a gate
    sees them; ``is_right``: all that follows is what it would say.
    """

    question: ShadowEval
    answer: ShadowEval
    shadow: ShadowEval
    is_right: bool

    @property
    def pooled(self) -> float:
        """KL a token, of the question and of what follows."""
        parts = (self.question, self.answer)
        total = sum(one.divergence * one.tokens for one in parts)
        return total / sum(one.tokens for one in parts)


@dataclass(frozen=True, slots=True)
class Full:
    """A prompt computed in full: logits of its question and of what follows, and what it says."""

    question: Tensor
    answer: Tensor
    says: list[int]
    saying: Tensor
    is_right: bool

    @classmethod
    def of(cls, case: Case) -> Full:
        """Compute *case*."""
        tokens, blender = case.tokens, case.engine.blender
        result = blender.prefill(tokens, logits_from=len(tokens) - len(case.question))
        says, saying = blender.decode(tokens, result, SHADOW_TOKENS)
        answer = case.after(result)
        return cls(result.logits, answer, says, saying, case.is_right(answer))

    def judge(self, case: Case, key: Key) -> Judged:
        """Blend *case*, the same prompt, and compare; what follows is teacher-forced."""
        blended = case.blend(key)
        question, after = compare(self.question, blended.logits), case.after(blended)
        said = compare(self.saying, case.engine.blender.score(case.tokens, blended, self.says))
        answer, shadow = compare(self.answer, after), worse(question, said)
        return Judged(question, answer, shadow, case.is_right(after))


class Prompts:
    """Prompts of the model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.engine, self._tokenizer = trained_engine(folder)
        rows = (FOLDER / "heldout.jsonl").read_text().splitlines()
        self._texts = [self._ids(json.loads(row)["text"][:4096]) for row in rows]
        self._system = (self.engine.sink, *self._ids(f"system\n{SYSTEM}\n\n"))

    def _ids(self, text: str) -> Tokens:
        return ids_of(self._tokenizer, text)

    def facts(self, rng: random.Random) -> list[Prompt]:
        """Return four questions about four documents."""
        things = rng.sample(THINGS, DOCUMENTS)
        codes = [f"{rng.randrange(1000, 10000)}" for _ in range(2 * DOCUMENTS)]
        documents = []
        for place, thing in enumerate(things):
            text = rng.choice(self._texts)
            first = rng.randrange(len(text) - _MANY)
            filler = text[first : first + rng.randrange(_FEW, _MANY)]
            fact = f"The code of the {thing} is {codes[place]}."
            if place:
                fact += f" The key of the item above is {codes[DOCUMENTS + place]}."
            fact += f" The {thing} is kept with the {things[place - 1]}."
            heading, end = self._ids(f"Item: the {thing}.\n"), self._ids(f"\n{fact}\n\n")
            documents.append((*heading, *filler, *end))
        one, other, third = rng.sample(range(DOCUMENTS), 3)
        above = rng.randrange(1, DOCUMENTS)
        asked = [
            (f"code of the {things[one]}", codes[one]),
            (f"code of the {things[other]}", codes[other]),
            (f"key of the {things[above - 1]}", codes[DOCUMENTS + above]),
            (f"code of the item that the {things[third]} is kept with", codes[third - 1]),
        ]
        stood = (0, *rng.choice([(2, 3, 1), (3, 1, 2), (3, 2, 1)]))
        return [
            Prompt(
                self._system, tuple(documents),
                self._ids(f"Question: What is the {wanted}?\nAnswer: it is"),
                self._ids(f" {code}"), stood,
            )
            for wanted, code in asked
        ]  # fmt: skip

    def passages(self) -> Iterator[Prompt]:
        """Yield running text, cut into four chunks, a question and what follows."""
        for text in self._texts:
            end = _CHUNK * DOCUMENTS
            chunks = tuple(text[at : at + _CHUNK] for at in range(0, end, _CHUNK))
            question, follows = text[end:][:_QUESTION], text[end + _QUESTION :][:_SCORED]
            if len(follows) == _SCORED:
                yield Prompt(self._system, chunks, question, follows, (0, 2, 3, 1))

    def stored(self, prompt: Prompt, way: str) -> tuple[Part, ...]:
        """Return the prefix and the documents of *prompt* as they are stored in one *way*.

        Scores are those that two other orders of the same documents teach.
        """
        engine, prefix, documents = self.engine, prompt.prefix, prompt.documents
        if way in (SERVED, NO_PREFIX):
            found = engine.cut(prefix, documents, prompt.stood)
        else:
            sinks = {WAYS[0]: (), WAYS[1]: (engine.sink,), WAYS[2]: prefix}
            sink = sinks[way]
            found = [(engine.blender.compile(one, sink=sink), len(sink)) for one in documents]
        orders = ((1, 0, 3, 2), (2, 1, 3, 0))
        scores = engine.learned(prefix, documents, [kv for kv, _ in found], orders)
        parts = (
            [Part(prefix, engine.blender.compile(prefix, sink=()), 0, "exact")] if prefix else []
        )
        for (kv, place), tokens, score in zip(found, documents, scores, strict=True):
            # The first document is the same prompt's where it stood behind the same prefix.
            is_exact = way in WAYS[2:] and len(parts) == 1 and place == len(prefix)
            parts.append(Part(tokens, kv, place, "exact" if is_exact else "approx", score))
        return tuple(parts)


class Tried:
    """Prompts of one kind and what came of blending them, each made once."""

    def __init__(self, model: Prompts, prompts: Sequence[Prompt], way: str = SERVED) -> None:
        self._model = model
        self.prompts = prompts
        self._parts: dict[tuple[int, str], tuple[Part, ...]] = {}
        self._judged: dict[tuple[str, Key], list[Judged]] = {}
        self.full = [Full.of(self._case(one, way)) for one in prompts]

    def judged(self, way: str, key: Key) -> list[Judged]:
        """Return what came of every prompt, documents stored in one *way*."""
        if (way, key) not in self._judged:
            self._judged[way, key] = [
                full.judge(self._case(prompt, way), key)
                for prompt, full in zip(self.prompts, self.full, strict=True)
            ]
        return self._judged[way, key]

    def _case(self, prompt: Prompt, way: str) -> Case:
        name = (id(prompt.documents), way)  # questions about the same documents share them
        if name not in self._parts:
            self._parts[name] = self._model.stored(prompt, way)
        return Case(self._model.engine, self._parts[name], prompt.question, prompt.follows)

    def answers(self, key: Key) -> NDArray[np.float64]:
        """Return the KL of answers of each context, the mean of its questions: they share its
        documents, so an interval is one of contexts. Documents out of another prompt.
        """
        found = np.array([one.answer.divergence for one in self.judged(SERVED, key)])
        means: NDArray[np.float64] = found.reshape(-1, QUESTIONS).mean(1)
        return means

    def line(self, way: str, key: Key) -> str:
        """Return one line of a table."""
        found = self.judged(way, key)
        kls = np.mean([(one.question.divergence, one.answer.divergence) for one in found], 0)
        agreed = np.mean([(one.shadow.agreement, one.shadow.agreement_of_all) for one in found], 0)
        right = sum(one.is_right for one in found)
        return (
            f"  {way:26s}{key[0]:16s}{key[1]:5.0%}{kls[0]:10.4f}{kls[1]:10.4f}"
            f"{agreed[0]:8.3f}{agreed[1]:8.3f}{right:5d} of {len(found)}"
        )


def measure_model(report: Report, folder: Path, sizes: ModelSizes) -> list[str]:
    """Measure the model of *folder*; return the tables."""
    model, rng = Prompts(folder), random.Random(SEED)
    facts = Tried(model, [one for _ in range(sizes.contexts) for one in model.facts(rng)])
    text = Tried(model, list(islice(model.passages(), sizes.texts)))
    some = (*facts.prompts[: 2 * sizes.bare : 2], *text.prompts[: sizes.bare])
    moved = [replace(one, prefix=(), stood=(1, 2, 3, 0)) for one in some]
    bare = Tried(model, moved, NO_PREFIX)
    naive = np.array([one.pooled for one in bare.judged(NO_PREFIX, NAIVE)])
    found = {
        key: quotient(np.array([one.pooled for one in bare.judged(NO_PREFIX, key)]), naive)
        for key in keys(RATIOS)[1:]
    }
    worst = max(found, key=lambda key: found[key][0])
    report.add(
        MODEL_KEYS[0],
        found[worst][0],
        f"KL of {worst[0]} at {worst[1]:.0%} over naive reuse, {paired(found[worst])}",
        f"no prefix, the first document moved; naive {naive.mean():.4f}, {len(naive)} prompts",
    )
    part = quotient(facts.answers(BEST), facts.answers(NAIVE))
    report.add(
        MODEL_KEYS[1],
        part[0],
        f"KL of answers of hybrid at 30 % over that of naive reuse, {paired(part)}",
        f"documents stored {SERVED}; {sizes.contexts} contexts of {QUESTIONS} questions",
    )
    for way in (SERVED, WAYS[0]):
        report.note(f"gate, documents stored {way}", *_gate(way, (facts, text)))
    lines = []
    for title, tried in (("facts", facts), ("text", text)):
        right = sum(one.is_right for one in tried.full)
        lines.append(f"{folder.name}, {title}: {right} of {len(tried.full)} right in full")
        lines.append(f"  {'documents stored':26s}{'selector':16s}ratio  question    answer"
                     "   clear     all  right")  # fmt: skip
        lines += [tried.line(way, key) for way in WAYS[:-1] for key in (NAIVE, BEST)]
        lines += [tried.line(SERVED, key) for key in keys(RATIOS)]
    return [*lines, "without a prefix", *(bare.line(NO_PREFIX, key) for key in keys(RATIOS))]


def _gate(way: str, tried: Sequence[Tried]) -> tuple[str, str]:
    """Return whether a gate opens on prompts whose documents were stored in one *way*, and why."""
    gates, name = Gates(GateTerms(), lambda: 1.0, Counters()), (b"model", "")
    while True:
        ratio = gates.view(name).ratio
        found = [one.shadow for part in tried for one in part.judged(way, ("hybrid", ratio))]
        for number in range(TRIALS):
            one = found[number % len(found)]
            result = GateResult(one.divergence, one.agreement, one.tokens, ratio)
            gate = gates.record(name, result)
        if gate.is_open or gate.why.startswith("closed"):
            state = "open" if gate.is_open else "closed"
            figures = f"agreement {gate.agreement:.3f}, KL {gate.divergence:.4f}"
            return f"{state} at {ratio:.3g}", f"{figures}, {len(found)} prompts in turns"
