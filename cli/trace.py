"""`kvstore trace` and `simulate`: record, replay and simulate a server's lookups."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from kvstore.cli import app
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import MIN_CHUNK_TOKENS, POLICIES, PutOutcome, policy_instead_of

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.cli.simulate import TraceWriter

MAX_NAMES = 1 << 24
"""Limit of distinct chunks, which ends a recording."""
MAX_RECORDING_S = 7 * 24 * 3600
POLL_S = 0.25
DEADLINE_MS = 20_000
_BATCH_CHUNKS = 64

app.group("trace", "Measure", "Record anonymised access traces of a server, and replay them.")


# --- recording


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
    """Record from a running server into *out*, which must not exist; return its writer.

    Raises KVStoreErrors of the server, and OSError for the file.
    """
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
    """Replay a trace: look up each prompt under a lease, and put missing chunks, first ones first.

    Raises InvalidRequestError, KVStoreErrors of the server, OSError.
    """
    from kvstore.cli.bench import chunks_of, noise, synthetic_model
    from kvstore.cli.simulate import make_blocks, read_trace

    model = synthetic_model(chunk_bytes, "trace-replay")
    trace = make_blocks(read_trace(path))
    options = {"chunk_tokens": MIN_CHUNK_TOKENS, "name": "trace-replay"}
    with app.client_of(address, model, DEADLINE_MS, **options) as client:
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
            fix = policy_instead_of(name, (*POLICIES, "or all"))
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
