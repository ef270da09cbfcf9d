"""Parallel writes: chunks that several writers put in parts.

Ranks of a parallel engine each hold some layers or heads. Each part is verified and copied to its
place in the buffer of the whole raw frame; the chunk is committed once every layer and head has
arrived. Until then lookups report the chunk as pending.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.raw import RAW, raw_header
from kvstore.codecs.slices import decode_shard
from kvstore.proto.buffers import Bytes, as_bytes, checksum, copy_bytes
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.frame import (
    FIXED_BYTES,
    FLAG_RESTORED,
    FrameHeader,
    FrameTemplate,
    check_identity,
    pack_header,
    parse_header,
    stated_header_bytes,
)
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey, ChunkShard, PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult, PutTicket, Reservations

UNFINISHED_PERCENT = 25
"""Share of CPU memory for partial chunks and the streamed parts on their way into them."""
MAX_UNFINISHED_CHUNKS = 4096
UNFINISHED_S = 30.0
"""A chunk that is not complete this long after its first part is dropped."""

_FREE, _CLAIMED, _COVERED = range(3)

Claim: TypeAlias = "list[NDArray[np.bool_]]"
"""Tiles that a writer fills: for each extent of its shard, (layers, heads)."""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """A frame of ``size_bytes`` of a shard; a streamed one is buffered until complete."""

    shard: ChunkShard
    size_bytes: int
    is_streamed: bool = False


@dataclass(slots=True, eq=False)
class PartTicket:
    """A part that is being put; owned by a session. The partial chunk owns its space.

    ``buffer`` buffers a streamed part; ``ticket_id`` and ``until`` are those of a PutTicket.
    """

    session: Session
    info: ChunkInfo
    part: ChunkPart
    hints: Hints = NO_HINTS
    is_last: bool | None = True
    buffer: Bytes | None = None
    ticket_id: int = 0
    until: float = math.inf


class PartialChunk:
    """One chunk whose parts arrive one by one, into the buffer of its raw frame.

    A tile is one head of one layer of a component: free, claimed by one writer, or covered. The
    owner's lock guards everything but ``fill`` and ``sum_up``, which touch claimed tiles only. The
    chunk is dropped at ``until``.
    """

    def __init__(self, ticket: PutTicket, until: float) -> None:
        assert ticket.buffer is not None
        ticket.hints = NO_HINTS  # set by parts that verify
        self.ticket = ticket
        self.info = info = ticket.info
        self.until = until
        self.sessions: set[int] = set()
        """Open sessions with a part in it."""
        self.writers = 0
        """Writers that fill the buffer now."""
        self.is_sealing = False
        """Complete, and about to be visible: it is not dropped any more."""
        self.is_dropped = False
        """The last writer frees the buffer."""
        self._buffer = buffer = ticket.buffer
        self._first: FrameHeader | None = None
        self._prefill_flops = 0.0
        blank = raw_header(FrameTemplate(info.key, info.parent, b"", b"", info.layout))
        self._tensors = RAW.views(blank, buffer)
        self._tiles = [np.full((c.layers, c.kv_heads), _FREE) for c in info.layout.components]
        end = blank.header_bytes
        for row in blank.segments:  # zero the padding, which no checksum covers
            buffer[end : int(row["offset"])] = 0
            end = int(row["offset"]) + int(row["stored_bytes"])

    def join(self, ticket: PartTicket) -> None:
        """Add the session of a part. Raises InvalidRequestError for a part of another chunk."""
        _same("layout", ticket.part.shard.whole, self.info.layout)
        _same("parent", ticket.info.parent.hex(), self.info.parent.hex())
        self.sessions.add(ticket.session.session_id)

    def agree(self, header: FrameHeader, hints: Hints) -> None:
        """Record what the first part states. Raises InvalidRequestError for a part that differs."""
        if self._first is None:
            self._first = header
        _same("content", header.content.hex(), self._first.content.hex())
        _same("position", header.position, self._first.position)
        self._prefill_flops = max(self._prefill_flops, header.prefill_flops)
        self.ticket.hints = self.ticket.hints if hints == NO_HINTS else hints

    # --- tiles

    def claim(self, shard: ChunkShard) -> Claim:
        """Claim the free tiles of *shard* for the caller and return them."""
        claim = []
        for tiles in self._tiles_of(shard):
            claim.append(tiles == _FREE)
            tiles[claim[-1]] = _CLAIMED
        self.writers += 1
        return claim

    def leave(self, shard: ChunkShard, claim: Claim, *, is_filled: bool) -> bool:
        """End a claim; return whether it completes the chunk."""
        self.writers -= 1
        for tiles, ours in zip(self._tiles_of(shard), claim, strict=True):
            tiles[ours] = _COVERED if is_filled else _FREE
        is_any = any(ours.any() for ours in claim)
        return is_filled and is_any and all((tiles == _COVERED).all() for tiles in self._tiles)

    def _tiles_of(self, shard: ChunkShard) -> list[NDArray[Any]]:
        return [
            self._tiles[number][one.first_layer : one.layer_stop, one.first_head : one.head_stop]
            for number, one in shard.numbered
        ]

    # --- bytes

    def fill(self, header: FrameHeader, frame: Bytes, shard: ChunkShard, claim: Claim) -> None:
        """Verify *frame*, of *shard*, and decode its claimed tiles into the buffer.

        Raises as ``decode_shard``; the claimed tiles are undefined then.
        """
        out: list[list[list[Part]]] = []
        partial: list[tuple[Part, Part, NDArray[np.bool_]]] = []
        for (number, one), ours in zip(shard.numbered, claim, strict=True):
            layers = self._tensors[number][one.first_layer : one.layer_stop]
            out.append([])
            for parts, heads in zip(layers, ours, strict=True):
                places = [part[one.first_head : one.head_stop] for part in parts]
                if not heads.all():  # do not overwrite another writer's tiles
                    aside = [np.empty(place.shape, place.dtype) for place in places]
                    partial += [(*pair, heads) for pair in zip(aside, places, strict=True)]
                    places = aside
                out[-1].append(places)
        decode_shard(header, frame, out)
        for part, place, heads in partial:
            place[heads] = part[heads]

    def sum_up(self) -> FrameHeader:
        """Write and return the header of the whole frame."""
        info, first = self.info, self._first
        assert first is not None
        template = FrameTemplate(
            info.key, info.parent, first.representation, first.content, info.layout,
            first.position, self._prefill_flops,
        )  # fmt: skip
        blank = raw_header(template)
        sums = [
            checksum(blank.segment(self._buffer, index)) for index in range(len(blank.segments))
        ]
        header = raw_header(template, sums)
        copy_bytes(self._buffer[: header.header_bytes], as_bytes(pack_header(header)))
        return header


def _same(name: str, given: object, known: object) -> None:
    if given != known:
        raise InvalidRequestError(name, given, f"another writer of this chunk stated {known}")


class ParallelWrites:
    """Partial chunks by key: *limit_bytes* in total, *unfinished_s* each. Thread-safe."""

    def __init__(self, reservations: Reservations, limit_bytes: int, unfinished_s: float) -> None:
        self._reservations = reservations
        self._limit_bytes = limit_bytes
        self._unfinished_s = unfinished_s
        self._counters = reservations.counters
        self._clock = reservations.clock
        self._chunks: dict[ChunkKey, PartialChunk] = {}
        self.used_bytes = 0
        """Bytes of partial chunks and of buffered streamed parts."""
        # Guards the two above, and each chunk except the copying of its bytes.
        self._lock = threading.Lock()

    def begin(self, ticket: PartTicket, deadline: float) -> PartTicket | PutResult:
        """Reserve space for the chunk of *ticket*, or return the result of a put that needs no
        write. Raises QuotaExceededError, InvalidRequestError if other writers state another chunk.
        """
        stream_bytes = ticket.part.size_bytes if ticket.part.is_streamed else 0
        with self._lock:
            chunk = self._chunks.get(ticket.info.key)
            need_bytes = stream_bytes if chunk else stream_bytes + ticket.info.size_bytes
            has_space = self.used_bytes + need_bytes <= self._limit_bytes
            has_space = has_space and (
                chunk is not None or len(self._chunks) < MAX_UNFINISHED_CHUNKS
            )
            if has_space:
                if chunk is not None:
                    chunk.join(ticket)
                self.used_bytes += need_bytes
        if not has_space:
            reason = f"use all of their {self._limit_bytes} bytes or number {MAX_UNFINISHED_CHUNKS}"
            return self._reservations.refuse(ticket.info.key, f"unfinished chunks {reason}")
        if stream_bytes:
            ticket.buffer = np.empty(stream_bytes, np.uint8)
        answer: PartTicket | PutResult | None = None
        try:
            answer = ticket if chunk is not None else self._open(ticket, deadline)
        finally:
            if answer is not ticket:
                self.discard(ticket)
        return answer

    def _open(self, ticket: PartTicket, deadline: float) -> PartTicket | PutResult:
        """Begin a chunk whose bytes are counted; check admission, quota and space once."""
        info, is_ours = ticket.info, False
        try:
            reserved = self._reservations.reserve(
                ticket.session, info, deadline, ticket.hints, is_last=ticket.is_last
            )
            if isinstance(reserved, PutResult):
                return reserved
            chunk = PartialChunk(reserved, self._clock() + self._unfinished_s)
            with self._lock:
                is_ours = self._chunks.setdefault(info.key, chunk) is chunk
        finally:
            if not is_ours:
                self._release(info.size_bytes)
        if not is_ours:  # another writer was first
            self._reservations.discard(reserved)
        elif self._reservations.has(info.key):  # others completed it in the meantime
            self._drop(lambda one: one is chunk)
            return PutResult(PutOutcome.exists)
        with self._lock:
            if (known := self._chunks.get(info.key)) is not None:
                known.join(ticket)
                return ticket
        return self._too_late(ticket)

    def _release(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes

    def discard(self, ticket: PartTicket) -> None:
        """Drop one part; another writer may put it."""
        if ticket.buffer is not None:
            ticket.buffer = None
            self._release(ticket.part.size_bytes)

    def commit(self, ticket: PartTicket, frame: Bytes | None) -> PutResult:
        """Verify *frame*, which its writer may still modify, and copy it into the chunk.

        The last part makes the chunk visible. Raises InvalidFrameError, ChunkCorruptError,
        UnknownCodecError, InvalidRequestError; the part is discarded then.
        """
        assert frame is not None
        try:
            return self._commit(ticket, frame)
        except KVStoreError as error:
            self._reservations.reject(ticket.info.key, error)
            raise
        finally:
            self.discard(ticket)

    def _too_late(self, ticket: PartTicket) -> PutResult:
        if self._reservations.has(ticket.info.key):
            return PutResult(PutOutcome.exists)
        return self._reservations.refuse(ticket.info.key, "its other shards did not arrive in time")

    def _commit(self, ticket: PartTicket, frame: Bytes) -> PutResult:
        header, shard = _read_header(ticket, frame), ticket.part.shard
        with self._lock:
            chunk = self._chunks.get(ticket.info.key)
            claim = [] if chunk is None else chunk.claim(shard)
        if chunk is None:
            return self._too_late(ticket)
        is_right = is_whole = False
        try:
            chunk.fill(header, frame, shard, claim)
            with self._lock:
                chunk.agree(header, ticket.hints)
            is_right = True
        finally:
            with self._lock:
                is_whole = chunk.leave(shard, claim, is_filled=is_right)
                is_gone = chunk.is_dropped and not chunk.writers
                chunk.is_sealing = chunk.is_sealing or (is_whole and not chunk.is_dropped)
            if is_gone:
                self._reservations.discard(chunk.ticket)
        if chunk.is_dropped:
            return self._too_late(ticket)
        self._counters.add("put_shards")
        if not is_whole:
            return PutResult(PutOutcome.pending, "waits for the chunk's other shards")
        try:
            return self._reservations.commit(chunk.ticket, chunk.sum_up())
        finally:  # after it is visible, so that it is never unknown
            with self._lock:
                self._forget(chunk)

    def _forget(self, chunk: PartialChunk) -> None:
        del self._chunks[chunk.info.key]
        self.used_bytes -= chunk.info.size_bytes

    # --- incomplete chunks

    def expire(self) -> int:
        """Drop expired chunks; return how many."""
        now_s = self._clock()
        return self._drop(lambda chunk: chunk.until <= now_s)

    def end_session(self, session_id: int) -> None:
        """Drop the chunks in which only this session has a part."""
        with self._lock:
            joined = {one for one in self._chunks.values() if session_id in one.sessions}
            for chunk in joined:
                chunk.sessions.discard(session_id)
        count = self._drop(lambda chunk: chunk in joined and not chunk.sessions)
        self._counters.add("dropped_unfinished_chunks", count)

    def _drop(self, is_over: Callable[[PartialChunk], bool]) -> int:
        with self._lock:
            over = [one for one in self._chunks.values() if is_over(one) and not one.is_sealing]
            for chunk in over:
                chunk.is_dropped = True
                self._forget(chunk)
            free = [chunk for chunk in over if not chunk.writers]
        for chunk in free:
            self._reservations.discard(chunk.ticket)
        return len(over)


def _read_header(ticket: PartTicket, frame: Bytes) -> FrameHeader:
    """Return the header of *frame* if it matches its reservation.

    The header is copied once, so that a concurrent writer cannot change it after the check.
    """
    start = frame[:FIXED_BYTES].copy()
    end = min(max(stated_header_bytes(start), FIXED_BYTES), len(frame)) if len(start) else 0
    header = parse_header(frame[:end].copy(), takes_shards=True)
    check_identity(header, len(frame), ticket.info.key)
    if header.shard != ticket.part.shard or header.parent != ticket.info.parent:
        raise InvalidRequestError(
            "frame", header.key.hex(), "its shard or parent is not what was reserved"
        )
    if header.representation != ticket.session.representation_digest:
        raise InvalidRequestError(
            "representation", header.representation.hex(), "the frame is of another model's KV"
        )
    if header.codec_id or header.accuracy is not Accuracy.exact or header.flags & FLAG_RESTORED:
        raise InvalidRequestError("codec", header.codec_id, "shards are put raw")
    return header
