"""Blending on a real language model: facts and text, with documents from another prompt.

Four documents of real text contain four-digit codes. Questions are about one document, about two
neighbours ("the item above"), or about one that names another. Then running text. KL of the
question's rows and of the rows after it are separate, as selectors see the question.
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

from bench.blend.cases import NAIVE, Case, Key, Part, keys, paired, quotient, trained_engine
from bench.lib.report import Report
from bench.lib.traces import TINYLM, ids_of
from bench.lib.traces import Ids as Tokens
from kvstore.client.blend.gate import compare

MODEL_KEYS = ("worst_selector_vs_naive_no_prefix", "hybrid30_answers_vs_naive")
THINGS = (
    "lamp", "boat", "clock", "violin", "ladder", "kettle", "mirror", "barrel", "saddle", "anchor",
    "basket", "camera", "carpet", "drum", "engine", "flag", "guitar", "hammer", "kite", "lantern",
)  # fmt: skip
SYSTEM = "Answer from the documents. Every answer is a code of four digits."
DOCUMENTS = 4
QUESTIONS = 4
"""Questions about one context."""
BEST: Key = ("hybrid", 0.3)
SEED = 3
_FEW, _MANY = 24, 60
"""Least and most tokens of real text in a document."""
_CHUNK, _QUESTION, _SCORED = 72, 16, 48
"""Tokens of running text: of each of four chunks, of the question, and scored after it."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """How much is measured: contexts, passages of text, and prompts of each without a prefix."""

    contexts: int = 14
    texts: int = 8
    bare: int = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of documents, and the tokens after it.

    ``stored_order``: the documents' order in the prompt that stored them.
    """

    prefix: Tokens
    documents: tuple[Tokens, ...]
    question: Tokens
    follows: Tokens
    stored_order: tuple[int, ...]


class Prompts:
    def __init__(self, folder: Path) -> None:
        self.engine, self._tokenizer = trained_engine(folder)
        rows = (TINYLM / "heldout.jsonl").read_text().splitlines()
        self._texts = [self._ids(json.loads(row)["text"][:4096]) for row in rows]
        self._system = (self.engine.sink, *self._ids(f"system\n{SYSTEM}\n\n"))

    def _ids(self, text: str) -> Tokens:
        return ids_of(self._tokenizer, text)

    def facts(self, rng: random.Random) -> list[Prompt]:
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
        questions = [
            (f"code of the {things[one]}", codes[one]),
            (f"code of the {things[other]}", codes[other]),
            (f"key of the {things[above - 1]}", codes[DOCUMENTS + above]),
            (f"code of the item that the {things[third]} is kept with", codes[third - 1]),
        ]
        stored_order = (0, *rng.choice([(2, 3, 1), (3, 1, 2), (3, 2, 1)]))
        return [
            Prompt(
                self._system, tuple(documents),
                self._ids(f"Question: What is the {wanted}?\nAnswer: it is"),
                self._ids(f" {code}"), stored_order,
            )
            for wanted, code in questions
        ]  # fmt: skip

    def passages(self) -> Iterator[Prompt]:
        for text in self._texts:
            end = _CHUNK * DOCUMENTS
            chunks = tuple(text[at : at + _CHUNK] for at in range(0, end, _CHUNK))
            question, follows = text[end:][:_QUESTION], text[end + _QUESTION :][:_SCORED]
            if len(follows) == _SCORED:
                yield Prompt(self._system, chunks, question, follows, (0, 2, 3, 1))

    def stored(self, prompt: Prompt) -> tuple[Part, ...]:
        """Return the prefix and the documents of *prompt*, cut from another prompt.

        Scores are learned from two other orders of the same documents.
        """
        engine, prefix, documents = self.engine, prompt.prefix, prompt.documents
        found = engine.cut(prefix, documents, prompt.stored_order)
        orders = ((1, 0, 3, 2), (2, 1, 3, 0))
        scores = engine.learned(prefix, documents, [kv for kv, _ in found], orders)
        parts = (
            [Part(prefix, engine.blender.compile(prefix, sink=()), 0, "exact")] if prefix else []
        )
        for (kv, place), tokens, score in zip(found, documents, scores, strict=True):
            # The first document is exact if it stored_order after the same prefix.
            is_exact = len(parts) == 1 and bool(prefix) and place == len(prefix)
            parts.append(Part(tokens, kv, place, "exact" if is_exact else "approx", score))
        return tuple(parts)


class Results:
    """Results of blending prompts of one kind.

    ``kl`` has for each key the KL a token of every prompt, of its question and of the tokens after
    it, teacher-forced: (prompts, 2). ``tokens`` counts both, (prompts, 2).
    """

    def __init__(self, model: Prompts, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        self.tokens = np.array([(len(one.question), len(one.follows)) for one in prompts])
        found: dict[Key, list[tuple[float, float]]] = {key: [] for key in keys()}
        stored: dict[int, tuple[Part, ...]] = {}
        for prompt in prompts:
            name = id(prompt.documents)  # questions about the same documents share them
            if name not in stored:
                stored[name] = model.stored(prompt)
            case = Case(model.engine, stored[name], prompt.question, prompt.follows)
            first = len(case.tokens) - len(case.question)
            full = case.engine.blender.prefill(case.tokens, logits_from=first)
            wanted = full.logits, case.after(full)
            for key, kls in found.items():
                result = case.blend(key)
                both = zip(wanted, (result.logits, case.after(result)), strict=True)
                question, answer = (compare(*pair).divergence for pair in both)
                kls.append((question, answer))
        self.kl = {key: np.array(kls) for key, kls in found.items()}

    def pooled(self, key: Key) -> NDArray[np.float64]:
        """Return the KL a token of every prompt, over its question and the tokens after it."""
        pooled: NDArray[np.float64] = np.average(self.kl[key], axis=1, weights=self.tokens)
        return pooled

    def answers(self, key: Key) -> NDArray[np.float64]:
        """Return the KL of answers of each context, the mean of its questions: they share its
        documents, so the unit of an interval is the context.
        """
        means: NDArray[np.float64] = self.kl[key][:, 1].reshape(-1, QUESTIONS).mean(1)
        return means

    def table(self, title: str) -> list[str]:
        lines = [f"{title}: {len(self.prompts)} prompts"]
        lines.append(f"  {'selector':16s}ratio  question    answer")
        for (name, ratio), kl in self.kl.items():
            question, answer = kl.mean(0)
            lines.append(f"  {name:16s}{ratio:5.0%}{question:10.4f}{answer:10.4f}")
        return lines


def measure_model(report: Report, folder: Path, sizes: ModelSizes) -> list[str]:
    """Measure the model of *folder*; return the tables."""
    model, rng = Prompts(folder), random.Random(SEED)
    facts = Results(model, [one for _ in range(sizes.contexts) for one in model.facts(rng)])
    text = Results(model, list(islice(model.passages(), sizes.texts)))
    some = (*facts.prompts[: 2 * sizes.bare : 2], *text.prompts[: sizes.bare])
    bare = Results(model, [replace(one, prefix=(), stored_order=(1, 2, 3, 0)) for one in some])
    naive = bare.pooled(NAIVE)
    found = {key: quotient(bare.pooled(key), naive) for key in keys()[1:]}
    worst = max(found, key=lambda key: found[key][0])
    measured = f"KL of {worst[0]} at {worst[1]:.0%} over naive reuse, {paired(found[worst])}"
    against = f"no prefix, first document moved; naive {naive.mean():.4f}, {len(naive)} prompts"
    report.add(MODEL_KEYS[0], found[worst][0], measured, against)
    part = quotient(facts.answers(BEST), facts.answers(NAIVE))
    measured = f"KL of answers of hybrid at 30 % over that of naive reuse, {paired(part)}"
    against = f"documents from another prompt; {sizes.contexts} contexts of {QUESTIONS} questions"
    report.add(MODEL_KEYS[1], part[0], measured, against)
    kinds = (("facts", facts), ("text", text), ("without a prefix", bare))
    return [line for title, one in kinds for line in one.table(f"{folder.name}, {title}")]
