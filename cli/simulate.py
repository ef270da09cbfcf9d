"""Reads and writes lookup traces, and simulates a policy's hits on one: a cache without bytes.

A file has Mooncake's block lines, or kvstore's token segments; either becomes chains of blocks,
as a store of chunks receives them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows, make_policy
from kvstore.server.settings.values import parse_size

MAX_LINE_BYTES = 8 << 20
MAX_REQUESTS = 4 << 20
MAX_REQUEST_TOKENS = 16 << 20
MAX_BLOCKS = 64 << 20
"""Limit of block accesses in one trace, whose rows are kept in memory."""
_NAME_BYTES = 8

_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, lt=MAX_REQUEST_TOKENS)]
_Time = Annotated[float, Meta(ge=0, lt=1e15)]
_Stream = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""Below 2^32, because a token id is ``stream * 2**32 + place``."""
Segment = tuple[_Stream, _Count]
"""A stream's number and its count of tokens."""


class BlockLine(msgspec.Struct, frozen=True):
    """A request of Mooncake's traces. *block_ids* name the blocks of its prompt, in order."""

    timestamp_ms: _Time = msgspec.field(name="timestamp")
    input_tokens: _Count = msgspec.field(name="input_length")
    output_tokens: _Count = msgspec.field(name="output_length")
    block_ids: tuple[_Id, ...] = msgspec.field(name="hash_ids")
    block_tokens: Annotated[int, Meta(gt=0, lt=1 << 20)] = 512

    def __post_init__(self) -> None:
        tokens = self.input_tokens + self.output_tokens
        if len(self.block_ids) > -(-tokens // self.block_tokens):
            raise ValueError(f"more hash_ids than one for each {self.block_tokens} tokens")

    @property
    def time_s(self) -> float:
        """Seconds from the trace's start."""
        return self.timestamp_ms / 1e3


class SegmentLine(msgspec.Struct, frozen=True):
    """A request of a token trace: its prompt and its answer as segments of streams."""

    time_s: _Time = msgspec.field(name="ts")
    session_id: _Id
    turn: _Id = msgspec.field(name="turn_id")
    inputs: tuple[Segment, ...] = msgspec.field(name="input_segs")
    output: Segment = msgspec.field(name="output_seg")
    input_tokens: _Count = msgspec.field(name="num_input_tokens")
    output_tokens: _Count = msgspec.field(name="num_output_tokens")

    def __post_init__(self) -> None:
        for name, segments in (("input", self.inputs), ("output", (self.output,))):
            tokens = sum(tokens for _, tokens in segments)
            if tokens != getattr(self, f"{name}_tokens"):
                raise ValueError(f"num_{name}_tokens is not the {tokens} of {name}_segs")


TraceLines = list[BlockLine] | list[SegmentLine]
_DECODERS: dict[str, Any] = {
    "hash_ids": msgspec.json.Decoder(BlockLine),
    "input_segs": msgspec.json.Decoder(SegmentLine),
}
"""The two kinds of lines, by a field that only one of them has."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class TraceWriter:
    """Writes a server's recording as block lines of ``block_tokens``.

    Chunk names become numbers in order of first appearance, times count from the start of the
    recording, and answer lengths are unknown.
    """

    file: IO[bytes]
    block_tokens: int
    lookups: int = 0
    lost: int = 0
    """Lookups that the server dropped before they were read."""
    _ids: dict[bytes, int] = field(default_factory=dict)

    def write(self, record: pb.TraceRecord) -> None:
        """Append a line."""
        names = record.chunks
        ids = tuple(
            self._ids.setdefault(names[at : at + _NAME_BYTES], len(self._ids))
            for at in range(0, len(names), _NAME_BYTES)
        )
        tokens = len(ids) * self.block_tokens
        if ids and record.tokens:  # the prompt may fill the last block in part
            tokens = max(record.tokens, tokens - self.block_tokens + 1)
        line = BlockLine(round(record.at_us / 1000, 3), tokens, 0, ids, self.block_tokens)
        self.file.write(msgspec.json.encode(line) + b"\n")
        self.lookups += 1

    @property
    def chunks(self) -> int:
        """Distinct chunks that were looked up."""
        return len(self._ids)


def read_trace(path: Path) -> TraceLines:
    """Read all requests of a trace, in order. Raises InvalidRequestError with the line; OSError."""
    lines: list[Any] = []
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            try:
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(f"keep lines under {MAX_LINE_BYTES} bytes")
                if raw.isspace():
                    continue
                lines.append(_read_line(raw, type(lines[0]) if lines else None))
                if len(lines) > MAX_REQUESTS:
                    raise ValueError(f"cut the trace to {MAX_REQUESTS} lines")
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                where = f"{path.name}:{number} line"
                raise InvalidRequestError(where, raw[:60].strip(), str(error)) from None
    if not lines:
        raise InvalidRequestError("trace", path.name, "give a file with at least one request")
    return lines


def _read_line(raw: bytes, kind: type | None) -> Any:
    fields = _fields.decode(raw)
    decoder = next((one for field, one in _DECODERS.items() if field in fields), None)
    if decoder is None:
        raise ValueError("give hash_ids (Mooncake's traces) or input_segs (kvstore's own)")
    if kind not in (None, decoder.type):
        raise ValueError("earlier lines are of the other kind: use one kind per file")
    return decoder.decode(raw)


class BlockRequest(NamedTuple):
    """A request as a chain of block rows; an answer follows its prompt.

    A lookup can name the first *known* blocks, those within the prompt. *is_full*: whether the
    last block is full; a partial one takes as much space as others, like an engine's pages.
    """

    time_s: float
    input_tokens: int
    chain: list[int]
    known: int
    is_full: bool


class BlockTrace(NamedTuple):
    """Requests in order of arrival, and how many distinct blocks they have: rows 1, 2, and so on.

    A block includes its prefix: the same tokens after another prefix are another block.
    """

    requests: list[BlockRequest]
    blocks: int
    block_tokens: int


def make_blocks(lines: TraceLines, block_tokens: int = 256) -> BlockTrace:
    """Return a trace as chains of blocks, of its own block size if stated, else *block_tokens*.

    Raises InvalidRequestError for too many blocks, or several block sizes.
    """
    first = lines[0]
    size = first.block_tokens if isinstance(first, BlockLine) else block_tokens
    if size < 1:
        raise InvalidRequestError("block_tokens", size, "give 1 or more, such as 256")
    row_of: dict[tuple[int, Hashable], int] = {}
    requests, accesses = [], 0
    for line in lines:
        blocks, known, is_full = _cut(line, size)
        row, chain = NO_ROW, []
        for block in blocks:
            row = row_of.setdefault((row, block), len(row_of) + 1)
            chain.append(row)
        requests.append(BlockRequest(line.time_s, line.input_tokens, chain, known, is_full))
        accesses += len(chain)
        if accesses > MAX_BLOCKS:
            fix = f"cut the trace to {MAX_BLOCKS} accesses"
            raise InvalidRequestError("trace blocks", accesses, fix)
    return BlockTrace(requests, len(row_of), size)


def _cut(line: BlockLine | SegmentLine, size: int) -> tuple[Sequence[Hashable], int, bool]:
    """Return a line's block identities, how many are known, and whether the last is full.

    In a token trace an answer follows its prompt as an engine stores them, so the block in which
    the prompt ends is not known.
    """
    if isinstance(line, SegmentLine):
        blocks = list(_cut_segments((*line.inputs, line.output), size))
        known = line.input_tokens // size if line.output_tokens else len(blocks)
        return blocks, known, (line.input_tokens + line.output_tokens) % size == 0
    if line.block_tokens != size:
        fix = f"use one block_tokens per file, such as the first line's {size}"
        raise InvalidRequestError("block_tokens", line.block_tokens, fix)
    count = len(line.block_ids)
    return line.block_ids, count, line.input_tokens >= count * size


def _cut_segments(segments: Iterable[Segment], size: int) -> Iterator[Hashable]:
    """Yield each block as its pieces of streams: (stream, first token, stop)."""
    block: list[tuple[int, int, int]] = []
    left = size
    for stream, tokens in segments:
        first = 0
        while first < tokens:
            end = min(tokens, first + left)
            block.append((stream, first, end))
            left -= end - first
            first = end
            if not left:
                yield tuple(block)
                block, left = [], size
    if block:
        yield tuple(block)


# --- replay

GHOSTS = 1 << 18
"""Evicted blocks whose history is kept: a server's default ``ghost_limit``."""
_LINEAR_FLOPS, _SQUARE_FLOPS = 1.6e10, 262_144.0
"""Prefill of Llama-3.1-8B: 1.6e10 L + 262,144 L^2 for a prompt of L tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's hits, as shares of the tokens and blocks requested.

    *requests_per_s* counts block requests; *flops_saved* is the prefill cost of the tokens hit.
    """

    policy: str
    capacity_bytes: int
    token_hit_rate: float
    block_hit_rate: float
    flops_saved: float
    evictions: int
    requests_per_s: float


def parse_capacity(text: str, footprint_bytes: int) -> int:
    """Return the bytes of 10GiB, or of 2.5% of *footprint_bytes*. Raises InvalidRequestError."""
    share = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%\s*", text)
    if share is not None:
        return int(Fraction(share[1]) / 100 * footprint_bytes)
    try:
        return parse_size(text.strip())
    except ValueError as error:
        raise InvalidRequestError("capacity", text, f"{error}, or 5% of the trace") from None


def replay_blocks(
    trace: BlockTrace,
    policy: str,
    capacity: str,
    kv_bytes_per_token: int = 131_072,
    from_half: bool = False,
    made: tuple[EvictionPolicy, AccessHistory] | None = None,
) -> Outcome:
    """Replay a trace of blocks on one tier of ``10GiB``, or of ``5%`` of the trace.

    A token's size defaults to Llama-3.1-8B in bfloat16. With *from_half* hits count from the middle
    of the trace on. *made* is the policy, if there is one, with the history that it ranks by.
    """
    block_bytes = trace.block_tokens * kv_bytes_per_token
    capacity_bytes = parse_capacity(capacity, trace.blocks * block_bytes)
    if 0 < capacity_bytes < block_bytes and "%" not in capacity:
        fix = f"a block has {block_bytes} bytes; a share of the trace is written as 5%"
        raise InvalidRequestError("capacity", capacity, fix)
    if made is None:
        history = AccessHistory(trace.block_tokens)
        made = make_policy(policy, history), history
    replay = BlockReplay(*made, capacity_bytes // block_bytes, block_bytes)
    longest = max(len(one.chain) for one in trace.requests)
    flops = np.diff(_prefill_flops(np.arange(longest + 1.0) * trace.block_tokens))
    started = time.perf_counter()
    hits = []
    for one in trace.requests:
        facts = InsertInfo(one.is_full, prompt_chunks=len(one.chain))
        hits.append(replay.request(one.chain, one.time_s, facts, flops[: len(one.chain)]))
    spent_s = time.perf_counter() - started
    first = len(hits) // 2 if from_half else 0
    counted = trace.requests[first:]
    inputs = np.array([one.input_tokens for one in counted], np.int64)
    known = np.array([one.known for one in counted], np.int64)
    hit_blocks = np.minimum(hits[first:], known)
    hit_tokens = np.minimum(hit_blocks * trace.block_tokens, inputs)
    return Outcome(
        policy=policy,
        capacity_bytes=capacity_bytes,
        token_hit_rate=int(hit_tokens.sum()) / max(1, int(inputs.sum())),
        block_hit_rate=int(hit_blocks.sum()) / max(1, int(known.sum())),
        flops_saved=float(_prefill_flops(hit_tokens).sum()),
        evictions=replay.evictions,
        requests_per_s=replay.blocks / max(spent_s, 1e-9),
    )


def _prefill_flops(tokens: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    return _LINEAR_FLOPS * tokens + _SQUARE_FLOPS * tokens**2


@dataclass(slots=True, eq=False)
class BlockReplay:
    """A policy on one tier of *places* blocks; requests are chains of blocks.

    A hit is the longest prefix of a request that is present before it. The hit is touched and the
    rest inserted, first block first, evicting as needed but none of the request's own blocks; if
    nothing can be evicted, the rest is not admitted. Deterministic.
    """

    policy: EvictionPolicy
    history: AccessHistory
    places: int
    block_bytes: int = 1
    ghosts: int = GHOSTS
    used: int = field(default=0, init=False)
    blocks: int = field(default=0, init=False)
    hit_blocks: int = field(default=0, init=False)
    evictions: int = field(default=0, init=False)
    _here: bytearray = field(default_factory=lambda: bytearray(1), init=False)
    """Which blocks are present, by row."""
    _ghosts: dict[int, None] = field(default_factory=dict, init=False)
    """Evicted blocks whose history is kept, oldest first."""

    def request(
        self,
        chain: Sequence[int],
        now_s: float,
        facts: InsertInfo = NO_INFO,
        flops: NDArray[np.float64] | None = None,
    ) -> int:
        """Look up and store a prompt; return how many of its leading blocks were present.

        *chain* are its blocks' rows, 1 or more, in prompt order; a row has the same predecessor in
        all prompts. *flops* is the prefill cost of each.
        """
        if not chain:
            return 0
        history, last = self.history, max(chain)
        if last >= len(self._here):
            self._here += bytes(1 + last - len(self._here) + spare_rows(last))
        rows = np.array(chain, np.intp)
        is_known = history.hits.take(rows, mode="clip") > 0  # its last place is always empty
        known = len(chain) if is_known.all() else int(is_known.argmin())
        history.requested(rows[:known], len(chain), now_s)
        if facts.reuse:
            history.hint(rows[:known], facts.reuse)
        history.seen_chain(rows[known:], chain[known - 1] if known else NO_ROW, facts, now_s)
        if flops is not None:
            history.reach(last)
            history.flops[rows] = flops
        hit = self._store(chain, rows, now_s)
        self.blocks += len(chain)
        self.hit_blocks += hit
        return hit

    def _store(self, chain: Sequence[int], rows: Rows, now_s: float) -> int:
        """Touch and insert a prompt's blocks; return how many leading ones were present."""
        policy, here = self.policy, self._here
        held = list(map(here.__getitem__, chain))
        hit = held.index(0) if 0 in held else len(held)  # a policy evicts the end of a chain first
        policy.touch(rows[:hit], now_s)
        lacking = self.used + len(chain) - hit - self.places
        if lacking > 0:
            self._evict(lacking, set(chain), now_s)
        end = min(len(chain), hit + self.places - self.used)
        if hit < end:
            for row in chain[hit:end]:
                here[row] = 1
                self._ghosts.pop(row, None)
            self.used += end - hit
            parent = chain[hit - 1] if hit else NO_ROW
            policy.insert_chain(rows[hit:end], parent, self.block_bytes, now_s)
        return hit

    def _evict(self, lacking: int, kept: set[int], now_s: float) -> None:
        """Evict *lacking* blocks, or all but those of *kept* if there are fewer."""
        victims = list(islice(self.policy.victims(kept.__contains__, now_s), lacking))
        for row in reversed(victims):  # parents first: else they would be queued as leaves
            self._here[row] = 0
            self.policy.remove(row)
        self._ghosts.update(dict.fromkeys(victims))
        self.used -= len(victims)
        self.evictions += len(victims)
        if len(self._ghosts) > self.ghosts:
            oldest = list(islice(self._ghosts, self.ghosts // 8 + 1))
            for row in oldest:
                del self._ghosts[row]
            self.history.forget_all(np.array(oldest, np.intp))
