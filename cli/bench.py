"""`kvstore bench`, `codecs`, `trace` and `simulate`: what a server, a codec or a policy would do.

`bench` and `trace replay` put synthetic chunks on a server.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from kvstore.cli import app
from kvstore.proto import types
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.types import MIN_CHUNK_TOKENS, POLICIES, KVLayout, Model, PutOutcome

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.cli.simulate import TraceWriter
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
MAX_NAMES = 1 << 24
"""Limit of distinct chunks, which ends a recording."""
MAX_RECORDING_S = 7 * 24 * 3600
POLL_S = 0.25
REPLAY_MS = 20_000
"""Deadline of each call of a replay."""
_BATCH_CHUNKS = 64
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


def chunks_of(keys: Sequence[types.ChunkKey], tensors: Sequence[ChunkTensors]) -> list[Chunk]:
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


# --- traces

app.group("trace", "Measure", "Record anonymised access traces of a server, and replay them.")


@app.command("trace record", example="trace.jsonl --seconds 60")
def trace_record(
    address: str,
    out: Annotated[Path, Argument(help="File to write, which must not exist.")],
    seconds: Annotated[
        float, Option(min=0.001, max=MAX_RECORDING_S, metavar="S", help="Seconds to record.")
    ] = 60.0,
    block_tokens: Annotated[int, app.number("Tokens of a chunk of that server.", 1, 1 << 20)] = 256,
) -> None:
    """Record a server's lookups from now on: times, lengths, and numbers in place of chunks.

    Runs on the server's host. Simulate and replay read the file.
    """
    made = record(address, out, seconds, block_tokens)
    lost = f", {made.lost} lost (read too late)" if made.lost else ""
    print(f"{out}: {made.lookups} lookups of {made.chunks} chunks{lost}")


def record(
    address: str,
    out: Path,
    duration_s: float,
    block_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> TraceWriter:
    """Record into *out*, which must not exist; return its writer. Raises KVStoreErrors, OSError."""
    from kvstore.cli.simulate import TraceWriter

    if out.exists():
        raise FileExistsError(EEXIST, "the file exists: give another name", str(out))
    with app.connected(address) as connection:
        page = app.rpc(connection, "Trace")
        with out.open("xb") as file:
            writer = TraceWriter(file, block_tokens)
            left_s, until = duration_s, clock() + duration_s
            while left_s > 0 and writer.chunks < MAX_NAMES:
                sleep(min(POLL_S, left_s))
                left_s = until - clock()
                while True:
                    page = app.rpc(connection, "Trace", recording=page.recording, after=page.last)
                    writer.lost += page.lost
                    if not page.records:
                        break
                    for one in page.records:
                        writer.write(one)
            return writer


# --- replay against a server


@dataclass(slots=True)
class Replayed:
    """Counts of a replay. *stored* chunks were put, *refused* ones were not admitted."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    stored: int = 0
    refused: int = 0
    spent_s: float = 0.0


@app.command("trace replay", example="trace.jsonl")
def trace_replay(
    address: str,
    trace: Annotated[Path, Argument(help="JSONL, as simulate reads.")],
    chunk_bytes: Annotated[int, app.size("Size of each chunk.")] = 64 << 10,
) -> app.Shown:
    """Replay a trace against a server, with synthetic chunks, and print its hits."""
    done = replay_trace(address, trace, chunk_bytes)
    rate = done.hit_blocks / done.blocks if done.blocks else 0.0
    text = (
        f"{done.requests} requests in {done.spent_s:.1f} s: {done.hit_blocks} of {done.blocks}"
        f" blocks hit ({rate:.2%}), {done.stored} stored, {done.refused} refused"
    )
    return app.Shown(asdict(done) | {"block_hit_rate": rate}, [text])


def replay_trace(address: str, path: Path, chunk_bytes: int) -> Replayed:
    """Look up each prompt under a lease, put its missing chunks. Raises KVStoreErrors, OSError."""
    from kvstore.cli.simulate import make_blocks, read_trace

    model = synthetic_model(chunk_bytes, "trace-replay")
    trace = make_blocks(read_trace(path))
    options = {"chunk_tokens": MIN_CHUNK_TOKENS, "name": "trace-replay"}
    with app.client_of(address, model, REPLAY_MS, **options) as client:
        done = Replayed(len(trace.requests))
        tensors = noise(client.model)
        started = time.monotonic()
        for one in trace.requests:
            if not one.chain:
                continue
            done.blocks += one.known
            keys = client.keys([token for row in one.chain for token in (row, 0, 0, 0) * 4])
            with client.lease(keys=keys) as lease:
                done.hit_blocks += min(lease.match.ready, one.known)
                missing = chunks_of(keys, [tensors])[lease.match.ready :]
                for start in range(0, len(missing), _BATCH_CHUNKS):
                    puts = client.put_chunks(missing[start : start + _BATCH_CHUNKS])
                    outcomes = [put.outcome for put in puts]
                    done.stored += outcomes.count(PutOutcome.stored)
                    done.refused += outcomes.count(PutOutcome.refused)
        done.spent_s = round(time.monotonic() - started, 3)
    return done


# --- simulate


@app.command("simulate", exits="0 2", example="trace.jsonl --policy all", section="Measure")
def simulate(
    trace: Annotated[Path, Argument(help="JSONL: Mooncake's blocks or token segments.")],
    policy: Annotated[str, app.chosen("Policies", ("all", *POLICIES))] = "hit_density",
    capacity: Annotated[
        str, Option("--capacity", "--size", metavar="C[,C]", help="10GiB, or 5% of the trace.")
    ] = "5%",
    kv_bytes_per_token: Annotated[int, app.number("KV bytes a token of the model.", 1)] = 131_072,
    block_tokens: Annotated[int, app.number("Tokens of a block, if not in the trace.", 1)] = 256,
    count_from: Annotated[
        Literal["start", "half"], Option("--from", help="Where counting of hits starts.")
    ] = "start",
) -> app.Shown:
    """Replay a trace on policies and capacities, and print the hits of each."""
    from kvstore.cli.simulate import make_blocks, parse_capacity, read_trace, replay_blocks

    names = list(POLICIES) if policy == "all" else policy.split(",")
    for name in names:
        if name not in POLICIES:
            fix = types.policy_instead_of(name, (*POLICIES, "or all"))
            raise InvalidRequestError("policy", name, fix)
    runs = list(itertools.product(capacity.split(","), names))
    for size, _ in runs:
        parse_capacity(size, 0)
    blocks = make_blocks(read_trace(trace), block_tokens)
    outcomes = [
        replay_blocks(blocks, name, size, kv_bytes_per_token, count_from == "half")
        for size, name in app.followed(runs, "replaying")
    ]
    headings = (
        "policy", "GiB", "tokens hit", "blocks hit", "PFLOPs saved", "evictions", "requests/s",
    )  # fmt: skip
    cells = (
        (
            one.policy, f"{one.capacity_bytes / (1 << 30):.2f}", f"{one.token_hit_rate:.2%}",
            f"{one.block_hit_rate:.2%}", f"{one.flops_saved / 1e15:.1f}", one.evictions,
            f"{one.requests_per_s:.0f}",
        )
        for one in outcomes
    )  # fmt: skip
    rows = list(map(asdict, outcomes))
    return app.Shown(rows[0] if len(rows) == 1 else rows, [app.Grid(headings, cells)])
