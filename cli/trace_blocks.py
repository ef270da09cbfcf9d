"""A trace as chains of blocks: what a store of chunks sees of it, in columns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.cli.trace_files import BlockLine, SegmentLine, TraceLines
from kvstore.cli.trace_tokens import TokenStreams
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW

Rows = NDArray[np.intp]

MAX_BLOCKS = 64 << 20
"""Accesses to blocks in one trace; their rows are kept in memory, 8 bytes each."""

DEFAULT_BLOCK_TOKENS = 256
_NODE_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Requests as chains of blocks, in the order in which they came.

    A block has a row of 1 or more, in the order of first appearance, and its identity is its
    chain: the same tokens after another prefix are another block. Request i came at
    ``times_s[i]``, with the blocks ``rows[starts[i]:starts[i + 1]]`` of which the first
    ``known[i]`` are within the prompt, so that a lookup can name them. By row: the ``parents``,
    and the ``tokens`` in a block; one that is not full takes as much room as others, as the
    pages of engines do.
    """

    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    rows: Rows
    known: NDArray[np.int64]
    parents: Rows
    tokens: NDArray[np.int64]
    block_tokens: int

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.times_s)

    @property
    def blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.parents) - 1

    @property
    def footprint_tokens(self) -> int:
        """Tokens that an infinite cache would have room for in the end."""
        return self.blocks * self.block_tokens

    def chain(self, request: int) -> Rows:
        """Return the rows of a request's blocks, the head of the prompt first."""
        return self.rows[self.starts[request] : self.starts[request + 1]]


class _Builder:
    """Columns under construction. Rows are found by the parent's row and a block's identity."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._by_parent: dict[tuple[int, int | bytes], int] = {}
        self._rows = array("q")
        self._starts = array("q", [0])
        self._parents = array("q", [NO_ROW])
        self._tokens = array("q", [0])
        self._requests: list[tuple[float, int, int, int]] = []

    def block(self, parent: int, identity: int | bytes, tokens: int) -> int:
        """Append a block to the request that is being built; return its row."""
        row = self._by_parent.setdefault((parent, identity), len(self._parents))
        if row == len(self._parents):
            self._parents.append(parent)
            self._tokens.append(tokens)
        self._rows.append(row)
        return row

    def end_request(self, time_s: float, inputs: int, outputs: int, known: int) -> None:
        """Finish the request whose blocks were appended."""
        self._requests.append((time_s, inputs, outputs, known))
        self._starts.append(len(self._rows))
        if len(self._rows) > MAX_BLOCKS:
            raise InvalidRequestError(
                "trace blocks", len(self._rows), f"cut the trace to {MAX_BLOCKS} accesses"
            )

    def finish(self) -> BlockTrace:
        """Return what was built."""
        times, inputs, outputs, known = zip(*self._requests, strict=True)
        return BlockTrace(
            times_s=np.array(times, np.float64),
            input_tokens=np.array(inputs, np.int64),
            output_tokens=np.array(outputs, np.int64),
            starts=np.array(self._starts, np.int64),
            rows=np.array(self._rows, np.intp),
            known=np.array(known, np.int64),
            parents=np.array(self._parents, np.intp),
            tokens=np.array(self._tokens, np.int64),
            block_tokens=self._block_tokens,
        )


def make_blocks(lines: TraceLines, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> BlockTrace:
    """Return a trace as chains of blocks: of its own size where it has one, else *block_tokens*.

    Raises InvalidRequestError when there are too many, or the lines disagree about their size.
    """
    if isinstance(lines[0], BlockLine):
        return _from_blocks([line for line in lines if isinstance(line, BlockLine)])
    return _from_segments([x for x in lines if isinstance(x, SegmentLine)], block_tokens)


def _from_blocks(lines: list[BlockLine]) -> BlockTrace:
    size = lines[0].block_tokens
    builder = _Builder(size)
    for line in lines:
        if line.block_tokens != size:
            fix = f"keep to one block_tokens a file, such as the first line's {size}"
            raise InvalidRequestError("block_tokens", line.block_tokens, fix)
        row, left = NO_ROW, line.input_tokens
        for one in line.block_ids:
            row = builder.block(row, one, max(1, min(size, left)))
            left -= size
        builder.end_request(line.time_s, line.input_tokens, line.output_tokens, len(line.block_ids))
    return builder.finish()


def _from_segments(lines: list[SegmentLine], size: int) -> BlockTrace:
    """Cut prompts with their answers: that is what an engine stores, tails that are not full too.

    A lookup cannot know the answer, so the block in which the prompt ends is not among those it
    names, unless there is no answer.
    """
    if size < 1:
        raise InvalidRequestError("block_tokens", size, "give 1 or more, such as 256")
    builder = _Builder(size)
    streams = TokenStreams()
    for line in lines:
        whole = streams.join((*line.inputs, line.output))
        row = NO_ROW
        for at in range(0, len(whole), size):
            part = whole[at : at + size]
            digest = blake3(part.tobytes()).digest(_NODE_BYTES)
            row = builder.block(row, digest, len(part))
        inputs, outputs = line.input_tokens, line.output[1]
        known = inputs // size if outputs else -(-inputs // size)
        builder.end_request(line.time_s, inputs, outputs, known)
    return builder.finish()
