"""`kvstore bench` and `kvstore codecs`: what a server and this machine's codecs do, measured.

Made-up chunks, of a model that does not exist, are put, looked up, read back and compared, then
deleted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np

from kvstore.cli.app import given_access
from kvstore.cli.output import Grid, followed, open_console, readable_size
from kvstore.client.chunk import Chunk, parents
from kvstore.client.client import Client
from kvstore.client.options import ClientOptions, TransportName
from kvstore.codecs.base import CODECS, ChunkTensors, Part, codec_by_name, empty_tensors
from kvstore.codecs.speed import CodecSpeed, make_sample, measure
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
    RopeParameters,
)

MAX_CHUNKS = 4096
MAX_CHUNK_BYTES = 64 << 20
MAX_BYTES = 4 << 30
"""Of all chunks of a run together: they are in this process's memory twice."""
DEADLINE_MS = 60_000
CODEC_BUDGET_S = 0.2
"""Of measuring each codec; its first use, which may compile, comes on top."""

_PATTERNS = 4
"""Chunks with bytes of their own; further ones repeat them under other names."""
_HEAD_DIM = 8
MIN_CHUNK_BYTES = MIN_CHUNK_TOKENS * 2 * 2 * _HEAD_DIM
"""Keys and values in bfloat16 of one layer and one head."""


def made_up_client(
    address: str, chunk_bytes: int, name: str, deadline_ms: int, transport: TransportName = "auto"
) -> Client:
    """Return a client of a made-up model whose chunks of 16 tokens have about *chunk_bytes*."""
    heads = max(1, round(chunk_bytes / MIN_CHUNK_BYTES))
    group = LayerGroup(LayerKind.attention, DType.bfloat16, (0,), heads, _HEAD_DIM)
    model = Model(
        model_id=f"kvstore/{name}",
        model_revision="1",
        adapter_digest="none",
        quantization="none",
        layer_groups=(group,),
        rope=RopeParameters(10_000.0, _HEAD_DIM),
        tokenizer_digest="none",
    )
    options = ClientOptions(
        transport,
        chunk_tokens=MIN_CHUNK_TOKENS,
        deadline_ms=deadline_ms,
        name=name,
        access=given_access(),
    )
    return Client(address, model, options)


def noise(model: Model, seed: int = 0) -> ChunkTensors:
    """Return the tensors of a chunk: bytes that do not compress, the same for the same *seed*."""
    tensors = empty_tensors(KVLayout.of(model, MIN_CHUNK_TOKENS))
    draw = np.random.default_rng(seed)
    for part in _parts(tensors):
        part[...] = np.frombuffer(draw.bytes(part.nbytes), part.dtype).reshape(part.shape)
    return tensors


def _parts(tensors: ChunkTensors) -> list[Part]:
    return [part for component in tensors for layer in component for part in layer]


# --- a server


@dataclass(frozen=True, slots=True)
class BenchTerms:
    """Which server, how many chunks of which size, over what. Refused where it is too much."""

    address: str
    chunks: int = 64
    chunk_bytes: int = 1 << 20
    transport: TransportName = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise InvalidRequestError("chunks", self.chunks, f"give 1 to {MAX_CHUNKS}")
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            fix = f"give {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
            raise InvalidRequestError("chunk_bytes", self.chunk_bytes, fix)
        if self.transport not in get_args(TransportName):
            fix = f"one of {', '.join(get_args(TransportName))}"
            raise InvalidRequestError("transport", self.transport, fix)
        if self.chunks * self.chunk_bytes > MAX_BYTES:
            fix = f"all together have at most {readable_size(MAX_BYTES)}"
            raise InvalidRequestError("chunks", self.chunks, fix)


@dataclass(frozen=True, slots=True)
class Benched:
    """What a run had: chunks that were stored and came back right, and the time of each step.

    *held* says whether all that was put came back as it was.
    """

    chunks: int
    chunk_bytes: int
    stored: int
    right: int
    put_s: float
    lookup_ms: float
    get_s: float
    held: bool

    def as_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self))

    def as_text(self) -> str:
        """Return a sentence for people."""
        size_bytes = self.chunks * self.chunk_bytes
        return (
            f"{self.chunks} chunks of {readable_size(self.chunk_bytes)}: put"
            f" {size_bytes / self.put_s / 1e9:.2f} GB/s, looked up in {self.lookup_ms:.2f} ms, got"
            f" {size_bytes / self.get_s / 1e9:.2f} GB/s; {self.stored} stored, {self.right} right"
        )


def bench(terms: BenchTerms) -> Benched:
    """Run it, under names that no other run has. Raises KVStoreErrors of the server."""
    count, clock = terms.chunks, time.perf_counter
    client = made_up_client(terms.address, terms.chunk_bytes, "bench", DEADLINE_MS, terms.transport)
    with client:
        layout = KVLayout.of(client.model, MIN_CHUNK_TOKENS)
        made = [noise(client.model, seed) for seed in range(min(_PATTERNS, count))]
        tensors = [made[at % len(made)] for at in range(count)]
        tokens = np.random.default_rng().integers(0, 1 << 31, count * MIN_CHUNK_TOKENS)
        keys = client.keys(tokens.tolist())
        above = parents(keys)
        chunks = [
            Chunk(keys[at], tensors[at], above[at], position=MIN_CHUNK_TOKENS * at)
            for at in range(count)
        ]
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
        all(map(np.array_equal, _parts(mine), _parts(theirs)))
        for mine, theirs in zip(tensors, out[:got], strict=False)
    )
    stored = outcomes.count(PutOutcome.stored)
    return Benched(
        count, layout.raw_bytes, stored, right, put - began, (found - put) * 1e3, read - found,
        held=stored == right == count,
    )  # fmt: skip


# --- codecs


def every_name() -> list[str]:
    """Return all codecs, those that write the raw bytes first."""
    return sorted(CODECS, key=lambda name: (CODECS.load(name).codec_id, name))


def measure_all(names: Sequence[str]) -> tuple[list[CodecSpeed], dict[str, str]]:
    """Measure codecs on one thread; return the figures, and why some have none.

    Raises UnknownCodecError for a name that is none.
    """
    found = [(name, codec_by_name(name)) for name in names]
    sample = make_sample()
    speeds, missing = [], {}
    for name, codec in followed(found, "measuring"):
        try:
            speeds.append(measure(name, codec, sample, time.perf_counter, CODEC_BUDGET_S))
        except KVStoreError as error:
            missing[name] = str(error)
    return speeds, missing


def speeds_as_json(speeds: Sequence[CodecSpeed], missing: Mapping[str, str]) -> str:
    """Return the figures as JSON: speeds in decoded bytes a second."""
    rows = [
        {
            "codec": one.name,
            "backend": one.backend,
            "accuracy": one.accuracy.name,
            "ratio": round(one.ratio, 4),
            "encode_bytes_per_s": round(one.encode_bytes_per_s),
            "decode_bytes_per_s": round(one.decode_bytes_per_s),
            "break_even_bytes_per_s": round(one.break_even_bytes_per_s),
            "full_gain_bytes_per_s": round(one.full_gain_bytes_per_s),
        }
        for one in speeds
    ]
    return json.dumps({"codecs": rows, "not_measured": dict(missing)}, indent=2)


def print_speeds(speeds: Sequence[CodecSpeed], missing: Mapping[str, str]) -> None:
    """Print the figures as a table."""
    console = open_console()
    table = Grid(
        "codec", "backend", "accuracy", "ratio", "enc GB/s", "dec GB/s", "even GB/s", "full GB/s"
    )
    for one in speeds:
        rates = (
            one.encode_bytes_per_s, one.decode_bytes_per_s, one.break_even_bytes_per_s,
            one.full_gain_bytes_per_s,
        )  # fmt: skip
        figures = [f"{rate / 1e9:.2f}" for rate in rates]
        table.add_row(one.name, one.backend, one.accuracy.name, f"{one.ratio:.2f}", *figures)
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: not measured: {reason}")
    console.print(
        "One thread, 2 MiB of synthetic bfloat16 KV. A codec breaks even on a link of so many GB/s"
        " (slower ones gain), and gains in full where decoding runs beside the next load.",
    )
