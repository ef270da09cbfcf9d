"""Puts through staging memory: what a client shares with its server to write chunks to."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from kvstore.client.session import Session
from kvstore.client.transports.base import Outgoing, Put, PutTerms, read_outcomes
from kvstore.client.transports.unix_rpc import CallQueue, UnixRpc
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
from kvstore.proto.types import DIGEST_BYTES, PutOutcome

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

    def groups(self, chunks: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
        """Cut *chunks* into groups that fit one part each. Raises InvalidRequestError."""
        group: list[Outgoing] = []
        used_bytes = 0
        for chunk in chunks:
            room_bytes = _aligned(chunk.frame_bytes)
            if room_bytes > self._part_bytes:
                raise InvalidRequestError(
                    "staging_bytes", self.size_bytes, f"give {PARTS * room_bytes}"
                )
            if group and used_bytes + room_bytes > self._part_bytes:
                yield group
                group, used_bytes = [], 0
            group.append(chunk)
            used_bytes += room_bytes
        if group:
            yield group

    def write(self, part: int, group: Sequence[Outgoing], wanted: Sequence[int]) -> list[int]:
        """Encode the wanted chunks of *group* into one part; return the offset of each."""
        offset = part * self._part_bytes
        offsets = []
        for chunk, is_wanted in zip(group, wanted, strict=True):
            if is_wanted:
                # The server sums what it copies; to sum here too would read it all twice.
                chunk.encode(self._memory[offset : offset + chunk.frame_bytes], FLAG_UNSUMMED)
                offsets.append(offset)
                offset += _aligned(chunk.frame_bytes)
        return offsets

    def close_descriptor(self) -> None:
        """Close ours, once the server has its own. Call once."""
        os.close(self.descriptor)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._memory = np.empty(0, np.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


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
        self._commits: UnixRpc | CallQueue = rpc if terms.durable else CallQueue(rpc)
        self._session_id = session.terms.session_id
        self._terms = terms
        self._deadline_ms = terms.within_ms
        self._results: list[Put] = []
        self._pending: deque[tuple[list[Put], Callable[[], pb.CommitResponse] | None]] = deque()
        """The outcomes of a group's reservations, and its commit that is on its way."""
        self._open_ids: set[int] = set()
        self._reserving: list[Callable[[], pb.ReserveResponse]] = []
        self._next_part = 0
        self.may_be_read = False
        """A commit ended without its answer: the server may read the staging memory still."""

    def run(self, groups: Sequence[Sequence[Outgoing]]) -> list[Put]:
        """Put the groups; return what became of each chunk, in order."""
        windows = [
            groups[start : start + _GROUPS_PER_RESERVE]
            for start in range(0, len(groups), _GROUPS_PER_RESERVE)
        ]
        is_done = False
        try:
            self._reserve(windows[0])
            for number, window in enumerate(windows, 1):
                outcomes, ids = self._reserved()
                if number < len(windows):
                    self._reserve(windows[number])
                self._put_window(window, outcomes, ids)
            self._finish_all()
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

    def _put_window(
        self, groups: Sequence[Sequence[Outgoing]], outcomes: list[Put], ids: list[int]
    ) -> None:
        """Write and commit what was reserved; reserve the rest anew, bit by bit."""
        if any(put.outcome is PutOutcome.refused for put in outcomes) and (
            self._pending or len(groups) > 1
        ):
            # What is under way may be what fills the tier: let it land, reserve less.
            self._finish_all()
            self._abort(ids)
            for group in groups:
                self._reserve([group])
                self._put_window([group], *self._reserved(-1))
            return
        start = 0
        for group in groups:
            stop = start + len(group)
            self._commit(group, outcomes[start:stop], ids[start:stop])
            start = stop

    def _reserve(self, groups: Sequence[Sequence[Outgoing]]) -> None:
        chunks = [chunk for group in groups for chunk in group]
        layouts = list(dict.fromkeys(chunk.extent for chunk in chunks))
        request = pb.ReserveRequest(
            session_id=self._session_id,
            digests=b"".join([chunk.template.key[DIGEST_BYTES:] for chunk in chunks]),
            parents=b"".join([chunk.template.parent for chunk in chunks]),
            frame_bytes=[chunk.frame_bytes for chunk in chunks],
            layout=[layouts.index(chunk.extent) for chunk in chunks],
            layouts=list(map(layout_to_message, layouts)),
            durable=self._terms.durable,
            deadline_ms=self._deadline_ms,
            hints=hints_to_message(self._terms.hints),
        )
        self._reserving.append(self._rpc.send("Reserve", request, self._deadline_ms))

    def _reserved(self, place: int = 0) -> tuple[list[Put], list[int]]:
        """Wait for the answer to a ``_reserve``, the first or the last one."""
        reply = self._reserving.pop(place)()
        self._open_ids.update(filter(None, reply.reservation_ids))
        return read_outcomes(reply.outcomes, reply.reasons), list(reply.reservation_ids)

    def _commit(self, group: Sequence[Outgoing], outcomes: list[Put], ids: Sequence[int]) -> None:
        """Write what of *group* has a reservation, and send its commit."""
        if len(self._pending) == PARTS:
            self._finish()  # its part of the staging memory is the one written to next
        offsets = self._staging.write(self._next_part, group, ids)
        self._next_part = (self._next_part + 1) % PARTS
        wanted = list(filter(None, ids))
        if not wanted:
            self._pending.append((outcomes, None))
            return
        request = pb.CommitRequest(
            session_id=self._session_id,
            reservation_ids=wanted,
            offsets=offsets,
            durable=self._terms.durable,
            deadline_ms=self._deadline_ms,
        )
        wait = self._commits.send("Commit", request, self._deadline_ms)
        self._pending.append((outcomes, wait))
        self._open_ids.difference_update(wanted)

    def _finish_all(self) -> None:
        while self._pending:
            self._finish()

    def _finish(self) -> None:
        """Wait for the commit that was sent first, and take its results."""
        outcomes, wait = self._pending.popleft()
        if wait is None:
            self._results += outcomes
            return
        try:
            reply = wait()
        except _UNANSWERED:
            self.may_be_read = True
            raise
        committed = iter(read_outcomes(reply.outcomes, reply.reasons))
        self._results += [
            next(committed) if put.outcome is PutOutcome.stored else put for put in outcomes
        ]

    def _abort(self, ids: Iterable[int]) -> None:
        """Give back those reservations that are not committed."""
        unused = self._open_ids.intersection(ids)
        if not unused:
            return
        self._open_ids -= unused
        request = pb.AbortRequest(session_id=self._session_id, reservation_ids=unused)
        with suppress(KVStoreError):  # they end with the session
            self._rpc.call("Abort", request, self._deadline_ms, pb.AbortResponse)
