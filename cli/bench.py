"""`kvstore bench` and `kvstore codecs`: the speed of a server, and of codecs on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from kvstore.cli import app
from kvstore.proto import types
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.types import MIN_CHUNK_TOKENS, ChunkKey, KVLayout, Model, PutOutcome

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.client.chunk import Chunk
    from kvstore.codecs.base import ChunkTensors, Part

MAX_CHUNKS = 4096
MAX_BYTES = 4 << 30
"""Limit of all chunks of a run together: this process holds them twice."""
DEADLINE_MS = 60_000
CODEC_BUDGET_S = 0.2
"""Time to measure each codec, without its first use, which may compile."""
_HEAD_DIM = 8
MIN_CHUNK_BYTES = 16 * 2 * 2 * _HEAD_DIM
"""K and V of 16 tokens in bfloat16, one layer and one head."""
MAX_CHUNK_BYTES = 64 << 20
_PATTERNS = 4
"""Distinct chunks; further ones repeat their bytes under other names."""
_RATES = (
    "encode_bytes_per_s", "decode_bytes_per_s", "break_even_bytes_per_s", "full_gain_bytes_per_s",
)  # fmt: skip


# --- synthetic chunks of a fictitious model


def synthetic_model(chunk_bytes: int, name: str) -> Model:
    """Return a model whose 16-token chunks have about *chunk_bytes*. Raises InvalidRequestError."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        fix = f"give {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise InvalidRequestError("chunk_bytes", chunk_bytes, fix)
    heads = max(1, round(chunk_bytes / MIN_CHUNK_BYTES))
    kind, dtype = types.LayerKind.attention, types.DType.bfloat16
    layers = (types.LayerGroup(kind, dtype, (0,), heads, _HEAD_DIM),)
    rope = types.RopeParameters(10_000.0, _HEAD_DIM)
    return Model(f"kvstore/{name}", "1", "none", "none", layers, rope, "none")


def noise(model: Model, seed: int = 0) -> ChunkTensors:
    """Return a chunk's tensors of incompressible bytes, determined by *seed*."""
    import numpy as np

    from kvstore.codecs.base import empty_tensors

    tensors = empty_tensors(KVLayout.of(model, MIN_CHUNK_TOKENS))
    draw = np.random.default_rng(seed)
    for part in _parts_of(tensors):
        part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return tensors


def _parts_of(tensors: ChunkTensors) -> list[Part]:
    return [part for component in tensors for layer in component for part in layer]


def chunks_of(keys: Sequence[ChunkKey], tensors: Sequence[ChunkTensors]) -> list[Chunk]:
    """Return the chunks of a prompt, cycling through *tensors*."""
    from kvstore.client.chunk import Chunk, parents

    return [
        Chunk(key, tensors[at % len(tensors)], parent=parent, position=MIN_CHUNK_TOKENS * at)
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]


# --- bench


@app.command("bench", exits="0 1 2 3", example="--chunks 16 --json", section="Measure")
def bench(
    address: str,
    chunks: Annotated[int, app.number("Number of chunks.", 1, MAX_CHUNKS)] = 64,
    chunk_bytes: Annotated[int, app.size("Size of each chunk.")] = 1 << 20,
    transport: Annotated[Literal["auto", "shm", "tcp", "grpc"], Option(help="Transport.")] = "auto",
) -> app.Shown:
    """Write, read back, verify and delete synthetic chunks; report throughput and latency.

    Exits with 1 unless all were read back intact.
    """
    import numpy as np

    from kvstore.codecs.base import empty_tensors

    if chunks * chunk_bytes > MAX_BYTES:
        fix = f"all chunks together may have at most {app.readable_size(MAX_BYTES)}"
        raise InvalidRequestError("chunks", chunks, fix)
    clock, model = time.perf_counter, synthetic_model(chunk_bytes, "bench")
    options = {"transport": transport, "chunk_tokens": MIN_CHUNK_TOKENS, "name": "bench"}
    with app.client_of(address, model, DEADLINE_MS, **options) as client:
        made = [noise(model, seed) for seed in range(min(_PATTERNS, chunks))]
        tokens = np.random.default_rng().integers(0, 1 << 31, chunks * MIN_CHUNK_TOKENS)
        keys = client.keys(tokens.tolist())  # of no other run
        sent, layout = chunks_of(keys, made), KVLayout.of(model, MIN_CHUNK_TOKENS)
        out = [empty_tensors(layout) for _ in keys]
        try:
            began = clock()
            outcomes = [put.outcome for put in client.put_chunks(sent)]
            put = clock()
            ready = client.lookup(keys=keys).ready
            found = clock()
            got = len(client.get_chunks(keys[:ready], out[:ready])) if ready else 0
            read = clock()
        finally:
            client.delete(keys=keys)
    put_s, lookup_ms, get_s = put - began, (found - put) * 1e3, read - found
    right = sum(
        all(map(np.array_equal, _parts_of(made[at % len(made)]), _parts_of(out[at])))
        for at in range(got)
    )
    stored, size = outcomes.count(PutOutcome.stored), layout.raw_bytes
    held = stored == right == chunks
    figures = {
        "chunks": chunks, "chunk_bytes": size, "stored": stored, "right": right,
        "put_s": put_s, "lookup_ms": lookup_ms, "get_s": get_s, "held": held,
    }  # fmt: skip
    speeds = [size * chunks / seconds / 1e9 for seconds in (put_s, get_s)]
    text = (
        f"{chunks} chunks of {app.readable_size(size)}: put {speeds[0]:.2f} GB/s, lookup"
        f" {lookup_ms:.2f} ms, get {speeds[1]:.2f} GB/s; {stored} stored, {right} verified"
    )
    return app.Shown(figures, [text], held)


# --- codecs


def complete_codecs(incomplete: str) -> list[str]:
    """Return the codec names that complete *incomplete*."""
    from kvstore.codecs.base import NAMES_BY_ID

    return [name for name in NAMES_BY_ID.values() if name.startswith(incomplete)]


@app.command("codecs", exits="0 2", example="raw kvq:2", section="Measure")
def codecs(
    names: Annotated[
        list[str] | None, Argument(help="As kvq:2; default: all.", autocompletion=complete_codecs)
    ] = None,
) -> app.Shown:
    """Measure each codec on this machine, and the link speed up to which it pays."""
    from kvstore.codecs.base import NAMES_BY_ID, codec_by_name
    from kvstore.codecs.speed import make_sample, measure

    found = [(name, codec_by_name(name)) for name in names or NAMES_BY_ID.values()]
    sample = make_sample()
    rows, missing = [], {}
    for name, codec in app.followed(found, "measuring"):
        try:
            one = measure(name, codec, sample, time.perf_counter, CODEC_BUDGET_S)
        except KVStoreError as error:
            missing[name] = str(error)
            continue
        row = {"codec": one.name, "backend": one.backend, "accuracy": one.accuracy.name}
        rates = {name: round(getattr(one, name)) for name in _RATES}
        rows.append(row | {"ratio": round(one.ratio, 4)} | rates)
    headings = (
        "codec", "backend", "accuracy", "ratio", "enc GB/s", "dec GB/s", "even GB/s", "full GB/s",
    )  # fmt: skip
    cells = (
        (
            one["codec"], one["backend"], one["accuracy"], f"{one['ratio']:.2f}",
            *(f"{one[name] / 1e9:.2f}" for name in _RATES),
        )
        for one in rows
    )  # fmt: skip
    reasons = (f"{name}: not measured: {reason}" for name, reason in missing.items())
    text = (
        "One thread, 2 MiB of synthetic bfloat16 KV. even: link speed at which a codec breaks even"
        " (slower links gain); full: the same if decoding runs beside the next load."
    )
    shown: list[str | app.Grid] = [app.Grid(headings, cells), *reasons, text]
    return app.Shown({"codecs": rows, "not_measured": missing}, shown)
