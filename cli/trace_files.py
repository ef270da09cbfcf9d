"""Reads traces: Mooncake's JSONL of blocks and our own of token segments, told apart by content."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.proto.errors import InvalidRequestError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces, unless a line says ``block_tokens``."""

MAX_LINE_BYTES = 8 << 20
MAX_REQUESTS = 4 << 20
MAX_REQUEST_TOKENS = 16 << 20
MAX_ID = 1 << 63
"""Of block ids; of segments it is 2**32, as a token is made from ``segment * 2**32 + place``."""

Segment = tuple[int, int]
"""A stream's number and how many of its tokens."""


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A request of a trace of blocks. *block_ids* name the blocks of its prompt, in order."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SegmentLine:
    """A request of a trace of tokens: its prompt and its answer as segments of streams."""

    time_s: float
    session_id: int
    turn: int
    inputs: tuple[Segment, ...]
    output: Segment

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.inputs)


TraceLines = list[BlockLine] | list[SegmentLine]


class _Line:
    """One object of a file, whose fields are taken out and checked; errors say where it stands."""

    def __init__(self, path: Path, number: int, fields: dict[str, Any]) -> None:
        self._where = f"{path.name}:{number}"
        self.fields = fields

    def wrong(self, field: str, value: object, fix: str) -> InvalidRequestError:
        """Return the error to raise about *field*."""
        return InvalidRequestError(f"{self._where} {field}", value, fix)

    def get(self, field: str) -> Any:
        """Return the value of *field*, which there must be."""
        if field not in self.fields:
            raise self.wrong(field, None, f"add {field} to the line: all of its kind have it")
        return self.fields[field]

    def count(self, field: str, limit: int, least: int = 0) -> int:
        """Return a whole number of *least* to *limit* - 1."""
        return self.whole(field, self.get(field), limit, least)

    def whole(self, field: str, value: object, limit: int, least: int = 0) -> int:
        """Return *value* of *field*, a whole number of *least* to *limit* - 1."""
        if type(value) is not int or not least <= value < limit:
            raise self.wrong(field, value, f"give a whole number of {least} to {limit - 1}")
        return value

    def seconds(self, field: str, scale: float) -> float:
        """Return a time in seconds from one that is written in units of *scale* seconds."""
        value = self.get(field)
        if type(value) not in (int, float) or not 0 <= value < 1e15 or not math.isfinite(value):
            raise self.wrong(field, value, "give a time of 0 or more from the trace's start")
        return float(value) * scale

    def items(self, field: str) -> list[Any]:
        """Return a list."""
        value = self.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, value, "give a list")
        return value

    def segment(self, field: str, value: object) -> Segment:
        """Return a pair of a segment and how many tokens of it."""
        if not isinstance(value, list) or len(value) != 2:
            raise self.wrong(field, value, "give [segment, tokens]")
        number = self.whole(f"{field} segment", value[0], 1 << 32)
        return number, self.whole(f"{field} tokens", value[1], MAX_REQUEST_TOKENS)


def read_trace(path: Path) -> TraceLines:
    """Read all requests of a trace, in the file's order.

    Raises InvalidRequestError that names the file, the line and the field and says how to mend
    it; OSError when the file cannot be read.
    """
    lines: list[Any] = []
    kind = ""
    for line in _lines(path):
        found = "hash_ids" if "hash_ids" in line.fields else "input_segs"
        if found not in line.fields:
            fix = "give hash_ids (Mooncake's traces) or input_segs (kvstore's own)"
            raise line.wrong("kind", sorted(line.fields)[:8], fix)
        if found != (kind := kind or found):
            raise line.wrong(found, "...", f"the lines before have {kind}: keep to one kind a file")
        lines.append(_block_line(line) if kind == "hash_ids" else _segment_line(line))
        if len(lines) > MAX_REQUESTS:
            raise line.wrong("requests", len(lines), f"cut the trace to {MAX_REQUESTS} lines")
    if not lines:
        raise InvalidRequestError("trace", str(path.name), "give a file with a request in it")
    return lines


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            bare = _Line(path, number, {})
            if len(raw) > MAX_LINE_BYTES:
                raise bare.wrong("line", len(raw), f"keep lines under {MAX_LINE_BYTES} bytes")
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise bare.wrong("line", raw[:60], f"give a JSON object a line ({error})") from None
            if not isinstance(fields, dict):
                raise bare.wrong("line", raw[:60], "give a JSON object a line")
            yield _Line(path, number, fields)


def _block_line(line: _Line) -> BlockLine:
    inputs = line.count("input_length", MAX_REQUEST_TOKENS)
    outputs = line.count("output_length", MAX_REQUEST_TOKENS)
    tokens = MOONCAKE_BLOCK_TOKENS
    if "block_tokens" in line.fields:
        tokens = line.count("block_tokens", 1 << 20, least=1)
    ids = line.items("hash_ids")
    if len(ids) > -(-(inputs + outputs) // tokens):
        fix = f"give one id for each {tokens} tokens of input_length at most"
        raise line.wrong("hash_ids", f"{len(ids)} ids", fix)
    for one in ids:
        line.whole("hash_ids", one, MAX_ID)
    return BlockLine(line.seconds("timestamp", 1e-3), inputs, outputs, tuple(ids), tokens)


def _segment_line(line: _Line) -> SegmentLine:
    inputs = tuple(line.segment("input_segs", one) for one in line.items("input_segs"))
    output = line.segment("output_seg", line.get("output_seg"))
    found = SegmentLine(
        line.seconds("ts", 1.0),
        line.count("session_id", MAX_ID),
        line.count("turn_id", MAX_ID),
        inputs,
        output,
    )
    stated = line.count("num_input_tokens", MAX_REQUEST_TOKENS)
    if stated != found.input_tokens:
        fix = f"input_segs have {found.input_tokens} tokens: make them agree"
        raise line.wrong("num_input_tokens", stated, fix)
    answer = line.count("num_output_tokens", MAX_REQUEST_TOKENS)
    if answer != output[1]:
        fix = f"output_seg has {output[1]} tokens: make them agree"
        raise line.wrong("num_output_tokens", answer, fix)
    return found
