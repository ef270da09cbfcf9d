"""`kvstore bench` and `kvstore codecs`: speeds of a server, and of this machine's codecs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from kvstore.cli.app import AsJson, command, number, size
from kvstore.cli.output import Grid, followed, readable_size, show
from kvstore.proto.errors import InvalidRequestError, KVStoreError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.client.options import TransportName
    from kvstore.codecs.speed import CodecSpeed

MAX_CHUNKS = 4096
MAX_BYTES = 4 << 30
"""Of all chunks of a run together: they are in this process's memory twice."""
DEADLINE_MS = 60_000
CODEC_BUDGET_S = 0.2
"""Of measuring each codec; its first use, which may compile, comes on top."""
_PATTERNS = 4
"""Chunks with bytes of their own; further ones repeat them under other names."""
_RATES = (
    "encode_bytes_per_s", "decode_bytes_per_s", "break_even_bytes_per_s", "full_gain_bytes_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Benched:
    """The chunks of a run that were stored and came back right, and the time of each step."""

    chunks: int
    chunk_bytes: int
    stored: int
    right: int
    put_s: float
    lookup_ms: float
    get_s: float
    held: bool
    """Whether all that was put came back as it was."""


@command("bench", exits="0 1 2 3", example="kvstore bench --chunks 16 --json", section="Measure")
def bench(
    address: str,
    chunks: Annotated[int, number("Number of chunks.", 1, MAX_CHUNKS)] = 64,
    chunk_bytes: Annotated[int, size("Size of each chunk.")] = 1 << 20,
    transport: Annotated[
        Literal["auto", "shm", "tcp", "grpc"], Option(help="Transport of the chunks.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write, read back, verify and delete synthetic chunks; report throughput and latency.

    Exits with 1 unless all came back as they were.
    """
    if chunks * chunk_bytes > MAX_BYTES:
        fix = f"all together have at most {readable_size(MAX_BYTES)}"
        raise InvalidRequestError("chunks", chunks, fix)
    done = run_bench(address, chunks, chunk_bytes, transport)
    size_bytes = done.chunks * done.chunk_bytes
    text = (
        f"{done.chunks} chunks of {readable_size(done.chunk_bytes)}: put"
        f" {size_bytes / done.put_s / 1e9:.2f} GB/s, lookup {done.lookup_ms:.2f} ms, get"
        f" {size_bytes / done.get_s / 1e9:.2f} GB/s; {done.stored} stored, {done.right} verified"
    )
    show(asdict(done), [text], as_json, held=done.held)


def run_bench(address: str, count: int, chunk_bytes: int, transport: TransportName) -> Benched:
    """Run it, under names that no other run has. Raises KVStoreErrors of the server."""
    import numpy as np

    from kvstore.cli.synthetic import chunks_of, noise, parts_of, synthetic_client
    from kvstore.codecs.base import empty_tensors
    from kvstore.proto.types import MIN_CHUNK_TOKENS, KVLayout, PutOutcome

    clock = time.perf_counter
    with synthetic_client(address, chunk_bytes, "bench", DEADLINE_MS, transport) as client:
        layout = KVLayout.of(client.model, MIN_CHUNK_TOKENS)
        made = [noise(client.model, seed) for seed in range(min(_PATTERNS, count))]
        tokens = np.random.default_rng().integers(0, 1 << 31, count * MIN_CHUNK_TOKENS)
        keys = client.keys(tokens.tolist())
        chunks = chunks_of(keys, made)
        out = [empty_tensors(layout) for _ in keys]
        try:
            began = clock()
            outcomes = [put.outcome for put in client.put_chunks(chunks)]
            put = clock()
            ready = client.lookup(keys=keys).ready
            found = clock()
            got = len(client.get_chunks(keys[:ready], out[:ready])) if ready else 0
            read = clock()
        finally:
            client.delete(keys=keys)
    right = sum(
        all(map(np.array_equal, parts_of(made[at % len(made)]), parts_of(out[at])))
        for at in range(got)
    )
    stored = outcomes.count(PutOutcome.stored)
    return Benched(
        count, layout.raw_bytes, stored, right, put - began, (found - put) * 1e3, read - found,
        held=stored == right == count,
    )  # fmt: skip


# --- codecs


@command("codecs", exits="0 2", example="kvstore codecs raw kvq:2", section="Measure")
def codecs(
    names: Annotated[
        list[str] | None, Argument(help="Codecs, such as kvq:2; default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each codec does on this machine, and up to which link it pays."""
    speeds, missing = measure_all(names or every_name())
    rows = [
        {"codec": one.name, "backend": one.backend, "accuracy": one.accuracy.name}
        | {"ratio": round(one.ratio, 4)}
        | {name: round(getattr(one, name)) for name in _RATES}
        for one in speeds
    ]
    show({"codecs": rows, "not_measured": missing}, _codecs_text(rows, missing), as_json)


def every_name() -> list[str]:
    """Return all codecs, those that write the raw bytes first."""
    from kvstore.codecs.base import CODECS

    return sorted(CODECS, key=lambda name: (CODECS.load(name).codec_id, name))


def measure_all(names: Sequence[str]) -> tuple[list[CodecSpeed], dict[str, str]]:
    """Measure codecs on one thread; return the figures, and why some have none.

    Raises UnknownCodecError for a name that is none.
    """
    from kvstore.codecs.base import codec_by_name
    from kvstore.codecs.speed import make_sample, measure

    found = [(name, codec_by_name(name)) for name in names]
    sample = make_sample()
    speeds, missing = [], {}
    for name, codec in followed(found, "measuring"):
        try:
            speeds.append(measure(name, codec, sample, time.perf_counter, CODEC_BUDGET_S))
        except KVStoreError as error:
            missing[name] = str(error)
    return speeds, missing


def _codecs_text(
    rows: Sequence[dict[str, Any]], missing: Mapping[str, str]
) -> Iterator[str | Grid]:
    table = Grid(
        "codec", "backend", "accuracy", "ratio", "enc GB/s", "dec GB/s", "even GB/s", "full GB/s"
    )
    for one in rows:
        rates = (f"{one[name] / 1e9:.2f}" for name in _RATES)
        table.add_row(one["codec"], one["backend"], one["accuracy"], f"{one['ratio']:.2f}", *rates)
    yield table
    yield from (f"{name}: not measured: {reason}" for name, reason in missing.items())
    yield (
        "One thread, 2 MiB of synthetic bfloat16 KV. A codec breaks even on a link of so many GB/s"
        " (slower ones gain), and gains in full where decoding runs beside the next load."
    )
