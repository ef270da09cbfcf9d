"""The shm transport: frames through memory shared by server and client on one host."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
from typing_extensions import override

from kvstore.client.connection import SLACK_S, Until
from kvstore.client.frames import Arrival, FileFrame, FrameAssembler, OpenFile, stays
from kvstore.client.session import Session, hangs, peer_pid
from kvstore.client.transports.base import (
    Arrivals,
    Outgoing,
    Put,
    PutTerms,
    ReadPlan,
    Transport,
    arrival_of,
    read_outcomes,
)
from kvstore.client.transports.peers import PeerReads
from kvstore.client.transports.unix_rpc import ENTER_WITHIN_S, Sent, UnixRpc, enter
from kvstore.client.view import MEMORY, WORD_BYTES, LeasedViews, View, geometry_of
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
from kvstore.proto.frame import ALIGN_BYTES, FLAG_UNSUMMED, raw_frame_bytes
from kvstore.proto.messages import hints_to_message, layout_to_message
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, ChunkShard, KVLayout, PutOutcome
from kvstore.proto.unix_socket import Place, Reach, unpack_places

_PEER = int(Reach.peer)
_HOLDER = attrgetter("reach", "number")
_MAX_SLABS = 4096
_MAX_FILES = 256


def can_share_memory(session: Session) -> bool:
    """Whether the server runs on this host and its socket is accessible."""
    terms = session.terms
    return bool(
        terms.socket_path
        and terms.host_id == unix_socket.host_id()
        and os.access(terms.socket_path, os.R_OK | os.W_OK)
    )


class ShmTransport(Transport):
    """Gets read sealed slabs of the server; puts go through the client's staging memory.

    The constructor raises TierUnavailableError when the server refuses, DeadlineError when it does
    not answer within *within_s*.
    """

    name = "shm"

    def __init__(self, session: Session, within_s: float = ENTER_WITHIN_S) -> None:
        super().__init__(session)
        whole_chunk = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._whole = geometry_of(whole_chunk)
        size_bytes = max(session.options.staging_bytes // PARTS, raw_frame_bytes(whole_chunk))
        self._staging = StagingMemory(size_bytes)
        try:
            memory = self._staging.size_bytes, self._staging.descriptor
            self._socket = enter(session.terms, unix_socket.Op.attach, within_s, memory=memory)
        finally:
            os.close(self._staging.descriptor)  # the server has its own
        self._socket.settimeout(min(ENTER_WITHIN_S / 2, session.options.deadline_ms / 1000))
        self._server_pid = peer_pid(self._socket)
        self.rpc = UnixRpc(session.terms, session.connection)
        self.calls, self.pool = self.rpc, self.rpc.links
        self.slabs = Slabs(self._socket)
        self._peers = PeerReads(session)
        self._peers.connect_to(session.peers)
        # One put at a time owns the staging memory; held during its copies by design.
        self._put_lock = threading.Lock()

    @override
    def hangs(self) -> bool:
        pid = self._server_pid
        return hangs(self.session.terms, pid) if pid else super().hangs()

    @override
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        left_ms = Until(terms.within_ms).left_ms
        if not self._put_lock.acquire(timeout=left_ms() / 1000):
            raise DeadlineError("other puts held the staging memory until the deadline")
        try:
            if self.is_spent:
                raise LeaseExpiredError("the server may still read the session's staging memory")
            terms = replace(terms, within_ms=left_ms())
            pipeline = PutPipeline(self._staging, self.session, self.rpc, terms)
            try:
                return pipeline.run(chunks)
            finally:
                # Rewriting it would change what the server copies and sums meanwhile: wrong bytes
                # with right checksums.
                self.is_spent = pipeline.may_be_read
        finally:
            self._put_lock.release()

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        request = self.request(plan, pb.VIA_SHARED_MEMORY)
        request.no_lease = plan.no_lease and not plan.lease_id
        with ExitStack() as stack:
            if plan.direct is not None and (self._peers.lenders or self.session.peers):
                yield Arrivals(self._with_peers(stack, request, plan))
                return
            replies, ranges = self.replies(stack, request), plan.ranges
            yield Arrivals(self._ranges(replies, ranges) if ranges else self._frames(replies, plan))

    def replies(self, stack: ExitStack, request: pb.GetRequest) -> Iterator[pb.GetResponse]:
        """Yield the replies of a get. *stack* ends it and its own lease."""
        until, leases = Until(request.deadline_ms), {0, request.lease_id}
        calls = self.rpc.stream("Get", request, request.deadline_ms)

        def release(lease_id: int) -> None:
            calls.close()
            self.release([lease_id], until.left_ms(1))  # the reader may be slow

        stack.enter_context(closing(calls))
        for reply in calls:
            if reply.lease_id not in leases:
                leases.add(reply.lease_id)
                stack.callback(release, reply.lease_id)
            yield reply

    def _with_peers(
        self, stack: ExitStack, request: pb.GetRequest, plan: ReadPlan
    ) -> Iterator[Arrival]:
        """Yield the frames of *request*; the own server sends those that another did not."""
        until = Until(plan.deadline_ms)
        request.peers.extend(self._peers.numbers())
        first: int | None = 0
        while first is not None:
            request.digests = plan.digests[DIGEST_BYTES * first :]
            request.deadline_ms = until.left_ms(1)
            first = yield from self._frames(self.replies(stack, request), plan, first, until)
            del request.peers[:]

    def _frames(
        self,
        replies: Iterator[pb.GetResponse],
        plan: ReadPlan,
        first: int = 0,
        until: Until | None = None,
    ) -> Generator[Arrival, None, int | None]:
        """Yield the frames that *replies* of a get of the chunks from *first* on name or contain.

        With *until*, the deadline, frames on other servers are read from there. Return the first
        chunk that another server failed to send, or None.
        """
        assembler: FrameAssembler | None = None
        index = first
        for reply in replies:
            if reply.HasField("part"):
                assembler = assembler or FrameAssembler(self.session.terms.max_frame_bytes)
                assembler.next_index = index - first
                if (whole := assembler.take(arrival_of(reply))) is not None:
                    index += 1
                    yield replace(whole, index=first + whole.index)
                continue
            names, index = reply.places.tier_names, first + reply.index
            if reply.places.peers:
                self._peers.connect_to(reply.places.peers)
            for (reach, number), run in groupby(unpack_places(reply.places.rows), key=_HOLDER):
                start, index = index, index + len(places := list(run))
                if reach != _PEER:
                    for at, place in enumerate(places, start):
                        yield self._arrival(at, names[place.tier], place)
                elif plan.direct is not None and until is not None:
                    digests = plan.digests[DIGEST_BYTES * start : DIGEST_BYTES * index]
                    left = yield from self._peers.read(
                        number, start, digests, plan.direct, until.at_s - SLACK_S
                    )
                    if left is not None:
                        return left
        return None

    def _arrival(self, index: int, tier: str, place: Place) -> Arrival:
        size_bytes = place.size_bytes
        if place.reach == Reach.file:
            # Key and checksums prove a file's contents, which are copied when read.
            file = FileFrame(self.slabs.file(place.number), place.offset, size_bytes)
            return Arrival(index, tier, size_bytes, file)
        if place.reach != MEMORY:
            raise InvalidRequestError("reach", place.reach, "give memory or a file")
        slab = self.slabs.slab_of(place)
        frame = slab.data[place.offset : place.offset + size_bytes]
        confirm = partial(slab.confirm, place.offset, place.generation)
        return Arrival(index, tier, size_bytes, frame, confirm)

    def _ranges(
        self, replies: Iterator[pb.GetResponse], ranges: Sequence[pb.FrameRange]
    ) -> Iterator[Arrival]:
        """Yield *ranges*, from memory and files that the server names, or as it sends them."""
        done: set[int] = set()
        for reply in replies:
            if reply.HasField("part"):
                yield arrival_of(reply)
            for place in unpack_places(reply.places.rows):
                if reply.index in done:
                    continue
                done.add(reply.index)
                whole = self._arrival(reply.index, reply.places.tier_names[place.tier], place)
                for one in ranges:
                    if one.index == reply.index and one.start < place.size_bytes:
                        data = np.array(whole.data[one.start : one.stop])
                        whole.confirm()  # before it is used as the chunk's
                        yield replace(whole, data=data, confirm=stays, offset=one.start)

    @override
    def viewer(self, rows: bytes, keys: Sequence[ChunkKey]) -> View:
        return LeasedViews(self.slabs, self._whole, rows, keys).__call__  # bound once

    @override
    def leave(self) -> None:
        super().leave()
        self._socket.close()  # closes the child's descriptor: the parent's connection stays
        self._staging.close()
        self.slabs.leave()
        self._peers.leave()

    @override
    def close(self) -> None:
        super().close()
        self._socket.close()
        self._staging.close()
        self.slabs.close()
        self._peers.close()


class SlabMap:
    """One slab: its bytes, and the generations among them as words of eight bytes."""

    __slots__ = ("bytes", "data", "words")

    def __init__(self, memory: mmap.mmap) -> None:
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self.bytes = memoryview(memory)
        """The same as ``data``, faster to compare a few bytes of."""
        self.words = self.bytes[: len(memory) // WORD_BYTES * WORD_BYTES].cast("Q")

    def confirm(self, offset: int, generation: int) -> None:
        """Raise LeaseExpiredError unless the frame at *offset* is still of this *generation*."""
        if self.words[offset // WORD_BYTES - 1] != generation:
            raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")


class Slabs:
    """Maps of slabs by id, and files of the disk tier, requested at first use over *link*, an
    attached connection with a timeout; its owner closes it. Thread-safe.
    """

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._slabs: dict[int, SlabMap] = {}
        self._files: dict[int, OpenFile] = {}
        # One request at a time on the socket; also guards additions to the two above.
        self._lock = threading.Lock()

    def slab(self, number: int) -> SlabMap:
        """Return a slab, mapped whole. Raises TierUnavailableError."""
        if (slab := self._slabs.get(number)) is not None:
            return slab  # while another thread waits for one
        with self._lock:
            slab = self._slabs.get(number)
            if slab is None:
                if len(self._slabs) >= _MAX_SLABS:
                    self._slabs.clear()
                descriptor, size_bytes = self._request(unix_socket.Op.slab, number)
                try:
                    memory = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
                slab = self._slabs[number] = SlabMap(memory)
            return slab

    def slab_of(self, place: Place) -> SlabMap:
        """Return the slab of *place*. Raises as ``slab``, and InvalidRequestError past its end."""
        slab = self._slabs.get(place.number) or self.slab(place.number)
        offset, stop = place.offset, place.offset + place.size_bytes
        if offset < WORD_BYTES or offset % WORD_BYTES or stop > len(slab.data):
            raise InvalidRequestError("place", (offset, stop), f"slab has {len(slab.data)} bytes")
        return slab

    def file(self, extent: int) -> OpenFile:
        """Return a file of the disk tier, open for reading. Raises TierUnavailableError."""
        with self._lock:
            file = self._files.get(extent)
            if file is None:
                if len(self._files) >= _MAX_FILES:
                    self._files.clear()
                file = self._files[extent] = OpenFile(*self._request(unix_socket.Op.extent, extent))
            return file

    def send_descriptor(self, request: unix_socket.Request, descriptor: int) -> unix_socket.Reply:
        """Send the server a descriptor; return its reply. Raises TierUnavailableError."""
        with self._lock:
            return self._exchange(request, [descriptor])[0]

    def _request(self, op: unix_socket.Op, number: int) -> tuple[int, int]:
        """Return a descriptor, which the caller closes, and its size."""
        reply, size_bytes, files = self._exchange(unix_socket.Request(op, number))
        if reply is unix_socket.Reply.ok and files:
            return files[0], size_bytes
        for descriptor in files:
            os.close(descriptor)
        if reply is unix_socket.Reply.invalid:  # it was freed, with its chunks
            raise LeaseExpiredError(f"{op.name} {number} was freed; look the chunk up again")
        raise TierUnavailableError("shm", f"{op.name} {number}: {reply.name}")

    def _exchange(
        self, request: unix_socket.Request, descriptors: Sequence[int] = ()
    ) -> tuple[unix_socket.Reply, int, list[int]]:
        files: list[int] = []
        try:
            socket.send_fds(self._socket, [request.pack()], descriptors)
            message, files, _, _ = socket.recv_fds(self._socket, unix_socket.HEADER_BYTES, 1)
            reply, size_bytes, _ = unix_socket.unpack_head(message, unix_socket.REPLY_KINDS)
        except (OSError, InvalidRequestError) as error:
            # A late answer must not be taken for that of the next request.
            self._socket.close()
            for descriptor in files:
                os.close(descriptor)
            raise TierUnavailableError("shm", f"the server hung up: {error}") from None
        return reply, size_bytes, files

    def leave(self) -> None:
        """In a child, once the socket is closed: drop every map and file."""
        self._lock = threading.Lock()  # another thread may have held it
        self.close()

    def close(self) -> None:
        """Drop every map and file; views and frames in use keep theirs. Idempotent."""
        with self._lock:
            self._slabs.clear()
            self._files.clear()


PARTS = 4
"""Parts of the staging memory: one is written while the server reads the others."""
_GROUPS_PER_RESERVE = 4
_UNANSWERED = (DeadlineError, TierUnavailableError, LeaseExpiredError)
"""Errors of a commit that may still be running. The last is that of a commit sent twice."""


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
                # The server sums what it copies; summing here would read everything twice.
                chunk.encode(self._memory[offset : offset + size_bytes], FLAG_UNSUMMED)
                offsets.append(offset)
                offset += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return offsets

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._memory = np.empty(0, np.uint8)


class PutPipeline:
    """One put: while one group is encoded, earlier ones are committed.

    Memory is reserved for several groups at once, and ahead, so that no copy waits for an answer.
    """

    def __init__(
        self, staging: StagingMemory, session: Session, rpc: UnixRpc, terms: PutTerms
    ) -> None:
        self._staging = staging
        self._rpc = rpc
        # Durable commits wait for the disk: concurrently, so that one flush serves all of them.
        self._commits = None if terms.durable else deque[Sent]()
        self._session_id = session.terms.session_id
        self._terms = terms
        self._left_ms = Until(terms.within_ms).left_ms
        self._results: list[Put] = []
        self._pending: deque[tuple[list[Put], Sent | None]] = deque()
        """The outcomes of a group's reservations, and its commit in flight."""
        self._open_ids: set[int] = set()
        self._reserving: list[Sent] = []
        self._next_part = 0
        self.may_be_read = False
        """A commit ended without an answer: the server may still read the staging memory."""

    def run(self, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return the outcome of each, in order."""
        groups = self._staging.groups(chunks)
        if not groups:
            return []
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
        except BaseException:  # an interrupt too
            while self._pending:  # the server reads the staging memory until then
                with suppress(KVStoreError):
                    self._finish()
            while self._reserving:
                with suppress(KVStoreError):
                    self._reserved()
            self._abort(self._open_ids)
            raise
        return self._results

    def _put_window(self, groups: Sequence[Sequence[Outgoing]], reply: pb.ReserveResponse) -> None:
        """Write and commit the reserved chunks. On a refusal, reserve again group by group."""
        if PutOutcome.refused in reply.outcomes and (self._pending or len(groups) > 1):
            # Commits in flight may be what fills the tier: finish them, then reserve less.
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
            deadline_ms=self._left_ms(),
            hints=hints_to_message(self._terms.hints),
        )
        self._reserving.append(self._rpc.send("Reserve", request, request.deadline_ms))

    def _reserved(self, place: int = 0) -> pb.ReserveResponse:
        """Wait for the answer to a ``_reserve``, the first or the last one."""
        reply: pb.ReserveResponse = self._rpc.wait(self._reserving.pop(place))
        self._open_ids.update(filter(None, reply.reservation_ids))
        return reply

    def _commit(self, group: Sequence[Outgoing], outcomes: list[Put], ids: Sequence[int]) -> None:
        if len(self._pending) == PARTS:
            self._finish()  # its part of the staging memory is written next
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
            deadline_ms=self._left_ms(),
        )
        sent = self._rpc.send("Commit", request, request.deadline_ms, self._commits)
        self._pending.append((outcomes, sent))
        self._open_ids.difference_update(wanted)

    def _finish(self) -> None:
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
        unused = self._open_ids.intersection(ids)
        if not unused:
            return
        self._open_ids -= unused
        request = pb.AbortRequest(session_id=self._session_id, reservation_ids=unused)
        with suppress(KVStoreError):  # they end with the session
            self._rpc.call("Abort", request, self._left_ms(1), pb.AbortResponse)
