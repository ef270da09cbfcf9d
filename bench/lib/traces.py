"""The traces and texts of the checkout."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.lib import ROOT, TRACES
from kvstore.cli.simulate import BlockTrace, SegmentLine, make_blocks, read_trace

TINYLM = ROOT / "data" / "tinylm"
Ids = tuple[int, ...]


@lru_cache(maxsize=2)
def read_blocks(trace: str) -> BlockTrace:
    """Return a trace by its file's stem, as chains of blocks."""
    return make_blocks(read_trace(TRACES / f"{trace}.jsonl"))


def read_segments(trace: str) -> list[SegmentLine]:
    """Return the lines of a trace of token segments."""
    lines = read_trace(TRACES / f"{trace}.jsonl")
    return [line for line in lines if isinstance(line, SegmentLine)]


def rows_of(file: Path, use: str = "score") -> list[Any]:
    """Return the rows of a file of texts or questions that are there for *use*."""
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["use"] == use]


def ids_of(tokenizer: Any, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
