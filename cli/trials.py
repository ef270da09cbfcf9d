"""The trials of `kvstore calibrate` and `blend calibrate`: a model on a text or stored prompts.

Needs torch and transformers, except for KV dumps.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvstore.cli import app
from kvstore.cli.calibrate import check_extras
from kvstore.client import Client
from kvstore.client.blend.plan import SegmentRange
from kvstore.client.segments import SegmentQuery
from kvstore.codecs.base import REPLACED, ChunkTensors, boundless_codecs
from kvstore.codecs.calibration import CHUNK_TOKENS, DUMPS, Layers, Samples, cut_prompt, read_dumps
from kvstore.proto.blend import GateView, ReuseReport, accuracy_tag, check_tag
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError
from kvstore.proto.keys import chunk_key, representation_digest
from kvstore.proto.types import DIGEST_BYTES, MIN_CHUNK_TOKENS, KVLayout, LayerKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvstore.client.blend.engine import Blender
    from kvstore.client.blend.gate import GuardedBlender, GuardedResult
    from kvstore.client.engines.transformers import TransformersConnector

CONTEXT_TOKENS = 1024
"""Limit of the prompts in which a model reads its text."""
DEADLINE_MS = 60_000
MAX_LINES = 8
"""Limit of listed prompts that did not count."""
MAX_TRIALS = 1024
"""More than all ratios of a gate need."""
MAX_IDLE = 16
"""Limit of consecutive trials without a blend."""
PREFIX_TOKENS = 16
"""Tokens of the text that replace BOS for a model without one: one exact chunk."""
T = TypeVar("T")
_REPORT_EVERY = 8
"""Trials per line of progress."""
_Question: TypeAlias = tuple[list[list[int]], list[int]]
"""Documents and a question about them, in tokens."""


class PromptLine(msgspec.Struct):
    """A line of --prompts."""

    prompt: str = ""
    tokens: tuple[int, ...] = ()


class QuestionLine(msgspec.Struct):
    """A line of --questions."""

    documents: Annotated[list[str], Meta(min_length=2)]
    question: str


def samples_of(
    sources: Sequence[Path], text: Path | None, representation: str | None, tokens: int
) -> Samples:
    """Return samples of a model on *tokens* of a text, or of dumps. Raises InvalidRequestError."""
    if tokens < CHUNK_TOKENS:
        raise InvalidRequestError("tokens", tokens, f"give at least {CHUNK_TOKENS}")
    is_dump = representation is not None or sources[0].suffix in DUMPS
    if not is_dump and not sources[0].exists():
        raise InvalidRequestError("sources", str(sources[0]), "no such folder")
    if not sources[0].is_dir():
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}", representation or ""):
            fix = f"dumps need the model's representation digest, {2 * DIGEST_BYTES} hex digits"
            raise InvalidRequestError("representation", representation, fix)
        return read_dumps(sources, bytes.fromhex(representation or ""))
    if len(sources) > 1:
        raise InvalidRequestError("sources", len(sources), "give one model, or dumps")
    if text is None:
        raise InvalidRequestError("text", None, "a model needs a text to read")
    return run_model(sources[0], read_text("text", text), tokens)


def read_text(option: str, path: Path) -> str:
    """Return the text in the file *path* given by *option*. Raises InvalidRequestError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(option, str(path), str(error)) from None


def read_lines(option: str, path: Path, form: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the name of each JSON line, and the line as a *kind*. Raises InvalidRequestError."""
    for number, line in enumerate(read_text(option, path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            fix = f"{error}; a line is {form}"
            raise InvalidRequestError(option, f"line {number}", fix) from None
        yield f"line {number}", found


def load_model(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model in *folder* and its tokenizer. Raises InvalidRequestError."""
    check_extras(folder)
    if not folder.is_dir():
        raise InvalidRequestError("model", str(folder), "no such folder")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise InvalidRequestError("model", str(folder), str(error).splitlines()[0]) from None
    return model, tokenizer


def run_model(folder: Path, text: str, tokens: int) -> Samples:
    """Return the KV that the model in *folder* computes for the first *tokens* of *text*.

    The model runs by its configuration, in prompts of at most CONTEXT_TOKENS. Raises
    InvalidRequestError, and ModelError for a model whose KV cannot be stored.
    """
    from kvstore.client.engines.transformers.identity import representation_of

    model, tokenizer = load_model(folder)
    named = representation_of(model, tokenizer)
    group, *others = named.layer_groups
    if others or group.kind is not LayerKind.attention:
        raise ModelError("layers", group.kind.name, "only full-attention layers are stored")
    ids = tokenizer(text)["input_ids"][:tokens]
    if len(ids) < MIN_CHUNK_TOKENS:
        raise InvalidRequestError("text", len(ids), f"give at least {MIN_CHUNK_TOKENS} tokens")
    (component,) = KVLayout.of(named, CHUNK_TOKENS).components
    limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT_TOKENS
    context = max(min(CONTEXT_TOKENS, limit), MIN_CHUNK_TOKENS)
    chunks: list[tuple[ChunkTensors, int]] = []
    for start in app.followed(range(0, len(ids), context), "reading the text"):
        prompt = ids[start : start + context]
        if len(prompt) >= MIN_CHUNK_TOKENS:
            chunks += cut_prompt(_computed(model, prompt))
    return Samples(representation_digest(named), component, chunks, named.rope)


def _computed(model: PreTrainedModel, prompt: Sequence[int]) -> Layers:
    """Return the KV of *prompt* as unsigned integers."""
    import torch
    from transformers import DynamicCache

    from kvstore.client.chunk import to_array
    from kvstore.client.engines.transformers.cache import forward

    cache, found = DynamicCache(config=model.config), []
    forward(model, torch.tensor([prompt], device=model.device), cache)
    layers: Sequence[Any] = cache.layers
    for layer in layers:
        arrays = [to_array(part[0].cpu().contiguous()) for part in (layer.keys, layer.values)]
        found.append([array.view(f"<u{array.dtype.itemsize}") for array in arrays])
    return found


def connect(address: str, model: PreTrainedModel, tokenizer: Any, chunk_tokens: int) -> Client:
    """Return a client of *model*."""
    from kvstore.client.engines.transformers import representation_of

    named, terms = representation_of(model, tokenizer), {"chunk_tokens": chunk_tokens}
    return app.client_of(address, named, DEADLINE_MS, name="calibrate", **terms)


# --- gates of lossy copies


def compare_copies(
    models: Sequence[Path], codec: str, prompts: Path | None, chunk_tokens: int, address: str
) -> GateView:
    """Compare prompts stored by *codec* with their full prefills.

    Returns the gate once it opened or closed, or all prompts were compared. Raises
    InvalidRequestError, ModelError for a model whose KV cannot be stored, and KVStoreErrors.
    """
    if len(models) > 1:
        raise InvalidRequestError("sources", len(models), "give one model")
    if prompts is None:
        raise InvalidRequestError("prompts", None, "give --prompts FILE")
    known = boundless_codecs()
    if codec not in known:
        others = f"one of {', '.join(known)}; copies of other codecs need no gate"
        new = REPLACED.get(codec)
        fix = f"use {f'{new}, which replaces {codec}' if new else others}"
        raise InvalidRequestError("codec", codec, fix)
    read_text("prompts", prompts)  # before the model is loaded
    model, tokenizer = load_model(models[0])
    from kvstore.client.engines.transformers import TransformersConnector

    short = list[str]()
    rows = _prompts(prompts, model, tokenizer)
    with connect(address, model, tokenizer, chunk_tokens) as client:
        gate = client.report_reuse(ReuseReport(accuracy_tag(codec)))
        compared = 0
        connector = TransformersConnector(client, model)
        for line, tokens in rows:
            found = connector.calibrate([tokens], codec)
            if found is None:
                continue
            before, gate, compared = gate, found, compared + 1
            is_news = gate.why != before.why  # each trial that counts changes it
            if gate.is_open != before.is_open or (is_news and gate.why.startswith("closed")):
                break
            if is_news or gate.is_open:
                _follow(gate)
            else:
                short.append(line.removeprefix("line "))
        if not compared:
            raise InvalidRequestError("prompts", str(prompts), _not_compared(connector, codec))
    if short:
        lines = ", ".join(short[:MAX_LINES]) + ", ..." * (len(short) > MAX_LINES)
        fix = "give longer prompts, or prompts stored by this codec to a larger part"
        text = f"{len(short)} of the prompts did not count: too few tokens to compare; {fix}"
        print(f"{text} (lines {lines})", file=sys.stderr)
    return gate


def _follow(gate: GateView) -> None:
    if gate.shadows % _REPORT_EVERY == 0:
        print(f"ratio {gate.ratio:.3f}, {gate.why}", file=sys.stderr, flush=True)


def _prompts(path: Path, model: PreTrainedModel, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return the tokens of each prompt in a file, with the name of its line."""
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 32
    form = '{"prompt": "..."} or {"tokens": [1, 2, ...]}'
    found = []
    for line, row in read_lines("prompts", path, form, PromptLine):
        tokens = list(row.tokens)
        if row.prompt and not tokens:
            tokens = tokenizer(row.prompt)["input_ids"]
        if not 0 < len(tokens) <= limit:
            fix = f"1 to {limit} tokens, not {len(tokens)}; a line is {form}"
            raise InvalidRequestError("prompts", line, fix)
        found.append((line, tokens))
    return found


def _not_compared(connector: TransformersConnector, codec: str) -> str:
    stats = connector.stats()
    if stats.load_errors:
        return f"the store failed: {', '.join(stats.load_errors)}"
    if not stats.hit_tokens:
        fix = "give the model, its revision and --chunk-tokens of the engine that stored them"
        return f"none of {stats.lookups} prompts is stored under this model's identity: {fix}"
    fix = f"with --codec disk={codec} the disk has them once memory has evicted them"
    return f"no approximate copy by {codec} was read of {stats.lookups} prompts; {fix}"


# --- blending


class _Prompt(NamedTuple):
    """A prompt's tokens, and the ranges of its documents."""

    tokens: list[int]
    ranges: list[SegmentRange]


@dataclass(frozen=True, slots=True)
class BlendTrials:
    """Trials of blending.

    Prompts are made from *text*, cut into documents of *document_tokens*, or are *questions*:
    JSON lines of ``documents`` and a ``question`` about them; *prefix* is the system prompt.
    """

    text: Path | None
    questions: Path | None
    prefix: Path | None
    tag: str
    documents: int
    document_tokens: int
    question_tokens: int

    def run(self, address: str, model_folder: Path) -> GateView:
        """Return the gate once it is open, or closed for good. Raises KVStoreErrors."""
        check_tag(self.tag)
        model, tokenizer = load_model(model_folder)
        from kvstore.client.blend.engine import Blender
        from kvstore.client.blend.gate import SHADOW_TOKENS, GuardedBlender
        from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter

        pairs, longest = self._prompts(tokenizer, np.random.default_rng(0))
        longest += SHADOW_TOKENS  # decoded after it
        limit = getattr(model.config, "max_position_embeddings", None) or longest
        if longest > limit:
            fix = f"at most {limit} tokens with question and prefix"
            raise InvalidRequestError("documents", longest, fix)
        blender, idle = Blender(TransformersAdapter(model)), 0
        with connect(address, model, tokenizer, min(256, self.document_tokens)) as client:
            terms = SegmentQuery(tag=self.tag, is_trial=True)
            guarded = GuardedBlender(client, blender, terms)
            for stored, moved in itertools.islice(pairs, MAX_TRIALS):
                done = _tried(client, blender, guarded, stored, moved)
                if done.shadow is None or done.gate is None:
                    idle += 1
                    if idle == MAX_IDLE:
                        reason = done.failure or done.result.report.failure or "nothing was found"
                        raise KVStoreError(f"no trial succeeded: {reason}")
                    continue
                idle = 0
                if done.gate.is_open or done.gate.why.startswith("closed"):
                    return done.gate
                _follow(done.gate)
        raise KVStoreError(f"the gate is not decided after {MAX_TRIALS} trials")

    def _prompts(
        self, tokenizer: Any, draw: np.random.Generator
    ) -> tuple[Iterator[tuple[_Prompt, _Prompt]], int]:
        """Return endless pairs of prompts, to store and to blend, and the longest one's tokens.

        A pair has the same documents in another order, after one prefix. Without a prefix the
        first document would be exact, or move its prompt's attention sink: served prompts do not
        begin with a document.
        """

        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        text = [] if self.text is None else ids(read_text("text", self.text))
        if self.prefix is not None:
            prefix = list(tokenizer(read_text("prefix", self.prefix))["input_ids"])
        elif tokenizer.bos_token_id is not None:
            prefix = [tokenizer.bos_token_id]
        else:
            prefix, text = text[:PREFIX_TOKENS], text[PREFIX_TOKENS:]
        if not prefix:
            raise InvalidRequestError("prefix", None, "this model has no BOS: give --prefix FILE")
        if self.questions is not None:
            given = list(_questions(self.questions, ids))
            if not given:
                raise InvalidRequestError(
                    "questions", str(self.questions), "give at least one line"
                )
            longest = max(sum(map(len, documents)) + len(question) for documents, question in given)
            rounds: Iterator[_Question] = itertools.cycle(given)
        elif self.text is not None:
            size = self.document_tokens
            passages = [text[stop - size : stop] for stop in range(size, len(text) + 1, size)]
            if len(passages) <= self.documents:
                fix = f"give at least {(self.documents + 1) * size} tokens"
                raise InvalidRequestError("text", len(text), fix)
            longest = self.documents * size + self.question_tokens
            rounds = iter(lambda: self._drawn(passages, draw), None)
        else:
            raise InvalidRequestError("text", None, "give --text FILE or --questions FILE")
        return (_pair(prefix, *one, draw) for one in rounds), len(prefix) + longest

    def _drawn(self, passages: list[list[int]], draw: np.random.Generator) -> _Question:
        """Return random passages of the text, and the continuation of one as the question."""
        places = draw.choice(len(passages) - 1, self.documents, replace=False)
        ends = [place for place in places if place + 1 not in places]  # the next is not drawn
        behind = passages[draw.choice(ends) + 1]
        return [passages[place] for place in places], behind[: self.question_tokens]


def _questions(path: Path, ids: Callable[[str], list[int]]) -> Iterator[_Question]:
    form = '{"documents": ["...", "..."], "question": "..."}, none of them empty'
    for line, row in read_lines("questions", path, form, QuestionLine):
        *documents, question = map(ids, (*row.documents, row.question))
        if not all((*documents, question)):  # some tokenizers make no token of blanks
            raise InvalidRequestError("questions", line, f"a line is {form}")
        yield documents, question


def _pair(
    prefix: list[int], documents: list[list[int]], question: list[int], draw: np.random.Generator
) -> tuple[_Prompt, _Prompt]:
    order = [*range(1, len(documents)), 0]
    if len(order) > 2 and draw.random() < 0.5:  # reversing two restores their order
        order.reverse()
    prompts = []
    for some in (documents, [documents[place] for place in order]):
        tokens, ranges = list(prefix), []
        for one in some:
            ranges.append(SegmentRange(len(tokens), len(tokens) + len(one)))
            tokens += one
        prompts.append(_Prompt([*tokens, *question], ranges))
    stored, moved = prompts
    return stored, moved


def _tried(
    client: Client, blender: Blender, guarded: GuardedBlender, stored: _Prompt, moved: _Prompt
) -> GuardedResult:
    """Store the prompt *stored*, blend *moved* from it, and delete it."""
    from kvstore.client.blend.store import store_prefill

    full = blender.prefill(stored.tokens, logits_from=len(stored.tokens) - 1)
    store_prefill(client, full, *stored)
    try:
        return guarded.run(*moved)
    finally:
        digests = [one.digest for part in client.name_segments(*stored) for one in part.chunks]
        client.delete(keys=[chunk_key(client.namespace, digest) for digest in digests])
