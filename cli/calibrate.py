"""What `kvstore calibrate` runs: a model over a text, or over prompts with lossy copies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvstore.cli.app import EXIT_NOT_HELD, given_access
from kvstore.cli.blend import follow, print_gate
from kvstore.client import Client, ClientOptions
from kvstore.codecs.base import ChunkTensors, boundless_codecs
from kvstore.codecs.calibration import CHUNK_TOKENS, Layers, Samples, cut_prompt, read_dumps
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import accuracy_tag
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import DIGEST_BYTES, MIN_CHUNK_TOKENS, Component, LayerKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvstore.client.engines.transformers import TransformersConnector

CONTEXT_TOKENS = 1024
"""Of the prompts in which a model reads its text, at most."""
DEADLINE_MS = 60_000
MAX_LINES = 8
"""Of prompts that did not count, so many are named."""


def samples_of(
    sources: Sequence[Path], text: Path | None, representation: str | None, tokens: int
) -> Samples:
    """Return what to calibrate a codec with, out of a model's folder and a text, or of KV dumps.

    At most *tokens* of the text are used. Raises InvalidRequestError that says what is missing.
    """
    if tokens < CHUNK_TOKENS:
        raise InvalidRequestError("tokens", tokens, "give at least a chunk's")
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
    """Return the text in the file *path* that *option* names. Raises InvalidRequestError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(option, str(path), str(error)) from None


def read_lines(
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


def check_extras(folder: Path) -> None:
    """Raise InvalidRequestError where what runs a model is not installed."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        fix = f"needs {' and '.join(missing)}: pip install 'kvstore-server[transformers]'"
        raise InvalidRequestError("model", str(folder), fix)


def load_model(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model in *folder* and its tokenizer. Raises InvalidRequestError."""
    check_extras(folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise InvalidRequestError("model", str(folder), str(error).splitlines()[0]) from None
    return model, tokenizer


def run_model(folder: Path, text: str, tokens: int) -> Samples:
    """Return the KV that the model in *folder* computes of the first *tokens* of *text*.

    The model runs as its configuration says, in prompts of CONTEXT_TOKENS at most. Raises
    InvalidRequestError for a folder or a text that will not do, ModelError for a
    model whose KV cannot be stored.
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
    component = Component(
        group.kind, group.dtype, len(group.layer_ids), group.kv_heads, group.head_dim, CHUNK_TOKENS
    )
    limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT_TOKENS
    context = max(min(CONTEXT_TOKENS, limit), MIN_CHUNK_TOKENS)
    chunks: list[tuple[ChunkTensors, int]] = []
    for start in range(0, len(ids), context):
        prompt = ids[start : start + context]
        if len(prompt) >= MIN_CHUNK_TOKENS:
            chunks += cut_prompt(_computed(model, prompt))
    return Samples(representation_digest(named), component, chunks, named.rope)


def _computed(model: PreTrainedModel, prompt: Sequence[int]) -> Layers:
    """Return the KV of *prompt* as its bits."""
    import torch
    from transformers import DynamicCache

    from kvstore.client.engines.transformers.cache import forward
    from kvstore.client.tensors import to_array

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

    options = ClientOptions(
        chunk_tokens=chunk_tokens, deadline_ms=DEADLINE_MS, name="calibrate", access=given_access()
    )
    return Client(address, representation_of(model, tokenizer), options)


# --- gates of lossy copies


def compare_copies(
    models: Sequence[Path], codec: str, prompts: Path | None, chunk_tokens: int, address: str
) -> None:
    """Compare prompts of which *codec*'s copies are stored with their full prefills.

    Until their gate opened or closed. Ends the process with 1 when it is not open then. Raises
    InvalidRequestError for a codec whose copies need no gate, a model or file that will not do,
    or prompts of which the server has no such copies; ModelError for a model whose KV cannot be
    stored, KVStoreErrors of the server.
    """
    if len(models) > 1:
        raise InvalidRequestError("sources", len(models), "give one model")
    if prompts is None:
        raise InvalidRequestError("prompts", None, "give --prompts FILE")
    known = boundless_codecs()
    if codec not in known:
        fix = f"use one of {', '.join(known)}; copies by other codecs are read without a gate"
        raise InvalidRequestError("codec", codec, fix)
    read_text("prompts", prompts)  # before the model is loaded
    model, tokenizer = load_model(models[0])
    from kvstore.client.engines.transformers import TransformersConnector

    short = list[str]()
    rows = _prompts(prompts, model, tokenizer)
    with connect(address, model, tokenizer, chunk_tokens) as client:
        gate = client.report_reuse(pb.ReportReuseRequest(tag=accuracy_tag(codec)))
        compared = 0
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
    print_gate(gate)
    _name_short(short)
    if not gate.is_open:
        raise typer.Exit(EXIT_NOT_HELD)


def _name_short(short: Sequence[str]) -> None:
    if short:
        lines = ", ".join(short[:MAX_LINES]) + ", ..." * (len(short) > MAX_LINES)
        fix = "give prompts that are longer, or more of which is stored by this codec alone"
        text = f"{len(short)} of the prompts did not count: too few tokens could be compared; {fix}"
        typer.echo(f"{text} (lines {lines})", err=True)


def _prompts(path: Path, model: PreTrainedModel, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return the tokens of the prompts in a file, and the names of their lines."""

    def read(row: Any) -> list[int]:
        tokens = row["tokens"] if "tokens" in row else tokenizer(row["prompt"])["input_ids"]
        return [int(token) for token in tokens]

    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 32
    form = '{"prompt": "..."} or {"tokens": [1, 2, ...]}'
    rows = list(read_lines("prompts", path, form, read))
    for line, tokens in rows:
        if not 0 < len(tokens) <= limit:
            fix = f"1 to {limit} tokens, not {len(tokens)}"
            raise InvalidRequestError("prompts", line, fix)
    return rows


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
