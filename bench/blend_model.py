"""Blending on a real language model: facts and text, by how the documents were stored.

Four documents of real text that tell four-digit codes, and questions about one document, about
two that are neighbours ("the item above"), and about one that names another; and running text.
KL of the question's rows and of what follows them are told apart: selectors see the question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.blend_cases import FOLDER, Scores, ranks, trained_engine
from bench.blend_quality import NAIVE, Key, quotient
from bench.report import Report
from kvstore.client.blend.engine import Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import SHADOW_TOKENS, ShadowEval, compare, deviations, worse
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.blend.selectors import SELECTORS
from kvstore.server.blending.gates import TRIALS, Gates
from kvstore.server.blending.gates import Shadow as Told
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


@dataclass(frozen=True)
class Prompt:
    """A prompt of documents, and what follows it. ``stood``: another order of the documents."""

    prefix: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    follows: tuple[int, ...]
    stood: tuple[int, ...]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.prefix, *(token for one in self.documents for token in one), *self.question)


@dataclass(frozen=True)
class Stored:
    """A document's KV as it was stored, where it stood, and the scores of its tokens."""

    kv: list[LayerKV]
    src_pos: int
    is_exact: bool
    scores: Scores


@dataclass(frozen=True)
class Judged:
    """One blend against a full prefill: the question's rows, what follows, and both as a gate
    sees them; ``is_right``: all that follows is what it would say.
    """

    question: ShadowEval
    answer: ShadowEval
    told: ShadowEval
    is_right: bool

    @property
    def pooled(self) -> float:
        """KL a token, of the question and of what follows."""
        parts = (self.question, self.answer)
        total = sum(one.divergence * one.tokens for one in parts)
        return total / sum(one.tokens for one in parts)


@dataclass(frozen=True)
class Full:
    """A prompt computed in full, the logits of what follows, and what it would say itself."""

    result: BlendResult
    answer: Tensor
    says: list[int]
    saying: Tensor
    is_right: bool


class RealModel:
    """The model of a folder: makes prompts, stores their documents, and blends them."""

    def __init__(self, folder: Path) -> None:
        self.engine, self._tokenizer = trained_engine(folder)
        self.blender: Blender = self.engine.blender
        rows = (FOLDER / "heldout.jsonl").read_text().splitlines()
        self._texts = [self.ids(json.loads(row)["text"][:4096]) for row in rows]

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of *text*."""
        found = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tuple(found)

    @cached_property
    def system(self) -> tuple[int, ...]:
        """The tokens of the system prompt, some twenty."""
        return (self.engine.sink, *self.ids(f"system\n{SYSTEM}\n\n"))

    # --- prompts

    def facts(self, rng: random.Random) -> list[Prompt]:
        """Return four questions about four documents."""
        things = rng.sample(THINGS, DOCUMENTS)
        codes = [f"{rng.randrange(1000, 10000)}" for _ in range(2 * DOCUMENTS)]
        documents = []
        for place, thing in enumerate(things):
            text = rng.choice(self._texts)
            first = rng.randrange(len(text) - _MANY)
            filler = text[first : first + rng.randrange(_FEW, _MANY)]
            told = f"The code of the {thing} is {codes[place]}."
            if place:
                told += f" The key of the item above is {codes[DOCUMENTS + place]}."
            told += f" The {thing} is kept with the {things[place - 1]}."
            heading, end = self.ids(f"Item: the {thing}.\n"), self.ids(f"\n{told}\n\n")
            documents.append((*heading, *filler, *end))
        one, other, third = rng.sample(range(DOCUMENTS), 3)
        above = rng.randrange(1, DOCUMENTS)
        asked = [
            (f"What is the code of the {things[one]}?", codes[one]),
            (f"What is the code of the {things[other]}?", codes[other]),
            (f"What is the key of the {things[above - 1]}?", codes[DOCUMENTS + above]),
            (f"What is the code of the item that the {things[third]} is kept with?",
             codes[third - 1]),
        ]  # fmt: skip
        stood = (0, *rng.choice([(2, 3, 1), (3, 1, 2), (3, 2, 1)]))
        return [
            Prompt(
                self.system, tuple(documents), self.ids(f"Question: {question}\nAnswer: it is"),
                self.ids(f" {code}"), stood,
            )
            for question, code in asked
        ]  # fmt: skip

    def passages(self) -> Iterator[Prompt]:
        """Yield running text, cut into four chunks, a question and what follows."""
        for text in self._texts:
            ends = [_CHUNK * place for place in range(DOCUMENTS + 1)]
            chunks = tuple(text[a : a + _CHUNK] for a in ends[:-1])
            question = text[ends[-1] :][:_QUESTION]
            follows = text[ends[-1] + _QUESTION :][:_SCORED]
            if len(follows) == _SCORED:
                yield Prompt(self.system, chunks, question, follows, (0, 2, 3, 1))

    # --- documents

    def stored(self, prompt: Prompt, way: str) -> list[Stored]:
        """Return the documents of *prompt* as they are stored in one *way*.

        Scores are those that two other orders of the same documents teach.
        """
        if way in (SERVED, NO_PREFIX):
            found = self._served(prompt)
        else:
            sinks = {WAYS[0]: (), WAYS[1]: (self.engine.sink,), WAYS[2]: prompt.prefix}
            sink = sinks[way]
            found = [(self.blender.compile(one, sink=sink), len(sink)) for one in prompt.documents]
        scores = self._learned(prompt, [kv for kv, _ in found])
        starts = [place == len(prompt.prefix) for _, place in found]
        is_served = way in WAYS[2:]
        return [
            Stored(kv, place, is_served and index == 0 and starts[0], score)
            for index, ((kv, place), score) in enumerate(zip(found, scores, strict=True))
        ]

    def _served(self, prompt: Prompt) -> list[tuple[list[LayerKV], int]]:
        """Return the documents out of a prompt that had them in the order ``stood``."""
        return self._cut(prompt, prompt.stood)

    def _cut(self, prompt: Prompt, order: Sequence[int]) -> list[tuple[list[LayerKV], int]]:
        """Return the documents out of a prompt that has them in *order*, and where they stood."""
        joined = [*prompt.prefix, *(t for place in order for t in prompt.documents[place])]
        kv, found = self.blender.prefill(joined, logits_from=len(joined) - 1).kv, {}
        at = len(prompt.prefix)
        for place in order:
            end = at + len(prompt.documents[place])
            found[place] = ([(k[:, at:end].clone(), v[:, at:end].clone()) for k, v in kv], at)
            at = end
        return [found[place] for place in range(len(found))]

    def _learned(self, prompt: Prompt, stored: Sequence[list[LayerKV]]) -> list[Scores]:
        sums = [torch.zeros(len(one)) for one in prompt.documents]
        for order in ((1, 0, 3, 2), (2, 1, 3, 0)):
            for place, (kv, _) in enumerate(self._cut(prompt, order)):
                sums[place] += ranks(deviations(kv, stored[place]))
        return [tuple(one.tolist()) for one in sums]

    # --- blends

    def blend(
        self, prompt: Prompt, stored: Sequence[Stored], ratio: float, selector: str
    ) -> BlendResult:
        """Return *prompt* blended. Raises RuntimeError when it was computed instead."""
        segments: list[Segment] = []
        source: dict[int, list[LayerKV]] = {}
        if prompt.prefix:
            source[0] = self._system_kv
            segments.append(Segment(0, len(prompt.prefix), "exact", src_pos=0))
        for one in stored:
            start = segments[-1].end if segments else 0
            source[len(segments)] = one.kv
            end = start + one.kv[0][0].shape[1]
            kind: Literal["exact", "approx"] = "exact" if one.is_exact else "approx"
            segments.append(Segment(start, end, kind, src_pos=one.src_pos, scores=one.scores))
        segments.append(Segment(segments[-1].end, len(prompt.tokens), "miss"))
        plan = BlendPlan(prompt.tokens, tuple(segments), ratio, selector)
        result = self.blender.blend(plan, MemorySource(source))
        if result.report.failure:
            raise RuntimeError(result.report.failure)
        return result

    @cached_property
    def _system_kv(self) -> list[LayerKV]:
        return self.blender.compile(self.system, sink=())

    def full(self, prompt: Prompt) -> Full:
        """Return *prompt* computed in full."""
        first = len(prompt.tokens) - len(prompt.question)
        result = self.blender.prefill(prompt.tokens, logits_from=first)
        says, saying = self.blender.decode(prompt.tokens, result, SHADOW_TOKENS)
        answer = self.blender.score(prompt.tokens, result, prompt.follows)
        return Full(result, answer, says, saying, _is_right(answer, prompt))

    def judge(self, prompt: Prompt, full: Full, blended: BlendResult) -> Judged:
        """Compare *blended* with *full*, what follows teacher-forced."""
        score = self.blender.score
        question = compare(full.result.logits, blended.logits)
        answer = score(prompt.tokens, blended, prompt.follows)
        saying = compare(full.saying, score(prompt.tokens, blended, full.says))
        return Judged(
            question, compare(full.answer, answer), worse(question, saying),
            _is_right(answer, prompt),
        )  # fmt: skip


def _is_right(logits: Tensor, prompt: Prompt) -> bool:
    return logits.argmax(-1).tolist() == list(prompt.follows)


# --- what is measured


class Tried:
    """Prompts of one kind and what came of blending them, made once."""

    def __init__(self, model: RealModel, prompts: Sequence[Prompt]) -> None:
        self._model = model
        self.prompts = prompts
        self.full = [model.full(one) for one in prompts]
        self._stored: dict[tuple[int, str], list[Stored]] = {}
        self._judged: dict[tuple[str, Key], list[Judged]] = {}

    def judged(self, way: str, key: Key) -> list[Judged]:
        """Return what came of every prompt, documents stored in one *way*."""
        if (way, key) not in self._judged:
            name, ratio = key
            selector = name if name in SELECTORS else "hybrid"
            self._judged[way, key] = [
                self._model.judge(
                    prompt, full, self._model.blend(prompt, self._of(prompt, way), ratio, selector)
                )
                for prompt, full in zip(self.prompts, self.full, strict=True)
            ]
        return self._judged[way, key]

    def _of(self, prompt: Prompt, way: str) -> list[Stored]:
        name = (id(prompt.documents), way)  # questions about the same documents share them
        if name not in self._stored:
            self._stored[name] = self._model.stored(prompt, way)
        return self._stored[name]

    def values(self, way: str, key: Key, name: str) -> NDArray[np.float64]:
        """Return the KL of every prompt, of its ``question`` or ``answer``."""
        return np.array([getattr(one, name).divergence for one in self.judged(way, key)])

    def by_context(self, key: Key) -> NDArray[np.float64]:
        """Return the KL of answers of each context, the mean of its questions: they share its
        documents, so an interval is one of contexts. Documents out of another prompt.
        """
        found = self.values(SERVED, key, "answer").reshape(-1, QUESTIONS)
        means: NDArray[np.float64] = found.mean(1)
        return means

    def line(self, way: str, key: Key) -> str:
        """Return one line of a table."""
        found = self.judged(way, key)
        clear = [one.told.agreement for one in found]
        return (
            f"  {way:26s}{key[0]:16s}{key[1]:5.0%}"
            f"{self.values(way, key, 'question').mean():10.4f}"
            f"{self.values(way, key, 'answer').mean():10.4f}{np.mean(clear):8.3f}"
            f"{np.mean([one.told.agreement_of_all for one in found]):8.3f}"
            f"{sum(one.is_right for one in found):5d} of {len(found)}"
        )


def measure_model(report: Report, folder: Path, sizes: ModelSizes) -> list[str]:
    """Measure the model of *folder*; return the tables."""
    model, rng = RealModel(folder), random.Random(SEED)
    facts = Tried(model, [one for _ in range(sizes.contexts) for one in model.facts(rng)])
    text = Tried(model, list(islice(model.passages(), sizes.texts)))
    bare = Tried(
        model, [replace(one, prefix=(), stood=(1, 2, 3, 0))
                for one in (*facts.prompts[: 2 * sizes.bare : 2], *text.prompts[: sizes.bare])]
    )  # fmt: skip
    _compare_bare(report, bare)
    part = quotient(facts.by_context(("hybrid", 0.3)), facts.by_context(NAIVE))
    report.add(
        "hybrid30_answers_vs_naive",
        part[0],
        f"KL of answers of hybrid at 30 % over that of naive reuse, {_interval(part)}",
        f"documents stored {SERVED}; {sizes.contexts} contexts of {QUESTIONS} questions",
    )
    for way in (SERVED, WAYS[0]):
        report.note(f"gate, documents stored {way}", *_gate(way, (facts, text)))
    keys = [NAIVE, *((name, ratio) for name in SELECTORS for ratio in RATIOS)]
    lines = []
    for title, tried in (("facts", facts), ("text", text)):
        right = sum(one.is_right for one in tried.full)
        lines.append(f"{folder.name}, {title}: {right} of {len(tried.full)} right in full")
        lines.append(f"  {'documents stored':26s}{'selector':16s}ratio  question    answer"
                     "   clear     all  right")  # fmt: skip
        lines += [tried.line(way, key) for way in WAYS[:-1] for key in (NAIVE, ("hybrid", 0.3))]
        lines += [tried.line(SERVED, key) for key in keys]
    return [*lines, "without a prefix", *(bare.line(NO_PREFIX, key) for key in keys)]


def _compare_bare(report: Report, bare: Tried) -> None:
    """Say how the worst selector does where nothing of a prompt is exact."""
    naive = np.array([one.pooled for one in bare.judged(NO_PREFIX, NAIVE)])
    found = {
        (name, ratio): quotient(
            np.array([one.pooled for one in bare.judged(NO_PREFIX, (name, ratio))]), naive
        )
        for name in SELECTORS
        for ratio in RATIOS
    }
    worst = max(found, key=lambda key: found[key][0])
    report.add(
        "worst_selector_vs_naive_no_prefix",
        found[worst][0],
        f"KL of {worst[0]} at {worst[1]:.0%} over naive reuse, {_interval(found[worst])}",
        f"no prefix, the first document moved; naive {naive.mean():.4f}, {len(naive)} prompts",
    )


def _gate(way: str, tried: Sequence[Tried]) -> tuple[str, str]:
    """Return whether a gate opens on prompts whose documents were stored in one *way*, and why."""
    gates, name = Gates(GateTerms(), lambda: 1.0, Counters()), (b"model", "")
    while True:
        ratio = gates.view(name).ratio
        found = [one.told for part in tried for one in part.judged(way, ("hybrid", ratio))]
        for number in range(TRIALS):
            one = found[number % len(found)]
            told = Told(one.divergence, one.agreement, one.tokens, ratio)
            gate = gates.record(name, told)
        if gate.is_open or gate.why.startswith("closed"):
            state = "open" if gate.is_open else "closed"
            figures = f"agreement {gate.agreement:.3f}, KL {gate.divergence:.4f}"
            return f"{state} at {ratio:.3g}", f"{figures}, {len(found)} prompts in turns"


def _interval(found: Sequence[float]) -> str:
    return f"paired 95 %: [{found[1]:.3f}, {found[2]:.3f}]"
