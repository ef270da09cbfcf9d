"""The shm transport: frames through memory that server and client share on one host."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np
from typing_extensions import override

from kvstore.client.connection import SLACK_S, Until
from kvstore.client.frames import FileFrame, FrameAssembler, OpenFile
from kvstore.client.session import Session, hangs, peer_pid
from kvstore.client.transports.base import (
    Arrival,
    Arrivals,
    Outgoing,
    Put,
    PutTerms,
    ReadPlan,
    Transport,
    arrival_of,
    room_of,
    stays,
    whole_frame,
)
from kvstore.client.transports.peers import LentRun, PeerReads
from kvstore.client.transports.staging import PARTS, PutPipeline, StagingMemory
from kvstore.client.transports.unix_rpc import UnixRpc, enter
from kvstore.client.view import ChunkView, RawGeometry, View, geometry_of, view_at
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
from kvstore.proto.frame import KEY_OFFSET, raw_frame_bytes
from kvstore.proto.keys import keys_of_digests
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, ChunkKey, KVLayout
from kvstore.proto.unix_socket import (
    NOWHERE,
    PLACE_ROW,
    ROW_BYTES,
    Place,
    Reach,
    unpack_places,
)

_SOCKET_TIMEOUT_S = 2.0
ATTACH_WITHIN_S = 2 * _SOCKET_TIMEOUT_S
_MEMORY, _PEER = int(Reach.memory), int(Reach.peer)
_HOLDER = attrgetter("reach", "number")
_MAX_SLABS = 4096
_MAX_FILES = 256
_WORD_BYTES = 8
_KEY_WORDS = np.arange(KEY_OFFSET // _WORD_BYTES, (KEY_OFFSET + KEY_BYTES) // _WORD_BYTES)
"""Where a frame has its key, in words from its start."""


def can_share_memory(session: Session) -> bool:
    """Whether the server runs on this host and listens on a socket that we may use."""
    terms = session.terms
    return bool(
        terms.socket_path
        and terms.host_id == unix_socket.host_id()
        and os.access(terms.socket_path, os.R_OK | os.W_OK)
    )


class ShmTransport(Transport):
    """Gets read sealed slabs of the server; puts go through staging memory of ours.

    Raises TierUnavailableError at birth when the server does not take part, DeadlineError when it
    does not answer within *within_s*.
    """

    name = "shm"

    def __init__(self, session: Session, within_s: float = ATTACH_WITHIN_S) -> None:
        super().__init__(session)
        whole_chunk = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._whole = geometry_of(whole_chunk)
        size_bytes = max(session.options.staging_bytes // PARTS, raw_frame_bytes(whole_chunk))
        self._staging = StagingMemory(size_bytes)
        try:
            self._socket = self._attach(self._staging, within_s)
        finally:
            self._staging.close_descriptor()
        self._server_pid = peer_pid(self._socket)
        self.rpc = UnixRpc(session.terms, session.connection)
        self.calls = self.rpc
        self.slabs = Slabs(self._socket)
        self._peers = PeerReads(session)
        self._peers.note(session.peers)
        # One put at a time owns the staging memory, over its copies by design.
        self._put_lock = threading.Lock()

    def _attach(self, staging: StagingMemory, within_s: float) -> socket.socket:
        terms = self.session.terms
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(min(_SOCKET_TIMEOUT_S, within_s / 2))  # for each of two answers
        try:
            memory = [staging.descriptor]
            reply = enter(link, terms, unix_socket.Op.attach, staging.size_bytes, memory)
        except TimeoutError:
            link.close()
            raise DeadlineError(f"{terms.socket_path}: the server did not answer in time") from None
        except (OSError, InvalidRequestError) as error:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {error}") from None
        if reply is not unix_socket.Reply.ok:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {reply.name}")
        link.settimeout(min(_SOCKET_TIMEOUT_S, self.session.options.deadline_ms / 1000))
        return link

    @override
    def _hangs(self) -> bool:
        if not self._server_pid:
            return super()._hangs()
        return hangs(self.session.terms, self._server_pid)

    @override
    def hang_up(self) -> None:
        super().hang_up()
        self.rpc.hang_up()

    @override
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        left_ms = Until(terms.within_ms).left_ms
        if not self._put_lock.acquire(timeout=left_ms() / 1000):
            raise DeadlineError("other puts had the staging memory all the time")
        try:
            if self.is_spent:
                raise LeaseExpiredError("the session's staging memory is in doubt: open another")
            terms = replace(terms, within_ms=left_ms())
            pipeline = PutPipeline(self._staging, self.session, self.rpc, terms)
            try:
                return pipeline.run(chunks)
            finally:
                # Written to again, it would change what the server is copying, and sums as it
                # copies: wrong bytes with right checksums.
                self.is_spent = pipeline.may_be_read
        finally:
            self._put_lock.release()

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        request = self.request(plan, pb.VIA_SHARED_MEMORY)
        with ExitStack() as stack:
            if plan.ranges:
                yield Arrivals(self._ranges(self.replies(stack, request), plan.ranges))
            else:
                yield Arrivals(self._frames(stack, request, plan))

    def replies(self, stack: ExitStack, request: pb.GetRequest) -> Iterator[pb.GetResponse]:
        """Yield the replies of a get. With *stack* it ends, and so does a lease of its own."""
        leases: set[int] = set()
        until = Until(request.deadline_ms)
        stack.callback(self._release_own, leases, request.lease_id, until)
        calls = stack.enter_context(closing(self.rpc.stream("Get", request, request.deadline_ms)))
        for reply in calls:
            leases.add(reply.lease_id)
            yield reply

    def _release_own(self, leases: set[int], given: int, until: Until) -> None:
        if own := leases - {0, given}:
            self.release(own, until.left_ms(1))  # who reads may be slow

    def _frames(
        self, stack: ExitStack, request: pb.GetRequest, plan: ReadPlan
    ) -> Iterator[Arrival]:
        """Yield what *request* brings. What another server did not send comes by way of ours."""
        until = Until(plan.deadline_ms)
        if not self._peers.are_there:
            plan = replace(plan, direct=None)
        if plan.direct is not None:
            request.peers.extend(self._peers.numbers())
        first: int | None = 0
        while first is not None:
            request.digests = plan.digests[DIGEST_BYTES * first :]
            request.deadline_ms = until.left_ms(1)
            first = yield from self._answer(self.replies(stack, request), first, plan, until)
            del request.peers[:]

    def _answer(
        self, replies: Iterator[pb.GetResponse], first: int, plan: ReadPlan, until: Until
    ) -> Generator[Arrival, None, int | None]:
        """Yield what *replies* of a get of the chunks from the *first* on put in reach.

        Return the first chunk that another server should have sent and did not, if one did not.
        """
        assembler: FrameAssembler | None = None
        index = first
        for reply in replies:
            if reply.HasField("part"):
                limit_bytes = self.session.terms.max_frame_bytes
                assembler = assembler or FrameAssembler(limit_bytes, room_of())
                assembler.next_index = index - first
                whole = whole_frame(assembler, arrival_of(reply))
                index = first + assembler.next_index
                if whole is not None:
                    yield replace(whole, index=first + whole.index)
                continue
            names, index = reply.places.tier_names, first + reply.index
            if reply.places.peers:
                self._peers.note(reply.places.peers)
            for (reach, number), run in groupby(unpack_places(reply.places.rows), key=_HOLDER):
                start, index = index, index + len(places := list(run))
                if reach != _PEER:
                    for at, place in enumerate(places, start):
                        yield self._arrival(at, names[place.tier], place)
                elif plan.direct is not None:
                    digests = plan.digests[DIGEST_BYTES * start : DIGEST_BYTES * index]
                    keys = keys_of_digests(digests, self.session.terms.namespace, len(places))
                    lent, until_s = LentRun(number, start, keys), until.at_s - SLACK_S
                    left = yield from self._peers.read(lent, plan.direct, until_s)
                    if left is not None:
                        return left
        return None

    def _arrival(self, index: int, tier: str, place: Place) -> Arrival:
        size_bytes = place.size_bytes
        if place.reach == Reach.file:
            # What a file holds is proven by its key and checksums: it is copied as it is read.
            file = FileFrame(self.slabs.file(place.number), place.offset, size_bytes)
            return Arrival(index, tier, size_bytes, file)
        if place.reach != _MEMORY:
            raise InvalidRequestError("reach", place.reach, "this client reads memory and files")
        slab = self.slabs.slab(place.number)
        slab.check(place)
        frame = slab.data[place.offset : place.offset + size_bytes]
        confirm = partial(slab.confirm, place.offset, place.generation)
        return Arrival(index, tier, size_bytes, frame, confirm)

    def _ranges(
        self, replies: Iterator[pb.GetResponse], ranges: Sequence[pb.FrameRange]
    ) -> Iterator[Arrival]:
        """Yield *ranges*: out of memory and files that the server names, or as it sends them."""
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
                        whole.confirm()  # before anybody takes it for the chunk's
                        yield replace(whole, data=data, confirm=stays, offset=one.start)

    @override
    def viewer(self, rows: bytes, keys: Sequence[ChunkKey]) -> View:
        return LeasedViews(self.slabs, self._whole, rows, keys).__call__  # bound once

    @override
    def leave(self) -> None:
        super().leave()
        self.rpc.leave()
        self._socket.close()  # closes the child's descriptor: the parent's connection stays
        self._staging.close()
        self.slabs.leave()
        self._peers.leave()

    @override
    def close(self) -> None:
        self.rpc.close()
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
        """The same as ``data``, for who compares a few of them."""
        self.words = self.bytes[: len(memory) // 8 * 8].cast("Q")

    def check(self, place: Place) -> None:
        """Raise InvalidRequestError unless *place* lies within, LeaseExpiredError once reused."""
        offset, stop = place.offset, place.offset + place.size_bytes
        if offset < _WORD_BYTES or offset % _WORD_BYTES or stop > len(self.data):
            raise InvalidRequestError("place", (offset, stop), f"slab has {len(self.data)} bytes")
        self.confirm(offset, place.generation)

    def confirm(self, offset: int, generation: int) -> None:
        """Raise LeaseExpiredError unless the frame at *offset* is still of this *generation*."""
        if self.words[offset // 8 - 1] != generation:
            raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")


class Slabs:
    """Maps of slabs by id, and files of the disk tier, asked for when first needed. Thread-safe.

    *link* is an attached connection to the server's Unix socket, with a timeout; it stays its
    owner's to close.
    """

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._slabs: dict[int, SlabMap] = {}
        self._files: dict[int, OpenFile] = {}
        # One question at a time on the socket; also guards the two above.
        self._lock = threading.Lock()

    def slab(self, number: int) -> SlabMap:
        """Return a slab, mapped whole. Raises TierUnavailableError."""
        slab = self._slabs.get(number)
        if slab is not None:
            return slab
        with self._lock:
            slab = self._slabs.get(number)
            if slab is None:
                if len(self._slabs) >= _MAX_SLABS:
                    self._slabs.clear()
                descriptor, size_bytes = self._ask(unix_socket.Op.slab, number)
                try:
                    memory = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
                slab = self._slabs[number] = SlabMap(memory)
            return slab

    def file(self, extent: int) -> OpenFile:
        """Return a file of the disk tier, open for reading. Raises TierUnavailableError."""
        with self._lock:
            file = self._files.get(extent)
            if file is None:
                if len(self._files) >= _MAX_FILES:
                    self._files.clear()
                file = self._files[extent] = OpenFile(*self._ask(unix_socket.Op.extent, extent))
            return file

    def give(self, request: unix_socket.Request, descriptor: int) -> unix_socket.Reply:
        """Give the server a descriptor of ours; return its answer. Raises TierUnavailableError."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [request.pack()], [descriptor])
                head = self._socket.recv(unix_socket.HEADER_BYTES)
                return unix_socket.unpack_head(head, unix_socket.REPLY_KINDS)[0]
            except (OSError, InvalidRequestError) as error:
                self._socket.close()
                raise TierUnavailableError("shm", f"the server hung up: {error}") from None

    def _ask(self, op: unix_socket.Op, number: int) -> tuple[int, int]:
        """Return a descriptor, ours to close, and its size."""
        try:
            self._socket.send(unix_socket.Request(op, number).pack())
            message, files, _, _ = socket.recv_fds(self._socket, unix_socket.HEADER_BYTES, 1)
        except OSError as error:
            # An answer that is only late must not be taken for that of the next question.
            self._socket.close()
            raise TierUnavailableError("shm", f"the server hung up: {error}") from None
        try:
            kinds = unix_socket.REPLY_KINDS
            reply, size_bytes, _ = unix_socket.unpack_head(message, kinds)
            if reply is not unix_socket.Reply.ok or len(files) != 1:
                raise TierUnavailableError("shm", f"{op.name} {number}: {reply.name}")
        except KVStoreError:
            for descriptor in files:
                os.close(descriptor)
            raise
        return files[0], size_bytes

    def leave(self) -> None:
        """In a child, once the socket is closed: forget every map and file."""
        self._lock = threading.Lock()  # another thread may have had it
        self.close()

    def close(self) -> None:
        """Forget every map and file; views and frames that are held keep theirs. Idempotent."""
        with self._lock:
            self._slabs.clear()
            self._files.clear()


class LeasedViews:
    """Gives the view of each leased chunk by its index.

    *rows* are the places of *keys*, those of the lease, as the server packed them; *whole* is what
    most of the frames look like. Raises InvalidRequestError when the rows are cut.
    """

    __slots__ = ("_found", "_keys", "_rows", "_slabs", "_whole")

    def __init__(
        self, slabs: Slabs, whole: RawGeometry, rows: bytes, keys: Sequence[ChunkKey]
    ) -> None:
        if len(rows) % ROW_BYTES:
            raise InvalidRequestError("places", len(rows), f"send rows of {ROW_BYTES} bytes")
        self._slabs = slabs
        self._whole = whole
        self._rows = rows
        self._keys = keys
        self._found: list[tuple[SlabMap, int, int] | None] = []
        """Slab, offset and generation of each chunk that was seen to lie where its place says."""

    def __call__(self, index: int) -> ChunkView | None:
        """Return the view of chunk *index*; None when it does not lie in memory that is shared.

        Raises LeaseExpiredError when the memory was reused, ChunkCorruptError when it holds another
        chunk, InvalidRequestError for a place outside its slab, InvalidFrameError, and
        TierUnavailableError when the server does not give the slab.
        """
        if not self._found:
            self._found = self._look()
        found = self._found[index]
        if found is None:
            return self._look_closer(index)
        slab, start, generation = found
        if slab.words[start // _WORD_BYTES - 1] != generation:
            slab.confirm(start, generation)  # which says it
        return ChunkView(self._keys[index], slab, start, generation, self._whole)

    def _look_closer(self, index: int) -> ChunkView | None:
        places = unpack_places(self._rows)
        place = places[index] if index < len(places) else NOWHERE
        if place.reach != _MEMORY:
            return None
        slab = self._slabs.slab(place.number)
        slab.check(place)
        return view_at(self._keys[index], place, slab, self._whole)

    def _look(self) -> list[tuple[SlabMap, int, int] | None]:
        """Check the places of all whole chunks, a slab at a time: one by one takes twice as long.

        Where one of them is not what it should be, none of its slab is found here: each is looked
        at by itself then, and what is wrong is told of that one alone.
        """
        found: list[tuple[SlabMap, int, int] | None] = [None] * len(self._keys)
        rows = np.frombuffer(self._rows, PLACE_ROW)[: len(self._keys)]
        is_usual = rows["size_bytes"] == self._whole.frame_bytes
        is_usual &= rows["reach"] == _MEMORY
        for number in set(rows["number"][is_usual].tolist()):
            with suppress(KVStoreError):
                slab = self._slabs.slab(number)
                here = np.flatnonzero(is_usual & (rows["number"] == number))
                indices, starts = here.tolist(), rows["offset"][here].tolist()
                keys = b"".join([self._keys[index] for index in indices])
                if not _hold(slab, starts, self._whole.frame_bytes, keys):
                    continue
                generations = rows["generation"][here].tolist()
                for at, start, word in zip(indices, starts, generations, strict=True):
                    found[at] = (slab, start, word)
        return found


def _hold(slab: SlabMap, starts: Sequence[int], size_bytes: int, keys: bytes) -> bool:
    """Whether a frame of so many bytes may begin at each of *starts*, and all have their *keys*."""
    last = len(slab.words) * _WORD_BYTES - size_bytes
    if min(starts) < _WORD_BYTES or max(starts) > last:
        return False
    at = np.array(starts, np.intp)
    if int(np.bitwise_or.reduce(at)) % _WORD_BYTES:
        return False
    words = np.frombuffer(slab.words, np.uint64)
    found: bytes = words[(at >> 3)[:, None] + _KEY_WORDS].tobytes()
    return found == keys
