"""One client of the soak, in a process of its own: reads, verifies every chunk, puts what is gone.

As a program: soak_client.py ADDRESS TRANSPORT SEED. It prints a line of JSON twice a second.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter

from helpers.prompts import SMALL, chunks_of, equal, keys_of

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkKey

PROMPTS = 160
CHUNKS = 32
"""A prompt's; small ones, so that many are verified a second."""
SAY_S = 0.5
DEADLINE_MS = 1500


class Reader:
    """Reads prompts at random and knows what each chunk has to be."""

    def __init__(self, address: str, transport: str, seed: int) -> None:
        options = ClientOptions(transport, 16, DEADLINE_MS, retry_after_ms=50)  # type: ignore[arg-type]
        self._client = Client(address, SMALL, options)
        self._draw = random.Random(seed)
        self._known: dict[int, tuple[list[ChunkKey], list[Chunk]]] = {}
        self.counts: Counter[str] = Counter(reads=0, wrong=0, errors=0, puts=0, overrun_ms=0)

    def _prompt(self, seed: int) -> tuple[list[ChunkKey], list[Chunk]]:
        if seed not in self._known:
            keys = keys_of(self._client, seed, CHUNKS)
            self._known[seed] = keys, chunks_of(self._client, keys)
        return self._known[seed]

    def step(self) -> None:
        """Read one prompt and verify it; put what is missing. Few are read often."""
        seed = min(int(self._draw.paretovariate(0.6)), PROMPTS)
        started = time.monotonic()
        try:
            keys, chunks = self._prompt(seed)
            if self._draw.random() < 0.2:
                with self._client.lease(keys=keys) as lease:
                    self._verify(chunks, lease.get())
                    found = lease.match.ready
            else:
                arrived = self._client.get_chunks(keys)
                found = self._verify(chunks, arrived)
            self._note_time(started)
            if found < CHUNKS:
                durable = self._draw.random() < 0.1
                self._client.put_chunks(chunks[found:], durable=durable)
                self.counts["puts"] += CHUNKS - found
            if self._draw.random() < 0.01:
                self._client.delete(keys=keys[-4:])
        except KVStoreError:
            self.counts["errors"] += 1
            time.sleep(0.01)

    def _verify(self, chunks: list[Chunk], arrived: list) -> int:  # type: ignore[type-arg]
        for chunk, one in zip(chunks, arrived, strict=False):
            self.counts["reads"] += 1
            if not equal(one, chunk.tensors):  # type: ignore[arg-type] # they are arrays here
                self.counts["wrong"] += 1
                print(f"WRONG BYTES of {chunk.key.hex()}", file=sys.stderr, flush=True)
        return len(arrived)

    def _note_time(self, started: float) -> None:
        late_ms = 1000 * (time.monotonic() - started) - DEADLINE_MS
        self.counts["overrun_ms"] = max(self.counts["overrun_ms"], int(late_ms))


def main() -> None:
    address, transport, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    reader = Reader(address, transport, seed)
    said_at = 0.0
    while True:
        reader.step()
        if time.monotonic() - said_at > SAY_S:
            said_at = time.monotonic()
            print(json.dumps(reader.counts), flush=True)


if __name__ == "__main__":
    main()
