"""Trials of blending by a model: the same documents stored in one order and blended in another.

Each is compared with a full prefill. Loads torch and transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.cli.blend import follow
from kvstore.cli.calibrate import connect, load_model, read_lines, read_text
from kvstore.client import Client
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import SHADOW_TOKENS, GuardedBlender, GuardedResult
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.blend.selectors import check_selector
from kvstore.client.blend.store import store_prefill
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.segments import SegmentQuery
from kvstore.proto.blend import GateView, check_tag
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chunk_key

MAX_TRIALS = 1024
"""More than all ratios of a gate need."""
MAX_IDLE = 16
"""Trials in a row in which nothing was found to blend."""
PREFIX_TOKENS = 16
"""Of the text, in front of prompts of a model without BOS: one chunk, which is exact."""

_Question: TypeAlias = tuple[list[list[int]], list[int]]
"""Documents and a question about them, in tokens."""


@dataclass(frozen=True, slots=True)
class BlendTrials:
    """What is tried.

    Prompts are made from *text*, cut into documents of so many tokens each, or are *questions*:
    JSON lines of ``documents`` and a ``question`` about them; *prefix* is the system prompt.
    Raises InvalidRequestError.
    """

    text: Path | None
    questions: Path | None
    prefix: Path | None
    tag: str
    documents: int
    document_tokens: int
    question_tokens: int
    selector: str
    seed: int

    def __post_init__(self) -> None:
        check_tag(self.tag)
        check_selector(self.selector)

    def run(self, address: str, model_folder: Path) -> GateView:
        """Return the gate once it is open, or closed for good.

        Raises InvalidRequestError for a model or file that will not do, ModelError for a
        model that cannot be blended, KVStoreErrors of the server.
        """
        model, tokenizer = load_model(model_folder)
        prompts = _Prompts(tokenizer, self)
        limit = getattr(model.config, "max_position_embeddings", None) or prompts.max_tokens
        if prompts.max_tokens > limit:
            fix = f"with its question and prefix at most {limit} tokens"
            raise InvalidRequestError("documents", prompts.max_tokens, fix)
        blender = Blender(TransformersAdapter(model))
        idle, draw = 0, np.random.default_rng(self.seed)
        with connect(address, model, tokenizer, min(256, self.document_tokens)) as client:
            terms = SegmentQuery(tag=self.tag, is_trial=True)
            guarded = GuardedBlender(client, blender, terms, self.selector)
            for _ in range(MAX_TRIALS):
                done = _tried(client, blender, guarded, *prompts.pair(draw))
                if done.shadow is None or done.gate is None:
                    idle += 1
                    if idle == MAX_IDLE:
                        reason = done.failure or done.result.report.failure or "nothing was found"
                        raise KVStoreError(f"no trial succeeded: {reason}")
                    continue
                idle = 0
                if done.gate.is_open or done.gate.why.startswith("closed"):
                    return done.gate
                follow(done.gate)
        raise KVStoreError(f"the gate is not decided after {MAX_TRIALS} trials")


class _Prompt(NamedTuple):
    """A prompt's tokens, and where its documents are."""

    tokens: list[int]
    ranges: list[SegmentRange]


def _tried(
    client: Client, blender: Blender, guarded: GuardedBlender, stored: _Prompt, moved: _Prompt
) -> GuardedResult:
    """Blend *moved* out of what is stored of *stored* meanwhile."""
    full = blender.prefill(stored.tokens, logits_from=len(stored.tokens) - 1)
    store_prefill(client, full, *stored)
    try:
        return guarded.run(*moved)
    finally:
        digests = [one.digest for part in client.name_segments(*stored) for one in part.chunks]
        client.delete(keys=[chunk_key(client.namespace, digest) for digest in digests])


class _Prompts:
    """Prompts to store and to blend: the same documents in another order, behind one prefix.

    Without a prefix the first document would be exact, or bring its prompt's attention sink to
    another place: no prompt that is served begins with a document.
    """

    def __init__(self, tokenizer: Any, trials: BlendTrials) -> None:
        self._tokenizer = tokenizer
        self._trials = trials
        text = [] if trials.text is None else self._ids(read_text("text", trials.text))
        if trials.prefix is not None:
            self._prefix = list(tokenizer(read_text("prefix", trials.prefix))["input_ids"])
        elif tokenizer.bos_token_id is not None:
            self._prefix = [tokenizer.bos_token_id]
        else:
            self._prefix, text = text[:PREFIX_TOKENS], text[PREFIX_TOKENS:]
        if not self._prefix:
            raise InvalidRequestError("prefix", None, "this model has no BOS: give --prefix FILE")
        self._given: Iterator[_Question] = iter(())
        self._passages: list[list[int]] = []
        longest = trials.documents * trials.document_tokens + trials.question_tokens
        if trials.questions is not None:
            given = list(self._questions(trials.questions))
            if not given:
                raise InvalidRequestError("questions", str(trials.questions), "give a line or more")
            longest = max(sum(map(len, documents)) + len(asked) for documents, asked in given)
            self._given = itertools.cycle(given)
        elif trials.text is not None:
            size = trials.document_tokens
            stops = range(size, len(text) + 1, size)
            self._passages = [text[stop - size : stop] for stop in stops]
            if len(self._passages) <= trials.documents:
                fix = f"give at least {(trials.documents + 1) * size} tokens"
                raise InvalidRequestError("text", len(text), fix)
        else:
            raise InvalidRequestError("text", None, "give --text FILE or --questions FILE")
        self.max_tokens = len(self._prefix) + longest + SHADOW_TOKENS
        """Of the longest prompt, and of what is decoded behind it."""

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _questions(self, path: Path) -> Iterator[_Question]:
        def read(row: Any) -> _Question:
            return [self._ids(one) for one in row["documents"]], self._ids(row["question"])

        form = '{"documents": ["...", "..."], "question": "..."}'
        for line, (documents, question) in read_lines("questions", path, form, read):
            if len(documents) < 2 or not all((*documents, question)):
                fix = "give two documents or more and a question, none of them empty"
                raise InvalidRequestError("questions", line, fix)
            yield documents, question

    def pair(self, draw: np.random.Generator) -> tuple[_Prompt, _Prompt]:
        """Return a prompt to store and one to blend."""
        documents, question = self._drawn(draw) if self._passages else next(self._given)
        order = [*range(1, len(documents)), 0]
        if len(order) > 2 and draw.random() < 0.5:  # two would be back as they were
            order.reverse()
        moved = [documents[place] for place in order]
        return self._joined(documents, question), self._joined(moved, question)

    def _drawn(self, draw: np.random.Generator) -> _Question:
        """Return passages of the text; the question is how one of them goes on."""
        places = draw.choice(len(self._passages) - 1, self._trials.documents, replace=False)
        ends = [place for place in places if place + 1 not in places]  # what is behind is in none
        behind = self._passages[draw.choice(ends) + 1]
        documents = [self._passages[place] for place in places]
        return documents, behind[: self._trials.question_tokens]

    def _joined(self, documents: Sequence[list[int]], question: list[int]) -> _Prompt:
        tokens, ranges = list(self._prefix), []
        for one in documents:
            ranges.append(SegmentRange(len(tokens), len(tokens) + len(one)))
            tokens += one
        return _Prompt([*tokens, *question], ranges)
