"""`kvstore trace`: what a server is asked for, recorded and replayed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from kvstore.cli.app import AsJson, ask, command, connected, group, parse_size
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.client import Client
    from kvstore.codecs.base import ChunkTensors
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.proto.types import ChunkKey

MAX_NAMES = 1 << 24
"""Different chunks in one recording, which then ends."""

MAX_RECORDING_S = 7 * 24 * 3600
POLL_S = 0.25
MAX_CHUNK_BYTES = 64 << 20
DEADLINE_MS = 20_000
_NAME_BYTES = 8
_BATCH_CHUNKS = 64

group("trace", "Measure", "Record anonymised access traces of a server, and replay them.")


@command("trace record", example="kvstore trace record trace.jsonl --seconds 60")
def trace_record(
    address: str,
    out: Annotated[Path, typer.Argument(help="File to write, which must not exist.")],
    seconds: Annotated[float, typer.Option(metavar="S", help="Seconds to record.")] = 60.0,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a chunk of that server.")
    ] = 256,
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
    trace: Annotated[Path, typer.Argument(help="JSONL, as simulate reads.")],
    chunk_bytes: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Size of each chunk.")
    ] = 64 << 10,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests to play; 0: all.")] = 0,
    speed: Annotated[
        float,
        typer.Option(metavar="X", help="Multiple of the trace's pace; 0: one after the other."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Play a trace against a server, with chunks of made-up bytes, and print what it had."""
    done = replay_trace(trace, ReplayTerms(address, chunk_bytes, requests, speed))
    rate = done.hit_blocks / done.blocks if done.blocks else 0.0
    if as_json:
        print(json.dumps({**asdict(done), "block_hit_rate": rate}))
        return
    print(
        f"{done.requests} requests in {done.spent_s:.1f} s: {done.hit_blocks} of {done.blocks}"
        f" blocks hit ({rate:.2%}), {done.stored} stored, {done.refused} refused"
    )


# --- recording


@dataclass(slots=True)
class TraceWriter:
    """Writes records as lines of Mooncake's format, with ``block_tokens``.

    The server's names of chunks become numbers in the order of first appearance, times are
    since the recording began, the answers' lengths are unknown.
    """

    file: TextIO
    block_tokens: int
    lookups: int = 0
    lost: int = 0
    """Lookups that were read too late."""
    _ids: dict[bytes, int] = field(default_factory=dict)

    def write(self, record: pb.TraceRecord) -> None:
        """Append a line."""
        names = record.chunks
        ids = [
            self._ids.setdefault(names[at : at + _NAME_BYTES], len(self._ids))
            for at in range(0, len(names), _NAME_BYTES)
        ]
        tokens = len(ids) * self.block_tokens
        if ids and record.tokens:  # the last block may be in part the prompt's
            tokens = max(record.tokens, tokens - self.block_tokens + 1)
        line = {
            "timestamp": round(record.at_us / 1000, 3),
            "input_length": tokens,
            "output_length": 0,
            "hash_ids": ids,
            "block_tokens": self.block_tokens,
        }
        self.file.write(json.dumps(line) + "\n")
        self.lookups += 1

    @property
    def chunks(self) -> int:
        """Different chunks that were looked up."""
        return len(self._ids)


def record(
    address: str,
    out: Path,
    duration_s: float,
    block_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> TraceWriter:
    """Record from a running server into *out*, which must not exist; return what there is.

    Raises InvalidRequestError, KVStoreErrors of the server, and OSError for the file.
    """
    if not 0 < duration_s <= MAX_RECORDING_S:
        raise InvalidRequestError("seconds", duration_s, "more than 0, a week at most")
    if not 0 < block_tokens < 1 << 20:
        raise InvalidRequestError("block_tokens", block_tokens, "give 1 or more")
    if out.exists():
        raise FileExistsError(EEXIST, "it is there already: name another file", str(out))
    with connected(address) as connection:
        page = ask(connection, "Trace")
        with out.open("x") as file:
            writer = TraceWriter(file, block_tokens)
            until = clock() + duration_s
            is_last = False
            while not is_last and writer.chunks < MAX_NAMES:
                left_s = until - clock()
                is_last = left_s <= 0
                if not is_last:
                    sleep(min(POLL_S, left_s))
                while True:
                    place = {"recording": page.recording, "after": page.last}
                    page = ask(connection, "Trace", **place)
                    writer.lost += page.lost
                    if not page.records:
                        break
                    for one in page.records:
                        writer.write(one)
            return writer


# --- replay


@dataclass(frozen=True, slots=True)
class ReplayTerms:
    """Where to play a trace, how large its chunks are, how much of it, and its time's pace.

    *speed* 0 plays request after request; 1 in the trace's own time, 2 twice as fast. *run*
    tells replays apart: chunks of another run are others.
    """

    address: str
    chunk_bytes: int = 64 << 10
    limit_requests: int = 0
    speed: float = 0.0
    run: int = 0

    def __post_init__(self) -> None:
        from kvstore.cli.bench import MIN_CHUNK_BYTES

        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            fix = f"give {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
            raise InvalidRequestError("chunk_bytes", self.chunk_bytes, fix)
        if self.limit_requests < 0 or not 0 <= self.speed < float("inf"):
            given = (self.limit_requests, self.speed)
            raise InvalidRequestError("requests, speed", given, "give 0 or more")
        if not 0 <= self.run < 1 << 32:
            raise InvalidRequestError("run", self.run, "give a whole number below 2^32")


@dataclass(slots=True)
class Replayed:
    """What a server had. *stored* chunks were put, *refused* ones it did not admit."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    stored: int = 0
    refused: int = 0
    spent_s: float = 0.0


def replay_trace(path: Path, terms: ReplayTerms) -> Replayed:
    """Play a trace: look each prompt up under a lease, put what is missing, its head first.

    Raises InvalidRequestError, KVStoreErrors of the server, OSError.
    """
    from kvstore.cli.bench import made_up_client, noise
    from kvstore.cli.trace_format import make_blocks, read_trace

    trace = make_blocks(read_trace(path))
    done = Replayed(min(trace.requests, terms.limit_requests or trace.requests))
    with made_up_client(terms.address, terms.chunk_bytes, "trace-replay", DEADLINE_MS) as client:
        tensors = noise(client.model)
        started = time.monotonic()
        for at in range(done.requests):
            if terms.speed:
                due_s = (trace.times_s[at] - trace.times_s[0]) / terms.speed
                time.sleep(max(0.0, started + due_s - time.monotonic()))
            if len(chain := trace.chain(at)):
                known = int(trace.known[at])
                done.blocks += known
                keys = _keys(client, chain.tolist(), terms.run)
                with client.lease(keys=keys) as lease:
                    done.hit_blocks += min(lease.match.ready, known)
                    _put_rest(client, keys, lease.match.ready, tensors, done)
        done.spent_s = round(time.monotonic() - started, 3)
    return done


def _keys(client: Client, rows: list[int], run: int) -> list[ChunkKey]:
    """Return the keys of a chain: the tokens of each block are its row and the run, four times."""
    return client.keys([token for row in rows for token in (row, run, 0, 0) * 4])


def _put_rest(
    client: Client, keys: list[ChunkKey], ready: int, tensors: ChunkTensors, done: Replayed
) -> None:
    from kvstore.client.chunk import Chunk, parents
    from kvstore.proto.types import MIN_CHUNK_TOKENS, PutOutcome

    above = parents(keys)
    for start in range(ready, len(keys), _BATCH_CHUNKS):
        chunks = [
            Chunk(keys[at], tensors, above[at], position=MIN_CHUNK_TOKENS * at)
            for at in range(start, min(start + _BATCH_CHUNKS, len(keys)))
        ]
        outcomes = [put.outcome for put in client.put_chunks(chunks)]
        done.stored += outcomes.count(PutOutcome.stored)
        done.refused += outcomes.count(PutOutcome.refused)
