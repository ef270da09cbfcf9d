"""Trials of a model's gate: documents in one order stored, in another blended and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.cli.app import given_access
from kvstore.cli.calibrate import read_text
from kvstore.cli.model_samples import load_model
from kvstore.client import Client, ClientOptions
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import SHADOW_TOKENS, GuardedBlender
from kvstore.client.blend.segments import SegmentRange
from kvstore.client.blend.selectors import check_selector
from kvstore.client.blend.store import store_prefill
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.engines.transformers.identity import representation_of
from kvstore.client.resolving import ResolveTerms
from kvstore.proto.blend import GateView, check_tag
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChunkKey

MAX_TRIALS = 1024
"""More than all ratios of a gate need."""
MAX_IDLE = 16
"""Trials in a row in which nothing was found to blend."""
DEADLINE_MS = 60_000
PREFIX_TOKENS = 16
"""Of the text, in front of prompts of a model without BOS: one chunk, which is exact."""


@dataclass(frozen=True, slots=True)
class TrialTerms:
    """What prompts are made of: *documents* of so many tokens each, in two orders, and the
    selector that is tried. Raises InvalidRequestError.
    """

    tag: str = ""
    documents: int = 4
    document_tokens: int = 128
    question_tokens: int = 32
    selector: str = "hybrid"
    seed: int = 0

    def __post_init__(self) -> None:
        check_tag(self.tag)
        check_selector(self.selector)


class TrialFiles(NamedTuple):
    """What prompts are made from: *text* to cut documents from, or *questions*, JSON lines of
    ``documents`` and a ``question`` about them; and a *prefix*, the system prompt.
    """

    text: Path | None
    questions: Path | None
    prefix: Path | None


class _Asked(NamedTuple):
    """Documents and a question about them, in tokens."""

    documents: list[list[int]]
    question: list[int]


class Prompt(NamedTuple):
    """A prompt's tokens, and where its documents are."""

    tokens: list[int]
    ranges: list[SegmentRange]


def run_trials(
    address: str,
    model_folder: Path,
    files: TrialFiles,
    terms: TrialTerms,
    follow: Callable[[GateView], None],
) -> GateView:
    """Return the gate once it is open, or closed for good; *follow* is told of it in between.

    Raises InvalidRequestError for a model or file that will not do, ModelError for a
    model that cannot be blended, KVStoreErrors of the server.
    """
    model, tokenizer = load_model(model_folder)
    prompts = _Prompts(tokenizer, files, terms)
    limit = getattr(model.config, "max_position_embeddings", None) or prompts.most_tokens
    if prompts.most_tokens > limit:
        fix = f"with its question and prefix at most {limit} tokens"
        raise InvalidRequestError("documents", prompts.most_tokens, fix)
    options = ClientOptions(
        chunk_tokens=min(256, terms.document_tokens),
        deadline_ms=DEADLINE_MS,
        name="calibrate",
        access=given_access(),
    )
    blender = Blender(TransformersAdapter(model))
    with Client(address, representation_of(model, tokenizer), options) as client:
        return _Trials(client, blender, terms, follow).run(prompts)


class _Prompts:
    """Prompts to store and to ask: the same documents in another order, behind one prefix.

    Without a prefix the first document would be exact, or bring its prompt's attention sink to
    another place: no prompt that is served begins with a document.
    """

    def __init__(self, tokenizer: Any, files: TrialFiles, terms: TrialTerms) -> None:
        self._tokenizer = tokenizer
        self._terms = terms
        text = [] if files.text is None else self._ids(read_text("text", files.text))
        if files.prefix is not None:
            self._prefix = list(tokenizer(read_text("prefix", files.prefix))["input_ids"])
        elif tokenizer.bos_token_id is not None:
            self._prefix = [tokenizer.bos_token_id]
        else:
            self._prefix, text = text[:PREFIX_TOKENS], text[PREFIX_TOKENS:]
        if not self._prefix:
            raise InvalidRequestError("prefix", None, "this model has no BOS: give --prefix FILE")
        self._asked: list[_Asked] = []
        self._passages: list[list[int]] = []
        if files.questions is not None:
            self._asked = list(self._questions(files.questions))
        elif files.text is not None:
            self._passages = _passages(text, terms)
        else:
            raise InvalidRequestError("text", None, "give --text FILE or --questions FILE")

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt, and of what is decoded behind it."""
        sizes = [sum(map(len, one.documents)) + len(one.question) for one in self._asked]
        terms = self._terms
        cut = terms.documents * terms.document_tokens + terms.question_tokens
        return len(self._prefix) + max(sizes, default=cut) + SHADOW_TOKENS

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _questions(self, path: Path) -> Iterator[_Asked]:
        for number, line in enumerate(read_text("questions", path).splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                documents, question = row["documents"], row["question"]
                asked = _Asked([self._ids(one) for one in documents], self._ids(question))
            except (ValueError, KeyError, TypeError):
                fix = 'a line is {"documents": ["...", "..."], "question": "..."}'
                raise InvalidRequestError("questions", f"line {number}", fix) from None
            if len(asked.documents) < 2 or not all((*asked.documents, asked.question)):
                fix = "give two documents or more and a question, none of them empty"
                raise InvalidRequestError("questions", f"line {number}", fix)
            yield asked

    def pairs(self, draw: np.random.Generator) -> Iterator[tuple[Prompt, Prompt]]:
        """Yield prompts to store and those to ask, MAX_TRIALS of them."""
        for number in range(MAX_TRIALS):
            one = self._asked[number % len(self._asked)] if self._asked else self._drawn(draw)
            order = [*range(1, len(one.documents)), 0]
            if len(order) > 2 and draw.random() < 0.5:  # two would be back as they were
                order.reverse()
            moved = [one.documents[place] for place in order]
            yield self._joined(one), self._joined(_Asked(moved, one.question))

    def _drawn(self, draw: np.random.Generator) -> _Asked:
        """Return passages of the text; the question is how one of them goes on."""
        places = draw.choice(len(self._passages) - 1, self._terms.documents, replace=False)
        ends = [place for place in places if place + 1 not in places]  # what is behind is in none
        behind = self._passages[draw.choice(ends) + 1]
        documents = [self._passages[place] for place in places]
        return _Asked(documents, behind[: self._terms.question_tokens])

    def _joined(self, asked: _Asked) -> Prompt:
        tokens, ranges = list(self._prefix), []
        for one in asked.documents:
            ranges.append(SegmentRange(len(tokens), len(tokens) + len(one)))
            tokens += one
        return Prompt([*tokens, *asked.question], ranges)


def _passages(ids: Sequence[int], terms: TrialTerms) -> list[list[int]]:
    size = terms.document_tokens
    found = [list(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
    if len(found) <= terms.documents:
        need = (terms.documents + 1) * size
        raise InvalidRequestError("text", len(ids), f"give at least {need} tokens")
    return found


@dataclass(frozen=True, slots=True)
class _Trials:
    client: Client
    blender: Blender
    terms: TrialTerms
    follow: Callable[[GateView], None]

    def run(self, prompts: _Prompts) -> GateView:
        trial = ResolveTerms(tag=self.terms.tag, is_trial=True)
        gated = GuardedBlender(self.client, self.blender, trial, self.terms.selector)
        idle = 0
        for stored, asked in prompts.pairs(np.random.default_rng(self.terms.seed)):
            keys = self._stored(stored)
            try:
                done = gated.run(*asked)
            finally:
                self.client.delete(keys=keys)
            if done.shadow is None or done.gate is None:
                idle += 1
                if idle == MAX_IDLE:
                    reason = done.failure or done.result.report.failure or "nothing was found"
                    raise KVStoreError(f"no trial succeeded: {reason}")
                continue
            idle = 0
            if done.gate.is_open or done.gate.why.startswith("closed"):
                return done.gate
            self.follow(done.gate)
        raise KVStoreError(f"the gate is not decided after {MAX_TRIALS} trials")

    def _stored(self, prompt: Prompt) -> list[ChunkKey]:
        tokens, ranges = prompt
        full = self.blender.prefill(tokens, logits_from=len(tokens) - 1)
        store_prefill(self.client, full, tokens, ranges)
        return [
            chunk_key(self.client.namespace, one.digest)
            for segment in self.client.name_segments(tokens, ranges)
            for one in segment.chunks
        ]
