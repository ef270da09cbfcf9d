"""Puts through staging memory: what a client shares with its server to write chunks to."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import numpy as np

from kvstore.client.session import Session
from kvstore.client.transports.base import Outgoing, Put, PutTerms, read_outcomes
from kvstore.client.transports.unix_rpc import CallQueue, Sent, UnixRpc
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import ALIGN_BYTES, FLAG_UNSUMMED
from kvstore.proto.messages import hints_to_message, layout_to_message
from kvstore.proto.types import DIGEST_BYTES, ChunkShard, KVLayout, PutOutcome

PARTS = 4
"""It is written part by part, while the server reads those before."""
_GROUPS_PER_RESERVE = 4
_UNANSWERED = (DeadlineError, TierUnavailableError, LeaseExpiredError)
"""How a commit ends that may be running yet. The last is one that was sent twice."""


class StagingMemory:
    """A memfd of PARTS parts, each of at least *part_bytes*. ``descriptor`` is for the server."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = PARTS * self._part_bytes
        self.descriptor = unix_socket.create_memfd("kvstore-staging", self.size_bytes)
        try:
            memory = mmap.mmap(self.descriptor, self.size_bytes)
            unix_socket.add_seals(self.descriptor, unix_socket.STAGING_SEALS)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory: Bytes = np.frombuffer(memory, np.uint8)

    def groups(self, chunks: Sequence[Outgoing]) -> list[list[Outgoing]]:
        """Cut *chunks* into groups that fit one part each. Raises InvalidRequestError."""
        groups: list[list[Outgoing]] = []
        left_bytes = -1
        for chunk in chunks:
            room_bytes = -(-chunk.frame_bytes // ALIGN_BYTES) * ALIGN_BYTES
            if room_bytes > self._part_bytes:
                fix = f"give {PARTS * room_bytes}"
                raise InvalidRequestError("staging_bytes", self.size_bytes, fix)
            left_bytes -= room_bytes
            if left_bytes < 0:
                groups.append([])
                left_bytes = self._part_bytes - room_bytes
            groups[-1].append(chunk)
        return groups

    def write(self, part: int, group: Sequence[Outgoing], wanted: Sequence[int]) -> list[int]:
        """Encode the wanted chunks of *group* into one part; return the offset of each."""
        offset = part * self._part_bytes
        offsets = []
        for chunk, is_wanted in zip(group, wanted, strict=True):
            if is_wanted:
                size_bytes = chunk.frame_bytes
                # The server sums what it copies; to sum here too would read it all twice.
                chunk.encode(self._memory[offset : offset + size_bytes], FLAG_UNSUMMED)
                offsets.append(offset)
                offset += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return offsets

    def close_descriptor(self) -> None:
        """Close ours, once the server has its own. Call once."""
        os.close(self.descriptor)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._memory = np.empty(0, np.uint8)


class PutPipeline:
    """One put: while one group is encoded, those before it are being committed.

    Memory is reserved for several groups at once, and ahead, so that no copy waits for an answer.
    """

    def __init__(
        self, staging: StagingMemory, session: Session, rpc: UnixRpc, terms: PutTerms
    ) -> None:
        self._staging = staging
        self._rpc = rpc
        # Durable ones wait for the disk: together, so that one flush is for all of them.
        self._commits = None if terms.durable else CallQueue()
        self._session_id = session.terms.session_id
        self._terms = terms
        self._results: list[Put] = []
        self._pending: deque[tuple[list[Put], Sent | None]] = deque()
        """The outcomes of a group's reservations, and its commit that is on its way."""
        self._open_ids: set[int] = set()
        self._reserving: list[Sent] = []
        self._next_part = 0
        self.may_be_read = False
        """A commit ended without its answer: the server may read the staging memory still."""

    def run(self, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return what became of each, in order."""
        groups = self._staging.groups(chunks)
        is_done = False
        try:
            self._reserve(groups[:_GROUPS_PER_RESERVE])
            for start in range(0, len(groups), _GROUPS_PER_RESERVE):
                stop = start + _GROUPS_PER_RESERVE
                reply = self._reserved()
                if stop < len(groups):
                    self._reserve(groups[stop : stop + _GROUPS_PER_RESERVE])
                self._put_window(groups[start:stop], reply)
            while self._pending:
                self._finish()
            is_done = True
        finally:
            if not is_done:  # whatever it was, an interrupt too
                while self._pending:  # the server reads the staging memory until then
                    with suppress(KVStoreError):
                        self._finish()
                while self._reserving:
                    with suppress(KVStoreError):
                        self._reserved()
                self._abort(self._open_ids)
        return self._results

    def _put_window(self, groups: Sequence[Sequence[Outgoing]], reply: pb.ReserveResponse) -> None:
        """Write and commit what was reserved; reserve the rest anew, bit by bit."""
        if PutOutcome.refused in reply.outcomes and (self._pending or len(groups) > 1):
            # What is under way may be what fills the tier: let it land, reserve less.
            while self._pending:
                self._finish()
            self._abort(reply.reservation_ids)
            for group in groups:
                self._reserve([group])
                self._put_window([group], self._reserved(-1))
            return
        outcomes, ids = read_outcomes(reply.outcomes, reply.reasons), reply.reservation_ids
        start = 0
        for group in groups:
            stop = start + len(group)
            self._commit(group, outcomes[start:stop], ids[start:stop])
            start = stop

    def _reserve(self, groups: Sequence[Sequence[Outgoing]]) -> None:
        """Ask for memory for the chunks of *groups*."""
        digests, parents, frame_bytes, places = [], [], [], []
        layouts: dict[KVLayout | ChunkShard, int] = {}
        for chunk in chain.from_iterable(groups):
            digests.append(chunk.template.key[DIGEST_BYTES:])
            parents.append(chunk.template.parent)
            frame_bytes.append(chunk.frame_bytes)
            places.append(layouts.setdefault(chunk.shard or chunk.template.layout, len(layouts)))
        request = pb.ReserveRequest(
            session_id=self._session_id,
            digests=b"".join(digests),
            parents=b"".join(parents),
            frame_bytes=frame_bytes,
            layout=places,
            layouts=map(layout_to_message, layouts),
            durable=self._terms.durable,
            deadline_ms=self._terms.within_ms,
            hints=hints_to_message(self._terms.hints),
        )
        self._reserving.append(self._rpc.send("Reserve", request, self._terms.within_ms))

    def _reserved(self, place: int = 0) -> pb.ReserveResponse:
        """Wait for the answer to a ``_reserve``, the first or the last one."""
        reply: pb.ReserveResponse = self._rpc.wait(self._reserving.pop(place))
        self._open_ids.update(filter(None, reply.reservation_ids))
        return reply

    def _commit(self, group: Sequence[Outgoing], outcomes: list[Put], ids: Sequence[int]) -> None:
        """Write what of *group* has a reservation, and send its commit."""
        if len(self._pending) == PARTS:
            self._finish()  # its part of the staging memory is the one written to next
        offsets = self._staging.write(self._next_part, group, ids)
        self._next_part = (self._next_part + 1) % PARTS
        if not offsets:
            self._pending.append((outcomes, None))
            return
        wanted = list(filter(None, ids))
        request = pb.CommitRequest(
            session_id=self._session_id,
            reservation_ids=wanted,
            offsets=offsets,
            durable=self._terms.durable,
            deadline_ms=self._terms.within_ms,
        )
        sent = self._rpc.send("Commit", request, self._terms.within_ms, self._commits)
        self._pending.append((outcomes, sent))
        self._open_ids.difference_update(wanted)

    def _finish(self) -> None:
        """Wait for the commit that was sent first, and take its results."""
        outcomes, sent = self._pending.popleft()
        if sent is not None:
            try:
                reply: pb.CommitResponse = self._rpc.wait(sent)
            except _UNANSWERED:
                self.may_be_read = True
                raise
            committed = iter(read_outcomes(reply.outcomes, reply.reasons))
            for place, put in enumerate(outcomes):
                if put.outcome is PutOutcome.stored:
                    outcomes[place] = next(committed)
        self._results += outcomes

    def _abort(self, ids: Iterable[int]) -> None:
        """Give back those reservations that are not committed."""
        unused = self._open_ids.intersection(ids)
        if not unused:
            return
        self._open_ids -= unused
        request = pb.AbortRequest(session_id=self._session_id, reservation_ids=unused)
        with suppress(KVStoreError):  # they end with the session
            self._rpc.call("Abort", request, self._terms.within_ms, pb.AbortResponse)
