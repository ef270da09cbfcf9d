"""The shm transport: frames through memory that server and client share on one host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import cast

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FileFrame, FrameAssembler
from kvstore.client.layer_sink import PutTerms
from kvstore.client.leased_views import LeasedViews
from kvstore.client.liveness import hangs, peer_pid
from kvstore.client.local_link import LocalLink, enter
from kvstore.client.peer_reads import LentRun, PeerReads
from kvstore.client.put_pipeline import PutPipeline
from kvstore.client.session import Session
from kvstore.client.slabs import Slabs
from kvstore.client.staging import PARTS, StagingMemory
from kvstore.client.transport import (
    Arrival,
    Arrivals,
    Outgoing,
    Put,
    ReadPlan,
    Transport,
    arrival_of,
    room_of,
    stays,
    whole_frame,
)
from kvstore.client.view import View, geometry_of
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.keys import chunk_key
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChainDigest, ChunkKey, KVLayout
from kvstore.proto.unix_socket import Place, Reach, unpack_places

_SOCKET_TIMEOUT_S = 2.0


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

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "shm"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        whole_chunk = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._whole = geometry_of(whole_chunk)
        size_bytes = max(session.options.staging_bytes // PARTS, raw_frame_bytes(whole_chunk))
        self._staging = StagingMemory(size_bytes)
        try:
            self._socket = self._attach(self._staging)
        finally:
            self._staging.close_descriptor()
        self._server_pid = peer_pid(self._socket)
        self.calls = LocalLink(session.terms, session.connection)
        self.slabs = Slabs(self._socket)
        self._peers = PeerReads(session)
        if session.options.read_peers:
            self._peers.note(session.peers)
        # One put at a time owns the staging memory, over its copies by design.
        self._put_lock = threading.Lock()

    def _attach(self, staging: StagingMemory) -> socket.socket:
        terms = self.session.terms
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_SOCKET_TIMEOUT_S)
        try:
            memory = [staging.descriptor]
            reply = enter(link, terms, unix_socket.Op.attach, staging.size_bytes, memory)
        except (OSError, InvalidRequestError) as error:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {error}") from None
        if reply is not unix_socket.Reply.ok:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {reply.name}")
        return link

    @override
    def _hangs(self) -> bool:
        if not self._server_pid:
            return super()._hangs()
        return hangs(self.session.terms, self._server_pid)

    @override
    def hang_up(self) -> None:
        super().hang_up()
        if isinstance(self.calls, LocalLink):
            self.calls.hang_up()

    @override
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        with self._put_lock:
            if self.is_spent:
                raise LeaseExpiredError("the session's staging memory is in doubt: open another")
            pipeline = PutPipeline(
                self._staging, self.session, self.calls, PutTerms(durable, deadline_ms, hints)
            )
            try:
                return pipeline.run(list(self._staging.groups(chunks)))
            finally:
                # Written to again, it would change what the server is copying, and sums as it
                # copies: wrong bytes with right checksums.
                self.is_spent = pipeline.may_be_read

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
        stack.callback(self._release_own, leases, request)
        calls = stack.enter_context(closing(self.calls.stream("Get", request, request.deadline_ms)))
        for reply in calls:
            leases.add(reply.lease_id)
            yield reply

    def _release_own(self, leases: set[int], request: pb.GetRequest) -> None:
        if own := leases - {0, request.lease_id}:
            self.release(own, request.deadline_ms)

    def _frames(
        self, stack: ExitStack, request: pb.GetRequest, plan: ReadPlan
    ) -> Iterator[Arrival]:
        """Yield what *request* brings. What another server did not send comes by way of ours."""
        until = time.monotonic() + plan.deadline_ms / 1000
        if not self.session.options.read_peers:
            plan = replace(plan, direct=None)
        if plan.direct is not None:
            request.peers.extend(self._peers.numbers())
        first: int | None = 0
        while first is not None:
            request.digests = b"".join(plan.digests[first:])
            request.deadline_ms = max(1, int(1000 * (until - time.monotonic())))
            first = yield from self._answer(self.replies(stack, request), first, plan, until)
            del request.peers[:]

    def _answer(
        self, replies: Iterator[pb.GetResponse], first: int, plan: ReadPlan, until: float
    ) -> Generator[Arrival, None, int | None]:
        """Yield what *replies* of a get of the chunks from the *first* on put in reach.

        Return the first chunk that another server should have sent and did not, if one did not.
        """
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room_of())
        for reply in replies:
            names = reply.places.tier_names
            if plan.direct is not None:
                self._peers.note(reply.places.peers)
            places = unpack_places(reply.places.rows)
            index = first + reply.index
            for number, run in groupby(places, key=_lender):
                start, index = index, index + len(some := list(run))
                if number is None:
                    for at, place in enumerate(some, start):
                        yield self._arrival(at, names[place.tier], place)
                elif plan.direct is not None:
                    lent = LentRun(number, start, self._keys(plan.digests[start:index]))
                    left = yield from self._peers.read(lent, plan.direct, until)
                    if left is not None:
                        return left
            if reply.HasField("part"):
                part = arrival_of(reply)
                whole = whole_frame(assembler, part, cast("Bytes", part.data))
                if whole is not None:
                    yield replace(whole, index=first + whole.index)
            else:
                assembler.next_index = index - first
        return None

    def _arrival(self, index: int, tier: str, place: Place) -> Arrival:
        size_bytes = place.size_bytes
        if place.reach == Reach.file:
            # What a file holds is proven by its key and checksums: it is copied as it is read.
            file = FileFrame(self.slabs.file(place.number), place.offset, size_bytes)
            return Arrival(index, tier, size_bytes, file)
        slab = self.slabs.reach(place)
        frame = slab.data[place.offset : place.offset + size_bytes]
        confirm = partial(slab.confirm, place.offset, place.generation)
        return Arrival(index, tier, size_bytes, frame, confirm)

    def _keys(self, digests: Sequence[ChainDigest]) -> list[ChunkKey]:
        return [chunk_key(self.session.terms.namespace, digest) for digest in digests]

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
        if isinstance(self.calls, LocalLink):
            self.calls.leave()
        self._socket.close()  # closes the child's descriptor: the parent's connection stays
        self._staging.close()
        self.slabs.leave()
        self._peers.leave()

    @override
    def close(self) -> None:
        self.calls.close()
        self._socket.close()
        self._staging.close()
        self.slabs.close()
        self._peers.close()


def _lender(place: Place) -> int | None:
    return place.number if place.reach == Reach.peer else None
