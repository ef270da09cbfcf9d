"""kvstore trace record: what a server is asked for, as a trace without anything of anybody's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EEXIST
from pathlib import Path
from typing import TextIO

from kvstore.cli.access import dial
from kvstore.cli.status import DEADLINE_MS
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError

MAX_NAMES = 1 << 24
"""Different chunks in one trace; then the recording ends."""

POLL_S = 0.25
_NAME_BYTES = 8


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record: for how long, and how many tokens a chunk of that server has."""

    address: str
    duration_s: float
    block_tokens: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= 7 * 24 * 3600:
            raise InvalidRequestError("seconds", self.duration_s, "more than 0, a week at most")
        if not 0 < self.block_tokens < 1 << 20:
            raise InvalidRequestError("block_tokens", self.block_tokens, "give 1 or more")


@dataclass(slots=True)
class Recorded:
    """How much there is: lookups, different chunks, and lookups that were missed."""

    lookups: int = 0
    chunks: int = 0
    lost: int = 0


@dataclass(slots=True)
class TraceWriter:
    """Writes records as lines of Mooncake's format, with ``block_tokens``.

    The server's names of chunks become numbers in the order of first appearance, times are
    since the recording began, the answers' lengths are unknown.
    """

    file: TextIO
    block_tokens: int
    counts: Recorded = field(default_factory=Recorded)
    _ids: dict[bytes, int] = field(default_factory=dict)

    def write(self, record: pb.TraceRecord) -> None:
        """Append a line."""
        names = record.chunks
        ids = [
            self._ids.setdefault(names[at : at + _NAME_BYTES], len(self._ids))
            for at in range(0, len(names), _NAME_BYTES)
        ]
        most = len(ids) * self.block_tokens
        line = {
            "timestamp": round(record.at_us / 1000, 3),
            "input_length": max(record.tokens, most - self.block_tokens + 1) if ids else 0,
            "output_length": 0,
            "hash_ids": ids,
            "block_tokens": self.block_tokens,
        }
        if not record.tokens:
            line["input_length"] = most
        self.file.write(json.dumps(line) + "\n")
        self.counts.lookups += 1
        self.counts.chunks = len(self._ids)

    @property
    def is_full(self) -> bool:
        """Whether no other chunk may come."""
        return len(self._ids) >= MAX_NAMES


def record(
    recording: Recording,
    out: Path,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Recorded:
    """Record from a running server into *out*, which must not exist; return what there is.

    Raises KVStoreErrors of the server, and OSError for the file.
    """
    if out.exists():
        raise FileExistsError(EEXIST, "it is there already: name another file", str(out))
    connection = dial(recording.address, DEADLINE_MS)
    try:
        page = _read(connection, 0, 0)
        with out.open("x") as file:
            writer = TraceWriter(file, recording.block_tokens)
            until = clock() + recording.duration_s
            is_last = False
            while not is_last and not writer.is_full:
                left_s = until - clock()
                is_last = left_s <= 0
                if not is_last:
                    sleep(min(POLL_S, left_s))
                while True:
                    page = _read(connection, page.recording, page.last)
                    writer.counts.lost += page.lost
                    for one in page.records:
                        writer.write(one)
                    if not page.records:
                        break
            return writer.counts
    finally:
        connection.close()


def _read(connection: Connection, recording: int, after: int) -> pb.TraceResponse:
    request = pb.TraceRequest(recording=recording, after=after)
    return connection.call("Trace", request, DEADLINE_MS, pb.TraceResponse)
