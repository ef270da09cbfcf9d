"""kvstore trace replay: a trace played against a real server, with chunks of made-up bytes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvstore.cli.access import given_access
from kvstore.cli.made_up_chunks import MIN_CHUNK_BYTES, model_of, noise
from kvstore.cli.trace_blocks import BlockTrace, make_blocks
from kvstore.cli.trace_files import read_trace
from kvstore.client.chunk import Chunk, parents
from kvstore.client.client import Client
from kvstore.client.options import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    ChunkKey,
    PutOutcome,
)

MAX_CHUNK_BYTES = 64 << 20
DEADLINE_MS = 20_000
_BATCH_CHUNKS = 64
_WORDS = 4


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
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            fix = f"give {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
            raise InvalidRequestError("chunk_bytes", self.chunk_bytes, fix)
        if self.limit_requests < 0 or not 0 <= self.speed < float("inf"):
            raise InvalidRequestError(
                "requests, speed", (self.limit_requests, self.speed), "give 0 or more"
            )
        if not 0 <= self.run < 1 << 32:
            raise InvalidRequestError("run", self.run, "give a whole number below 2^32")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a server had. *stored* chunks were put, *refused* ones it did not admit."""

    requests: int
    blocks: int
    hit_blocks: int
    stored: int
    refused: int
    spent_s: float

    @property
    def block_hit_rate(self) -> float:
        """The share of blocks that were there."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    def as_json(self) -> str:
        """Return one JSON object."""
        return json.dumps({**asdict(self), "block_hit_rate": self.block_hit_rate})


def replay_trace(path: Path, terms: ReplayTerms, block_tokens: int = 256) -> Replayed:
    """Play a trace. Raises InvalidRequestError, KVStoreErrors of the server, OSError."""
    trace = make_blocks(read_trace(path), block_tokens)
    options = ClientOptions(
        chunk_tokens=MIN_CHUNK_TOKENS,
        deadline_ms=DEADLINE_MS,
        name="trace-replay",
        access=given_access(),
    )
    with Client(terms.address, model_of(terms.chunk_bytes), options) as client:
        return _Player(client, trace, terms).play()


class _Player:
    """Looks each prompt up under a lease, puts what is missing, its head first, and lets go."""

    def __init__(self, client: Client, trace: BlockTrace, terms: ReplayTerms) -> None:
        self._client = client
        self._trace = trace
        self._terms = terms
        self._tensors = noise(client.model)
        self._hits = self._stored = self._refused = self._blocks = 0

    def play(self) -> Replayed:
        trace, terms = self._trace, self._terms
        count = min(trace.requests, terms.limit_requests or trace.requests)
        started = time.monotonic()
        for at in range(count):
            if terms.speed:
                due_s = (trace.times_s[at] - trace.times_s[0]) / terms.speed
                time.sleep(max(0.0, started + due_s - time.monotonic()))
            self._request(at)
        spent_s = time.monotonic() - started
        return Replayed(
            count, self._blocks, self._hits, self._stored, self._refused, round(spent_s, 3)
        )

    def _request(self, at: int) -> None:
        chain = self._trace.chain(at)
        if not len(chain):
            return
        keys = self._keys(chain.tolist())
        known = int(self._trace.known[at])
        self._blocks += known
        with self._client.lease(keys=keys) as lease:
            there = lease.match.ready
            self._hits += min(there, known)
            for start in range(there, len(keys), _BATCH_CHUNKS):
                self._put(keys, start, min(start + _BATCH_CHUNKS, len(keys)))

    def _keys(self, rows: list[int]) -> list[ChunkKey]:
        """Return the keys of a chain: 16 tokens for each block, which say its row and the run."""
        words = np.zeros((len(rows), MIN_CHUNK_TOKENS // _WORDS, _WORDS), np.uint32)
        words[:, :, 0] = np.array(rows)[:, None]
        words[:, :, 1] = self._terms.run
        return self._client.keys(words.reshape(-1).tolist())

    def _put(self, keys: list[ChunkKey], start: int, stop: int) -> None:
        above = parents(keys)
        chunks = [
            Chunk(keys[at], self._tensors, above[at], position=MIN_CHUNK_TOKENS * at)
            for at in range(start, stop)
        ]
        outcomes = [put.outcome for put in self._client.put_chunks(chunks)]
        self._stored += outcomes.count(PutOutcome.stored)
        self._refused += outcomes.count(PutOutcome.refused)
