"""`kvstore bench`: made-up chunks put, looked up, read back and compared, then deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from kvstore.cli.access import given_access
from kvstore.cli.made_up_chunks import MIN_CHUNK_BYTES, model_of, noise
from kvstore.cli.status import readable_size
from kvstore.client.chunk import Chunk, parents
from kvstore.client.client import Client
from kvstore.client.options import ClientOptions, TransportName
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import MIN_CHUNK_TOKENS, KVLayout, PutOutcome

MAX_CHUNKS = 4096
MAX_CHUNK_BYTES = 64 << 20
MAX_BYTES = 4 << 30
"""Of all chunks of a run together: they are in this process's memory twice."""
DEADLINE_MS = 60_000
_PATTERNS = 4
"""Chunks with bytes of their own; further ones repeat them under other names."""


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
    """What a run had: chunks that were stored and came back right, and the time of each step."""

    chunks: int
    chunk_bytes: int
    stored: int
    right: int
    put_s: float
    lookup_ms: float
    get_s: float

    @property
    def held(self) -> bool:
        """Whether all that was put came back as it was."""
        return self.stored == self.right == self.chunks

    def as_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self) | {"held": self.held})

    def as_text(self) -> str:
        """Return a sentence for people."""
        size_bytes = self.chunks * self.chunk_bytes
        return (
            f"{self.chunks} chunks of {readable_size(self.chunk_bytes)}: put"
            f" {size_bytes / self.put_s / 1e9:.2f} GB/s, looked up in {self.lookup_ms:.2f} ms, got"
            f" {size_bytes / self.get_s / 1e9:.2f} GB/s; {self.stored} stored, {self.right} right"
        )


def bench(terms: BenchTerms, seed: int, clock: Callable[[], float] = time.perf_counter) -> Benched:
    """Run it; *seed* makes the names, so that no run finds what another stored.

    The chunks are deleted again. Raises KVStoreErrors of the server.
    """
    options = ClientOptions(
        terms.transport,
        chunk_tokens=MIN_CHUNK_TOKENS,
        deadline_ms=DEADLINE_MS,
        name="bench",
        access=given_access(),
    )
    with Client(terms.address, model_of(terms.chunk_bytes, "bench"), options) as client:
        return _run(client, terms, seed, clock)


def _run(client: Client, terms: BenchTerms, seed: int, clock: Callable[[], float]) -> Benched:
    model = client.model
    layout = KVLayout.of(model, MIN_CHUNK_TOKENS)
    patterns = [noise(model, number) for number in range(min(_PATTERNS, terms.chunks))]
    names = np.random.default_rng(seed).integers(0, 1 << 31, terms.chunks * MIN_CHUNK_TOKENS)
    keys = client.keys(names.tolist())
    chunks = [
        Chunk(key, patterns[at % len(patterns)], parent, position=MIN_CHUNK_TOKENS * at)
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]
    room = [empty_tensors(layout) for _ in keys]
    try:
        began = clock()
        outcomes = [put.outcome for put in client.put_chunks(chunks)]
        put = clock()
        ready = client.lookup(keys=keys).ready
        found = clock()
        got = len(client.get_chunks(keys[:ready], room[:ready])) if ready else 0
        read = clock()
        right = sum(_same(room[at], patterns[at % len(patterns)]) for at in range(got))
    finally:
        client.delete(keys=keys)
    stored = outcomes.count(PutOutcome.stored)
    return Benched(
        terms.chunks, layout.raw_bytes, stored, right,
        put - began, (found - put) * 1e3, read - found,
    )  # fmt: skip


def _same(one: ChunkTensors, other: ChunkTensors) -> bool:
    flat = zip(_parts(one), _parts(other), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in flat)


def _parts(tensors: ChunkTensors) -> list[Any]:
    return [part for component in tensors for layer in component for part in layer]
