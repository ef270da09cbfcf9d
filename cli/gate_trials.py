"""Trials of the gate of a model and a codec: prompts behind its lossy copies, and in full."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.cli.app import given_access
from kvstore.cli.calibrate import read_text
from kvstore.cli.model_samples import load_model
from kvstore.client import Client, ClientOptions
from kvstore.client.engines.transformers import TransformersConnector
from kvstore.client.engines.transformers.identity import representation_of
from kvstore.codecs.base import boundless_codecs
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView, accuracy_tag
from kvstore.proto.errors import InvalidRequestError

DEADLINE_MS = 60_000


class GateTrials(NamedTuple):
    """Prompts of which copies by *codec* are stored, in JSON lines, and the engine's chunks."""

    codec: str
    prompts: Path
    chunk_tokens: int


class GateTrialsDone(NamedTuple):
    """What came of trials: the gate, and the lines of the prompts that did not count, as too few of
    their tokens could be compared."""

    gate: GateView
    short: Sequence[int]


def run_gate_trials(
    address: str, model_folder: Path, trials: GateTrials, follow: Callable[[GateView], None]
) -> GateTrialsDone:
    """Return the gate once it opened or closed, or all prompts were compared; *follow* is told of
    it in between.

    Raises InvalidRequestError for a codec whose copies need no gate, a model or file that will not
    do, or prompts of which the server has no such copies; ModelError for a model whose KV
    cannot be stored, KVStoreErrors of the server.
    """
    known = boundless_codecs()
    if trials.codec not in known:
        fix = f"use one of {', '.join(known)}; copies by other codecs are read without a gate"
        raise InvalidRequestError("codec", trials.codec, fix)
    text = read_text("prompts", trials.prompts)
    model, tokenizer = load_model(model_folder)
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 32
    prompts = list(_prompts(text, tokenizer, limit))
    options = ClientOptions(
        chunk_tokens=trials.chunk_tokens,
        deadline_ms=DEADLINE_MS,
        name="calibrate",
        access=given_access(),
    )
    with Client(address, representation_of(model, tokenizer), options) as client:
        asked = pb.ReportReuseRequest(tag=accuracy_tag(trials.codec))
        gate, compared, short = client.report_reuse(asked), 0, list[int]()
        connector = TransformersConnector(client, model)
        for number, tokens in prompts:
            found = connector.calibrate([tokens], trials.codec)
            if found is None:
                continue
            before, gate, compared = gate, found, compared + 1
            is_news = gate.why != before.why  # each trial that counts says so
            if gate.is_open != before.is_open or (is_news and gate.why.startswith("closed")):
                break
            if is_news or gate.is_open:
                follow(gate)
            else:
                short.append(number)
        if not compared:
            raise InvalidRequestError("prompts", str(trials.prompts), _why(connector, trials))
    return GateTrialsDone(gate, short)


def _why(connector: TransformersConnector, trials: GateTrials) -> str:
    """Say why no prompt was compared."""
    stats = connector.stats()
    if stats.load_errors:
        return f"the store failed: {', '.join(stats.load_errors)}"
    if not stats.hit_tokens:
        fix = "give the model, its revision and --chunk-tokens of the engine that stored them"
        return f"none of {stats.lookups} prompts is stored under this model's name: {fix}"
    fix = f"a tier has them with --codec disk={trials.codec} once memory has them no more"
    return f"no copy by {trials.codec} without a bound was read of {stats.lookups} prompts; {fix}"


def _prompts(text: str, tokenizer: Any, limit: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each prompt's line and its tokens."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tokens = row["tokens"] if "tokens" in row else tokenizer(row["prompt"])["input_ids"]
            found = [int(token) for token in tokens]
        except (ValueError, KeyError, TypeError):
            fix = 'a line is {"prompt": "..."} or {"tokens": [1, 2, ...]}'
            raise InvalidRequestError("prompts", f"line {number}", fix) from None
        if not 0 < len(found) <= limit:
            fix = f"1 to {limit} tokens, not {len(found)}"
            raise InvalidRequestError("prompts", f"line {number}", fix)
        yield number, found
