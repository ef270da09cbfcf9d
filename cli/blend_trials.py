"""Trials of a model's gate: documents in one order stored, in another blended and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.cli.access import given_access
from kvstore.client import Client, ClientOptions
from kvstore.client.blend.blender import Blender
from kvstore.client.blend.gate import GatedBlender
from kvstore.client.blend.selectors import selector_of
from kvstore.client.blend.store_prefill import store_prefill
from kvstore.client.engines.transformers_blend import TransformersAdapter
from kvstore.client.engines.transformers_identity import representation_of
from kvstore.client.resolving import ResolveTerms
from kvstore.proto.blend import GateView, SegmentRange, check_tag
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChunkKey

MAX_TRIALS = 1024
"""More than all ratios of a gate need."""
MAX_IDLE = 16
"""Trials in a row in which nothing was found to blend."""
DEADLINE_MS = 60_000


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
        selector_of(self.selector)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.documents * self.document_tokens + self.question_tokens


def run_trials(
    address: str,
    model_folder: Path,
    text: Path,
    terms: TrialTerms,
    follow: Callable[[GateView], None],
) -> GateView:
    """Return the gate once it is open, or closed for good; *follow* is told of it in between.

    Raises InvalidRequestError for a model or text that will not do, RepresentationError for a
    model that cannot be blended, KVStoreErrors of the server.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
    except (OSError, ValueError) as error:
        fix = str(error).splitlines()[0]
        raise InvalidRequestError("model", str(model_folder), fix) from None
    limit = getattr(model.config, "max_position_embeddings", None) or terms.prompt_tokens
    if terms.prompt_tokens > limit:
        raise InvalidRequestError("documents", terms.prompt_tokens, f"at most {limit} tokens")
    try:
        ids = tokenizer(text.read_text())["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("text", str(text), str(error)) from None
    options = ClientOptions(
        chunk_tokens=min(256, terms.document_tokens),
        deadline_ms=DEADLINE_MS,
        name="calibrate",
        access=given_access(),
    )
    blender = Blender(TransformersAdapter(model))
    with Client(address, representation_of(model, tokenizer), options) as client:
        return _Trials(client, blender, terms, follow).run(_passages(ids, terms))


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

    def run(self, passages: Sequence[Sequence[int]]) -> GateView:
        trial = ResolveTerms(tag=self.terms.tag, is_trial=True)
        gated = GatedBlender(self.client, self.blender, trial, self.terms.selector)
        idle = 0
        for stored, asked in self._prompts(passages):
            keys = self._stored(stored)
            try:
                done = gated.run(asked, self._ranges())
            finally:
                self.client.delete(keys)
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

    def _prompts(self, passages: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield prompts to store and those to ask: the same documents in another order."""
        draw = np.random.default_rng(self.terms.seed)
        count = self.terms.documents
        for _ in range(MAX_TRIALS):
            chosen = draw.choice(len(passages), count + 1, replace=False)
            question = list(passages[chosen[-1]][: self.terms.question_tokens])
            order = [*range(1, count), 0]
            if draw.random() < 0.5:
                order.reverse()
            documents = [passages[place] for place in chosen[:-1]]
            yield (
                [*(token for one in documents for token in one), *question],
                [*(token for place in order for token in documents[place]), *question],
            )

    def _ranges(self) -> list[SegmentRange]:
        size = self.terms.document_tokens
        return [SegmentRange(at * size, (at + 1) * size) for at in range(self.terms.documents)]

    def _stored(self, tokens: Sequence[int]) -> list[ChunkKey]:
        store_prefill(
            self.client,
            self.blender.prefill(tokens, logits_from=len(tokens) - 1),
            tokens,
            self._ranges(),
        )
        return [
            chunk_key(self.client.namespace, one.digest)
            for segment in self.client.name_segments(tokens, self._ranges())
            for one in segment.chunks
        ]
