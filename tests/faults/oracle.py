"""What a store acknowledged, in a file that outlives whoever was told it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from helpers.prompts import is_right

from kvstore.client import Client
from kvstore.proto.types import ChunkKey


class OracleFile:
    """A line for each prompt that was stored: its seed, and whether it was durable.

    A line is written behind the acknowledgement, so every line is true; the last may be cut.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def note(self, seed: int, *, is_durable: bool) -> None:
        """The prompt of *seed* was acknowledged."""
        line = json.dumps({"seed": seed, "durable": is_durable}) + "\n"
        with self._lock, self._path.open("a") as file:
            file.write(line)

    def seeds(self, *, durable: bool = False) -> list[int]:
        """Return the prompts in the order of their acknowledgement; with *durable* those only."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row["seed"] for row in rows if row["durable"] or not durable]


def verified(client: Client, keys: Sequence[ChunkKey]) -> int:
    """Read *keys* and return how many came; fail at the first byte that is not what was put."""
    found = client.get_chunks(list(keys))
    for key, one in zip(keys, found, strict=False):
        assert is_right(client, key, one), f"{client.transport_name}: wrong bytes of {key.hex()}"
    return len(found)


def fetched(client: Client, keys: Sequence[ChunkKey]) -> int:
    """Look *keys* up, as engines do, and read them; return how many came."""
    client.lookup(keys=list(keys))
    return verified(client, keys)
