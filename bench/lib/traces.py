"""The traces and texts of the checkout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib import ROOT, TRACES
from kvstore.cli.simulate import BlockTrace, Segment, SegmentLine, make_blocks, read_trace

TINYLM = ROOT / "data" / "tinylm"
Ids = tuple[int, ...]
Tokens = NDArray[np.int32]
_FIRST_TOKEN, _TOKEN_IDS = 3, 31_997


@lru_cache(maxsize=2)
def read_blocks(trace: str) -> BlockTrace:
    """Return a trace by its file's stem, as chains of blocks."""
    return make_blocks(read_trace(TRACES / f"{trace}.jsonl"))


def read_segments(trace: str) -> list[SegmentLine]:
    """Return the lines of a trace of token segments."""
    lines = read_trace(TRACES / f"{trace}.jsonl")
    return [line for line in lines if isinstance(line, SegmentLine)]


def tokens_of(segments: Iterable[Segment]) -> Tokens:
    """Return the concatenated tokens of segments: int32 (tokens,).

    Token j of stream s is 3 + splitmix64(s * 2**32 + j) % 31997. splitmix64 is that of Steele, Lea
    and Flood (OOPSLA 2014), with the state as argument.
    """
    parts = [np.zeros(0, np.uint64)]
    parts += [
        np.uint64(number << 32) + np.arange(tokens, dtype=np.uint64) for number, tokens in segments
    ]
    mixed = np.concatenate(parts)
    mixed += np.uint64(0x9E3779B97F4A7C15)  # numpy arrays wrap around, as splitmix64 does
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (_FIRST_TOKEN + mixed % np.uint64(_TOKEN_IDS)).astype(np.int32)


def rows_of(file: Path, use: str = "score") -> list[Any]:
    """Return the rows of a file of texts or questions with that *use*."""
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["use"] == use]


def ids_of(tokenizer: Any, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def held_out(use: str) -> list[str]:
    """Return the texts for one *use*: ``score`` or ``calibrate``."""
    return [row["text"] for row in rows_of(TINYLM / "heldout.jsonl", use)]


def windows(tokenizer: Any, use: str, count: int, tokens: int) -> list[Ids]:
    """Return *count* sequences of *tokens*: the BOS token and the start of a held-out text.

    Raises ValueError when fewer texts are that long.
    """
    texts = (ids_of(tokenizer, text) for text in held_out(use))
    found = [
        (tokenizer.bos_token_id, *ids[: tokens - 1]) for ids in texts if len(ids) >= tokens - 1
    ]
    if len(found) < count:
        raise ValueError(f"heldout.jsonl: {len(found)} texts of {tokens} tokens, not {count}")
    return found[:count]
