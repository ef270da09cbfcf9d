"""`kvstore trace`: the lookups of a server, recorded and replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvstore.cli.app import AsJson, ask, command, connected, group, number, size
from kvstore.cli.output import show

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.cli.trace_format import TraceWriter

MAX_NAMES = 1 << 24
"""Different chunks in one recording, which then ends."""
MAX_RECORDING_S = 7 * 24 * 3600
POLL_S = 0.25
DEADLINE_MS = 20_000
_BATCH_CHUNKS = 64

group("trace", "Measure", "Record anonymised access traces of a server, and replay them.")


@command("trace record", example="kvstore trace record trace.jsonl --seconds 60")
def trace_record(
    address: str,
    out: Annotated[Path, Argument(help="File to write, which must not exist.")],
    seconds: Annotated[
        float, Option(min=0.001, max=MAX_RECORDING_S, metavar="S", help="Seconds to record.")
    ] = 60.0,
    block_tokens: Annotated[int, number("Tokens of a chunk of that server.", 1, 1 << 20)] = 256,
) -> None:
    """Record a server's lookups from now on: times, lengths, and numbers in place of chunks.

    Runs on the server's host. The file is one that simulate and replay read.
    """
    made = record(address, out, seconds, block_tokens)
    lost = f", {made.lost} lost: read too late" if made.lost else ""
    print(f"{out}: {made.lookups} lookups of {made.chunks} chunks{lost}")


@command("trace replay", example="kvstore trace replay trace.jsonl")
def trace_replay(
    address: str,
    trace: Annotated[Path, Argument(help="JSONL, as simulate reads.")],
    chunk_bytes: Annotated[int, size("Size of each chunk.")] = 64 << 10,
    requests: Annotated[int, number("Requests to play; 0: all.", 0)] = 0,
    speed: Annotated[
        float, Option(min=0, metavar="X", help="Multiple of the trace's pace; 0: no pauses.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Play a trace against a server, with chunks of synthetic bytes, and print what it had."""
    done = replay_trace(address, trace, chunk_bytes, requests, speed)
    rate = done.hit_blocks / done.blocks if done.blocks else 0.0
    text = (
        f"{done.requests} requests in {done.spent_s:.1f} s: {done.hit_blocks} of {done.blocks}"
        f" blocks hit ({rate:.2%}), {done.stored} stored, {done.refused} refused"
    )
    show(asdict(done) | {"block_hit_rate": rate}, [text], as_json)


# --- recording


def record(
    address: str,
    out: Path,
    duration_s: float,
    block_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> TraceWriter:
    """Record from a running server into *out*, which must not exist; return what there is.

    Raises KVStoreErrors of the server, and OSError for the file.
    """
    from kvstore.cli.trace_format import TraceWriter

    if out.exists():
        raise FileExistsError(EEXIST, "it is there already: name another file", str(out))
    with connected(address) as connection:
        page = ask(connection, "Trace")
        with out.open("xb") as file:
            writer = TraceWriter(file, block_tokens)
            until = clock() + duration_s
            is_last = False
            while not is_last and writer.chunks < MAX_NAMES:
                left_s = until - clock()
                is_last = left_s <= 0
                if not is_last:
                    sleep(min(POLL_S, left_s))
                while True:
                    page = ask(connection, "Trace", recording=page.recording, after=page.last)
                    writer.lost += page.lost
                    if not page.records:
                        break
                    for one in page.records:
                        writer.write(one)
            return writer


# --- replay


@dataclass(slots=True)
class Replayed:
    """What a server had. *stored* chunks were put, *refused* ones it did not admit."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    stored: int = 0
    refused: int = 0
    spent_s: float = 0.0


def replay_trace(
    address: str, path: Path, chunk_bytes: int, requests: int = 0, speed: float = 0.0
) -> Replayed:
    """Play a trace: look each prompt up under a lease, put what is missing, its head first.

    The first *requests* of it, unless 0; in the trace's own time at a *speed* of 1, without
    pauses at 0. Raises InvalidRequestError, KVStoreErrors of the server, OSError.
    """
    from kvstore.cli.synthetic import chunks_of, noise, synthetic_client
    from kvstore.cli.trace_format import make_blocks, read_trace
    from kvstore.proto.types import PutOutcome

    with synthetic_client(address, chunk_bytes, "trace-replay", DEADLINE_MS) as client:
        trace = make_blocks(read_trace(path))
        done = Replayed(min(trace.requests, requests or trace.requests))
        tensors = noise(client.model)
        started = time.monotonic()
        for at in range(done.requests):
            if speed:
                due_s = (trace.times_s[at] - trace.times_s[0]) / speed
                time.sleep(max(0.0, started + due_s - time.monotonic()))
            chain = trace.chain(at).tolist()
            if not chain:
                continue
            known = int(trace.known[at])
            done.blocks += known
            keys = client.keys([token for row in chain for token in (row, 0, 0, 0) * 4])
            with client.lease(keys=keys) as lease:
                done.hit_blocks += min(lease.match.ready, known)
                missing = chunks_of(keys, [tensors])[lease.match.ready :]
                for start in range(0, len(missing), _BATCH_CHUNKS):
                    puts = client.put_chunks(missing[start : start + _BATCH_CHUNKS])
                    outcomes = [put.outcome for put in puts]
                    done.stored += outcomes.count(PutOutcome.stored)
                    done.refused += outcomes.count(PutOutcome.refused)
        done.spent_s = round(time.monotonic() - started, 3)
    return done
