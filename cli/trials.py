"""Trials of gates, by a model: documents blended in another order, or lossy copies of prompts.

Each is compared with a full prefill. Loads torch and transformers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.cli.app import given_access
from kvstore.cli.calibrate import load_model, read_text
from kvstore.client import Client, ClientOptions
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.gate import SHADOW_TOKENS, GuardedBlender
from kvstore.client.blend.segments import SegmentRange
from kvstore.client.blend.selectors import check_selector
from kvstore.client.blend.store import store_prefill
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.client.engines.transformers.identity import representation_of
from kvstore.client.segments import SegmentQuery
from kvstore.codecs.base import boundless_codecs
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView, accuracy_tag, check_tag
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chunk_key

MAX_TRIALS = 1024
"""More than all ratios of a gate need."""
MAX_IDLE = 16
"""Trials in a row in which nothing was found to blend."""
DEADLINE_MS = 60_000
PREFIX_TOKENS = 16
"""Of the text, in front of prompts of a model without BOS: one chunk, which is exact."""

Follow = Callable[[GateView], None]
"""Gets the gate after each trial that decides nothing yet."""


def _lines(
    option: str, path: Path, form: str, read: Callable[[Any], Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each JSON line in a file and what *read* makes of it.

    Raises InvalidRequestError that names the line, and *form*, where *read* fails.
    """
    for number, line in enumerate(read_text(option, path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = read(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(option, f"line {number}", f"a line is {form}") from None
        yield f"line {number}", found


@contextmanager
def _connected(address: str, model: Any, tokenizer: Any, chunk_tokens: int) -> Iterator[Client]:
    options = ClientOptions(
        chunk_tokens=chunk_tokens, deadline_ms=DEADLINE_MS, name="calibrate", access=given_access()
    )
    with Client(address, representation_of(model, tokenizer), options) as client:
        yield client


# --- copies of a codec


def run_copy_trials(
    address: str, model_folder: Path, codec: str, prompts: Path, chunk_tokens: int, follow: Follow
) -> tuple[GateView, list[str]]:
    """Compare prompts of which *codec*'s copies are stored, until their gate opened or closed.

    Return the gate, and the lines of the *prompts* that did not count, as too few of their tokens
    could be compared. Raises InvalidRequestError for a codec whose copies need no gate, a model or
    file that will not do, or prompts of which the server has no such copies; ModelError for a model
    whose KV cannot be stored, KVStoreErrors of the server.
    """
    known = boundless_codecs()
    if codec not in known:
        fix = f"use one of {', '.join(known)}; copies by other codecs are read without a gate"
        raise InvalidRequestError("codec", codec, fix)
    read_text("prompts", prompts)  # before the model is loaded
    model, tokenizer = load_model(model_folder)
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 32

    def read(row: Any) -> list[int]:
        tokens = row["tokens"] if "tokens" in row else tokenizer(row["prompt"])["input_ids"]
        return [int(token) for token in tokens]

    rows = list(_lines("prompts", prompts, '{"prompt": "..."} or {"tokens": [1, 2, ...]}', read))
    for line, tokens in rows:
        if not 0 < len(tokens) <= limit:
            fix = f"1 to {limit} tokens, not {len(tokens)}"
            raise InvalidRequestError("prompts", line, fix)
    with _connected(address, model, tokenizer, chunk_tokens) as client:
        gate = client.report_reuse(pb.ReportReuseRequest(tag=accuracy_tag(codec)))
        compared, short = 0, list[str]()
        connector = TransformersConnector(client, model)
        for line, tokens in rows:
            found = connector.calibrate([tokens], codec)
            if found is None:
                continue
            before, gate, compared = gate, found, compared + 1
            is_news = gate.why != before.why  # each trial that counts says so
            if gate.is_open != before.is_open or (is_news and gate.why.startswith("closed")):
                break
            if is_news or gate.is_open:
                follow(gate)
            else:
                short.append(line.removeprefix("line "))
        if not compared:
            raise InvalidRequestError("prompts", str(prompts), _not_compared(connector, codec))
    return gate, short


def _not_compared(connector: TransformersConnector, codec: str) -> str:
    """Return why no prompt was compared."""
    stats = connector.stats()
    if stats.load_errors:
        return f"the store failed: {', '.join(stats.load_errors)}"
    if not stats.hit_tokens:
        fix = "give the model, its revision and --chunk-tokens of the engine that stored them"
        return f"none of {stats.lookups} prompts is stored under this model's name: {fix}"
    fix = f"a tier has them with --codec disk={codec} once memory has them no more"
    return f"no copy by {codec} without a bound was read of {stats.lookups} prompts; {fix}"


# --- blending


_Question: TypeAlias = tuple[list[list[int]], list[int]]
"""Documents and a question about them, in tokens."""


@dataclass(frozen=True, slots=True)
class BlendTrials:
    """What is tried: prompts, the same documents stored in one order and blended in another.

    Prompts are made from *text*, cut into documents of so many tokens each, or are *questions*:
    JSON lines of ``documents`` and a ``question`` about them; *prefix* is the system prompt.
    Raises InvalidRequestError.
    """

    text: Path | None
    questions: Path | None
    prefix: Path | None
    tag: str = ""
    documents: int = 4
    document_tokens: int = 128
    question_tokens: int = 32
    selector: str = "hybrid"
    seed: int = 0

    def __post_init__(self) -> None:
        check_tag(self.tag)
        check_selector(self.selector)

    def run(self, address: str, model_folder: Path, follow: Follow) -> GateView:
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
        terms = SegmentQuery(tag=self.tag, is_trial=True)
        idle, draw = 0, np.random.default_rng(self.seed)
        with _connected(address, model, tokenizer, min(256, self.document_tokens)) as client:
            guarded = GuardedBlender(client, blender, terms, self.selector)
            for _ in range(MAX_TRIALS):
                stored, moved = prompts.pair(draw)
                full = blender.prefill(stored.tokens, logits_from=len(stored.tokens) - 1)
                store_prefill(client, full, *stored)
                try:
                    done = guarded.run(*moved)
                finally:
                    named = client.name_segments(*stored)
                    digests = [chunk.digest for segment in named for chunk in segment.chunks]
                    client.delete(keys=[chunk_key(client.namespace, digest) for digest in digests])
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
        sizes = [trials.documents * trials.document_tokens + trials.question_tokens]
        if trials.questions is not None:
            given = list(self._questions(trials.questions))
            if not given:
                raise InvalidRequestError("questions", str(trials.questions), "give a line or more")
            sizes = [sum(map(len, documents)) + len(question) for documents, question in given]
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
        self.max_tokens = len(self._prefix) + max(sizes) + SHADOW_TOKENS
        """Of the longest prompt, and of what is decoded behind it."""

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _questions(self, path: Path) -> Iterator[_Question]:
        def read(row: Any) -> _Question:
            return [self._ids(one) for one in row["documents"]], self._ids(row["question"])

        form = '{"documents": ["...", "..."], "question": "..."}'
        for line, (documents, question) in _lines("questions", path, form, read):
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
