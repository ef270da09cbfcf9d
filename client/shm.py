"""The shm transport: frames through memory that server and client share on one host."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvstore.client.local_link import LocalLink
from kvstore.client.session import Session
from kvstore.client.transport import Arrived, Assembly, Outgoing, Put, Transport, read_outcomes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import shm
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import ALIGN_BYTES, FLAG_UNSUMMED, raw_frame_bytes
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, KVLayout, PutOutcome
from kvstore.proto.wire import join_digests, layout_to_message

_GENERATION_BYTES = 8
_SOCKET_TIMEOUT_S = 2.0
_GROUPS_PER_RESERVE = 4
_PARTS = 4
"""The staging memory is written part by part, while the server reads those before."""
_MAX_SLABS = 4096


def can_share_memory(session: Session) -> bool:
    """Whether the server runs on this host and listens on a socket that we may use."""
    terms = session.terms
    return bool(
        terms.socket_path
        and terms.host_id == shm.host_id()
        and os.access(terms.socket_path, os.R_OK | os.W_OK)
    )


class ShmTransport(Transport):
    """Gets read sealed slabs of the server; puts go through staging memory of ours.

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "shm"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        whole_chunk = KVLayout.of(session.representation, session.options.chunk_tokens)
        part_bytes = max(session.options.staging_bytes // _PARTS, raw_frame_bytes(whole_chunk))
        self._part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size_bytes = _PARTS * self._part_bytes
        descriptor = shm.create_memfd("kvstore-staging", size_bytes)
        try:
            shm.add_seals(descriptor, shm.SIZE_SEALS)
            self._staging: Bytes = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
            self._socket = self._attach(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self.calls = LocalLink(session.terms, session.connection)
        self._slabs: dict[int, Bytes] = {}
        # One question at a time on the socket; also guards _slabs.
        self._slab_lock = threading.Lock()
        # One put at a time owns the staging memory, over its copies by design.
        self._put_lock = threading.Lock()

    def _attach(self, staging: int, size_bytes: int) -> socket.socket:
        terms = self.session.terms
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_SOCKET_TIMEOUT_S)
        try:
            link.connect(terms.socket_path)
            request = shm.Request(shm.Op.attach, size_bytes, terms.attach_token)
            socket.send_fds(link, [request.pack()], [staging])
            reply, _ = shm.unpack_reply(link.recv(shm.MESSAGE_BYTES))
        except (OSError, InvalidRequestError) as error:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {error}") from None
        if reply is not shm.Reply.ok:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {reply.name}")
        return link

    # --- put

    @override
    def put(self, chunks: Sequence[Outgoing], *, durable: bool, deadline_ms: int) -> list[Put]:
        with self._put_lock:
            return _Pipeline(self, durable, deadline_ms).run(list(self._groups(chunks)))

    def _groups(self, chunks: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
        """Cut *chunks* into groups that fit one part of the staging memory each."""
        group: list[Outgoing] = []
        used_bytes = 0
        for chunk in chunks:
            room_bytes = _aligned(chunk.frame_bytes)
            if room_bytes > self._part_bytes:
                raise InvalidRequestError(
                    "staging_bytes", _PARTS * self._part_bytes, f"give {_PARTS * room_bytes}"
                )
            if group and used_bytes + room_bytes > self._part_bytes:
                yield group
                group, used_bytes = [], 0
            group.append(chunk)
            used_bytes += room_bytes
        if group:
            yield group

    def write(self, part: int, group: Sequence[Outgoing], wanted: Sequence[int]) -> list[int]:
        """Encode the wanted chunks of *group* into one part of the staging memory.

        Return the offset of each.
        """
        offset = part * self._part_bytes
        offsets = []
        for chunk, is_wanted in zip(group, wanted, strict=True):
            if is_wanted:
                # The server sums what it copies; to sum here too would read it all twice.
                chunk.encode(self._staging[offset : offset + chunk.frame_bytes], FLAG_UNSUMMED)
                offsets.append(offset)
                offset += _aligned(chunk.frame_bytes)
        return offsets

    # --- get

    @override
    @contextmanager
    def get(
        self, digests: Sequence[ChainDigest], lease_id: int, deadline_ms: int
    ) -> Iterator[Iterator[Arrived]]:
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_SHARED_MEMORY)
        leases: set[int] = set()
        try:
            with closing(self.calls.stream("Get", request, deadline_ms)) as replies:
                yield self._arriving(replies, leases)
        finally:
            for own_lease in leases - {0, lease_id}:
                self._release(own_lease, deadline_ms)

    def _arriving(self, replies: Iterator[pb.GetResponse], leases: set[int]) -> Iterator[Arrived]:
        """Yield what *replies* put in reach; *leases* learns under which leases."""
        assembly = Assembly(self.session.terms.max_frame_bytes)
        for reply in replies:
            leases.add(reply.lease_id)
            for number, place in enumerate(reply.places.places):
                yield self._arrived(reply.index + number, place)
            frame = assembly.add(reply.part) if reply.HasField("part") else None
            if frame is not None:
                yield Arrived(reply.index, reply.tier, frame, _stays)

    def _arrived(self, index: int, place: pb.Place) -> Arrived:
        slab = self._slab(place.slab)
        stop = place.offset + place.size_bytes
        if place.offset < _GENERATION_BYTES or stop > len(slab):
            raise InvalidRequestError("place", (place.offset, stop), f"slab has {len(slab)} bytes")
        word = slab[place.offset - _GENERATION_BYTES : place.offset].view("<u8")

        def confirm() -> None:
            if int(word[0]) != place.generation:
                raise LeaseExpiredError(
                    "the chunk was replaced while it was read; look it up again"
                )

        confirm()
        return Arrived(index, place.tier, slab[place.offset : stop], confirm)

    def _slab(self, slab_id: int) -> Bytes:
        with self._slab_lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                if len(self._slabs) >= _MAX_SLABS:
                    self._slabs.clear()
                slab = self._slabs[slab_id] = self._ask_slab(slab_id)
            return slab

    def _ask_slab(self, slab_id: int) -> Bytes:
        try:
            self._socket.send(shm.Request(shm.Op.slab, slab_id).pack())
            message, files, _, _ = socket.recv_fds(self._socket, shm.MESSAGE_BYTES, 1)
        except OSError as error:
            # An answer that is only late must not be taken for that of the next question.
            self._socket.close()
            raise TierUnavailableError("shm", f"the server hung up: {error}") from None
        try:
            reply, size_bytes = shm.unpack_reply(message)
            if reply is not shm.Reply.ok or len(files) != 1:
                raise TierUnavailableError("shm", f"slab {slab_id}: {reply.name}")
            mapping = mmap.mmap(files[0], size_bytes, prot=mmap.PROT_READ)
        finally:
            for descriptor in files:
                os.close(descriptor)
        return np.frombuffer(mapping, np.uint8)

    def _release(self, lease_id: int, deadline_ms: int) -> None:
        request = pb.ReleaseRequest(session_id=self.session.terms.session_id, lease_ids=[lease_id])
        try:
            self.calls.call("Release", request, deadline_ms, pb.ReleaseResponse)
        except KVStoreError:
            return  # it ends with the lease's own time

    @override
    def close(self) -> None:
        self.calls.close()
        self._socket.close()
        self._staging = np.empty(0, np.uint8)
        with self._slab_lock:
            self._slabs.clear()


class _Pipeline:
    """One put: while one group is encoded, those before it are being committed.

    A call costs each side about half a millisecond of its core, so room is reserved for several
    groups at once, and ahead.
    """

    def __init__(self, transport: ShmTransport, durable: bool, deadline_ms: int) -> None:
        self._transport = transport
        self._calls = transport.calls
        self._session_id = transport.session.terms.session_id
        self._durable = durable
        self._deadline_ms = deadline_ms
        self._results: list[Put] = []
        self._pending: deque[_Group] = deque()
        self._open_ids: set[int] = set()
        self._asked: list[Callable[[], pb.ReserveResponse]] = []
        self._next_part = 0

    def run(self, groups: Sequence[Sequence[Outgoing]]) -> list[Put]:
        """Put the groups; return what became of each chunk, in order."""
        windows = [
            groups[start : start + _GROUPS_PER_RESERVE]
            for start in range(0, len(groups), _GROUPS_PER_RESERVE)
        ]
        try:
            reserved = self._reserve(windows[0])
            for number, window in enumerate(windows):
                outcomes, ids = reserved()
                if number + 1 < len(windows):
                    reserved = self._reserve(windows[number + 1])
                self._put_window(window, outcomes, ids)
            self._finish_all()
        except KVStoreError:
            for left in self._pending:
                left.settle()
            self._abort()
            raise
        return self._results

    def _put_window(
        self, groups: Sequence[Sequence[Outgoing]], outcomes: list[Put], ids: list[int]
    ) -> None:
        """Write and commit what room was reserved for; ask again for the rest, bit by bit."""
        is_short = any(put.outcome is PutOutcome.refused for put in outcomes)
        if is_short and (self._pending or len(groups) > 1):
            # What we have under way may be what fills the tier: let it land, ask for less.
            self._finish_all()
            self._abort(ids)
            for group in groups:
                self._put_window([group], *self._reserve([group])())
            return
        start = 0
        for group in groups:
            stop = start + len(group)
            self._stage(group, outcomes[start:stop], ids[start:stop])
            start = stop

    def _stage(self, group: Sequence[Outgoing], outcomes: list[Put], ids: Sequence[int]) -> None:
        if len(self._pending) == _PARTS:
            # Its part of the staging memory is the one written to next.
            self._results += self._pending.popleft().finish()
        offsets = self._transport.write(self._next_part, group, ids)
        self._next_part = (self._next_part + 1) % _PARTS
        self._pending.append(_Group(outcomes, self._commit(ids, offsets)))

    def _reserve(
        self, groups: Sequence[Sequence[Outgoing]]
    ) -> Callable[[], tuple[list[Put], list[int]]]:
        """Ask for room for *groups*; the returned function waits for the answer."""
        chunks = [chunk for group in groups for chunk in group]
        request = _reserve_request(self._session_id, chunks, self._durable, self._deadline_ms)
        wait = self._calls.send("Reserve", request, self._deadline_ms)
        self._asked.append(wait)

        def reserved() -> tuple[list[Put], list[int]]:
            self._asked.remove(wait)
            reply: pb.ReserveResponse = wait()
            self._open_ids.update(i for i in reply.reservation_ids if i)
            return read_outcomes(reply.outcomes, reply.reasons), list(reply.reservation_ids)

        return reserved

    def _commit(
        self, ids: Sequence[int], offsets: Sequence[int]
    ) -> Callable[[], pb.CommitResponse] | None:
        wanted = [i for i in ids if i]
        if not wanted:
            return None
        request = pb.CommitRequest(
            session_id=self._session_id,
            reservation_ids=wanted,
            offsets=offsets,
            durable=self._durable,
            deadline_ms=self._deadline_ms,
        )
        wait = self._calls.send("Commit", request, self._deadline_ms)
        self._open_ids.difference_update(wanted)
        return wait

    def _finish_all(self) -> None:
        while self._pending:
            self._results += self._pending.popleft().finish()

    def _abort(self, reservation_ids: Sequence[int] | None = None) -> None:
        """Give back those of the given reservations, or of all, that are not committed."""
        if reservation_ids is None:
            for wait in self._asked:
                with suppress(KVStoreError):
                    self._open_ids.update(i for i in wait().reservation_ids if i)
        unused = self._open_ids.intersection(reservation_ids or self._open_ids)
        if not unused:
            return
        self._open_ids -= unused
        request = pb.AbortRequest(session_id=self._session_id, reservation_ids=unused)
        try:
            self._calls.call("Abort", request, self._deadline_ms, pb.AbortResponse)
        except KVStoreError:
            return  # they end with the session


@dataclass(slots=True)
class _Group:
    """Chunks of one part of the staging memory, and the commit that is on its way."""

    outcomes: list[Put]
    commit: Callable[[], pb.CommitResponse] | None

    def finish(self) -> list[Put]:
        """Wait for the commit; return what became of each chunk of the group."""
        if self.commit is None:
            return self.outcomes
        reply = self.commit()
        committed = iter(read_outcomes(reply.outcomes, reply.reasons))
        return [
            next(committed) if put.outcome is PutOutcome.stored else put for put in self.outcomes
        ]

    def settle(self) -> None:
        """Wait until the server reads the staging memory no more, whatever the outcome."""
        try:
            self.finish()
        except KVStoreError:
            return


def _stays() -> None:
    """The frame is ours: nobody reuses its memory."""


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _reserve_request(
    session_id: int, group: Sequence[Outgoing], durable: bool, deadline_ms: int
) -> pb.ReserveRequest:
    layouts = list(dict.fromkeys(chunk.template.layout for chunk in group))
    return pb.ReserveRequest(
        session_id=session_id,
        digests=join_digests(chunk.template.key[DIGEST_BYTES:] for chunk in group),
        parents=join_digests(chunk.template.parent for chunk in group),
        frame_bytes=[chunk.frame_bytes for chunk in group],
        layout=[layouts.index(chunk.template.layout) for chunk in group],
        layouts=[layout_to_message(layout) for layout in layouts],
        durable=durable,
        deadline_ms=deadline_ms,
    )
