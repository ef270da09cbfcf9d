"""SkippedRows: the token rows of chunks that a reader does not need, and their wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import MAX_CHUNK_TOKENS

RUN = np.dtype([("chunk", "<u4"), ("start", "<u4"), ("stop", "<u4")])
"""Rows start to stop, exclusive, of the request's chunk of that index."""

MAX_RUNS = 1 << 14
"""Runs of one request: 192 KiB."""

Rows = NDArray[np.intp]
"""Token rows of a chunk, ascending: (rows)."""


class SkippedRows:
    """Runs of rows by chunk, ascending, with gaps between. Rows past a chunk's end are ignored.

    Raises InvalidRequestError for runs that are empty, touch or overlap, or too many.
    """

    def __init__(self, runs: NDArray[np.void]) -> None:
        if len(runs) > MAX_RUNS:
            raise InvalidRequestError("skip_rows", len(runs), f"at most {MAX_RUNS} runs")
        chunks, starts, stops = (runs[name].astype(np.int64) for name in ("chunk", "start", "stop"))
        if (starts >= stops).any() or (stops > MAX_CHUNK_TOKENS).any():
            fix = f"a start below its stop, up to {MAX_CHUNK_TOKENS}"
            raise InvalidRequestError("skip_rows", "an empty or too long run", fix)
        places = chunks * (2 * MAX_CHUNK_TOKENS)  # a chunk's runs end far below the next one's
        if (places[1:] + starts[1:] <= places[:-1] + stops[:-1]).any():
            raise InvalidRequestError("skip_rows", "out of order", "ascending, with gaps between")
        self._runs = runs
        self._chunks = chunks

    @classmethod
    def of(cls, rows: Mapping[int, Sequence[int]]) -> SkippedRows:
        """Return the runs of *rows*, ascending, by chunk; keeps the longest of too many."""
        found = [np.empty(0, RUN)]
        for chunk in sorted(rows):
            places = np.asarray(rows[chunk], np.int64)
            if len(places):
                cuts = np.flatnonzero(np.diff(places) > 1)
                runs = np.empty(len(cuts) + 1, RUN)
                runs["chunk"] = chunk
                runs["start"] = places[np.concatenate(([0], cuts + 1))]
                runs["stop"] = places[np.concatenate((cuts, [-1]))] + 1
                found.append(runs)
        every = np.concatenate(found)
        if len(every) > MAX_RUNS:
            lengths = every["stop"] - every["start"]
            longest = np.argsort(-lengths.astype(np.int64), kind="stable")[:MAX_RUNS]
            every = every[np.sort(longest)]
        return cls(every)

    @classmethod
    def unpack(cls, data: bytes, chunks: int) -> SkippedRows | None:
        """Parse the result of ``pack`` for a request of *chunks* chunks; None if it is empty.

        Raises InvalidRequestError.
        """
        if len(data) % RUN.itemsize or len(data) > MAX_RUNS * RUN.itemsize:
            fix = f"{RUN.itemsize} bytes a run, at most {MAX_RUNS} runs"
            raise InvalidRequestError("skip_rows", len(data), fix)
        if not data:
            return None
        found = cls(np.frombuffer(data, RUN))
        if found._chunks[-1] >= chunks:
            raise InvalidRequestError("skip_rows", int(found._chunks[-1]), f"below {chunks}")
        return found

    def pack(self) -> bytes:
        """Return 12 bytes a run."""
        return self._runs.tobytes()

    def kept(self, chunk: int, tokens: int) -> Rows | None:
        """Return the rows to read of a chunk of *tokens*; None: all of them."""
        first, last = np.searchsorted(self._chunks, (chunk, chunk + 1))
        wanted = np.ones(tokens, np.bool_)
        for run in self._runs[first:last]:
            wanted[run["start"] : run["stop"]] = False
        return None if wanted.all() else np.flatnonzero(wanted)

    def __len__(self) -> int:
        return len(self._runs)
